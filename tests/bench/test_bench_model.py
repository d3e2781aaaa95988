"""The benchmark of the model, on few pairs."""

import json

import pytest

from infra.bench import model
from infra.demo_model.vocabulary import WEIGHTS
from worker.model.checkpoint import load


def test_every_model_is_asked_one_by_one_in_batches_and_with_shared_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "BATCH_PAIRS", 6)
    monkeypatch.setattr(model, "ALONE_PAIRS", 3)
    monkeypatch.setattr(model, "distilled", lambda: (None, load(WEIGHTS)))  # the real one takes ten seconds a round
    figures = model.measure(0, lambda said: None)
    assert json.loads(json.dumps(figures)) == figures
    assert {"bench", "pairs_per_s", "ratio", "target", "met"} <= figures.keys()
    models = figures["models"]
    assert isinstance(models, dict) and len(models) == 3
    assert [one["pairs"] for one in models.values()] == [6, 6, 3]
    assert [one["pictures"] for one in models.values()] == [2, 2, 1]
    assert all(one["alone_per_s"] > 0 and one["shared_per_s"] > 0 for one in models.values())


def test_slices_of_like_lengths_are_padded_less() -> None:
    padding = model.padding()
    assert 0 < padding["by_length"] < padding["as_they_come"]


def test_a_batch_has_pictures_apart_or_three_pairs_to_each() -> None:
    assert len({one.image_key for one in model.batch(12, apart=True)}) == 12
    assert len({one.image_key for one in model.batch(12, apart=False)}) == 4
