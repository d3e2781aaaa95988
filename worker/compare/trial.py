"""What is to be compared, made ready: every recipe quantized into a folder, and pairs that calibrated none of them."""

import hashlib
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from worker.errors import CheckpointRefused, ConcordError
from worker.model.checkpoint import MANIFEST, SAFETENSORS, Checkpoint, load
from worker.moderator import Question
from worker.quant.quantize import has_text, quantize, seal
from worker.quant.recipes import RECIPES
from worker.quant.replay import make_reference
from worker.quant.statistics import Progress

#: The recipe that everything is compared with.
BASELINE = "fp32"

#: Without calibration pairs of their own, at most so many of the labelled pairs calibrate, and at most this share.
CALIBRATION_PAIRS, CALIBRATION_SHARE = 256, 0.25


@dataclass(frozen=True)
class LabelledPair:
    """A question and the label that is known to be right."""

    question: Question
    label: str


@dataclass(frozen=True)
class Variant:
    """A recipe at an input size, as a checkpoint folder."""

    name: str
    folder: Path


@dataclass(frozen=True)
class Trial:
    """Variants in their folders, and the pairs to measure them on."""

    variants: Sequence[Variant]  # the baseline first
    pairs: Sequence[LabelledPair]
    calibrated_on: int


def prepare(
    model_dir: str | Path,
    recipes: Sequence[str | Path],
    pairs: Sequence[LabelledPair],
    scratch: Path,
    *,
    image_sizes: Sequence[int],
    calibration: Sequence[Question] | None,
    seed: int,
    tell: Progress,
    fallback: str | None = None,
) -> Trial:
    """Check what is asked for, then quantize it into folders under `scratch`. Raises ConcordError."""
    original = load(model_dir)
    if original.quantization is not None:
        raise CheckpointRefused(f"{model_dir} is quantized already: compare with the original weights.")
    check_pairs(pairs, original)
    wanted = named(recipes, image_sizes, original)
    calibrates = any(isinstance(recipe, str) and RECIPES[recipe].calibrated for recipe, _ in wanted.values())
    questions, measured = deal(pairs, calibration, seed) if calibrates else ([], list(pairs))
    if not measured:
        raise ConcordError("No pair is left to measure on: give pairs whose pictures do not calibrate.")
    made: dict[str, Path] = {}
    variants: list[Variant] = []
    for name, (recipe, size) in wanted.items():
        tell("quantizing", len(variants), len(wanted))
        if isinstance(recipe, str) and recipe not in made:
            made[recipe] = scratch / recipe
            quantize(model_dir, recipe, questions, made[recipe], fallback=fallback, measure_on=(), seed=seed)
        folder = made[recipe] if isinstance(recipe, str) else recipe
        if folder_size(folder) != size:
            folder = resized(folder, size, scratch / f"{len(variants)}-{size}")
        variants.append(Variant(name, folder))
    tell("quantizing", len(wanted), len(wanted))
    return Trial(variants, measured, len(questions))


def named(
    recipes: Sequence[str | Path], image_sizes: Sequence[int], original: Checkpoint
) -> dict[str, tuple[str | Path, int]]:
    """Each variant's name -> its recipe or folder and its input size, the baseline first. Raises ConcordError."""
    own = original.configuration.patch_image_size
    wanted: list[tuple[str | Path, int]] = [(BASELINE, own)]
    for text in recipes:
        recipe, only = asked(text)
        wanted += [(recipe, size) for size in ([only] if only else image_sizes or [own])]
    found: dict[str, tuple[str | Path, int]] = {}
    for recipe, size in wanted:
        original.config.check_image_size(size)
        plain = recipe if isinstance(recipe, str) else recipe.resolve().name
        name = f"{plain}@{size}" if image_sizes or size != own else plain
        if found.setdefault(name, (recipe, size)) != (recipe, size):
            raise ConcordError(f"Two of the recipes would be called {name}: rename one of the folders.")
    return found


def asked(recipe: str | Path) -> tuple[str | Path, int | None]:
    """A recipe's name or folder, and the input size if it names one. Raises ConcordError."""
    text, at, size = str(recipe).rpartition("@")
    if not (at and size.isdigit()):
        text, size = str(recipe), ""
    found = text if text in RECIPES else Path(text)
    if isinstance(found, Path) and not found.is_dir():
        raise ConcordError(f"{text!r} is neither a recipe ({', '.join(RECIPES)}) nor the folder of a quantized model.")
    if isinstance(found, Path) and load(found).quantization is None:
        raise CheckpointRefused(f"{found} is not quantized: name a recipe, or run `concord quantize` first.")
    return found, int(size) if size else None


def check_pairs(pairs: Sequence[LabelledPair], original: Checkpoint) -> None:
    """Raise ConcordError for a pair that cannot be measured on."""
    for number, pair in enumerate(pairs, 1):
        if pair.label not in original.labels:
            known = ", ".join(original.labels)
            raise ConcordError(f"Pair {number} has the label {pair.label!r}; this model's labels are {known}.")
        if not has_text(pair.question, original):
            raise ConcordError(f"Pair {number} has no text to score ({pair.question.text!r:.60}): leave it out.")


def deal(
    pairs: Sequence[LabelledPair], calibration: Sequence[Question] | None, seed: int
) -> tuple[list[Question], list[LabelledPair]]:
    """Pairs that calibrate and pairs that measure, without a picture in common."""
    pictures = [picture(pair.question) for pair in pairs]
    if calibration is not None:
        measured_on = set(pictures)
        return [question for question in calibration if picture(question) not in measured_on], list(pairs)
    wanted, by_picture = min(CALIBRATION_PAIRS, int(len(pairs) * CALIBRATION_SHARE)), dict[bytes, list[Question]]()
    for key, pair in zip(pictures, pairs, strict=True):
        by_picture.setdefault(key, []).append(pair.question)
    apart: dict[bytes, list[Question]] = {}
    for key in random.Random(seed).sample(list(by_picture), len(by_picture)):
        if sum(map(len, apart.values())) + len(by_picture[key]) <= wanted:
            apart[key] = by_picture[key]
    measured = [pair for key, pair in zip(pictures, pairs, strict=True) if key not in apart]
    return [question for questions in apart.values() for question in questions], measured


def picture(question: Question) -> bytes:
    """The sha256 of a picture's pixels; two files of the same picture are one picture."""
    return hashlib.sha256(repr(question.image.size).encode() + question.image.convert("RGB").tobytes()).digest()


def folder_size(folder: Path) -> int:
    """The input size, in pixels, that a checkpoint's settings have."""
    return int(json.loads((folder / "configuration.json").read_text(encoding="utf-8"))["model"]["patch_image_size"])


def resized(folder: Path, size: int, out: Path) -> Path:
    """A copy of a quantized checkpoint that looks at pictures at `size` x `size` pixels.

    The weights are the same, and its reference pairs are answered anew.
    """
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns(SAFETENSORS))
    try:
        (out / SAFETENSORS).hardlink_to(folder / SAFETENSORS)
    except OSError:
        shutil.copyfile(folder / SAFETENSORS, out / SAFETENSORS)
    settings = json.loads((out / "configuration.json").read_text(encoding="utf-8"))
    settings["model"]["patch_image_size"] = size
    (out / "configuration.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    seal(out, manifest)
    make_reference(out, load(out))
    seal(out, manifest)
    return out
