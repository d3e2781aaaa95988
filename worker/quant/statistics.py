"""Pairs through the network, and what its Linears read meanwhile.

Statistics are running ones: a group of Linears costs the same memory however many pairs are seen. Padding is left out,
since a batch's padding is nothing that the weights have to be good for.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from worker.model.checkpoint import Checkpoint
from worker.model.config import TRUNK_STRIDE_PIXELS
from worker.model.decode import score
from worker.model.ofa import OFA, Memory
from worker.model.preprocess import make_pixels, make_prompt, pad
from worker.quant.int4 import GROUPS, in_groups
from worker.quant.layers import Group, reads_prompt

#: Tokens, picture and text together, that go through the encoder at a time. OFA-large has 932 a pair.
MAX_BATCH_TOKENS = 4096

#: Rows of a group's input that are kept, a sample in which every row seen is as likely as any other.
KEPT_ROWS = 512

Progress = Callable[[str, int, int], None]


class Pair(Protocol):
    """A question as far as calibration needs it: worker.moderator.Question is one."""

    @property
    def image(self) -> Image.Image: ...
    @property
    def image_key(self) -> bytes: ...
    @property
    def text(self) -> str: ...
    @property
    def premise(self) -> str | None: ...


@torch.inference_mode()
def probabilities(
    checkpoint: Checkpoint, pairs: Sequence[Pair], after_batch: Callable[[int], None] = lambda done: None
) -> Tensor:
    """Score pairs on the checkpoint's device: (len(pairs), A) float32 on the CPU, in the order of `pairs`.

    `after_batch` is told how many pairs are done. Raises PairRejected for a text without anything to score.
    """
    probs = torch.empty(len(pairs), len(checkpoint.answers.names))
    done = 0
    for places, ids, features in batches(checkpoint, pairs):
        memory = checkpoint.model.encode(ids, features)
        probs[places] = score(checkpoint.model, ids, memory, checkpoint.answers).probs.cpu()
        done += len(places)
        after_batch(done)
    return probs


def batches(checkpoint: Checkpoint, pairs: Sequence[Pair]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Batches of like lengths: places in `pairs`, ids (B, L), features (B, 1024, h, w)."""
    configuration, weight = checkpoint.configuration, checkpoint.model.encoder.image_proj.weight
    texts = [make_prompt(pair.text, pair.premise, checkpoint.tokenizer, configuration).ids for pair in pairs]
    patches = (-(-configuration.patch_image_size // TRUNK_STRIDE_PIXELS)) ** 2
    order = sorted(range(len(pairs)), key=lambda place: len(texts[place]))
    while order:
        # The longest text of a batch is its last; it is at most as long as the longest of all.
        size = max(1, MAX_BATCH_TOKENS // (patches + len(texts[order[-1]])))
        places, order = order[:size], order[size:]
        keys = list(dict.fromkeys(pairs[place].image_key for place in places))
        images = {pairs[place].image_key: pairs[place].image for place in places}
        pixels = torch.stack([make_pixels(images[key], configuration) for key in keys])
        features = checkpoint.model.trunk(pixels.to(weight.device, weight.dtype))
        ids = pad([texts[place] for place in places], checkpoint.tokenizer.pad, configuration.max_src_length + 2)
        yield places, ids.to(weight.device), features[[keys.index(pairs[place].image_key) for place in places]]


class InputStatistics:
    """What one group of Linears read: rows x (K,) of tokens, without padding."""

    def __init__(self, width: int, group: int | None, generator: torch.Generator) -> None:
        """Without a `group` size no Gram matrices are kept."""
        self.group = group
        self.count = 0
        self.rows = torch.empty(0, width)  # (at most KEPT_ROWS, K)
        #: Sum over rows of x xT within each group of channels.
        self.grams = torch.zeros(0 if group is None else width // group, group or 0, group or 0)  # (K/G, G, G)
        self._sum = torch.zeros(width, dtype=torch.float64)  # (K,), of |x|
        self._keys = torch.empty(0)
        self._generator = generator

    def add(self, x: Tensor) -> None:
        """Take rows (n, K) into account."""
        x = x.float()
        self.count += len(x)
        self._sum += x.abs().sum(0, dtype=torch.float64)
        if self.group is not None:
            cut = in_groups(x, self.group).transpose(0, 1)  # (K/G, n, G)
            self.grams += cut.transpose(1, 2) @ cut
        # The rows with the largest of independent random keys are a uniform sample.
        keys = torch.cat((self._keys, torch.rand(len(x), generator=self._generator)))
        self._keys, kept = keys.topk(min(KEPT_ROWS, len(keys)))
        self.rows = torch.cat((self.rows, x))[kept]

    @property
    def mean_abs(self) -> Tensor:
        """Mean of |x| by channel, (K,) float32."""
        return (self._sum / self.count).float()


class Masks:
    """Which of the tokens now in the network are no padding, found out as batches go by."""

    def __init__(self, model: OFA) -> None:
        self._source = self._prompt = torch.empty(0)
        self._pad = model.config.pad_token_id
        self.handles = [
            model.encoder.register_forward_pre_hook(self._encoding),
            model.decoder.register_forward_pre_hook(self._decoding),
        ]

    def _encoding(self, module: nn.Module, inputs: tuple[Tensor, Tensor]) -> None:
        ids, features = inputs
        patches = features.size(2) * features.size(3)
        self._source = torch.cat((ids.new_ones(len(ids), patches).bool(), ids.ne(self._pad)), 1)  # (B, S)

    def _decoding(self, module: nn.Module, inputs: tuple[Tensor, Memory]) -> None:
        prompt, memory = inputs
        self._prompt = prompt.ne(self._pad)  # (B, T)
        if memory.key_mask is None:
            self._source = torch.ones(memory.states.shape[:2], dtype=torch.bool, device=prompt.device)
        else:
            self._source = memory.key_mask[:, 0, 0].eq(0)

    def real(self, name: str, x: Tensor) -> Tensor:
        """The rows (n, d) of the named module's input or output x (B, T, d) that are no padding."""
        return x[self._prompt if reads_prompt(name) else self._source]


@contextmanager
def watching(model: OFA, names: Sequence[str], see: Callable[[str, Tensor, Tensor], Any]) -> Iterator[None]:
    """Call `see(name, input rows, output rows)`, padding left out, whenever one of the named modules has run."""
    masks = Masks(model)
    handles: list[RemovableHandle] = [*masks.handles]

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        return lambda module, inputs, output: see(name, masks.real(name, inputs[0]), masks.real(name, output))

    try:
        handles += [model.get_submodule(name).register_forward_hook(hook(name)) for name in names]
        yield
    finally:
        for handle in handles:
            handle.remove()


def gram_size(width: int) -> int | None:
    """The size of the groups of a width; None where none divides it, as then nothing of that width is quantized."""
    return next((size for size in GROUPS if width % size == 0), None)


def collect(
    checkpoint: Checkpoint,
    pairs: Sequence[Pair],
    groups: Sequence[Group],
    seed: int,
    grams: bool,
    after_batch: Callable[[int], None] = lambda done: None,
) -> dict[str, InputStatistics]:
    """Statistics of what each group of Linears reads while `pairs` are scored, by the group's name."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, InputStatistics] = {}
    for group in groups:
        # All Linears of a group read the same, so the first is watched.
        width = cast(nn.Linear, checkpoint.model.get_submodule(group.linears[0])).in_features
        found[group.linears[0]] = InputStatistics(width, gram_size(width) if grams else None, generator)
    with watching(checkpoint.model, list(found), lambda name, x, _: found[name].add(x)):
        probabilities(checkpoint, pairs, after_batch)
    return {group.name: found[group.linears[0]] for group in groups}
