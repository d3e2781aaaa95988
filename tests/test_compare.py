"""Recipes side by side: what is compared with what, on which pairs, and how the figures come about."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console

from infra.bench.plain import judge_plain, load_plain
from infra.bench.precision import TARGETS, met
from infra.bench.precision_page import page
from infra.demo_model.generate import held_out_pairs
from infra.demo_model.vocabulary import WEIGHTS
from tests.model.golden import SETS, TOLERANCE, loaded, picture, recorded, reference, write_checkpoint
from worker.compare import clock
from worker.compare.clock import in_fresh_process, in_turns, percentile
from worker.compare.compare import Comparison, Effort, Measurement, compare, fastest, paired_interval
from worker.compare.trial import LabelledPair, Trial, Variant, deal, prepare, resized
from worker.errors import CheckpointRefused, ConcordError
from worker.model.checkpoint import load
from worker.moderator import Judgement, Question
from worker.quant.quantize import quantize
from worker.quant.replay import replay

QUICK = Effort(batch_sizes=(2, 4), singles=3, rounds=2)

#: The keys of one recipe in the line of JSON, which others read.
KEYS = {
    "accuracy", "agreement", "accuracy_diff", "diff_ci95", "batch_drift", "p50_ms", "p95_ms", "p99_ms", "pairs_per_s",
    "speed_ratio", "bytes", "load_s", "peak_rss_mb",
}  # fmt: skip


def pairs_of(number: int) -> list[LabelledPair]:
    """Test pairs of the demo model, three a picture."""
    return [
        LabelledPair(
            Question(Image.fromarray(pair.pixels), pair.line["image"].encode(), pair.line["text"]), pair.line["label"]
        )
        for pair in held_out_pairs(number)
    ]


@pytest.fixture(scope="module")
def compared() -> tuple[Comparison, list[tuple[str, int, int]]]:
    """A comparison of the demo model's recipes, and what its progress was told."""
    told: list[tuple[str, int, int]] = []
    comparison = compare(
        WEIGHTS,
        ["awq-int4", "bf16@48"],
        pairs_of(60),
        effort=QUICK,
        progress=lambda stage, done, total: told.append((stage, done, total)),
    )
    return comparison, told


def test_every_recipe_is_compared_with_float32_which_comes_first(compared: tuple[Comparison, Any]) -> None:
    comparison, _ = compared
    assert list(comparison.recipes) == ["fp32", "awq-int4", "bf16@48"]
    baseline = comparison.recipes["fp32"]
    assert (baseline.agreement, baseline.accuracy_diff, baseline.speed_ratio) == (1, 0, 1)
    assert comparison.recipes["awq-int4"].bytes < comparison.recipes["bf16@48"].bytes < baseline.bytes
    for row in comparison.recipes.values():
        assert row.p50_ms <= row.p95_ms <= row.p99_ms
        assert row.diff_ci95[0] <= row.accuracy_diff <= row.diff_ci95[1]
        assert row.batch_drift <= 0.01
        assert row.best_batch in QUICK.batch_sizes
        assert row.load_s > 0 and row.peak_rss_mb > 50


def test_the_json_is_one_line_of_one_shape(compared: tuple[Comparison, Any]) -> None:
    line = compared[0].json()
    assert "\n" not in line
    values = json.loads(line)
    assert list(values) == ["recipes"]
    assert all(set(row) == KEYS for row in values["recipes"].values())
    assert all(len(row["diff_ci95"]) == 2 for row in values["recipes"].values())


