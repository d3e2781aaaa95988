"""`concord quantize`, `compare` and `tune`: files of pairs in, the work in worker.quant and worker.compare.

What loads torch is imported inside the commands, so that the others start without it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tasks.settings import settings
from worker.errors import ConcordError

out, err = Console(soft_wrap=True, highlight=False), Console(stderr=True, soft_wrap=True, highlight=False)

#: Recipes that `compare` tries unless told otherwise.
COMPARED = "fp32,awq-int4,rtn-int4,int8-dynamic,bf16"

#: What `--quick` measures less of: batch sizes, pairs one by one, rounds.
QUICK: dict[str, Any] = {"batch_sizes": (8, 32), "singles": 32, "rounds": 2}

Model = Annotated[Path, typer.Option(help="The checkpoint's folder, not quantized.")]
Labelled = Annotated[Path, typer.Option(help="A file of pairs with a true `label` each.")]
Calibration = Annotated[Path | None, typer.Option(help="Unlabelled pairs to calibrate on; without: some of --pairs.")]
Quick = Annotated[bool, typer.Option("--quick", help="A rough first look in a fraction of the time.")]
Sizes = Annotated[str, typer.Option(help="Input sizes in pixels, separated by commas; without: the checkpoint's own.")]


def quantize(
    model: Model,
    calibration: Annotated[Path, typer.Option(help="Some 256 pairs like those to be judged; labels are not used.")],
    into: Annotated[Path, typer.Option("--out", help="The folder to make.")],
    recipe: Annotated[str, typer.Option(help="awq-int4, rtn-int4, int8-dynamic, fp16, bf16 or fp32.")] = "awq-int4",
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A Linear or block to keep at higher precision, or how many of the worst."),
    ] = None,
    fallback: Annotated[str | None, typer.Option(help="Recipe where the reference pairs are not met.")] = None,
    report: Annotated[Path | None, typer.Option(help="Where to write the error report: .json, .txt and .png.")] = None,
    seed: Annotated[int, typer.Option(help="Deals the pairs out for calibrating, accepting and reporting.")] = 0,
) -> None:
    """Quantize a checkpoint for workers, and say what that costs."""
    from tasks.scoring import only_questions
    from worker.quant.quantize import quantize as quantize_checkpoint

    kept = int(keep[0]) if keep and len(keep) == 1 and keep[0].isdigit() else tuple(keep or ())
    questions = only_questions(calibration, model) or []
    with stages() as tell:
        made = quantize_checkpoint(
            model, recipe, questions, into, keep=kept, fallback=fallback, seed=seed, progress=tell
        )
    out.print(made.text(), markup=False)
    if report is not None:
        out.print("report: " + ", ".join(map(str, made.write(report))), markup=False)
    out.print(f"Workers run it with CONCORD_MODEL_DIR={into}", markup=False)


def compare(
    model: Model,
    pairs: Labelled,
    recipes: Annotated[str, typer.Option(help="Recipes or folders of quantized checkpoints, by commas.")] = COMPARED,
    calibration: Calibration = None,
    image_size: Sizes = "",
    quick: Quick = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
    seed: Annotated[int, typer.Option(help="Deals the pairs out and shuffles the batches.")] = 0,
) -> None:
    """What each precision costs and buys on this machine, side by side in one table."""
    from tasks.scoring import device_named, labelled, only_questions
    from worker.compare.compare import STANDARD
    from worker.compare.compare import compare as compare_recipes

    with stages() as tell:
        found = compare_recipes(
            model,
            split(recipes),
            labelled(pairs, model),
            image_sizes=sizes(image_size),
            calibration=only_questions(calibration, model),
            device=device_named(settings().device),
            effort=replace(STANDARD, **QUICK) if quick else STANDARD,
            seed=seed,
            progress=tell,
        )
    out.print(found.table())
    if as_json:
        print(found.json())


def tune(
    model: Model,
    pairs: Labelled,
    into: Annotated[Path, typer.Option("--out", help="The folder to make.")],
    agreement: Annotated[float, typer.Option(help="Share of the pairs that keep float32's label, at least.")] = 0.985,
    calibration: Calibration = None,
    image_size: Sizes = "",
    quick: Quick = False,
    env_file: Annotated[Path | None, typer.Option(help="Settings file to write to; without: one in --out.")] = None,
    seed: Annotated[int, typer.Option(help="Deals the pairs out and shuffles the batches.")] = 0,
) -> None:
    """Pick the fastest recipe, input size and batch that keep a given agreement, and write them for the worker."""
    from tasks.scoring import device_named, labelled, only_questions
    from worker.compare.compare import STANDARD
    from worker.compare.tune import tune as tune_checkpoint

    with stages() as tell:
        tuned = tune_checkpoint(
            model,
            labelled(pairs, model),
            into,
            agreement=agreement,
            image_sizes=sizes(image_size),
            calibration=only_questions(calibration, model),
            env_file=env_file,
            device=device_named(settings().device),
            effort=replace(STANDARD, **QUICK) if quick else STANDARD,
            seed=seed,
            progress=tell,
        )
    out.print(tuned.comparison.table())
    out.print(f"{tuned.name} in batches of {tuned.batch_pairs}: {tuned.folder}", markup=False)
    out.print(
        f"Workers run it with CONCORD_ENV_FILE={tuned.env_file}, or with its lines in your own file", markup=False
    )


def split(names: str) -> list[str | Path]:
    """Recipes by name, folders by path."""
    parts = [part.strip() for part in names.split(",") if part.strip()]
    return [Path(part) if Path(part).is_dir() else part for part in parts]


def sizes(given: str) -> list[int]:
    try:
        return [int(part) for part in given.split(",") if part.strip()]
    except ValueError:
        raise ConcordError(f"--image-size takes whole numbers of pixels separated by commas, not {given!r}") from None


@contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar a stage, on standard error; nothing at all where that is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield tell
