"""The model alone, without servers: pairs one by one against batches of 64, and what pairs that share a picture save.

`prepare` and `score` of the worker's own Moderator on one thread of torch, over the demo model's test pairs: its
quantized weights, its float32 weights, and the shape of the hub's distilled checkpoint with random weights.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from infra.bench.precision import distilled, question
from infra.demo import WEIGHTS as QUANTIZED
from infra.demo_model.generate import held_out_pairs
from infra.demo_model.scenes import SEEDS
from infra.demo_model.vocabulary import WEIGHTS
from worker.model.checkpoint import load
from worker.moderator import Judgement, Moderator, Question

BATCH_PAIRS = 64
#: Pairs of the batch that are also judged one by one, and, of the slow distilled shape, are a batch.
ALONE_PAIRS = 16
#: Three statements are made about each picture of the test pairs.
PAIRS_A_PICTURE = 3


def measure(seconds: float, say: Callable[[str], None]) -> dict[str, object]:
    """`seconds` for each of the three models; at least one round, in which every side has its turn."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        models = {}
        checkpoints = {
            "demo, awq-int4": (load(QUANTIZED), BATCH_PAIRS),
            "demo, fp32": (load(WEIGHTS), BATCH_PAIRS),
            "distilled shape, fp32, random weights": (distilled()[1], ALONE_PAIRS),
        }
        for name, (checkpoint, pairs) in checkpoints.items():
            models[name] = compared(Moderator(checkpoint, "cpu"), pairs, seconds)
            say(f"{name}: {models[name]['ratio']} times one by one, {models[name]['shared_ratio']} where they share")
    finally:
        torch.set_num_threads(before)
    demo = models["demo, awq-int4"]
    return {
        "bench": "model",
        "pairs_per_s": demo["pairs_per_s"],
        "ratio": demo["ratio"],
        "target": "the demo model judges batches of 64 faster than the same pairs one by one",
        "met": demo["ratio"] > 1,
        "models": models,
        "padding": padding(),
        "notes": [
            "`alone`: one pair at a time; `pairs_per_s`: batches in which every pair has a picture of its own;"
            f" `shared`: batches with {PAIRS_A_PICTURE} pairs a picture, which goes through the trunk once. Ratios are"
            " medians over rounds in which the sides take turns. One thread of torch; on a CPU a batch saves the calls'"
            " overhead and not arithmetic, so that the larger a model is the less it gains.",
            "Padding is the share of the tokens computed that are no pair's: batches are cut into slices of up to 64"
            " pairs of like lengths, against the same pairs in slices as they came.",
        ],
    }


def batch(pairs: int, apart: bool) -> list[Question]:
    """Test pairs, each with a picture of its own or three to a picture."""
    found = islice(held_out_pairs(PAIRS_A_PICTURE * pairs, SEEDS["test"]), 0, None, PAIRS_A_PICTURE if apart else 1)
    return [question(pair) for pair in islice(found, pairs)]


def compared(moderator: Moderator, pairs: int, seconds: float) -> dict[str, Any]:
    """Pairs a second one by one, in batches, and in batches that share pictures."""
    apart, shared = batch(pairs, apart=True), batch(pairs, apart=False)
    sides: Mapping[str, Sequence[Sequence[Question]]] = {
        "alone": [[one] for one in apart[:ALONE_PAIRS]],
        "batched": [apart],
        "shared": [shared],
    }
    for calls in sides.values():
        judge(moderator, calls)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    began_at = time.monotonic()
    while not rates["alone"] or time.monotonic() < began_at + seconds:
        for name, calls in sides.items():
            rates[name].append(judge(moderator, calls))
    return {
        "pairs": pairs,
        "alone_per_s": round(statistics.median(rates["alone"]), 1),
        "pairs_per_s": round(statistics.median(rates["batched"]), 1),
        "ratio": times(rates["batched"], rates["alone"]),
        "shared_per_s": round(statistics.median(rates["shared"]), 1),
        "shared_ratio": times(rates["shared"], rates["batched"]),
        "pictures": len({one.image_key for one in shared}),
    }


def judge(moderator: Moderator, calls: Sequence[Sequence[Question]]) -> float:
    """Pairs a second over these calls."""
    began_at, judged = time.perf_counter(), 0
    for questions in calls:
        for answer in moderator.judge(questions):
            if not isinstance(answer, Judgement):
                raise answer
            judged += 1
    return judged / (time.perf_counter() - began_at)


def times(one: Sequence[float], other: Sequence[float]) -> float:
    """How many times as fast the first is, in the median of the rounds."""
    return round(statistics.median(a / b for a, b in zip(one, other, strict=True)), 2)


def padding() -> dict[str, float]:
    """Share of computed tokens that are padding, for batches of texts of one word to twenty-six."""
    moderator = Moderator(load(QUANTIZED), "cpu")
    words = "a red cup and two blue shoes " * 4
    texts = [" ".join(words.split()[: 1 + place * 7 % 26]) for place in range(4 * BATCH_PAIRS)]
    picture = batch(1, apart=True)[0]
    questions = [Question(picture.image, picture.image_key, text) for text in texts]
    judged = moderator.judge(questions)
    as_they_come = [moderator.judge(questions[at : at + BATCH_PAIRS]) for at in range(0, len(questions), BATCH_PAIRS)]
    return {
        "by_length": share_padded(judged),
        "as_they_come": share_padded([one for answers in as_they_come for one in answers]),
    }


def share_padded(answers: Sequence[object]) -> float:
    judged = [one for one in answers if isinstance(one, Judgement)]
    return round(1 - sum(one.tokens for one in judged) / sum(one.padded_tokens for one in judged), 3)