def test_the_table_is_whole_also_on_a_narrow_console(compared: tuple[Comparison, Any]) -> None:
    console = Console(width=40, soft_wrap=True, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(compared[0].table())
    text = console.export_text()
    assert "…" not in text
    assert all(name in text for name in compared[0].recipes)


def test_without_calibration_pairs_some_pictures_are_set_apart(compared: tuple[Comparison, Any]) -> None:
    comparison, _ = compared
    assert (comparison.calibrated_on, comparison.pairs) == (15, 45)


def test_progress_goes_through_the_stages_to_their_ends(
    compared: tuple[Comparison, list[tuple[str, int, int]]],
) -> None:
    stages = list(dict.fromkeys(stage for stage, _, _ in compared[1]))
    assert stages[:3] == ["quantizing", "loading", "speed"]
    assert {"answers of awq-int4", "latency of awq-int4"} <= set(stages)
    for stage in stages:
        done = [(at, total) for name, at, total in compared[1] if name == stage]
        assert done[-1][0] == done[-1][1]
        assert done == sorted(done)


def test_pairs_whose_picture_calibrates_never_measure() -> None:
    pairs = pairs_of(60)
    calibration, measured = deal(pairs, None, seed=0)
    seen = {question.image.tobytes() for question in calibration}
    assert len(calibration) == 15 and len(measured) == 45
    assert not seen & {pair.question.image.tobytes() for pair in measured}


def test_given_calibration_pairs_are_left_out_where_they_measure() -> None:
    pairs = pairs_of(12)
    # The same picture under another key is the same picture.
    again = replace(pairs[0].question, image_key=b"another name", text="something else")
    other = Question(Image.new("RGB", (9, 9)), pairs[0].question.image_key, "a dog")
    calibration, measured = deal(pairs, [again, other], seed=0)
    assert calibration == [other]
    assert measured == pairs


def test_a_resized_checkpoint_looks_at_smaller_pictures_with_the_same_weights(tmp_path: Path) -> None:
    quantize(WEIGHTS, "rtn-int4", [], tmp_path / "whole", measure_on=())
    small = load(resized(tmp_path / "whole", 48, tmp_path / "small"))
    whole = load(tmp_path / "whole")
    assert (small.configuration.patch_image_size, whole.configuration.patch_image_size) == (48, 64)
    assert small.sha256 == whole.sha256
    # Its reference pairs are those that it answers at its own size.
    assert replay(small).worst < 1e-4
    assert replay(whole).worst < 1e-4


def test_image_sizes_multiply_recipes_and_name_them(tmp_path: Path) -> None:
    made = prepare(
        WEIGHTS, ["bf16", "rtn-int4@32"], pairs_of(3), tmp_path,
        image_sizes=(64, 48), calibration=None, seed=0, tell=lambda *_: None,
    )  # fmt: skip
    sizes = {variant.name: load(variant.folder).configuration.patch_image_size for variant in made.variants}
    assert sizes == {"fp32@64": 64, "bf16@64": 64, "bf16@48": 48, "rtn-int4@32": 32}
    assert made.calibrated_on == 0 and len(made.pairs) == 3


@pytest.mark.usefixtures("no_fresh_processes")
def test_a_quantized_folder_is_compared_as_it_is(tmp_path: Path) -> None:
    quantize(WEIGHTS, "bf16", [], tmp_path / "mine", measure_on=())
    comparison = compare(WEIGHTS, [tmp_path / "mine"], pairs_of(6), effort=QUICK)
    assert list(comparison.recipes) == ["fp32", "mine"]


def prepared(recipes: Sequence[str | Path], scratch: Path, pairs: Sequence[LabelledPair]) -> Trial:
    return prepare(
        WEIGHTS, recipes, pairs, scratch, image_sizes=(), calibration=None, seed=0, tell=lambda *_: None
    )  # fmt: skip


@pytest.fixture
def no_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process of its own takes is measured once for all; starting one takes seconds."""
    monkeypatch.setattr("worker.compare.compare.in_fresh_process", lambda *_: (1.0, 100.0))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("int5", r"'int5' is neither a recipe \(awq-int4, .*\) nor the folder"),
        ("int5@48", "'int5' is neither a recipe"),
        ("fp32@9999", "a grid of 625 x 625"),
        (str(WEIGHTS), "is not quantized: name a recipe, or run `concord quantize` first"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_refused(recipe: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConcordError, match=message):
        prepared([recipe], tmp_path, pairs_of(3))
    assert list(tmp_path.iterdir()) == []


def test_two_folders_of_one_name_are_refused(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        quantize(WEIGHTS, "bf16", [], tmp_path / parent / "mine", measure_on=())
    with pytest.raises(ConcordError, match="would be called mine: rename one"):
        prepared([tmp_path / "a" / "mine", tmp_path / "b" / "mine"], tmp_path / "scratch", pairs_of(3))


def test_quantized_weights_are_no_baseline(tmp_path: Path) -> None:
    quantize(WEIGHTS, "bf16", [], tmp_path / "mine", measure_on=())
    with pytest.raises(CheckpointRefused, match="is quantized already: compare with the original weights"):
        compare(tmp_path / "mine", ["bf16"], pairs_of(3), effort=QUICK)


def test_a_pair_without_a_right_label_or_a_text_is_refused_by_its_number(tmp_path: Path) -> None:
    good = pairs_of(3)
    with pytest.raises(ConcordError, match=r"Pair 2 has the label 'maybe'; .* are entailment, contradiction, neutral"):
        prepared(["bf16"], tmp_path, [good[0], replace(good[1], label="maybe")])
    with pytest.raises(ConcordError, match="Pair 3 has no text to score"):
        prepared(["bf16"], tmp_path, [*good[:2], LabelledPair(replace(good[2].question, text="?!"), "neutral")])
    with pytest.raises(ConcordError, match="No pair is left to measure on"):
        prepared(["bf16"], tmp_path, [])


@pytest.mark.usefixtures("no_fresh_processes")
def test_another_models_quantized_folder_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "other")
    (source / "ans2label.json").write_text('{"no": 0, "yes": 1}')
    quantize(source, "bf16", [], tmp_path / "made", measure_on=())
    with pytest.raises(ConcordError, match="made@96 answers with other labels than the original"):
        compare(WEIGHTS, [tmp_path / "made@96"], pairs_of(3), effort=QUICK)


class Scripted:
    """A moderator that gives the labels it was told to, a little less surely in company."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = labels
        self.checkpoint = loaded()

    def judge(self, questions: Sequence[Question]) -> list[Judgement]:
        sure = 0.9 if len(questions) == 1 else 0.875
        return [
            Judgement(
                self.labels[int(question.text)],
                "",
                {},
                sure,
                1 - sure,
                0.0,
                question.text,
                None,
                (),  # type: ignore[arg-type]
            )
            for question in questions
        ]


def measurement(truth: Sequence[str]) -> Measurement:
    pairs = [LabelledPair(Question(picture("tiny.png"), b"", str(i)), label) for i, label in enumerate(truth)]
    return Measurement(Trial([Variant("fp32", Path())], pairs, 0), "cpu", QUICK, 0, lambda *_: None)


def test_quality_counts_pair_by_pair() -> None:
    truth = ["neutral"] * 100
    expected, found = list(truth), list(truth)
    expected[0] = expected[1] = found[1] = found[2] = found[3] = found[4] = "entailment"
    measured = measurement(truth)
    one, other = (measured.answers("x", Scripted(labels)) for labels in (found, expected))  # type: ignore[arg-type]
    quality = measured.quality(one, other)
    assert quality["accuracy"] == 0.96
    assert quality["agreement"] == 0.96
    assert quality["accuracy_diff"] == -0.02
    assert quality["diff_ci95"][0] < -0.02 < quality["diff_ci95"][1]


def test_drift_is_the_largest_change_between_alone_and_in_company() -> None:
    measured = measurement(["entailment"] * 5)
    moderator: Any = Scripted(["entailment"] * 5)
    times, drift = measured.singles("x", moderator, measured.answers("x", moderator))
    assert len(times) == QUICK.singles
    assert drift == pytest.approx(0.025)


def test_a_pair_that_cannot_be_judged_ends_the_comparison() -> None:
    class Failing(Scripted):
        def judge(self, questions: Sequence[Question]) -> Any:
            return [ConcordError("out of luck")] * len(questions)

    with pytest.raises(ConcordError, match="awq could not judge pair 1: out of luck"):
        measurement(["neutral"]).answers("awq", Failing([""]))  # type: ignore[arg-type]


def test_the_interval_of_a_paired_difference_covers_it_as_often_as_it_says() -> None:
    rng, n, covered = random.Random(4), 300, 0
    for _ in range(400):
        drawn = rng.choices((1, -1, 0), (0.04, 0.02, 0.94), k=n)
        low, high = paired_interval(drawn.count(1), drawn.count(-1), n)
        covered += low <= 0.02 <= high
    assert 0.92 <= covered / 400 <= 0.98


def test_the_interval_is_never_without_width_and_stays_within_bounds() -> None:
    low, high = paired_interval(0, 0, 6000)
    assert -0.001 < low < 0 < high < 0.001
    assert low == -high
    assert paired_interval(2, 0, 2)[1] <= 1
    assert paired_interval(0, 3, 50) == pytest.approx([-value for value in reversed(paired_interval(3, 0, 50))])


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, p) for p in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert percentile([7.0], 50) == percentile([7.0], 99) == 7


