"""Scales and ranges are found where channels stand out, cost nothing at run time, and never make anything worse."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.quant.toy import CONFIG, GAIN, questions, tensors, write_toy
from worker.model.checkpoint import TIED, TOKENS, Checkpoint, load, network_state
from worker.model.decode import score
from worker.model.ofa import OFA
from worker.model.preprocess import make_pixels, make_prompt, pad
from worker.quant.awq import ALPHAS, Halves, search_clip, search_scale
from worker.quant.convert import convert
from worker.quant.layers import SKIPPED, groups, may_clip
from worker.quant.quantize import converted, look, quantize, split
from worker.quant.recipes import RECIPES, Recipe
from worker.quant.report import Report
from worker.quant.statistics import KEPT_ROWS, InputStatistics, collect
from worker.quant.stored import linears_of

AWQ = RECIPES["awq-int4"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy") / "toy")


@pytest.fixture(scope="module")
def checkpoint(toy: Path) -> Checkpoint:
    return load(toy)


def report(toy: Path, out: Path, recipe: Recipe) -> Report:
    return quantize(toy, recipe, questions(48), out, measure_on=questions(24, "test"))


def mean_ratio(report: Report) -> float:
    """The mean error a Linear relative to plain rounding's."""
    plain = [linear.plain_error or 0.0 for linear in report.linears]
    return sum(linear.error or 0.0 for linear in report.linears) / sum(plain)


def statistics(rows: Tensor, group: int | None = 128) -> InputStatistics:
    seen = InputStatistics(rows.size(1), group, torch.Generator().manual_seed(0))
    seen.add(rows)
    return seen


def quiet(stage: str, done: int, total: int) -> None:
    pass


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_scaling_lowers_the_error_where_channels_stand_out(toy: Path, tmp_path: Path) -> None:
    assert GAIN == 15
    assert mean_ratio(report(toy, tmp_path / "out", replace(AWQ, clip=False))) <= 0.85


def test_scaling_with_clipping_lowers_it_further(toy: Path, tmp_path: Path) -> None:
    found = report(toy, tmp_path / "out", AWQ)

    assert mean_ratio(found) <= 0.70
    assert all((linear.error or 0.0) <= (linear.plain_error or 0.0) for linear in found.linears)


def test_queries_and_keys_are_never_clipped(toy: Path, tmp_path: Path) -> None:
    found = report(toy, tmp_path / "out", replace(AWQ, scale=False))

    clipped = {linear.name: linear.clipped for linear in found.linears}
    assert {name for name, share in clipped.items() if not may_clip(name)} == {
        name for name in clipped if name.endswith(("q_proj", "k_proj"))
    }
    assert not any(share for name, share in clipped.items() if name.endswith(("q_proj", "k_proj")))
    assert all(clipped[name] for name in clipped if name.endswith("fc1"))


def test_every_linear_is_in_one_group_or_on_the_skip_list() -> None:
    with torch.device("meta"):
        model = OFA(CONFIG)
    grouped = [name for group in groups(CONFIG) for name in group.linears]

    assert len(grouped) == len(set(grouped))
    assert sorted([*grouped, *SKIPPED]) == sorted(linears_of(model))


def test_folding_scales_leaves_the_float32_network_as_it_was(toy: Path, checkpoint: Checkpoint) -> None:
    parts = split(list(questions(24)), (), seed=0)
    floats = replace(AWQ, stored=torch.float32)
    with torch.inference_mode():
        conversion = convert(checkpoint.model, floats, look(checkpoint, floats, parts, (), 0, quiet), (), quiet)
        assert max(conversion.alphas.values()) > 0.1
        assert {group.source for group in groups(CONFIG)} == set(conversion.divided)
        # With no Linear replaced, what would be written is the network with its scales folded in.
        conversion.made.clear()
        hub = network_state(tensors(toy), CONFIG, 80)
        folded = converted(conversion, hub)
        moved = [name for name in folded if not torch.equal(folded[name], hub[name])]
        assert len(moved) > 40
        model = OFA(CONFIG)
        model.load_state_dict({**folded, TIED[0]: folded[TOKENS]}, strict=False)
        model = model.fold()
        ids, features = batch(checkpoint, 6)
        before = score(checkpoint.model, ids, checkpoint.model.encode(ids, features), checkpoint.answers)
        after = score(model, ids, model.encode(ids, features), checkpoint.answers)
        hidden = [m.decode(ids, m.encode(ids, features)) for m in (checkpoint.model, model)]

    assert (before.probs - after.probs).abs().max() < 1e-5
    assert (hidden[0] - hidden[1]).norm() < 1e-5 * hidden[0].norm()


