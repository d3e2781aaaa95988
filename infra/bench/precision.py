"""What each precision costs and buys, and what the short cuts buy: `python -m infra.bench.precision [--out DIR]`.

First the demo model's recipes on its 6,000 test pairs, calibrated on development pairs. Then two ratios in batches of
16, the sides taking turns: `awq-int4` against float32; and float32 against the plain loop of infra/bench/plain.py, on
the demo model and on the shape of the hub's distilled checkpoint with random weights. Where a target is missed, a
profile of both sides says what the time went into. With --out, precision.md and precision.json are written there.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from torch.profiler import ProfilerActivity, profile

from infra.bench.plain import judge_plain, load_plain
from infra.bench.precision_page import page
from infra.demo_model.generate import HeldOutPair, held_out_pairs
from infra.demo_model.scenes import SEEDS
from infra.demo_model.vocabulary import WEIGHTS
from worker.compare.clock import in_turns
from worker.compare.compare import Effort, compare
from worker.compare.trial import LabelledPair
from worker.model.checkpoint import Checkpoint, load
from worker.model.config import OFAConfig
from worker.model.ofa import OFA
from worker.moderator import Judgement, Moderator, Question
from worker.quant.quantize import quantize

RECIPES = ("awq-int4", "rtn-int4", "int8-dynamic", "bf16", "fp16")

#: Input sizes of the second table, in pixels: the demo model's own, and smaller ones.
IMAGE_SIZES = (64, 56, 48)

#: Pairs that calibrate, from the development scenes, which share no picture with the test scenes.
CALIBRATION_PAIRS = 256

BATCH_PAIRS = 16

#: OFA-Tiny, which the hub's damo/ofa_visual-entailment_snli-ve_distilled_v2_en is: 33M parameters, pictures of 256.
DISTILLED = OFAConfig(
    d_model=256,
    encoder_layers=4,
    encoder_attention_heads=4,
    encoder_ffn_dim=1024,
    decoder_layers=4,
    decoder_attention_heads=4,
    decoder_ffn_dim=1024,
    resnet_type="resnet50",
)
DISTILLED_SIDE_PX = 256

#: What must hold: name -> (at least or at most, bound).
TARGETS: Mapping[str, tuple[str, float]] = {
    "awq-int4: loss of accuracy": ("at most", 0.005),
    "awq-int4: agreement with float32": ("at least", 0.985),
    "awq-int4: agreement less rtn-int4's": ("at least", 0.0),
    "awq-int4: batch drift": ("at most", 0.01),
    "awq-int4: speed in batches of 16, of float32's": ("at least", 0.95),
    "float32 against the plain loop, demo shape": ("at least", 4.0),
    "float32 against the plain loop, distilled shape": ("at least", 1.8),
}

#: Operations of a profile that are named.
PROFILED = 8


def question(pair: HeldOutPair) -> Question:
    return Question(Image.fromarray(pair.pixels), pair.line["image"].encode(), pair.line["text"])


def labelled(pairs: int) -> list[LabelledPair]:
    return [LabelledPair(question(pair), pair.line["label"]) for pair in held_out_pairs(pairs, SEEDS["test"])]


def calibration() -> list[Question]:
    return [question(pair) for pair in held_out_pairs(CALIBRATION_PAIRS, SEEDS["development"])]


def batch_of(size: int) -> list[Question]:
    """A batch of test pairs, each with a picture of its own."""
    return [question(pair) for pair in list(held_out_pairs(3 * size, SEEDS["test"]))[::3]]


def against(first: Callable[[], object], second: Callable[[], object], rounds: int) -> dict[str, Any]:
    """Milliseconds a pair of both, and how many times as fast `second` is, as the median over rounds."""
    seconds = in_turns({"first": first, "second": second}, rounds)
    return ratio(seconds["first"], seconds["second"])


def ratio(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """Two sides of the same rounds: milliseconds a pair, and how many times as fast the second is."""
    ms = [round(1000 * statistics.median(seconds) / BATCH_PAIRS, 2) for seconds in (first, second)]
    return {"ms": ms, "ratio": round(statistics.median(a / b for a, b in zip(first, second, strict=True)), 2)}


def profiled(run: Callable[[], object]) -> dict[str, float]:
    """Share of the time that each of the costliest operations takes by itself."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    events = sorted(seen.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    return {event.key: round(event.self_cpu_time_total / total, 3) for event in events[:PROFILED]}


def int4_speed(rounds: int) -> dict[str, Any]:
    """`awq-int4` against float32 in one batch: milliseconds a pair, and the ratio of speeds."""
    questions = batch_of(BATCH_PAIRS)
    with tempfile.TemporaryDirectory() as scratch:
        quantize(WEIGHTS, "awq-int4", calibration(), Path(scratch, "awq"), measure_on=())
        moderators = [Moderator(load(folder), "cpu") for folder in (WEIGHTS, Path(scratch, "awq"))]
    runs = [partial(moderator.judge, questions) for moderator in moderators]
    found = against(runs[0], runs[1], rounds)
    missed = found["ratio"] < TARGETS["awq-int4: speed in batches of 16, of float32's"][1]
    return {**found, "profile": [profiled(run) for run in runs]} if missed else found