def test_runs_take_turns_after_one_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: Iterator[int] = count()
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(ticks))
    order: list[str] = []
    done: list[int] = []
    seconds = in_turns({name: lambda name=name: order.append(name) for name in "abc"}, 3, done.append)  # type: ignore[misc]
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert seconds == {name: [1, 1, 1] for name in "abc"}
    assert done == [1, 2, 3]


def test_the_ratio_is_the_median_of_the_rounds_own() -> None:
    baseline = {8: [100.0, 50.0, 100.0], 16: [10.0, 10.0, 10.0]}
    found = fastest({8: [1.0, 1.0, 1.0], 16: [150.0, 75.0, 500.0]}, baseline)
    assert found == {"best_batch": 16, "pairs_per_s": 150, "speed_ratio": 1.5}


def test_the_memory_of_a_fresh_process_is_its_own(tmp_path: Path) -> None:
    held = bytearray(400_000_000)
    for page_start in range(0, len(held), 4096):
        held[page_start] = 1
    load_s, peak_rss_mb = in_fresh_process(WEIGHTS, "cpu")
    assert load_s > 0
    # Python with torch takes some 250 MB; whoever starts the process had 400 more.
    assert 50 < peak_rss_mb < clock.peak_rss_mb()


def test_a_fresh_process_that_fails_is_reported_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ConcordError, match=r"could not load .*config\.json is missing in"):
        in_fresh_process(tmp_path, "cpu")


