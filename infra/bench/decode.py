"""What DCT scaling saves, and what it does to scores: `python -m infra.bench.decode [--pairs 200] [--repeats 9]`.

Cost: a JPEG with detail at every scale is decoded exactly and reduced, in turn, on one thread, and each result
brought down to the model's input as the worker does. CPU time is counted, so that a busy machine changes little.
Scores: the demo model's test scenes, drawn up to 2,048 pixels and saved as JPEG, are judged from both decodes.
"""

import argparse
import io
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, features

from infra.demo_model.generate import held_out_pairs
from infra.demo_model.scenes import SEEDS
from infra.demo_model.vocabulary import WEIGHTS
from worker.decode_image import decode
from worker.model.checkpoint import load
from worker.moderator import Judgement, Moderator, Question

#: Sides of the JPEGs whose decoding is timed.
SIDES_PX = (1000, 2000, 4000)
#: Sides of a model's input: the hub's large checkpoints', and the demo model's.
TARGETS_PX = (480, 64)
#: Side to which the demo scenes are drawn up.
SCENE_SIDE_PX = 2048
#: As cameras and shops save them.
JPEG_QUALITY = 90
#: Pairs judged at a time.
BATCH_PAIRS = 20


def textured(side_px: int) -> Image.Image:
    """Noise of equal strength at every scale, which is about what photographs are made of."""
    random = np.random.default_rng(side_px)
    total = np.zeros((side_px, side_px, 3), dtype=np.float32)
    cells = 4
    while cells <= side_px:
        noise = Image.fromarray(random.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        strength = 0.35 if cells <= 64 else 0.08
        total += strength * (np.asarray(noise.resize((side_px, side_px), Image.Resampling.BICUBIC)) - 127.5)
        cells *= 4
    return Image.fromarray(np.clip(total + 127.5, 0, 255).astype(np.uint8))


def jpeg(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()


def cost(side_px: int, target_px: int, repeats: int) -> dict[str, Any]:
    """Median milliseconds from the file to the model's input, both decodes taking turns."""
    data = jpeg(textured(side_px))
    spent: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(2 * repeats):
        exact = repeat % 2 == 0
        started = time.thread_time()
        result = decode(data, target_px=target_px, exact=exact, squeeze=False)
        result.image.resize((target_px, target_px), Image.Resampling.BICUBIC)
        spent[exact].append(1000 * (time.thread_time() - started))
    exact_ms, reduced_ms = statistics.median(spent[True]), statistics.median(spent[False])
    return {
        "side_px": side_px,
        "kilobytes": len(data) // 1000,
        "target_px": target_px,
        "decoded_px": result.image.width,
        "exact_ms": round(exact_ms, 1),
        "reduced_ms": round(reduced_ms, 1),
        "ratio": round(exact_ms / reduced_ms, 1),
    }


def judged_twice(pairs: int, drawn: Literal["smooth", "sharp"]) -> Iterator[tuple[Judgement, Judgement]]:
    """Each pair judged from the exact and from the reduced decode of one and the same JPEG."""
    moderator = Moderator(load(WEIGHTS), "cpu")
    target_px = moderator.checkpoint.configuration.patch_image_size
    resampling = Image.Resampling.BICUBIC if drawn == "smooth" else Image.Resampling.NEAREST
    # Three statements are made about each scene; every third pair is another picture.
    chosen = [
        pair for index, pair in enumerate(held_out_pairs(3 * pairs, SEEDS["test"])) if index % 3 == index // 3 % 3
    ]
    for first in range(0, len(chosen), BATCH_PAIRS):
        questions: dict[bool, list[Question]] = {True: [], False: []}
        for pair in chosen[first : first + BATCH_PAIRS]:
            scene = Image.fromarray(pair.pixels).resize((SCENE_SIDE_PX, SCENE_SIDE_PX), resampling)
            data = jpeg(scene)
            for exact in (True, False):
                result = decode(data, target_px=target_px, exact=exact)
                assert result.decode_mode == ("exact" if exact else "reduced")
                questions[exact].append(Question(result.image, result.sha256, pair.line["text"]))
        for answers in zip(moderator.judge(questions[True]), moderator.judge(questions[False]), strict=True):
            exactly, reduced = answers
            if not isinstance(exactly, Judgement) or not isinstance(reduced, Judgement):
                raise TypeError(f"a test pair was not judged: {answers}")
            yield exactly, reduced


def effect(pairs: int, drawn: Literal["smooth", "sharp"]) -> dict[str, Any]:
    """How far probabilities move, and how many labels change."""
    moved, flips = [], 0
    for exact, reduced in judged_twice(pairs, drawn):
        moved.append(max(abs(exact.probs[answer] - reduced.probs[answer]) for answer in exact.probs))
        flips += exact.label != reduced.label
    return {
        "drawn": drawn,
        "pairs": len(moved),
        "mean": round(statistics.mean(moved), 4),
        "p95": round(statistics.quantiles(moved, n=20)[-1], 4),
        "max": round(max(moved), 4),
        "label_flips": flips,
    }


def main() -> None:
    """Print what DCT scaling saves and what it does to the demo model's scores."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--pairs", type=int, default=200, help="0 leaves the scores out")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("side px  kB     target px  decoded px  exact ms  reduced ms  ratio")
    costs = [cost(side, target, arguments.repeats) for target in TARGETS_PX for side in SIDES_PX]
    for row in costs:
        sizes = "{side_px:<8} {kilobytes:<6} {target_px:<10} {decoded_px:<11}".format(**row)
        print(sizes, "{exact_ms:<9} {reduced_ms:<11} {ratio}".format(**row))
    effects = [effect(arguments.pairs, drawn) for drawn in ("smooth", "sharp")] if arguments.pairs else []
    if effects:
        print("\ndrawn   pairs  moved: mean  p95     max     labels changed")
    for row in effects:
        print("{drawn:<7} {pairs:<6} {mean:<12} {p95:<7} {max:<7} {label_flips}".format(**row))
    machine = {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "pillow": features.version("pil"),
        "libjpeg_turbo": features.version("libjpeg_turbo"),
    }
    print(json.dumps({"bench": "decode", **machine, "cost": costs, "effect": effects}))


if __name__ == "__main__":
    main()
