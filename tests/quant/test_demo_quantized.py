"""The demo model by awq-int4 answers like the demo model: on 600 test pairs, and with `make slow` on all 6,000."""

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from infra.demo_model.generate import held_out_pairs
from infra.demo_model.scenes import LABELS, SEEDS
from infra.demo_model.vocabulary import WEIGHTS
from tests.quant.toy import questions
from worker.model.checkpoint import Checkpoint, load
from worker.moderator import Judgement, Moderator, Question
from worker.quant.quantize import quantize
from worker.quant.report import Report
from worker.quant.statistics import probabilities

CALIBRATION, MEASURED = 256, 300
FAST = 600

#: What awq-int4 may cost.
MAX_ACCURACY_DIFFERENCE, MIN_AGREEMENT, MAX_BATCH_DRIFT, MAX_SHARE_OF_FP16 = 0.005, 0.985, 0.01, 0.27

Made = dict[str, tuple[Checkpoint, Report]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The demo model by both four-bit recipes."""
    folder, found = tmp_path_factory.mktemp("demo"), {}
    for recipe in ("awq-int4", "rtn-int4"):
        report = quantize(
            WEIGHTS, recipe, questions(CALIBRATION), folder / recipe, measure_on=questions(MEASURED, "test")
        )
        found[recipe] = (load(folder / recipe), report)
    return found


def test_linears_take_at_most_27_hundredths_of_float16(made: Made) -> None:
    _, report = made["awq-int4"]
    assert {linear.kept_as for linear in report.linears} == {"int4 in groups of 128"}
    assert report.share_of_fp16 <= MAX_SHARE_OF_FP16


def test_a_linear_s_error_is_at_most_that_of_plain_rounding_and_on_average_clearly_below(made: Made) -> None:
    awq, rtn = ({linear.name: linear.error or 0.0 for linear in made[name][1].linears} for name in made)
    ratios = [awq[name] / rtn[name] for name in awq]
    assert sum(ratio <= 1 for ratio in ratios) >= 0.95 * len(ratios)
    assert sum(ratios) / len(ratios) <= 0.9


def test_600_pairs_get_the_same_labels(made: Made) -> None:
    check_labels(made, FAST)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_6000_pairs_get_the_same_labels(made: Made) -> None:
    check_labels(made, 6000)


def check_labels(made: Made, count: int) -> None:
    asked = questions(count, "test")
    truth = torch.tensor([LABELS.index(pair.line["label"]) for pair in held_out_pairs(count, SEEDS["test"])])
    original = load(WEIGHTS)
    labels = {"float32": labels_of(original, asked), **{name: labels_of(made[name][0], asked) for name in made}}
    right = {name: found.eq(truth).double() for name, found in labels.items()}
    difference = right["awq-int4"] - right["float32"]
    half = 1.96 * float(difference.std()) / math.sqrt(count)
    agreement = {name: float(labels[name].eq(labels["float32"]).double().mean()) for name in made}
    stated = (
        f"{count} pairs: accuracy {float(right['float32'].mean()):.4f} in float32, "
        f"{float(right['awq-int4'].mean()):.4f} by awq-int4, "
        f"difference {float(difference.mean()):+.4f} +- {half:.4f}, agreement {agreement}"
    )
    print(stated)
    assert abs(float(difference.mean())) <= MAX_ACCURACY_DIFFERENCE, stated
    assert agreement["awq-int4"] >= MIN_AGREEMENT, stated
    assert agreement["awq-int4"] >= agreement["rtn-int4"], stated


def labels_of(checkpoint: Checkpoint, asked: Sequence[Question]) -> Tensor:
    """Places in LABELS, (n,)"""
    order = torch.tensor([LABELS.index(label) for label in checkpoint.labels])
    return order[probabilities(checkpoint, asked).argmax(1)]


def test_probabilities_do_not_depend_on_the_batch(made: Made) -> None:
    asked = list(questions(64, "test"))
    shuffled = random.Random(0).sample(range(64), 64)
    moderator = Moderator(made["awq-int4"][0], "cpu")

    alone = [moderator.judge([question])[0] for question in asked]
    together = moderator.judge([asked[place] for place in shuffled])

    for place, result in zip(shuffled, together, strict=True):
        single = alone[place]
        assert isinstance(result, Judgement)
        assert isinstance(single, Judgement)
        assert result.probs == pytest.approx(single.probs, abs=MAX_BATCH_DRIFT / 100)
