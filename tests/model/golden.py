"""The reference's own answers, and a small checkpoint in the hub's layout for which they were recorded."""

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from worker.model.checkpoint import Checkpoint, load
from worker.model.decode import Scores, score
from worker.model.ofa import Memory
from worker.model.preprocess import Prompt, make_pixels, make_prompt, pad

GOLDEN = Path(__file__).resolve().parent.parent / "data" / "golden"

#: One checkpoint under three sets of answers, and once more asked with two texts.
SETS = ("plain", "long_answers", "shared_prefix", "text2")

#: How closely scores must agree with the reference, and with themselves in another batch.
TOLERANCE = 1e-5

# The model is so small that threads would spend their time waiting for each other.
torch.set_num_threads(1)


@cache
def recorded(name: str) -> dict[str, Any]:
    """One set: the configuration, the answers, and for every case its ids, log_probs and probs."""
    values: dict[str, Any] = json.loads((GOLDEN / f"ve_{name}.json").read_text(encoding="utf-8"))
    return values


def write_checkpoint(folder: Path, name: str = "plain") -> Path:
    """The small checkpoint as the hub lays it out, in a new folder."""
    shutil.copytree(GOLDEN / "ofa_mini", folder)
    write_json(folder / "configuration.json", recorded(name)["configuration"])
    write_json(folder / "ans2label.json", recorded(name)["ans2label"])
    return folder


class Spy:
    """A function that notes the shape of its first argument, and does as before."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, first: torch.Tensor, *others: Any) -> Any:
        self.shapes.append(tuple(first.shape))
        return self.function(first, *others)


def write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values), encoding="utf-8")


@cache
def loaded(name: str = "plain") -> Checkpoint:
    """The small checkpoint as loading gives it."""
    with tempfile.TemporaryDirectory() as scratch:
        return load(write_checkpoint(Path(scratch, "ofa_mini"), name))


@cache
def picture(name: str) -> Image.Image:
    with Image.open(GOLDEN / "images" / name) as image:
        return image.convert("RGB")


def prompts(checkpoint: Checkpoint, cases: list[dict[str, Any]]) -> list[Prompt]:
    return [
        make_prompt(case["text"], case.get("text2"), checkpoint.tokenizer, checkpoint.configuration) for case in cases
    ]


@torch.inference_mode()
def encoded(checkpoint: Checkpoint, cases: list[dict[str, Any]]) -> tuple[torch.Tensor, Memory]:
    """Ids and memory of the cases as one padded batch, each picture looked at once."""
    names = sorted({case["image"] for case in cases})
    pixels = torch.stack([make_pixels(picture(name), checkpoint.configuration) for name in names])
    features = checkpoint.model.trunk(pixels)
    index = torch.tensor([names.index(case["image"]) for case in cases])
    ids = pad([prompt.ids for prompt in prompts(checkpoint, cases)], checkpoint.tokenizer.pad, 82)
    return ids, checkpoint.model.encode(ids, features[index])


@torch.inference_mode()
def scored(checkpoint: Checkpoint, cases: list[dict[str, Any]]) -> Scores:
    ids, memory = encoded(checkpoint, cases)
    return score(checkpoint.model, ids, memory, checkpoint.answers)


def reference(cases: list[dict[str, Any]], key: str) -> torch.Tensor:
    """The reference's `log_probs` or `probs` of the cases, (B, A)."""
    return torch.tensor([list(case[key].values()) for case in cases])
