"""Measure a folder of weights on the test pairs: `python -m infra.demo_model.evaluate [--model DIR] [--pairs 6000]`.

The weights go through the project's own loading, preprocessing and scoring; pictures are handed over as drawn.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from PIL import Image

from infra.demo_model.generate import HeldOutPair, held_out_pairs
from infra.demo_model.scenes import SEEDS
from infra.demo_model.vocabulary import WEIGHTS
from worker.model.checkpoint import load
from worker.moderator import Judgement, Moderator, Question

#: Pairs judged at a time.
BATCH_PAIRS = 96


def kinds_of(pair: HeldOutPair) -> tuple[str, ...]:
    """Under which names a pair counts: all, label, kind, and the policy where it is `prohibited`."""
    line = pair.line
    kind = "prohibited category" if line["policy"] == "prohibited" else line["attributes"]["kind"]
    return ("all", line["label"], kind, f"{kind}, {line['label']}")


def accuracies(pairs: Iterable[HeldOutPair], judged: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Name -> (right, asked)."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for pair, label in zip(pairs, judged, strict=True):
        for name in kinds_of(pair):
            counts[name][0] += label == pair.line["label"]
            counts[name][1] += 1
    return {name: (right, asked) for name, (right, asked) in counts.items()}


def judge(model: Path, pairs: list[HeldOutPair]) -> list[str]:
    """The label of each pair, in order, by the weights in a folder, computed in float32 on the CPU."""
    moderator = Moderator(load(model), "cpu")
    labels = []
    for first in range(0, len(pairs), BATCH_PAIRS):
        batch = pairs[first : first + BATCH_PAIRS]
        questions = [
            Question(Image.fromarray(pair.pixels), pair.line["image"].encode(), pair.line["text"]) for pair in batch
        ]
        for judged in moderator.judge(questions):
            labels.append(judged.label if isinstance(judged, Judgement) else judged.code.value)
    return labels


def main() -> None:
    """Print accuracy by label and by kind of statement, and one line of JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, default=WEIGHTS)
    parser.add_argument("--pairs", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=SEEDS["test"], help="the test scenes' seed unless given")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pairs = list(held_out_pairs(arguments.pairs, arguments.seed))
    started = time.monotonic()
    counts = accuracies(pairs, judge(arguments.model, pairs))
    seconds = time.monotonic() - started
    for name, (right, asked) in sorted(counts.items()):
        print(f"{name:36} {right / asked:.4f}  ({right} of {asked})")
    print(
        json.dumps({"accuracy": {name: round(r / n, 4) for name, (r, n) in counts.items()}, "seconds": round(seconds)})
    )


if __name__ == "__main__":
    main()
