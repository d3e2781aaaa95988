"""Write a run's weights in the hub's layout: `python -m infra.demo_model.export --run DIR [--out DIR]`."""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from infra.demo_model.scenes import SIDE_PX
from infra.demo_model.train import demo_config
from infra.demo_model.vocabulary import ANSWERS, WEIGHTS
from worker.model.checkpoint import MANIFEST, MANIFEST_FORMAT, SAFETENSORS, SETTINGS, UNQUANTIZED, sha256

#: As in the hub's visual-entailment checkpoints, but for the picture's size and the lengths.
CONFIGURATION = {
    "framework": "pytorch",
    "task": "visual-entailment",
    "model": {
        "type": "ofa",
        "seed": 7,
        "language": "en",
        "max_src_length": 80,
        "patch_image_size": SIDE_PX,
        "max_image_size": 512,
        "imagenet_default_mean_and_std": False,
        "gen_type": "traverse",
        "batch_size": 1,
        "valid_batch_size": 20,
        "answer2label": "ans2label.json",
        "prompt_type": "prev_output",
    },
    "pipeline": {"type": "visual-entailment"},
    "preprocessor": {"type": "ofa-tasks-preprocessor"},
}


#: By what name and revision verdicts know these weights.
NAME, REVISION = "concord/demo-ofa", "v1"


def half(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that a checkpoint keeps, in float16: no batch counters, and the tied embeddings once."""
    dropped = ("num_batches_tracked", "decoder.embed_tokens.weight")
    return {name: tensor.half().contiguous() for name, tensor in weights.items() if not name.endswith(dropped)}


def main() -> None:
    """Write configuration, weights and answers; vocabulary files are copied where `--out` is another folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of a training run")
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    weights = torch.load(arguments.run / "last.pt", weights_only=True)["model"]
    save_file(half(weights), out / SAFETENSORS, metadata={"format": "pt"})
    # safetensors makes the file readable by its owner alone.
    (out / SAFETENSORS).chmod(0o644)
    config = demo_config(len(weights["encoder.embed_tokens.weight"])).to_hub()
    for name, values in (("config.json", config), ("configuration.json", CONFIGURATION), ("ans2label.json", ANSWERS)):
        (out / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    if out.resolve() != WEIGHTS.resolve():
        for name in ("vocab.json", "merges.txt"):
            shutil.copyfile(WEIGHTS / name, out / name)
    files = {name: sha256(out / name) for name in (SAFETENSORS, *SETTINGS, "ans2label.json")}
    manifest = {"format": MANIFEST_FORMAT, "name": NAME, "revision": REVISION, "recipe": UNQUANTIZED, "files": files}
    (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    print(f"{out / 'model.safetensors'}: {(out / 'model.safetensors').stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
