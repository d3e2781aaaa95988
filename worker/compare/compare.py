"""What each precision costs and buys on this machine: `compare(model_dir, recipes, pairs)`.

Every recipe is quantized, loaded and judged by the code that workers run. Answers are compared pair by pair with those
of the original weights in float32 at the checkpoint's own input size. Speeds are taken in turns in one process, so that
whatever else the machine does strikes all recipes alike; load time and peak memory in a fresh process each.
"""

import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement as RichMeasurement
from rich.table import Table
from torch import Tensor

from worker.compare.clock import in_fresh_process, in_turns, percentile
from worker.compare.trial import LabelledPair, Trial, prepare
from worker.errors import ConcordError
from worker.model.checkpoint import SAFETENSORS, load
from worker.moderator import Judgement, Moderator, Question
from worker.quant.statistics import Progress

#: Pairs of the batches, shuffled, with whose scores those of single pairs are compared.
MIXED_BATCH_PAIRS = 64

#: The columns of a comparison's table; differences are in points of a hundred.
HEADINGS = (
    "recipe", "accuracy", "agrees\nwith\nfloat32", "difference\nin points\n(95%)", "batch\ndrift", "ms, p50\np95 p99",
    "pairs/s", "best\nbatch", "speed", "MB\non disk", "load\ns", "peak\nMB",
)  # fmt: skip

#: The widest that a table may be.
MAX_TABLE_COLUMNS = 400

#: Standard errors on both sides of a normal interval of 95%.
Z95 = 1.959964


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    #: Batches among which the best is looked for; as many pairs as the largest has are timed in each.
    batch_sizes: tuple[int, ...] = (8, 16, 32, 64)
    #: Pairs that are judged one by one, for latency and drift.
    singles: int = 256
    #: Rounds in which the recipes take turns.
    rounds: int = 7


STANDARD = Effort()


@dataclass(frozen=True)
class Measured:
    """One line of a comparison."""

    accuracy: float
    agreement: float  # share of the pairs with the baseline's label
    accuracy_diff: float  # to the baseline's
    diff_ci95: tuple[float, float]
    batch_drift: float  # largest change of a probability between a pair alone and in a batch of 64
    p50_ms: float  # latency of a single pair, from its decoded picture and its text to its label
    p95_ms: float
    p99_ms: float
    best_batch: int
    pairs_per_s: float  # in batches of that size, each pair with a picture of its own
    speed_ratio: float  # to the baseline in its best batch, the median over rounds
    bytes: int  # of the weights' file
    load_s: float
    peak_rss_mb: float  # of a process that loads the model and warms it up