# ---- The benchmark ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("together", [False, True])
def test_the_plain_loop_gives_the_references_answers(name: str, together: bool, tmp_path: Path) -> None:
    cases = recorded(name)["cases"][:6]
    folder = write_checkpoint(tmp_path / "ofa_mini", name)
    questions = [Question(picture(case["image"]), b"", case["text"], case.get("text2")) for case in cases]
    checkpoint = loaded(name)
    plain = load_plain(folder, checkpoint.configuration.max_src_length)
    found = judge_plain(plain, checkpoint, questions, together)
    torch.testing.assert_close(found, reference(cases, "probs"), atol=TOLERANCE, rtol=0)


def test_the_paper_tells_which_targets_were_missed(compared: tuple[Comparison, Any]) -> None:
    rows = json.loads(compared[0].json())["recipes"]
    rows = {name: {**row, "best_batch": 4} for name, row in rows.items()}
    sides = {"ms": [2.0, 1.0], "ratio": 2.0}
    result: dict[str, Any] = dict.fromkeys(("pairs", "calibrated_on"), 60)
    result |= {"command": "c", "date": "d", "commit": "0", "load_at_end": 0.1, "recipes": rows, "image_sizes": rows}
    result["machine"] = dict.fromkeys(
        ("cpu", "cores", "vector_instructions", "threads", "load", "torch", "python"), "known"
    )
    result |= {"int4": sides, "demo": {**sides, "answers_together": sides, "profile": [{"aten::addmm": 0.5}, {}]}}
    result |= {"distilled": sides, "targets": dict.fromkeys(TARGETS, 2.0)}
    text = page(result, {name: (*bound, met(name, 2.0)) for name, bound in TARGETS.items()})
    assert "| float32 against the plain loop, demo shape | at least 4 | 2 | **no** |" in text
    assert "| float32 against the plain loop, distilled shape | at least 1.8 | 2 | yes |" in text
    assert "`aten::addmm` 50%" in text
    assert text.count("| `awq-int4` |") == 2
