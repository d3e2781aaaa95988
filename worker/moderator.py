"""Judging one batch of questions: probabilities, a label, and what a policy makes of them.

Everything about a batch and nothing about where it came from or where its verdicts go. A pair's scores do not depend
on its batch mates, and a pair on which the model fails fails alone.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from worker.errors import CodedError, DeviceLost, ErrorCode, PairRejected, TryLater
from worker.model.checkpoint import Checkpoint, Label
from worker.model.config import Configuration
from worker.model.decode import score
from worker.model.ofa import OFA
from worker.model.preprocess import (
    OFF_LANGUAGE,
    Prompt,
    make_prompt,
    make_square,
    normalised,
    pad,
    padded_length,
)

log = logging.getLogger(__name__)

Decision = Literal["accept", "review", "reject"]

#: Pairs that go through the model at once. More use the device better and need more of its memory.
MAX_SLICE = 64


@dataclass(frozen=True)
class Question:
    """Does this picture bear out this text?"""

    image: Image.Image  # RGB
    image_key: bytes  # the same for the same picture, such as its sha256
    text: str
    premise: str | None = None  # a second text, taken as true beside the picture


@dataclass(frozen=True)
class Judgement:
    """What the model says about one question."""

    label: Label
    answer: str  # the checkpoint's own word for the label
    probs: dict[str, float]  # answer -> probability, which sum to 1
    p_entailment: float
    p_contradiction: float
    p_neutral: float
    text_scored: str
    premise_scored: str | None
    flags: tuple[str, ...]
    tokens: int = 0  # of its prompt
    padded_tokens: int = 0  # those that the device computed for it


@dataclass(frozen=True)
class Policy:
    """The rule from probabilities to a decision.

    `should_hold`: the text should be true of the picture, so its contradiction is bad. `should_not_hold`: the claim
    should not be true, so its entailment is. A threshold of None is never reached.
    """

    name: str
    version: int
    polarity: Literal["should_hold", "should_not_hold"]
    review_at: float | None
    reject_at: float | None


SHIPPED_POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("catalog", 1, "should_hold", review_at=0.5, reject_at=None),
        Policy("prohibited", 1, "should_not_hold", review_at=0.2, reject_at=0.5),
    )
}


def decide(policy: Policy, judgement: Judgement) -> Decision:
    """Apply a policy. SQL states the same rule: double precision, and a threshold is reached when equalled.

    A text mostly outside the checkpoint's language is never accepted unseen.
    """
    p_bad = judgement.p_contradiction if policy.polarity == "should_hold" else judgement.p_entailment
    if policy.reject_at is not None and p_bad >= policy.reject_at:
        return "reject"
    if policy.review_at is not None and p_bad >= policy.review_at:
        return "review"
    return "review" if OFF_LANGUAGE in judgement.flags else "accept"


@dataclass(frozen=True, eq=False)
class Prepared:
    """A question that is ready for the device; `square` is the picture as (S, S, 3) uint8, shared by those of a batch
    that show the same one.
    """

    question: Question
    prompt: Prompt
    square: Tensor


@dataclass(frozen=True, eq=False)
class Item:
    """What is judged, and where its judgement goes."""

    place: int
    prepared: Prepared

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prepared.prompt.ids

    @property
    def image_key(self) -> bytes:
        return self.prepared.question.image_key


@dataclass
class Ceiling:
    """How many fit into the device's memory at once, by their size: what ran out of it once would do so again.

    Memory grows with the size of each, so what is found at one size bounds every larger one too.
    """

    what: str
    most: int
    found: dict[int, int] = field(default_factory=dict)  # size -> how many at once

    def at(self, size: int) -> int:
        return min([self.most, *(many for smaller, many in self.found.items() if smaller <= size)])

    def ran_out(self, size: int, many: int) -> None:
        """That many of that size did not fit: from now on it is half as many."""
        self.found[size] = max(1, many // 2)
        log.warning("out of memory with %d %s of size %d: from now on %d", many, self.what, size, self.found[size])
        torch.cuda.empty_cache()


class Moderator:
    """A checkpoint on a device, which judges batches of questions one batch at a time."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device | str, max_slice: int = MAX_SLICE) -> None:
        """`max_slice` bounds the pairs that go through the model at once; it changes speed and memory, not scores."""
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        self.model = checkpoint.model.to(self.device)
        self._pairs = Ceiling("pairs", max_slice)  # of a padded length in tokens
        self._pictures = Ceiling("pictures", max_slice)  # all of one size, in pixels of a side
        self._longest = checkpoint.configuration.max_src_length + 2

    def judge(self, questions: Sequence[Question]) -> list[Judgement | CodedError]:
        """`prepare` and `score` in one: one judgement a question, in order, or the error that stands in its place."""
        prepared = self.prepare(questions)
        scored = iter(self.score([one for one in prepared if isinstance(one, Prepared)]))
        return [next(scored) if isinstance(one, Prepared) else one for one in prepared]

    def prepare(self, questions: Sequence[Question]) -> list[Prepared | CodedError]:
        """What a batch needs no device for: prompts and pixels, in order, any number of batches at a time.

        A text without anything to score is PairRejected instead, and what fails otherwise TryLater with MODEL_FAILED.
        """
        configuration, squares = self.checkpoint.configuration, dict[bytes, Tensor]()
        results = list[Prepared | CodedError]()
        for one in questions:
            try:
                prompt = make_prompt(one.text, one.premise, self.checkpoint.tokenizer, configuration)
                if one.image_key not in squares:
                    squares[one.image_key] = make_square(one.image, configuration)
                results.append(Prepared(one, prompt, squares[one.image_key]))
            except PairRejected as error:
                results.append(error)
            except Exception as error:
                # Memory that ran out, for example: no reason to keep its neighbours from their verdicts.
                results.append(failure_of(error))
        return results

    def score(self, prepared: Sequence[Prepared]) -> list[Judgement | CodedError]:
        """Judge a batch on the device, one batch at a time: one judgement each, in order.

        A pair on which the model fails is TryLater with MODEL_FAILED. Raises DeviceLost, and nothing else but what ends
        the process.
        """
        results: list[Judgement | CodedError | None] = [None] * len(prepared)
        items = [Item(place, one) for place, one in enumerate(prepared)]
        features = Features(self.model, self.checkpoint.configuration, items, self._pictures)
        for slice_ in self._slices(items):
            for item, result in zip(slice_, self._judge_or_halve(slice_, features), strict=True):
                results[item.place] = result
        return [result for result in results if result is not None]

    def warm_up(self) -> None:
        """Send the shortest and the longest prompt through every stage, so that no pair waits for what is made once.

        Raises the error where that fails: a model that cannot judge a plain picture is not to be given others.
        """
        grey = Image.new("RGB", (64, 64), (128, 128, 128))
        longest = "word " * self.checkpoint.configuration.max_src_length
        for result in self.judge([Question(grey, b"warm-up", text) for text in ("a picture", longest)]):
            if isinstance(result, CodedError):
                raise result

    def _slices(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        """Cut a batch into slices of like lengths, so that little is padded.

        One is cut after the other was judged, so that a ceiling which that one found holds for this one.
        """
        slice_: list[Item] = []
        for item in sorted(items, key=lambda item: (len(item.ids), item.place)):
            if slice_ and len(slice_) >= self._pairs.at(self._length([item])):
                yield slice_
                slice_ = []
            slice_.append(item)
        if slice_:
            yield slice_

    def _judge_or_halve(self, slice_: Sequence[Item], features: "Features") -> list[Judgement | CodedError]:
        """Judge a slice; where that fails, smaller ones, down to the pairs that fail alone."""
        try:
            return list(self._judge_slice(slice_, features))
        except Exception as error:
            # Whatever it was, it was the model's on this slice: each pair gets its chance without the others.
            failure = failure_of(error)
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if not out_of_memory and not self._device_answers():
            # After an illegal access, for example, every call of this process fails, whoever's pair it is.
            raise DeviceLost(f"{self.device} does not answer any more: {failure.detail}")
        if len(slice_) == 1:
            return [failure]
        middle = len(slice_) // 2
        parts: Iterable[Sequence[Item]] = (slice_[:middle], slice_[middle:])
        if out_of_memory:
            # The exception is gone by now, and with it the tensors that its traceback kept.
            self._pairs.ran_out(self._length(slice_), len(slice_))
            parts = self._slices(slice_)
        return [result for part in parts for result in self._judge_or_halve(part, features)]

    def _device_answers(self) -> bool:
        """Whether the device still does the least thing that it is asked for."""
        try:
            return torch.ones(1, device=self.device).item() == 1
        except torch.OutOfMemoryError:
            return True
        except RuntimeError:
            return False

    @torch.inference_mode()
    def _judge_slice(self, slice_: Sequence[Item], features: "Features") -> list[Judgement]:
        prompts = [item.ids for item in slice_]
        ids = pad(prompts, self.checkpoint.tokenizer.pad, self._longest).to(self.device)  # (B, L)
        memory = self.model.encode(ids, features.of(slice_))
        probs = score(self.model, ids, memory, self.checkpoint.answers).probs.double().cpu()  # (B, A)
        if not probs.isfinite().all():
            raise FloatingPointError("the model's scores are not numbers")
        padded = ids.shape[1]
        return [
            self._judgement(item.prepared.prompt, row.tolist(), padded) for item, row in zip(slice_, probs, strict=True)
        ]

    def _judgement(self, prompt: Prompt, probs: list[float], padded: int) -> Judgement:
        names, labels = self.checkpoint.answers.names, self.checkpoint.labels
        by_label = dict(zip(labels, probs, strict=True))
        best = probs.index(max(probs))
        return Judgement(
            label=labels[best],
            answer=names[best],
            probs=dict(zip(names, probs, strict=True)),
            p_entailment=by_label["entailment"],
            p_contradiction=by_label["contradiction"],
            p_neutral=by_label.get("neutral", 0.0),  # a checkpoint may have no word for it
            text_scored=prompt.text,
            premise_scored=prompt.premise,
            flags=prompt.flags,
            tokens=len(prompt.ids),
            padded_tokens=padded,
        )

    def _length(self, slice_: Sequence[Item]) -> int:
        """The tokens to which the slice's prompts are padded."""
        return padded_length(max(len(item.ids) for item in slice_), self._longest)


def failure_of(error: Exception) -> TryLater:
    return TryLater(ErrorCode.MODEL_FAILED, f"{type(error).__name__}: {error}"[:500])


class Features:
    """The image trunk's answers for one batch: each distinct picture is looked at once."""

    def __init__(self, model: OFA, configuration: Configuration, items: Sequence[Item], ceiling: Ceiling) -> None:
        self._model, self._configuration, self._ceiling = model, configuration, ceiling
        self._uses = Counter(item.image_key for item in items)
        self._kept: dict[bytes, Tensor] = {}

    def of(self, slice_: Sequence[Item]) -> Tensor:
        """Features of the slice's pictures in its order: (B, 1024, h, w)."""
        squares = {item.image_key: item.prepared.square for item in slice_}
        found = {key: self._kept[key] for key in squares if key in self._kept}
        missing = [key for key in squares if key not in found]
        if missing:
            found.update(zip(missing, self._look([squares[key] for key in missing]), strict=True))
        here = Counter(item.image_key for item in slice_)
        for key in missing:
            # Features are large (3.7 MB for OFA-large in float32): kept only where other slices need them.
            if self._uses[key] > here[key]:
                self._kept[key] = found[key].clone()
        return torch.stack([found[item.image_key] for item in slice_])

    def _look(self, squares: Sequence[Tensor]) -> list[Tensor]:
        """Features of distinct pictures, (1024, h, w) each, as many at once as fit."""
        side, found = self._configuration.patch_image_size, list[Tensor]()
        while waiting := squares[len(found) : len(found) + self._ceiling.at(side)]:
            try:
                found.extend(self._trunk(waiting))
                continue
            except torch.OutOfMemoryError as error:
                if len(waiting) == 1:
                    # Not for want of room for pairs, whose ceiling is to stay where it is.
                    raise MemoryError(f"for one picture: {error}") from None
            self._ceiling.ran_out(side, len(waiting))
        return found

    def _trunk(self, squares: Sequence[Tensor]) -> Tensor:
        weight = self._model.encoder.image_proj.weight
        stacked = torch.stack(list(squares))  # (N, S, S, 3) uint8: a quarter of what float32 would carry to the device
        if weight.is_cuda:
            stacked = stacked.pin_memory()
        pixels = normalised(stacked.to(weight.device, non_blocking=True), self._configuration)
        return self._model.trunk(pixels.to(weight.dtype))  # (N, 1024, h, w)
