"""Speed of OFA-large's shape with random weights, by recipe and batch, plain and compiled, and the device's ceiling."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from worker.model.config import OFAConfig
from worker.model.decode import Answers, score
from worker.model.ofa import OFA, DecoderLayer, EncoderLayer
from worker.model.resnet import Bottleneck
from worker.quant.int4 import Int4Linear, group_of, quantize
from worker.quant.layers import groups
from worker.quant.stored import lay_out

#: Recipe -> in what it is computed.
COMPUTED_IN = {"fp16": torch.float16, "bf16": torch.bfloat16, "awq-int4": torch.float16}

#: Calls of a batch that are timed, at least and at most; between the two a shape's time decides.
MIN_CALLS, MAX_CALLS = 5, 50

#: A compiler that has less time than this left does not begin.
COMPILE_S = 100.0

#: What the largest change of a probability by compiling is called.
DRIFT = "compiled, change"

#: Kinds of blocks times kinds of batches for which one function is compiled.
MAX_COMPILED = 64

#: Tokens of the texts, begin and end included: short ones, so that some of a batch are padded.
TEXT_TOKENS = (12, 24)


@dataclass(frozen=True)
class Shape:
    """A network, its pictures and its batches."""

    name: str
    config: OFAConfig
    image_px: int
    batches: tuple[int, ...]
    calls_s: float  # for how long a batch is timed
    ceiling_n: int  # rows and columns of the matrices that are multiplied for the ceiling


#: The hub's iic/ofa_visual-entailment_snli-ve_large_en, in sizes.
LARGE = Shape(
    "OFA-large",
    OFAConfig(
        d_model=1024,
        encoder_layers=12,
        encoder_attention_heads=16,
        encoder_ffn_dim=4096,
        decoder_layers=12,
        decoder_attention_heads=16,
        decoder_ffn_dim=4096,
        resnet_type="resnet152",
    ),
    image_px=480,
    batches=(1, 8, 32, 64),
    calls_s=3.0,
    ceiling_n=8192,
)

#: For machines without a GPU, where it only shows that every line runs.
TINY = Shape(
    "tiny",
    OFAConfig(
        vocab_size=300,
        d_model=64,
        encoder_layers=1,
        encoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=64,
        resnet_type="resnet18",
        max_position_embeddings=64,
    ),
    image_px=32,
    batches=(1, 2),
    calls_s=0.0,
    ceiling_n=256,
)

ANSWERS = Answers(("yes", "no", "maybe"), ((4,), (5,), (6,)), eos=2)


def build(config: OFAConfig, recipe: str, device: torch.device) -> OFA:
    """A network with random weights by a recipe; plain rounding stands for AWQ, whose codes cost the same."""
    torch.manual_seed(0)
    with device:
        model = OFA(config)
    model = model.fold()
    if recipe == "awq-int4":
        for name in [name for group in groups(config) for name in group.linears]:
            linear = cast(nn.Linear, model.get_submodule(name))
            weight = quantize(linear.weight, group_of(linear.in_features))
            model.set_submodule(name, Int4Linear(weight, linear.bias.detach()))
    model = model.to(COMPUTED_IN[recipe])
    lay_out(model)
    return model


def questions(shape: Shape, batch: int) -> tuple[Tensor, Tensor]:
    """Texts of mixed lengths (B, L) and pictures (B, 3, S, S) float32, on the CPU as a worker has them."""
    generator = torch.Generator().manual_seed(batch)
    short, long = TEXT_TOKENS
    ids = torch.full((batch, long), shape.config.pad_token_id)
    for row in range(batch):
        # The last text has every place filled; one alone does, too.
        length = long if row == batch - 1 else int(torch.randint(short, long + 1, (1,), generator=generator))
        ids[row, 1:length] = torch.randint(10, 200, (length - 1,), generator=generator)
        ids[row, 0], ids[row, length - 1] = shape.config.bos_token_id, shape.config.eos_token_id
    return ids, torch.randn(batch, 3, shape.image_px, shape.image_px, generator=generator)


@torch.inference_mode()
def judge(model: OFA, ids: Tensor, pixels: Tensor) -> Tensor:
    """Probabilities (B, 3) on the CPU, from texts and pixels on the CPU."""
    weight = model.encoder.image_proj.weight
    ids = ids.to(weight.device)
    features = model.trunk(pixels.to(weight.device, weight.dtype))
    return score(model, ids, model.encode(ids, features), ANSWERS).probs.cpu()


def compile_blocks(model: OFA, backend: str) -> None:
    """Compile each block on its own: what is between them branches on what is in a batch."""
    torch._dynamo.config.recompile_limit = MAX_COMPILED
    for module in model.modules():
        if isinstance(module, Bottleneck | EncoderLayer | DecoderLayer):
            module.compile(backend=backend)


def flop_a_pair(model: OFA, shape: Shape) -> float:
    """Floating-point operations that one pair takes, counted as it goes through."""
    counter = FlopCounterMode(display=False)
    with counter:
        judge(model, *questions(shape, 1))
    return float(counter.get_total_flops())


def ceiling(shape: Shape, dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of one large matrix product, at its fastest."""
    n = shape.ceiling_n
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return max(2 * n**3 / seconds for seconds in timed(lambda: F.linear(a, b), device, for_s=0.2))


