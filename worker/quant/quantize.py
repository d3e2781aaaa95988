"""Quantizing a checkpoint: `quantize(model_dir, recipe, calibration, out)`.

Pairs go through the original network while running statistics of what its Linears read are kept; each Linear is then
converted by the recipe; the result is written in the hub's layout, loaded like any other checkpoint, and compared with
the original on pairs that had no part in making it.
"""

import hashlib
import json
import random
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import safetensors.torch
import torch
from torch import Tensor

from worker.errors import CheckpointRefused, ConcordError, PairRejected
from worker.model.checkpoint import (
    MANIFEST,
    MANIFEST_FORMAT,
    SAFETENSORS,
    SETTINGS,
    Checkpoint,
    Files,
    load,
    network_state,
    sha256,
)
from worker.model.preprocess import make_prompt
from worker.quant.convert import Conversion, Seen, convert, is_dense
from worker.quant.int4 import GROUPS
from worker.quant.layers import SKIPPED, groups
from worker.quant.recipes import FALLBACKS, Recipe, recipe_named
from worker.quant.replay import make_reference
from worker.quant.report import Report, compare, linear_reports
from worker.quant.statistics import InputStatistics, Pair, Progress, collect
from worker.quant.stored import FORMAT

#: One of so many pairs is kept apart for the report; of the others one half calibrates and one half accepts.
REPORT_SHARE = 5

#: Fewer pairs say too little about which channels matter.
MIN_CALIBRATION_PAIRS = 10


@dataclass(frozen=True)
class Parts:
    """Pairs by what they are used for."""

    calibration: Sequence[Pair]
    held_out: Sequence[Pair]
    report: Sequence[Pair]


