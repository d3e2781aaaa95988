"""The error report names what is worst, in numbers, words and a picture."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tests.quant.test_quantize import NARROW
from tests.quant.toy import questions, write_toy
from worker.model.checkpoint import load
from worker.quant.layers import SKIPPED, groups
from worker.quant.quantize import quantize
from worker.quant.report import KINDS, PICTURE_PX, Report
from worker.quant.statistics import probabilities


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_toy(folder / "toy", NARROW)
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return quantize(folder / "toy", "awq-int4", questions(15), folder / "awq", measure_on=questions(9, "test"))


def test_every_linear_is_reported_in_the_order_of_the_network(report: Report) -> None:
    names = [linear.name for linear in report.linears]
    assert sorted(names) == sorted(name for group in groups(NARROW) for name in group.linears)
    assert [linear.place for linear in report.linears] == list(range(len(names)))
    assert names[0] == "encoder.layers.0.self_attn.q_proj"
    assert names[-1] == "decoder.layers.1.fc2"


def test_sizes_are_those_of_the_file(report: Report) -> None:
    fc2 = next(linear for linear in report.linears if linear.name == "encoder.layers.0.fc2")
    assert fc2.bytes == 64 * 128 // 2 + 64 * 2 + 64 + 64 * 2
    assert fc2.fp16_bytes == 2 * (64 * 128 + 64)
    assert fc2.kept_as == "int4 in groups of 128"
    assert report.bytes == sum(linear.bytes for linear in report.linears)


def test_answers_are_compared_with_the_original_on_the_pairs_to_measure_on(report: Report, folder: Path) -> None:
    p, q = (probabilities(load(folder / name), questions(9, "test")).double() for name in ("toy", "awq"))

    assert report.pairs == 9
    assert report.agreement == pytest.approx(float(p.argmax(1).eq(q.argmax(1)).float().mean()))
    assert report.kl == pytest.approx(float((p * (p / q).log()).sum(1).mean()), abs=1e-6)
    assert report.worst_change == pytest.approx(float((p - q).abs().max()), abs=1e-5)


def test_errors_pile_up_from_block_to_block(report: Report) -> None:
    assert [block.name for block in report.blocks] == [
        "encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1",
    ]  # fmt: skip
    assert all(0 < block.error < 1 for block in report.blocks)


def test_a_float32_copy_has_no_errors(folder: Path, tmp_path: Path) -> None:
    report = quantize(folder / "toy", "fp32", [], tmp_path / "out", measure_on=questions(6, "test"))
    assert max(linear.error or 0.0 for linear in report.linears) < 1e-7
    assert {block.error for block in report.blocks} == {0.0}
    assert (report.agreement, report.worst_change) == (1.0, 0.0)
    assert report.share_of_fp16 == 2


def test_the_report_is_written_as_json_text_and_picture(report: Report, tmp_path: Path) -> None:
    json_file, text_file, picture_file = report.write(tmp_path / "reports" / "awq.json")

    values = json.loads(json_file.read_text())
    assert values["recipe"] == "awq-int4"
    assert values["share_of_fp16"] == pytest.approx(report.share_of_fp16, abs=1e-4)
    assert len(values["linears"]) == len(report.linears)
    text = text_file.read_text()
    assert text.index(report.worst_first()[0].name) < text.index(report.worst_first()[1].name)
    assert all(name in text for name in SKIPPED)
    with Image.open(picture_file) as picture:
        assert picture.size == PICTURE_PX
        colours = {colour for _, colour in picture.convert("RGB").getcolors(100_000)}
    assert {tuple(bytes.fromhex(colour[1:])) for colour in KINDS.values()} <= colours


def test_worst_comes_first(report: Report) -> None:
    errors = [linear.error or 0.0 for linear in report.worst_first()]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > errors[-1]


def test_without_pairs_there_are_sizes_alone(folder: Path, tmp_path: Path) -> None:
    report = quantize(folder / "toy", "rtn-int4", [], tmp_path / "out")

    assert (report.pairs, report.agreement, report.blocks) == (0, None, ())
    assert {linear.error for linear in report.linears} == {None}
    assert len(report.write(tmp_path / "report.json")) == 2
    assert report.share_of_fp16 == replace(report, pairs=1).share_of_fp16 < 0.3