def timed(run: Callable[[], object], device: torch.device, for_s: float) -> list[float]:
    """Seconds of each call, after two that do not count."""
    seconds: list[float] = []
    for _ in range(2):
        run()
    while len(seconds) < MIN_CALLS or (len(seconds) < MAX_CALLS and sum(seconds) < for_s):
        wait(device)
        started = time.perf_counter()
        run()
        wait(device)
        seconds.append(time.perf_counter() - started)
    return seconds


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(model: OFA, shape: Shape, batch: int, device: torch.device, flop: float, top: float) -> dict[str, Any]:
    """One cell of the table."""
    ids, pixels = questions(shape, batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = sorted(timed(lambda: judge(model, ids, pixels), device, shape.calls_s))
    per_s = batch / statistics.median(seconds)
    return {
        "pairs_per_s": round(per_s, 2),
        "p50_ms": round(1000 * statistics.median(seconds), 2),
        "p95_ms": round(1000 * seconds[math.ceil(0.95 * len(seconds)) - 1], 2),
        "peak_mb": round(torch.cuda.max_memory_allocated(device) / 1e6) if device.type == "cuda" else None,
        "share_of_ceiling": round(per_s * flop / top, 4),
    }


def speed(shape: Shape, device: torch.device, left_s: Callable[[], float]) -> Iterator[tuple[str, Any]]:
    """What is measured, as it comes: (key of the result, value). What there is no time for is said to be left out."""
    tops = {dtype: ceiling(shape, dtype, device) for dtype in set(COMPUTED_IN.values())}
    yield "ceiling_tflops", {str(dtype).removeprefix("torch."): round(top / 1e12, 2) for dtype, top in tops.items()}
    flop, backend = 0.0, "inductor" if device.type == "cuda" else "eager"
    for mode in ("eager", "compiled"):
        for recipe, dtype in COMPUTED_IN.items():
            if left_s() < (COMPILE_S if mode == "compiled" and device.type == "cuda" else 0):
                yield f"{recipe} {mode}", "left out: no time"
                continue
            model = build(shape.config, recipe, device)
            if not flop:
                flop = flop_a_pair(model, shape)
                yield "tflop_a_pair", round(flop / 1e12, 4)
            expected = judge(model, *questions(shape, shape.batches[1]))
            if mode == "compiled":
                compile_blocks(model, backend)
            found = cells(model, shape, device, flop, tops[dtype], left_s)
            yield f"{recipe} {mode}", found
            if mode == "compiled" and isinstance(found[str(shape.batches[1])], dict):
                drift = (judge(model, *questions(shape, shape.batches[1])) - expected).abs().max()
                yield f"{recipe} {DRIFT}", float(f"{drift:.2e}")
            del model
            release(device)


def cells(
    model: OFA, shape: Shape, device: torch.device, flop: float, top: float, left_s: Callable[[], float]
) -> dict[str, Any]:
    """Every batch of one recipe. Whatever fails is part of the result, as the figures before it are worth having."""
    found: dict[str, Any] = {}
    for batch in shape.batches:
        if left_s() <= 0:
            found[str(batch)] = "left out: no time"
            continue
        try:
            found[str(batch)] = measure(model, shape, batch, device, flop, top)
        except Exception as error:
            found[str(batch)] = f"{type(error).__name__}: {error}"[:300]
            release(device)
    return found


def release(device: torch.device) -> None:
    """Give a model's memory back before the next is made."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def lines(results: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """The figures for people."""
    yield f"{'recipe':20} {'batch':>5} {'pairs/s':>9} {'p50 ms':>9} {'p95 ms':>9} {'peak MB':>8} {'of ceiling':>10}"
    row = "{:20} {:>5} {pairs_per_s:9} {p50_ms:9} {p95_ms:9} {peak_mb!s:>8} {share_of_ceiling:10.1%}"
    for key, value in results:
        if not isinstance(value, dict) or key == "ceiling_tflops":
            yield f"{key}: {value}"
            continue
        for batch, cell in value.items():
            yield f"{key:20} {batch:>5} {cell}" if isinstance(cell, str) else row.format(key, batch, **cell)
