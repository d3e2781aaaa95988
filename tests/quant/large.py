"""Quantize OFA-large's shape with random weights, in a process of its own: `python -m tests.quant.large FOLDER`.

The last line is JSON: seconds, peak resident bytes, bytes of the Linears and of the whole file.
"""

import json
import resource
import shutil
import sys
import time
from pathlib import Path

import torch
from PIL import Image

from tests.model.golden import GOLDEN, recorded, write_json
from tests.quant.toy import save_random
from worker.model.checkpoint import SAFETENSORS
from worker.model.config import OFAConfig
from worker.moderator import Question
from worker.quant.quantize import MIN_CALIBRATION_PAIRS, quantize

LARGE = OFAConfig(
    d_model=1024,
    encoder_layers=12,
    decoder_layers=12,
    encoder_attention_heads=16,
    decoder_attention_heads=16,
    encoder_ffn_dim=4096,
    decoder_ffn_dim=4096,
    resnet_type="resnet152",
)
SIDE_PX = 480


def write_large(folder: Path) -> Path:
    """The checkpoint, in float32, with the words of the small one."""
    folder.mkdir(parents=True)
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(GOLDEN / "ofa_mini" / name, folder / name)
    values = recorded("plain")
    configuration = values["configuration"]
    configuration["model"]["patch_image_size"] = SIDE_PX
    write_json(folder / "configuration.json", configuration)
    write_json(folder / "ans2label.json", values["ans2label"])
    save_random(folder, LARGE)
    return folder


def main(folder: Path) -> None:
    source = write_large(folder / "large")
    image = Image.effect_noise((SIDE_PX, SIDE_PX), 80).convert("RGB")
    pairs = [Question(image.rotate(n), bytes([n]), "a red shoe " * (n + 1)) for n in range(MIN_CALIBRATION_PAIRS)]
    started = time.monotonic()

    def tell(stage: str, done: int, total: int) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {stage} {done} of {total}", flush=True)

    report = quantize(source, "awq-int4", pairs, folder / "large-awq-int4", progress=tell)
    report.write(folder / "report.json")
    figures = {
        "seconds": round(time.monotonic() - started, 1),
        "search_seconds": report.seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "linear_bytes": report.bytes,
        "share_of_fp16": round(report.share_of_fp16, 4),
        "file_bytes": (folder / "large-awq-int4" / SAFETENSORS).stat().st_size,
        "source_bytes": (source / SAFETENSORS).stat().st_size,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    torch.set_num_threads(2)
    main(Path(sys.argv[1]))
