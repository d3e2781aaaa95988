"""A batch of questions is judged pair by pair, whatever its neighbours are or do."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from PIL import Image

from tests.model.golden import SETS, TOLERANCE, Spy, loaded, picture, recorded, write_checkpoint
from worker.errors import CodedError, DeviceLost, ErrorCode, PairRejected, TryLater
from worker.model.checkpoint import load
from worker.moderator import SHIPPED_POLICIES, Judgement, Moderator, Policy, Question, decide


def question(case: dict[str, Any]) -> Question:
    return Question(picture(case["image"]), case["image"].encode(), case["text"], case.get("text2"))


def questions(name: str = "plain") -> list[Question]:
    return [question(case) for case in recorded(name)["cases"]]


def judgements(results: Sequence[Judgement | CodedError]) -> list[Judgement]:
    assert all(isinstance(result, Judgement) for result in results)
    return [result for result in results if isinstance(result, Judgement)]


def assert_same(results: Sequence[Judgement], others: Sequence[Judgement], tolerance: float = TOLERANCE) -> None:
    for result, other in zip(results, others, strict=True):
        assert result.text_scored == other.text_scored
        assert result.probs == pytest.approx(other.probs, abs=tolerance)


@pytest.mark.parametrize("name", SETS)
def test_a_batch_is_judged_as_the_reference_judges_its_pairs(name: str) -> None:
    cases = recorded(name)["cases"]

    results = judgements(Moderator(loaded(name), "cpu").judge(questions(name)))

    for result, case in zip(results, cases, strict=True):
        assert result.answer == case["label"]
        assert result.probs == pytest.approx(case["probs"], abs=TOLERANCE)
        assert (result.p_entailment, result.p_contradiction, result.p_neutral) == tuple(result.probs.values())


def test_a_judgement_says_what_was_scored() -> None:
    (result,) = Moderator(loaded(), "cpu").judge([Question(picture("wide.jpg"), b"", "A Red-Shoe", "!A  Shop\n")])

    assert isinstance(result, Judgement)
    assert (result.text_scored, result.premise_scored) == ("a red shoe", "a shop")
    assert result.flags == ()
    assert sum(result.probs.values()) == pytest.approx(1)
    assert result.label == {"yes": "entailment", "no": "contradiction", "maybe": "neutral"}[result.answer]


@pytest.mark.parametrize("max_slice", [1, 3, 64])
def test_scores_do_not_depend_on_mates_order_or_padding(max_slice: int) -> None:
    asked = questions() + questions("text2")
    order = random.Random(3).sample(range(len(asked)), k=len(asked))

    together = judgements(Moderator(loaded(), "cpu").judge(asked))
    shuffled = judgements(Moderator(loaded(), "cpu", max_slice).judge([asked[place] for place in order]))

    assert_same(shuffled, [together[place] for place in order])


def test_half_precision_stays_near_the_reference(tmp_path: Path) -> None:
    checkpoint = load(write_checkpoint(tmp_path / "ofa_mini"), dtype=torch.bfloat16)

    results = judgements(Moderator(checkpoint, "cpu").judge(questions()))

    for result, case in zip(results, recorded("plain")["cases"], strict=True):
        assert result.probs == pytest.approx(case["probs"], abs=0.05)


def test_a_checkpoint_without_a_word_for_neutral_gives_it_no_probability(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "ofa_mini")
    (folder / "ans2label.json").write_text('{"no": 0, "yes": 1}')

    (result,) = judgements(Moderator(load(folder), "cpu").judge(questions()[:1]))

    assert result.p_neutral == 0
    assert result.p_entailment == result.probs["yes"]
    assert result.p_entailment + result.p_contradiction == pytest.approx(1)


def test_no_question_gives_no_answer() -> None:
    assert Moderator(loaded(), "cpu").judge([]) == []


def test_a_text_without_content_is_rejected_and_its_neighbours_are_judged() -> None:
    good = questions()[0]
    moderator = Moderator(loaded(), "cpu")

    results = moderator.judge([good, Question(good.image, good.image_key, "!?"), good])

    assert isinstance(results[1], PairRejected)
    assert results[1].code is ErrorCode.TEXT_EMPTY
    assert_same(judgements([results[0], results[2]]), judgements(moderator.judge([good, good])))


@pytest.mark.parametrize("max_slice", [2, 64])
def test_each_distinct_picture_goes_through_the_trunk_once(max_slice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    moderator = Moderator(loaded(), "cpu", max_slice)
    trunk = Spy(moderator.model.trunk)
    monkeypatch.setattr(moderator.model, "trunk", trunk)
    wide, tall = picture("wide.jpg"), picture("tall.png")
    asked = [Question(*pair, "word " * n) for n in (1, 9, 20, 40) for pair in ((wide, b"wide"), (tall, b"tall"))]

    results = judgements(moderator.judge(asked))

    assert sum(shape[0] for shape in trunk.shapes) == 2
    monkeypatch.undo()
    assert_same(results, [judgements(moderator.judge([one]))[0] for one in asked])


def test_a_slice_pads_like_lengths_together(monkeypatch: pytest.MonkeyPatch) -> None:
    moderator = Moderator(loaded(), "cpu", max_slice=2)
    encode = Spy(moderator.model.encode)
    monkeypatch.setattr(moderator.model, "encode", encode)
    asked = [Question(picture("wide.jpg"), b"", "cup " * n) for n in (40, 1, 41, 2)]

    moderator.judge(asked)

    assert [rows for rows, _ in encode.shapes] == [2, 2]
    assert encode.shapes[0][1] < encode.shapes[1][1]


class Fails:
    """An encoder that fails on pairs with any of some tokens."""

    def __init__(self, moderator: Moderator, bad: Sequence[int], error: Exception) -> None:
        self.encode, self.bad, self.error = moderator.model.encode, torch.tensor(bad), error

    def __call__(self, ids: torch.Tensor, features: torch.Tensor) -> object:
        if torch.isin(ids, self.bad).any():
            raise self.error
        return self.encode(ids, features)


def test_a_pair_on_which_the_model_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    moderator = Moderator(loaded(), "cpu")
    asked = questions()[:9]
    expected = judgements(moderator.judge(asked))
    (rare,) = loaded().tokenizer.encode("@")
    asked[4] = Question(asked[4].image, asked[4].image_key, "the @ cup")
    monkeypatch.setattr(moderator.model, "encode", Fails(moderator, [rare], ValueError("a broken pair")))

    results = moderator.judge(asked)

    failed = results.pop(4)
    assert isinstance(failed, TryLater)
    assert (failed.code, failed.detail) == (ErrorCode.MODEL_FAILED, "ValueError: a broken pair")
    assert_same(judgements(results), expected[:4] + expected[5:])


def test_a_pair_that_cannot_be_made_ready_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    moderator, asked = Moderator(loaded(), "cpu"), questions()[:5]
    expected = judgements(moderator.judge(asked))
    asked[2] = replace(asked[2], image=Image.new("L", (8, 8)), image_key=b"its own")

    def convert(image: Image.Image, mode: str) -> Image.Image:
        raise MemoryError("no room for it")

    monkeypatch.setattr(Image.Image, "convert", convert)

    results = moderator.judge(asked)

    failed = results.pop(2)
    assert isinstance(failed, TryLater)
    assert (failed.code, failed.detail) == (ErrorCode.MODEL_FAILED, "MemoryError: no room for it")
    assert_same(judgements(results), expected[:2] + expected[3:])


def test_scores_that_are_not_numbers_fail_the_pair_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    moderator = Moderator(loaded(), "cpu")
    trunk = moderator.model.trunk

    def spoil_black(pixels: torch.Tensor) -> torch.Tensor:
        features = trunk(pixels)
        return torch.where((pixels == -1).all((1, 2, 3))[:, None, None, None], math.nan, features)

    monkeypatch.setattr(moderator.model, "trunk", spoil_black)
    black = Question(Image.new("RGB", (9, 9)), b"black", "a black square")

    results = moderator.judge([questions()[0], black, questions()[1]])

    assert isinstance(results[1], TryLater)
    assert results[1].code is ErrorCode.MODEL_FAILED
    judgements([results[0], results[2]])


class SmallMemory:
    """A step of the model that runs out of memory where `size` of its first argument is above `room`."""

    def __init__(self, step: Callable[..., Any], size: Callable[[tuple[int, ...]], int], room: int) -> None:
        self.step, self.size, self.room = step, size, room
        self.fitted: list[tuple[int, ...]] = []
        self.ran_out: list[tuple[int, ...]] = []

    def __call__(self, first: torch.Tensor, *others: Any) -> Any:
        shape = tuple(first.shape)
        if self.size(shape) > self.room:
            self.ran_out.append(shape)
            raise torch.OutOfMemoryError(f"no room for {shape}")
        self.fitted.append(shape)
        return self.step(first, *others)


def rows(shape: tuple[int, ...]) -> int:
    return shape[0]


def cells(shape: tuple[int, ...]) -> int:
    return shape[0] * shape[1]


def test_running_out_of_memory_halves_and_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    moderator = Moderator(loaded(), "cpu")
    encode = SmallMemory(moderator.model.encode, rows, room=2)
    monkeypatch.setattr(moderator.model, "encode", encode)
    asked = [questions()[0]] * 8

    first = judgements(moderator.judge(asked))
    again = judgements(moderator.judge(asked))

    assert [rows(shape) for shape in encode.ran_out] == [8, 4]
    assert [rows(shape) for shape in encode.fitted] == [2] * 8
    assert_same(first, again)


def test_a_ceiling_found_at_one_length_holds_for_longer_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    moderator = Moderator(loaded(), "cpu")
    encode = SmallMemory(moderator.model.encode, cells, room=4 * 16)
    monkeypatch.setattr(moderator.model, "encode", encode)

    def ask(words: int) -> list[tuple[int, ...]]:
        encode.ran_out.clear()
        judgements(moderator.judge([Question(picture("wide.jpg"), b"wide", "cup " * words)] * 8))
        return encode.ran_out

    assert ask(1) == [(8, 16)]
    assert ask(20) == [(4, 32)]  # not 8 again
    assert ask(40) == [(2, 48)]
    assert (ask(1), ask(20), ask(40)) == ([], [], [])
    assert encode.fitted[-14:] == [(4, 16)] * 2 + [(2, 32)] * 4 + [(1, 48)] * 8, "shorter ones suffer"


@pytest.mark.parametrize("room", [100, 300, 1_000])
def test_whatever_fits_every_pair_is_judged_as_with_ample_memory(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [replace(one, text=one.text + " cup" * (n * 5 % 41)) for n, one in enumerate(questions() * 2)]
    expected = judgements(Moderator(loaded(), "cpu").judge(asked))
    moderator = Moderator(loaded(), "cpu")
    encode = SmallMemory(moderator.model.encode, cells, room)
    trunk = SmallMemory(moderator.model.trunk, rows, room=3)
    monkeypatch.setattr(moderator.model, "encode", encode)
    monkeypatch.setattr(moderator.model, "trunk", trunk)

    counts = []
    for _ in range(4):
        assert_same(judgements(moderator.judge(asked)), expected)
        counts.append(len(encode.ran_out) + len(trunk.ran_out))

    assert counts[0] > 0
    assert counts[-1] == counts[-2], "it goes on running out of memory"


def test_running_out_of_memory_for_pictures_leaves_the_pairs_ceiling_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    moderator = Moderator(loaded(), "cpu")
    encode = Spy(moderator.model.encode)
    trunk = SmallMemory(moderator.model.trunk, rows, room=2)
    monkeypatch.setattr(moderator.model, "encode", encode)
    monkeypatch.setattr(moderator.model, "trunk", trunk)
    pictures = [Image.new("RGB", (9, 9), (20 * n, 0, 0)) for n in range(7)]
    asked = [Question(picture, picture.tobytes(), "a cup") for picture in pictures]

    first = judgements(moderator.judge(asked))
    again = judgements(moderator.judge(asked))

    assert [rows(shape) for shape in trunk.ran_out] == [7, 3]
    assert [rows(shape) for shape in trunk.fitted] == [1] * 14
    assert [rows(shape) for shape in encode.shapes] == [7, 7]
    assert_same(first, again)


def test_a_picture_too_large_for_the_memory_by_itself_fails_its_own_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    moderator = Moderator(loaded(), "cpu")
    trunk = moderator.model.trunk

    def no_black(pixels: torch.Tensor) -> torch.Tensor:
        if (pixels == -1).all((1, 2, 3)).any():
            raise torch.OutOfMemoryError("no room for black")
        return trunk(pixels)

    monkeypatch.setattr(moderator.model, "trunk", no_black)
    asked = questions()[:5]
    asked[2] = Question(Image.new("RGB", (9, 9)), b"black", "a black square")

    results = moderator.judge(asked)

    failed = results.pop(2)
    assert isinstance(failed, TryLater)
    assert (failed.code, failed.detail) == (ErrorCode.MODEL_FAILED, "MemoryError: for one picture: no room for black")
    judgements(results)
    encode = Spy(moderator.model.encode)
    monkeypatch.setattr(moderator.model, "encode", encode)
    judgements(moderator.judge([questions()[0]] * 8))
    assert [rows(shape) for shape in encode.shapes] == [8]


def test_a_pair_too_large_for_the_memory_by_itself_is_tried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    moderator = Moderator(loaded(), "cpu")
    monkeypatch.setattr(moderator.model, "encode", Fails(moderator, range(9000), torch.OutOfMemoryError("full")))

    results = moderator.judge(questions()[:3])

    assert [result.code for result in results if isinstance(result, TryLater)] == [ErrorCode.MODEL_FAILED] * 3


def test_a_device_that_is_lost_is_not_taken_for_the_fault_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    moderator = Moderator(loaded(), "cpu")
    illegal = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(moderator.model, "encode", Fails(moderator, range(9000), illegal))

    def ones(*_: object, **__: object) -> torch.Tensor:
        raise illegal

    monkeypatch.setattr(torch, "ones", ones)
    with pytest.raises(DeviceLost, match="cpu does not answer any more: RuntimeError: CUDA error: an illegal"):
        moderator.judge(questions()[:2])


def test_what_ends_the_process_is_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    moderator = Moderator(loaded(), "cpu")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(moderator.model, "encode", interrupt)
    with pytest.raises(KeyboardInterrupt):
        moderator.judge(questions()[:2])


def test_warming_up_goes_through_every_stage_with_the_longest_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    moderator = Moderator(loaded(), "cpu")
    encode = Spy(moderator.model.encode)
    monkeypatch.setattr(moderator.model, "encode", encode)

    moderator.warm_up()

    assert max(length for _, length in encode.shapes) == loaded().configuration.max_src_length + 2


def test_a_model_that_cannot_judge_does_not_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    moderator = Moderator(loaded(), "cpu")
    monkeypatch.setattr(moderator.model, "encode", Fails(moderator, range(9000), ValueError("no model")))

    with pytest.raises(TryLater, match="ValueError: no model"):
        moderator.warm_up()


def judgement(entailment: float, contradiction: float, flags: tuple[str, ...] = ()) -> Judgement:
    probs = {"yes": entailment, "no": contradiction, "maybe": 1 - entailment - contradiction}
    return Judgement("neutral", "maybe", probs, entailment, contradiction, probs["maybe"], "a cup", None, flags)


@pytest.mark.parametrize(
    ("policy", "entailment", "contradiction", "decision"),
    [
        ("catalog", 0.9, 0.1, "accept"),
        ("catalog", 0.1, 0.49999999, "accept"),
        ("catalog", 0.1, 0.5, "review"),
        ("catalog", 0.0, 1.0, "review"),
        ("prohibited", 0.19999999, 0.5, "accept"),
        ("prohibited", 0.2, 0.5, "review"),
        ("prohibited", 0.49999999, 0.5, "review"),
        ("prohibited", 0.5, 0.5, "reject"),
        ("prohibited", 0.0, 1.0, "accept"),
    ],
)
def test_shipped_policies_decide(policy: str, entailment: float, contradiction: float, decision: str) -> None:
    assert decide(SHIPPED_POLICIES[policy], judgement(entailment, contradiction)) == decision


@pytest.mark.parametrize("polarity", ["should_hold", "should_not_hold"])
def test_an_off_language_text_is_never_accepted(polarity: Literal["should_hold", "should_not_hold"]) -> None:
    lenient, strict = Policy("p", 1, polarity, None, None), Policy("p", 1, polarity, None, 0.0)

    assert decide(lenient, judgement(0.5, 0.5)) == "accept"
    assert decide(lenient, judgement(0.5, 0.5, ("off_language",))) == "review"
    assert decide(strict, judgement(0.5, 0.5, ("off_language",))) == "reject"


def test_a_threshold_is_compared_in_double_precision() -> None:
    policy = Policy("p", 1, "should_hold", review_at=0.1, reject_at=None)
    just_below = float(torch.tensor(0.1).double()) - 2e-9

    assert just_below < 0.1 < float(torch.tensor(0.1).double())
    assert decide(policy, judgement(0.5, just_below)) == "accept"
