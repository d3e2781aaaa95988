"""Fetching a checkpoint from ModelScope's hub, once, into a directory that workers load.

A pinned revision is downloaded, file by file as needed and no code among them; each file's sha256 is checked against
the hub's own listing; the weights are rewritten as safetensors, without what can be computed; `concord.json` records
where they came from and the hashes of what was written. `modelscope` is needed only here, and only to download.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Protocol

import safetensors.torch
import torch

from worker.errors import CheckpointRefused, ConcordError
from worker.model.checkpoint import (
    MANIFEST,
    MANIFEST_FORMAT,
    PICKLED,
    SAFETENSORS,
    SETTINGS,
    UNQUANTIZED,
    Files,
    load,
    network_state,
    sha256,
)
from worker.model.config import Configuration, OFAConfig

#: A full git commit, which names one state of a repository for ever.
COMMIT = re.compile(r"[0-9a-f]{40}")


class Hub(Protocol):
    """What is asked of a model hub."""

    def revisions(self, model_id: str) -> tuple[list[str], list[str]]:
        """Names of the model's branches, which move, and of its tags."""

    def files(self, model_id: str, revision: str) -> Mapping[str, str]:
        """The sha256 of each file by its path, empty where the hub has none."""

    def download(self, model_id: str, revision: str, names: Iterable[str], folder: Path) -> None:
        """Put the named files into a folder."""


class ModelScopeHub:
    """ModelScope's hub. Raises ConcordError where `modelscope` is not installed or the hub gives no answer."""

    def __init__(self) -> None:
        try:
            from modelscope.hub.api import HubApi
            from modelscope.hub.snapshot_download import snapshot_download
        except ImportError as error:
            raise ConcordError(f"Fetching weights needs modelscope ({error}): pip install 'concord[hub]'") from error
        self._api, self._snapshot = HubApi(), snapshot_download

    def revisions(self, model_id: str) -> tuple[list[str], list[str]]:
        with answering(model_id):
            branches, tags = self._api.get_model_branches_and_tags(model_id)
        return list(branches), list(tags)

    def files(self, model_id: str, revision: str) -> Mapping[str, str]:
        with answering(model_id):
            # Of the two listings that modelscope offers, only this one has hashes.
            listed = self._api.list_repo_files(model_id, "model", revision=revision, recursive=False)
        return {file.path: file.sha256 or "" for file in listed}

    def download(self, model_id: str, revision: str, names: Iterable[str], folder: Path) -> None:
        with answering(model_id):
            self._snapshot(model_id, revision=revision, local_dir=str(folder), allow_patterns=list(names))


@contextmanager
def answering(model_id: str) -> Iterator[None]:
    """Turn whatever the hub's client raises, which has no common base, into one sentence."""
    try:
        yield
    except Exception as error:
        raise ConcordError(f"The hub gave no answer for {model_id}: {error}") from error


def fetch(
    model_id: str,
    revision: str,
    out: Path,
    hub: Hub | None = None,
    labels: Mapping[str, str] | None = None,
) -> Path:
    """Fetch `model_id` at `revision`, a tag or a full commit, into the new directory `out`, and return it.

    `labels` says what answers in an unknown wording mean (answer -> entailment, contradiction or neutral). Raises
    ConcordError where the request cannot be followed and CheckpointRefused where the checkpoint cannot be used; either
    way nothing is left in `out`.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConcordError(f"{out} is there already: name a new directory, or remove it first.")
    hub = hub or ModelScopeHub()
    _check_pinned(hub, model_id, revision)
    out.parent.mkdir(parents=True, exist_ok=True)
    # A folder beside `out` becomes `out` in one step at the end, so that nobody ever finds half a checkpoint.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        source, target = Path(scratch, "source"), Path(scratch, "target")
        source.mkdir()
        originals = _download(hub, model_id, revision, source)
        _convert(source, target, originals, {"name": model_id, "revision": revision, "labels": dict(labels or {})})
        load(target)
        if out.exists():
            out.rmdir()
        target.rename(out)
    return out


def _check_pinned(hub: Hub, model_id: str, revision: str) -> None:
    branches, tags = hub.revisions(model_id)
    if revision in tags or COMMIT.fullmatch(revision):
        return
    what = "a branch, which moves" if revision in branches else f"not a revision of {model_id}"
    known = f"a tag ({', '.join(tags)}) or " if tags else ""
    raise ConcordError(
        f"{revision!r} is {what}: give {known}a full commit of 40 digits, so that weights stay the same."
    )


def _download(hub: Hub, model_id: str, revision: str, folder: Path) -> dict[str, str]:
    """Download and verify the files that loading reads: their names and sha256."""
    listed = hub.files(model_id, revision)
    weights = SAFETENSORS if SAFETENSORS in listed else PICKLED
    originals = _download_verified(hub, model_id, revision, listed, (*SETTINGS, weights), folder)
    configuration = Configuration.from_hub(Files(folder).json_object("configuration.json"))
    if configuration.answer2label:
        # Whatever kind of file is named, only JSON is ever read.
        answers = str(PurePosixPath(configuration.answer2label).with_suffix(".json"))
        originals |= _download_verified(hub, model_id, revision, listed, (answers,), folder)
    return originals


def _download_verified(
    hub: Hub, model_id: str, revision: str, listed: Mapping[str, str], names: Iterable[str], folder: Path
) -> dict[str, str]:
    names = list(names)
    for name in names:
        if name not in listed:
            raise CheckpointRefused(f"{model_id} at {revision} has no {name} at its top level.")
        if not listed[name]:
            raise CheckpointRefused(f"The hub lists no sha256 for {name} of {model_id}, so it cannot be verified.")
    hub.download(model_id, revision, names, folder)
    for name in names:
        digest = sha256(Files(folder).path(name))
        if digest != listed[name].lower():
            raise CheckpointRefused(
                f"{name} arrived with sha256 {digest}, the hub lists {listed[name]}: fetch it again."
            )
    return {name: listed[name].lower() for name in names}


def _convert(source: Path, target: Path, originals: Mapping[str, str], about: Mapping[str, object]) -> None:
    """Write the checkpoint in `source` to `target`: settings as they are, weights as safetensors, a manifest."""
    target.mkdir()
    files = Files(source)
    for name in originals:
        if name not in (SAFETENSORS, PICKLED):
            shutil.copyfile(files.path(name), target / name)
    configuration = Configuration.from_hub(files.json_object("configuration.json"))
    config = OFAConfig.from_hub(files.json_object("config.json"))
    weights, _ = files.weights()
    state = network_state(weights, config, configuration.max_src_length)
    # safetensors stores each tensor apart, so views of a common storage are copied.
    state = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
    safetensors.torch.save_file(state, target / SAFETENSORS, metadata={"format": "pt"})
    manifest = {
        "format": MANIFEST_FORMAT,
        **about,
        "recipe": UNQUANTIZED,
        "files": {path.name: sha256(path) for path in sorted(target.iterdir())},
        "originals": dict(originals),
    }
    (target / MANIFEST).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