def quantize(
    model_dir: str | Path,
    recipe: str | Recipe,
    calibration: Sequence[Pair],
    out: str | Path,
    *,
    keep: Sequence[str] | int = (),
    fallback: str | None = None,
    measure_on: Sequence[Pair] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Write the checkpoint in `model_dir` by `recipe` into the new directory `out`, and report what that costs.

    `calibration` needs no labels; pairs without text are left out. `keep` names Linears, or blocks of them such as
    "decoder.layers.1", that stay at higher precision, or says how many of the most sensitive ones do. `fallback` is
    the recipe for machines that fail to replay the reference pairs. The report is on `measure_on`, or else on a fifth
    of `calibration`. `progress` is told a stage, and how much of how much of it is done.

    Raises ConcordError for a request that cannot be followed, CheckpointRefused for a checkpoint that cannot be
    quantized; either way nothing is left in `out`.
    """
    started, source, target = time.monotonic(), Path(model_dir), Path(out)
    chosen = recipe_named(recipe) if isinstance(recipe, str) else recipe
    if fallback is not None and fallback not in FALLBACKS:
        raise ConcordError(f"{fallback!r} is no recipe to fall back to: use one of {', '.join(FALLBACKS)}.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConcordError(f"{target} is there already: name a new directory, or remove it first.")
    original = load(source)
    if original.quantization is not None:
        raise CheckpointRefused(f"{source} is quantized already ({original.recipe}): quantize the original weights.")
    tell = progress or (lambda stage, done, total: None)
    usable = [pair for pair in calibration if has_text(pair, original)]
    if (chosen.calibrated or (isinstance(keep, int) and keep)) and len(usable) < MIN_CALIBRATION_PAIRS:
        raise ConcordError(
            f"{len(usable)} pairs with text are too few to calibrate on: give at least {MIN_CALIBRATION_PAIRS}, "
            "better some 256."
        )
    measured = None if measure_on is None else [pair for pair in measure_on if has_text(pair, original)]
    parts = split(usable, measured, seed)
    with torch.inference_mode():
        conversion = convert(original.model, chosen, look(original, chosen, parts, keep, seed, tell), keep, tell)
        linears = linear_reports(conversion)
    # They take over a gigabyte for OFA-large, and writing needs as much again.
    conversion.seen = Seen({}, {}, {})
    about = {
        "fallback": fallback,
        "seed": seed,
        "source_sha256": original.sha256,
        "calibration_sha256": digest(usable) if chosen.calibrated else None,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    # A folder beside `out` becomes `out` in one step at the end, so that nobody ever finds half a checkpoint.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        folder = Path(scratch, "new")
        manifest = write(conversion, original, source, folder, about)
        seal(folder, manifest)
        made = load(folder)
        make_reference(folder, made)
        seal(folder, manifest)
        report = compare(original, made, linears, parts.report, time.monotonic() - started, tell)
        if target.exists():
            target.rmdir()
        folder.rename(target)
    return report


def has_text(pair: Pair, checkpoint: Checkpoint) -> bool:
    """Whether cleaning leaves something of a pair's text to score."""
    try:
        make_prompt(pair.text, pair.premise, checkpoint.tokenizer, checkpoint.configuration)
    except PairRejected:
        return False
    return True


def split(pairs: Sequence[Pair], measure_on: Sequence[Pair] | None, seed: int) -> Parts:
    """Shuffle pairs and deal them out; where others are to be measured on, none is kept apart for that."""
    shuffled = random.Random(seed).sample(list(pairs), len(pairs))
    apart = len(pairs) // REPORT_SHARE if measure_on is None else 0
    rest = shuffled[apart:]
    return Parts(rest[::2], rest[1::2], shuffled[:apart] if measure_on is None else measure_on)


def look(
    checkpoint: Checkpoint, recipe: Recipe, parts: Parts, keep: Sequence[str] | int, seed: int, tell: Progress
) -> Seen:
    """Statistics of each part's pairs, as far as the recipe needs them."""
    every = groups(checkpoint.config)

    def seen(stage: str, pairs: Sequence[Pair], needed: bool, grams: bool) -> dict[str, InputStatistics]:
        def after_batch(done: int) -> None:
            tell(stage, done, len(pairs))

        return collect(checkpoint, pairs if needed else [], every, seed, grams, after_batch)

    accepts = recipe.calibrated or (isinstance(keep, int) and keep > 0)
    return Seen(
        seen("calibration pairs", parts.calibration, recipe.calibrated, recipe.clip),
        seen("held-out pairs", parts.held_out, accepts, recipe.clip),
        seen("report pairs", parts.report, True, False),
    )


def digest(pairs: Sequence[Pair]) -> str:
    """sha256 over pairs as they were given, pictures included."""
    content = hashlib.sha256()
    for pair in pairs:
        content.update(json.dumps([pair.image.size, pair.text, pair.premise]).encode())
        content.update(pair.image.tobytes())
    return content.hexdigest()


def write(
    conversion: Conversion, original: Checkpoint, source: Path, folder: Path, about: Mapping[str, object]
) -> dict[str, object]:
    """Write a converted checkpoint, settings as they are and weights as safetensors; returns its manifest."""
    folder.mkdir()
    files = Files(source)
    settings = [*SETTINGS, str(PurePosixPath(original.configuration.answer2label).with_suffix(".json"))]
    for name in settings:
        shutil.copyfile(files.path(name), folder / name)
    weights, _ = files.weights()
    state = network_state(weights, original.config, original.configuration.max_src_length)
    safetensors.torch.save_file(converted(conversion, state), folder / SAFETENSORS, metadata={"format": "pt"})
    # safetensors makes the file readable by its owner alone.
    (folder / SAFETENSORS).chmod(0o644)
    quantization = {
        "format": FORMAT,
        "group": GROUPS[0],
        "dense": [*SKIPPED, *(name for name, made in conversion.made.items() if is_dense(made))],
        **about,
        "alphas": conversion.alphas,
        "clipped": {name: round(share, 4) for name, share in conversion.clipped.items()},
    }
    return {
        "format": MANIFEST_FORMAT,
        "name": original.name,
        "revision": original.revision,
        "recipe": conversion.recipe.name,
        "labels": dict(zip(original.answers.names, original.labels, strict=True)),
        "quantization": quantization,
    }


def seal(folder: Path, manifest: Mapping[str, object]) -> None:
    """Write concord.json with the hashes of the files that are in a folder."""
    files = {path.name: sha256(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}
    content = json.dumps({**manifest, "files": files}, indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(content + "\n", encoding="utf-8")


def converted(conversion: Conversion, hub_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The hub's tensors with scales folded in, and the converted Linears' own in place of theirs."""
    stored, state = conversion.recipe.stored, {}
    for name, tensor in hub_state.items():
        module = name.rpartition(".")[0]
        if module not in conversion.made:
            # Vectors are few, and norms are divided by scales, so they keep the precision that folding needs.
            state[name] = conversion.folded(module, tensor.float()).to(stored if tensor.ndim > 1 else torch.float32)
    for name, made in conversion.made.items():
        for key, tensor in made.state_dict().items():
            state[f"{name}.{key}"] = tensor.to(stored) if key in ("weight", "bias") else tensor
    for name, tensor in state.items():
        if not tensor.isfinite().all():
            raise CheckpointRefused(f"{name} holds values beyond the range of {tensor.dtype}: use the recipe fp32.")
        # safetensors stores each tensor apart, so views of a common storage are copied.
        state[name] = tensor.clone(memory_format=torch.contiguous_format)
    return state
