"""The fastest recipe, input size and batch that answer as float32 does: `tune(model_dir, pairs, out)`.

What is found is written where workers look. Recipe and input size are properties of a checkpoint, so they become a
checkpoint folder, the very one that was measured; the folder's place and the batch become two lines of an environment
file.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from worker.compare.compare import STANDARD, Comparison, Effort, Measurement
from worker.compare.trial import BASELINE, LabelledPair, prepare
from worker.errors import ConcordError
from worker.moderator import Question
from worker.quant.statistics import Progress

#: Recipes that are tried unless others are asked for: all but the one that exists to be beaten.
TRIED = ("awq-int4", "int8-dynamic", "bf16", "fp16", BASELINE)

#: Those of them that are not tried on a CPU, which computes in float16 ten times as slowly.
SLOW_ON_CPU = ("fp16",)

#: Share of the pairs that must have float32's label.
AGREEMENT = 0.985

#: The environment file that is made in the checkpoint folder where no other is named.
ENV_FILE = "worker.env"


@dataclass(frozen=True)
class Tuned:
    """What was chosen, and where it was written."""

    name: str  # of the recipe, with its input size
    batch_pairs: int
    folder: Path
    env_file: Path
    comparison: Comparison


def tune(
    model_dir: str | Path,
    pairs: Sequence[LabelledPair],
    out: str | Path,
    *,
    agreement: float = AGREEMENT,
    recipes: Sequence[str | Path] | None = None,
    image_sizes: Sequence[int] = (),
    calibration: Sequence[Question] | None = None,
    fallback: str | None = None,
    env_file: str | Path | None = None,
    device: torch.device | str = "cpu",
    effort: Effort = STANDARD,
    seed: int = 0,
    progress: Progress | None = None,
) -> Tuned:
    """Write the fastest variant that has float32's label on at least `agreement` of the pairs into the folder `out`.

    CONCORD_MODEL_DIR and CONCORD_MAX_PAIRS are set in `env_file`, whose other lines stay; without one, a file of these
    two is made in `out`. Float32 itself always qualifies. `recipes` are all that suit the device unless they are given,
    and a folder among them that wins stays where it is. Arguments otherwise as in `compare`. Raises ConcordError.
    """
    target = Path(out)
    if not 0 <= agreement <= 1:
        raise ConcordError(f"An agreement of {agreement} cannot be kept: give a share between 0 and 1, such as 0.985.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConcordError(f"{target} is there already: name a new directory, or remove it first.")
    tell = progress or (lambda stage, done, total: None)
    if recipes is None:
        on_cpu = torch.device(device).type == "cpu"
        recipes = [recipe for recipe in TRIED if not (on_cpu and recipe in SLOW_ON_CPU)]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        trial = prepare(
            model_dir, recipes, pairs, Path(scratch),
            image_sizes=image_sizes, calibration=calibration, seed=seed, tell=tell, fallback=fallback,
        )  # fmt: skip
        comparison = Measurement(trial, device, effort, seed, tell).comparison()
        name = choose(comparison, agreement)
        (folder,) = (variant.folder for variant in trial.variants if variant.name == name)
        if folder.is_relative_to(scratch):
            if target.exists():
                target.rmdir()
            folder.rename(target)
        else:
            # A folder that was given is used where it is.
            target = folder
    batch = comparison.recipes[name].best_batch
    settings = {"CONCORD_MODEL_DIR": str(target.resolve()), "CONCORD_MAX_PAIRS": str(batch)}
    written = target / ENV_FILE if env_file is None else Path(env_file)
    set_in_env_file(written, settings)
    return Tuned(name, batch, target, written, comparison)


def choose(comparison: Comparison, agreement: float) -> str:
    """The name of the fastest variant among those that agree often enough."""
    return max(
        (name for name, row in comparison.recipes.items() if row.agreement >= agreement),
        key=lambda name: comparison.recipes[name].pairs_per_s,
    )


def set_in_env_file(path: Path, values: Mapping[str, str]) -> None:
    """Set variables in an environment file in one step; its other lines and its mode stay as they are."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [line for line in lines if line.removeprefix("export ").partition("=")[0].strip() not in values]
    quoted = [f"{name}='{escaped(value)}'" for name, value in values.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    # Such files hold passwords, so a new one is its owner's alone.
    fresh.touch(mode=path.stat().st_mode & 0o777 if path.exists() else 0o600)
    fresh.write_text("\n".join([*kept, *quoted]) + "\n", encoding="utf-8")
    fresh.replace(path)


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("'", "\\'")
