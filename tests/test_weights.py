"""Fetching a checkpoint: pinned, verified, converted once, and all of it or nothing."""

import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.model.golden import loaded, recorded, scored, write_checkpoint
from worker.errors import CheckpointRefused, ConcordError
from worker.model.checkpoint import load, sha256
from worker.weights import ModelScopeHub, fetch

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FolderHub:
    """A hub that serves one folder, and remembers what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.listing = {path.name: sha256(path).upper() for path in folder.iterdir()}
        self.downloaded: list[str] = []

    def revisions(self, model_id: str) -> tuple[list[str], list[str]]:
        return ["master"], ["v1.0.0", "v1.0.1"]

    def files(self, model_id: str, revision: str) -> Mapping[str, str]:
        return self.listing

    def download(self, model_id: str, revision: str, names: Iterable[str], folder: Path) -> None:
        for name in names:
            shutil.copyfile(self.folder / name, folder / name)
            self.downloaded.append(name)


@pytest.fixture
def hub(tmp_path: Path) -> FolderHub:
    folder = write_checkpoint(tmp_path / "hub", "long_answers")
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "README.md").write_text("# A model")
    return FolderHub(folder)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "models" / "ofa"


def nothing_is_left(out: Path) -> bool:
    return not out.exists() and not (out.parent.exists() and list(out.parent.iterdir()))


@pytest.mark.parametrize("revision", ["v1.0.1", COMMIT])
def test_a_fetched_checkpoint_loads_and_scores_as_before(hub: FolderHub, out: Path, revision: str) -> None:
    assert fetch("owner/model", revision, out, hub) == out

    checkpoint = load(out)
    assert (checkpoint.name, checkpoint.revision, checkpoint.recipe) == ("owner/model", revision, "none")
    cases = recorded("long_answers")["cases"]
    assert torch.equal(scored(checkpoint, cases).probs, scored(loaded("long_answers"), cases).probs)


def test_only_what_loading_reads_is_fetched_and_kept(hub: FolderHub, out: Path) -> None:
    fetch("owner/model", COMMIT, out, hub)

    settings = ["ans2label.json", "config.json", "configuration.json", "merges.txt"]
    assert sorted(hub.downloaded) == [*settings, "pytorch_model.bin", "vocab.json"]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [*settings, "concord.json", "model.safetensors", "vocab.json"]
    )
    assert list(out.parent.iterdir()) == [out]


def test_the_manifest_records_what_came_and_what_was_written(hub: FolderHub, out: Path) -> None:
    fetch("owner/model", COMMIT, out, hub)

    manifest = json.loads((out / "concord.json").read_text())
    assert manifest["originals"]["pytorch_model.bin"] == sha256(hub.folder / "pytorch_model.bin")
    written = {path.name: sha256(path) for path in out.iterdir() if path.name != "concord.json"}
    assert manifest["files"] == written


def test_weights_keep_their_precision(hub: FolderHub, out: Path) -> None:
    fetch("owner/model", COMMIT, out, hub)

    weights = safetensors.torch.load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}


def test_the_hubs_safetensors_are_fetched_before_its_pickled_file(hub: FolderHub, out: Path) -> None:
    weights = torch.load(hub.folder / "pytorch_model.bin", weights_only=True)
    safetensors.torch.save_file(weights, hub.folder / "model.safetensors")
    hub = FolderHub(hub.folder)

    fetch("owner/model", COMMIT, out, hub)

    assert "pytorch_model.bin" not in hub.downloaded
    assert load(out).name == "owner/model"


@pytest.mark.parametrize(
    ("revision", "sentence"),
    [
        ("master", r"'master' is a branch, which moves: give a tag \(v1\.0\.0, v1\.0\.1\) or a full commit"),
        ("v9", "'v9' is not a revision of owner/model"),
        (COMMIT[:12], "is not a revision of owner/model"),
    ],
)
def test_a_revision_that_may_move_is_refused(hub: FolderHub, out: Path, revision: str, sentence: str) -> None:
    with pytest.raises(ConcordError, match=sentence):
        fetch("owner/model", revision, out, hub)
    assert hub.downloaded == []
    assert nothing_is_left(out)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "vocab.json", "ans2label.json"])
def test_a_file_that_arrives_changed_is_refused(hub: FolderHub, out: Path, name: str) -> None:
    with (hub.folder / name).open("ab") as file:
        file.write(b" ")

    with pytest.raises(CheckpointRefused, match=f"{name} arrived with sha256 [0-9a-f]{{64}}, the hub lists"):
        fetch("owner/model", COMMIT, out, hub)
    assert nothing_is_left(out)


def test_a_file_without_a_hash_is_refused(hub: FolderHub, out: Path) -> None:
    hub.listing["pytorch_model.bin"] = ""

    with pytest.raises(CheckpointRefused, match=r"no sha256 for pytorch_model\.bin"):
        fetch("owner/model", COMMIT, out, hub)
    assert hub.downloaded == []


@pytest.mark.parametrize("name", ["pytorch_model.bin", "merges.txt", "ans2label.json"])
def test_a_file_that_the_hub_lacks_is_named(hub: FolderHub, out: Path, name: str) -> None:
    del hub.listing[name]

    with pytest.raises(CheckpointRefused, match=f"owner/model at {COMMIT} has no {name}"):
        fetch("owner/model", COMMIT, out, hub)
    assert nothing_is_left(out)


def test_a_checkpoint_that_does_not_load_is_not_kept(hub: FolderHub, out: Path) -> None:
    (hub.folder / "ans2label.json").write_text('{"yes": 0, "no": 1, "perhaps": 2}')
    hub = FolderHub(hub.folder)

    with pytest.raises(CheckpointRefused, match="not known what the answer 'perhaps' means"):
        fetch("owner/model", COMMIT, out, hub)
    assert nothing_is_left(out)

    fetch("owner/model", COMMIT, out, hub, labels={"perhaps": "neutral"})
    assert load(out).labels == ("entailment", "contradiction", "neutral")


def test_a_directory_with_something_in_it_is_left_alone(hub: FolderHub, out: Path) -> None:
    out.mkdir(parents=True)
    (out / "precious").write_text("x")

    with pytest.raises(ConcordError, match="is there already"):
        fetch("owner/model", COMMIT, out, hub)
    assert [path.name for path in out.iterdir()] == ["precious"]


def test_an_empty_directory_is_filled(hub: FolderHub, out: Path) -> None:
    out.mkdir(parents=True)

    assert load(fetch("owner/model", COMMIT, out, hub)).revision == COMMIT


def test_without_modelscope_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)

    with pytest.raises(ConcordError, match=r"pip install 'concord\[hub\]'"):
        ModelScopeHub()