def short_cuts(plain: OFA, checkpoint: Checkpoint, target: float, rounds: int) -> dict[str, Any]:
    """Float32 in one batch against the plain loop, with the answers' decoder passes one by one, and as one."""
    questions, moderator = batch_of(BATCH_PAIRS), Moderator(checkpoint, "cpu")
    batch = partial(moderator.judge, questions)
    loop = partial(judge_plain, plain, checkpoint, questions)
    judged = [list(row.probs.values()) for row in batch() if isinstance(row, Judgement)]
    if not torch.allclose(torch.tensor(judged), loop(), atol=1e-4):
        raise ArithmeticError("the plain loop and the short cuts give different answers")
    seconds = in_turns({"loop": loop, "together": partial(loop, together=True), "batch": batch}, rounds)
    found = ratio(seconds["loop"], seconds["batch"])
    missed = found["ratio"] < target
    found["answers_together"] = ratio(seconds["together"], seconds["batch"])
    return {**found, "profile": [profiled(loop), profiled(batch)]} if missed else found


def distilled() -> tuple[OFA, Checkpoint]:
    """The distilled checkpoint's shape with random weights, plain and with the short cuts; the demo's words."""
    torch.manual_seed(0)
    plain, demo = OFA(DISTILLED).eval().requires_grad_(False), load(WEIGHTS)
    configuration = replace(demo.configuration, patch_image_size=DISTILLED_SIDE_PX)
    folded = copy.deepcopy(plain).fold()
    return plain, replace(demo, model=folded, config=DISTILLED, configuration=configuration)


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    info, name = Path("/proc/cpuinfo"), platform.processor() or platform.machine()
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit that is checked out, and whether files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "worker", "infra/demo_model", "infra/bench")
        return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def measured_targets(result: dict[str, Any]) -> dict[str, float]:
    """What TARGETS are compared with, by their names."""
    rows = result["recipes"]
    awq, rtn = rows["awq-int4"], rows["rtn-int4"]
    values = (
        0 - awq["accuracy_diff"], awq["agreement"], awq["agreement"] - rtn["agreement"], awq["batch_drift"],
        result["int4"]["ratio"], result["demo"]["ratio"], result["distilled"]["ratio"],
    )  # fmt: skip
    return dict(zip(TARGETS, values, strict=True))


def met(name: str, value: float) -> bool:
    kind, bound = TARGETS[name]
    return value >= bound if kind == "at least" else value <= bound


def run(pairs: int, effort: Effort) -> dict[str, Any]:
    """All that is measured."""
    test, cal, about = labelled(pairs), calibration(), machine()
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("")

        def tell(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        first = compare(WEIGHTS, RECIPES, test, calibration=cal, effort=effort, progress=tell)
        second = compare(
            WEIGHTS, ("fp32", "awq-int4"), test, image_sizes=IMAGE_SIZES, calibration=cal, effort=effort, progress=tell
        )
        for table in (first.table(), second.table()):
            bar.console.print(table, soft_wrap=True)
    (_, demo_target), (_, distilled_target) = list(TARGETS.values())[-2:]
    demo, rounds = load(WEIGHTS), effort.rounds
    result: dict[str, Any] = {
        "bench": "precision",
        "machine": about,
        "commit": commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "pairs": first.pairs,
        "calibrated_on": first.calibrated_on,
        "recipes": {name: asdict(row) for name, row in first.recipes.items()},
        "image_sizes": {name: asdict(row) for name, row in second.recipes.items()},
        "int4": int4_speed(rounds),
        "demo": short_cuts(load_plain(WEIGHTS, demo.configuration.max_src_length), demo, demo_target, rounds),
        "distilled": short_cuts(*distilled(), distilled_target, rounds),
        "load_at_end": round(os.getloadavg()[0], 2),
    }
    result["targets"] = {name: float(f"{value:.4g}") for name, value in measured_targets(result).items()}
    return result


def main() -> None:
    """Measure, print the tables, write the papers, and print one line of JSON last."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--pairs", type=int, default=6000)
    parser.add_argument("--singles", type=int, default=1000, help="pairs judged one by one")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for precision.md and precision.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result = run(arguments.pairs, Effort(singles=arguments.singles, rounds=arguments.rounds))
    result["command"] = " ".join(["python -m infra.bench.precision", *sys.argv[1:]])
    line = json.dumps(result)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        bounds = {name: (*bound, met(name, result["targets"][name])) for name, bound in TARGETS.items()}
        (arguments.out / "precision.md").write_text(page(result, bounds), encoding="utf-8")
        (arguments.out / "precision.json").write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