@dataclass(frozen=True)
class Comparison:
    """Recipes side by side."""

    recipes: Mapping[str, Measured]
    baseline: str
    pairs: int  # measured on
    calibrated_on: int
    device: str

    def json(self) -> str:
        """One line: {"recipes": {name: {...}}}"""
        rows = {name: asdict(row) for name, row in self.recipes.items()}
        for row in rows.values():
            del row["best_batch"]
        return json.dumps({"recipes": rows})

    def table(self) -> Table:
        """The comparison for people; as wide as it has to be."""
        table = Table(
            title=f"{self.pairs:,} pairs on {self.device}, compared with {self.baseline}",
            caption=f"calibrated on {self.calibrated_on:,} other pairs" if self.calibrated_on else None,
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for heading in HEADINGS:
            table.add_column(heading, justify="right" if table.columns else "left", no_wrap=True)
        for name, row in self.recipes.items():
            points = [100 * value for value in (row.accuracy_diff, *row.diff_ci95)]
            table.add_row(
                name, f"{row.accuracy:.4f}", f"{row.agreement:.4f}",
                "" if name == self.baseline else "{:+.2f} ({:+.2f}, {:+.2f})".format(*points),
                f"{row.batch_drift:.0e}", f"{row.p50_ms:.1f} {row.p95_ms:.1f} {row.p99_ms:.1f}",
                f"{row.pairs_per_s:,.1f}", str(row.best_batch), f"{row.speed_ratio:.2f}", f"{row.bytes / 1e6:,.1f}",
                f"{row.load_s:.1f}", f"{row.peak_rss_mb:,.0f}",
            )  # fmt: skip
        # A console of 80 columns would otherwise cut the cells short.
        console = Console()
        table.width = RichMeasurement.get(console, console.options.update(width=MAX_TABLE_COLUMNS), table).maximum
        return table


def compare(
    model_dir: str | Path,
    recipes: Sequence[str | Path],
    pairs: Sequence[LabelledPair],
    *,
    image_sizes: Sequence[int] = (),
    calibration: Sequence[Question] | None = None,
    device: torch.device | str = "cpu",
    effort: Effort = STANDARD,
    seed: int = 0,
    progress: Progress | None = None,
) -> Comparison:
    """Compare recipes, each at each of the input sizes, with the weights in `model_dir` computed in float32.

    A recipe is a name, or the folder of a checkpoint that is quantized already; "awq-int4@320" asks for one size only.
    Pairs whose pictures calibrate never measure: without `calibration` some of `pairs` are set apart for it, and of
    `calibration` those whose picture is among `pairs` are left out. `progress` is told a stage, and how much of how
    much of it is done. Raises ConcordError, with a sentence, for whatever cannot be compared.
    """
    tell = progress or (lambda stage, done, total: None)
    with tempfile.TemporaryDirectory(prefix="concord-compare-") as scratch:
        trial = prepare(
            model_dir, recipes, pairs, Path(scratch),
            image_sizes=image_sizes, calibration=calibration, seed=seed, tell=tell,
        )  # fmt: skip
        return Measurement(trial, device, effort, seed, tell).comparison()


@dataclass(frozen=True)
class Answers:
    """What a variant says about all pairs."""

    labels: tuple[str, ...]
    probs: Tensor  # (n, 3) float64: entailment, contradiction, neutral


@dataclass(frozen=True)
class Measurement:
    """A trial on a device."""

    trial: Trial
    device: torch.device | str
    effort: Effort
    seed: int
    tell: Progress

    def comparison(self) -> Comparison:
        """Measure every variant. Raises ConcordError where one has other labels or cannot judge a pair."""
        variants, rows = self.trial.variants, dict[str, Measured]()
        alone = {}
        for done, variant in enumerate(variants):
            self.tell("loading", done, len(variants))
            alone[variant.name] = in_fresh_process(variant.folder, self.device)
        moderators = {v.name: Moderator(load(v.folder, self.device), self.device) for v in variants}
        self.tell("loading", len(variants), len(variants))
        check_labels(moderators)
        for moderator in moderators.values():
            moderator.warm_up()
        baseline = variants[0].name
        speeds = self.speeds(moderators)
        answers = {name: self.answers(name, moderator) for name, moderator in moderators.items()}
        for variant in variants:
            name = variant.name
            times, drift = self.singles(name, moderators[name], answers[name])
            load_s, peak_rss_mb = alone[name]
            rows[name] = Measured(
                **self.quality(answers[name], answers[baseline]),
                batch_drift=float(f"{drift:.2e}"),
                p50_ms=round(1000 * percentile(times, 50), 2),
                p95_ms=round(1000 * percentile(times, 95), 2),
                p99_ms=round(1000 * percentile(times, 99), 2),
                **fastest(speeds[name], speeds[baseline]),
                bytes=(variant.folder / SAFETENSORS).stat().st_size,
                load_s=load_s,
                peak_rss_mb=peak_rss_mb,
            )
        return Comparison(rows, baseline, len(self.trial.pairs), self.trial.calibrated_on, str(self.device))

    def quality(self, found: Answers, expected: Answers) -> dict[str, Any]:
        """Accuracy, agreement, and the paired difference with its interval."""
        rows = [(a, b, pair.label) for a, b, pair in zip(found.labels, expected.labels, self.trial.pairs, strict=True)]
        n = len(rows)
        won, lost = sum(a == label != b for a, b, label in rows), sum(b == label != a for a, b, label in rows)
        low, high = paired_interval(won, lost, n)
        return {
            "accuracy": round(sum(a == label for a, _, label in rows) / n, 5),
            "agreement": round(sum(a == b for a, b, _ in rows) / n, 5),
            "accuracy_diff": round((won - lost) / n, 5),
            "diff_ci95": (round(low, 5), round(high, 5)),
        }

    def speeds(self, moderators: Mapping[str, Moderator]) -> dict[str, dict[int, list[float]]]:
        """Pairs a second by name and batch size, one figure a round."""
        batch_sizes, rounds = self.effort.batch_sizes, self.effort.rounds
        count = max(batch_sizes)
        some = [pair.question for pair in self.trial.pairs[:count]]
        # A picture shared by several pairs is looked at once, which would flatter some batches.
        questions = [replace(some[i % len(some)], image_key=str(i).encode()) for i in range(count)]

        def run(moderator: Moderator, size: int) -> Callable[[], object]:
            return lambda: [moderator.judge(questions[first : first + size]) for first in range(0, count, size)]

        runs = {(name, size): run(m, size) for size in sorted(batch_sizes) for name, m in moderators.items()}
        seconds = in_turns(runs, rounds, lambda done: self.tell("speed", done, rounds))
        return {name: {size: [count / s for s in seconds[name, size]] for size in batch_sizes} for name in moderators}

    def answers(self, name: str, moderator: Moderator) -> Answers:
        """Judge all pairs, shuffled, in batches of MIXED_BATCH_PAIRS."""
        order = random.Random(self.seed).sample(range(len(self.trial.pairs)), len(self.trial.pairs))
        labels, probs = [""] * len(order), torch.empty(len(order), 3, dtype=torch.float64)
        for first in range(0, len(order), MIXED_BATCH_PAIRS):
            places = order[first : first + MIXED_BATCH_PAIRS]
            judged = moderator.judge([self.trial.pairs[place].question for place in places])
            for place, judgement in zip(places, judged, strict=True):
                labels[place], probs[place] = read(name, place, judgement)
            self.tell(f"answers of {name}", first + len(places), len(order))
        return Answers(tuple(labels), probs)

    def singles(self, name: str, moderator: Moderator, mixed: Answers) -> tuple[list[float], float]:
        """Judge some pairs one by one: seconds of each, and the largest change of a probability from `mixed`."""
        count = self.effort.singles
        places = random.Random(self.seed + 1).sample(range(len(self.trial.pairs)), min(count, len(self.trial.pairs)))
        times, drift = [], 0.0
        for done, place in enumerate(places, 1):
            started = time.perf_counter()
            (judgement,) = moderator.judge([self.trial.pairs[place].question])
            times.append(time.perf_counter() - started)
            drift = max(drift, float((read(name, place, judgement)[1] - mixed.probs[place]).abs().max()))
            self.tell(f"latency of {name}", done, len(places))
        return times, drift


def read(name: str, place: int, judgement: object) -> tuple[str, Tensor]:
    """A judgement's label and probabilities (3,). Raises ConcordError for an error in its place."""
    if not isinstance(judgement, Judgement):
        raise ConcordError(f"{name} could not judge pair {place + 1}: {judgement}")
    probs = (judgement.p_entailment, judgement.p_contradiction, judgement.p_neutral)
    return judgement.label, torch.tensor(probs, dtype=torch.float64)


def check_labels(moderators: Mapping[str, Moderator]) -> None:
    """Raise ConcordError where a variant's labels are not the first one's."""
    labels = [set(moderator.checkpoint.labels) for moderator in moderators.values()]
    for name, own in zip(moderators, labels, strict=True):
        if own != labels[0]:
            raise ConcordError(f"{name} answers with other labels than the original: it is another model's.")


def fastest(speeds: Mapping[int, Sequence[float]], baseline: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """The best batch, its pairs a second, and the ratio to the baseline's best; speeds are by batch and round."""
    batch, best = max(speeds.items(), key=lambda item: statistics.median(item[1]))
    rival = max(baseline.values(), key=statistics.median)
    return {
        "best_batch": batch,
        "pairs_per_s": round(statistics.median(best), 2),
        "speed_ratio": round(statistics.median(a / b for a, b in zip(best, rival, strict=True)), 3),
    }


def paired_interval(won: int, lost: int, pairs: int) -> tuple[float, float]:
    """The 95% interval of the difference of two accuracies on the same pairs.

    Normal on the paired differences, after one more pair won and one more lost: Bonett and Price, "Adjusted Wald
    confidence interval for a difference of binomial proportions based on paired data" (Journal of Educational and
    Behavioral Statistics 37, 2012). Without the two, a recipe that differs nowhere would have an interval of width 0.
    """
    n = pairs + 2
    p_won, p_lost = (won + 1) / n, (lost + 1) / n
    middle = p_won - p_lost
    reach = Z95 * math.sqrt((p_won + p_lost - middle**2) / n)
    return max(-1.0, middle - reach), min(1.0, middle + reach)