def batch(checkpoint: Checkpoint, count: int) -> tuple[Tensor, Tensor]:
    """Ids padded on the right, and features, of `count` pairs of unlike lengths."""
    pairs = questions(24)[:count]
    prompts = [
        make_prompt(pair.text, pair.premise, checkpoint.tokenizer, checkpoint.configuration).ids for pair in pairs
    ]
    assert len({len(ids) for ids in prompts}) > 1
    pixels = torch.stack([make_pixels(pair.image, checkpoint.configuration) for pair in pairs])
    return pad(prompts, checkpoint.tokenizer.pad, 82), checkpoint.model.trunk(pixels)


def test_padding_does_not_change_the_statistics(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, every = questions(24)[:9], groups(CONFIG)
    together = collect(checkpoint, pairs, every, seed=0, grams=True)
    # One pair at a time, and no prompt filled up to a multiple of anything.
    monkeypatch.setattr("worker.quant.statistics.MAX_BATCH_TOKENS", 1)
    monkeypatch.setattr("worker.model.preprocess.LENGTH_BUCKET_TOKENS", 1)
    alone = collect(checkpoint, pairs, every, seed=0, grams=True)

    for name, seen in together.items():
        assert seen.count == alone[name].count
        torch.testing.assert_close(seen.mean_abs, alone[name].mean_abs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(seen.grams, alone[name].grams, rtol=1e-3, atol=1e-3 * float(seen.grams.max()))


def test_statistics_take_the_same_memory_however_much_is_seen() -> None:
    seen = InputStatistics(256, 128, torch.Generator().manual_seed(0))
    for step in range(8):
        seen.add(random(300, 256, seed=step))

    assert seen.count == 2400
    assert seen.rows.shape == (KEPT_ROWS, 256)
    assert seen.grams.shape == (2, 128, 128)


def test_every_row_seen_is_as_likely_to_be_kept() -> None:
    seen = InputStatistics(1, None, torch.Generator().manual_seed(0))
    for step in range(40):
        seen.add(torch.full((100, 1), float(step)))

    kept = torch.bincount(seen.rows.flatten().long(), minlength=40)
    assert kept.sum() == KEPT_ROWS
    # 512 of 4,000 are 12.8 of each hundred, give or take 3.3.
    assert int(kept.min()) >= 1
    assert int(kept.max()) <= 28


def test_what_does_not_help_on_held_out_rows_is_not_taken() -> None:
    rows, weight = random(400, 128), random(64, 128, seed=1)
    rows[:, 3] *= 40
    weight[:, 3] *= 3
    other = random(400, 128, seed=2)
    other[:, 3] = 0  # a channel that carries nothing only makes the range wider by being scaled

    helped, _ = search_scale([weight], Halves(statistics(rows), statistics(rows)), 128)
    refused, scale = search_scale([weight], Halves(statistics(rows), statistics(other)), 128)

    assert helped > 0
    assert refused == 0
    assert torch.equal(scale, torch.ones(128))
    assert ALPHAS[0] == 0


def test_a_clip_that_does_not_help_on_held_out_rows_is_not_taken() -> None:
    weight = random(32, 128, seed=1).abs()
    weight[:, 5] = 9.0
    absent, loud = random(400, 128), random(400, 128, seed=2)
    absent[:, 5] = 0  # where the large weights meet nothing, they are worth giving up
    loud[:, 5] *= 40
    ones = torch.ones(128)

    clip = search_clip(weight, ones, Halves(statistics(absent), statistics(absent)), 128)

    assert clip is not None
    assert (clip < 1).float().mean() > 0.8
    assert search_clip(weight, ones, Halves(statistics(absent), statistics(loud)), 128) is None
