"""Check a machine's GPU, or its CPU: `python infra/gpu/check.py [--device cuda] [--seconds 420] [--tiny]`.

It needs this checkout and torch, numpy, pillow, tokenizers and safetensors. The reference's recorded answers are
computed in float32, float16 and bfloat16; four-bit Linears are compared with exact arithmetic, and the demo model's
quantized weights with the answers that they gave on the CPU; then OFA-large's shape with random weights is timed. The
last line is one JSON object. Exits 1 where an answer is wrong, however fast. Without a GPU the shape is a tiny one.
"""

import argparse
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Run as a script, it finds the project without an installation.
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from PIL import Image  # noqa: E402

from infra.gpu.speed import DRIFT, LARGE, TINY, lines, speed  # noqa: E402
from worker.model.checkpoint import load  # noqa: E402
from worker.moderator import Question  # noqa: E402
from worker.quant import int8  # noqa: E402
from worker.quant.int4 import KERNEL_TOLERANCE, Int4Linear, dequantize, quantize, with_kernel  # noqa: E402
from worker.quant.quantize import quantize as quantize_checkpoint  # noqa: E402
from worker.quant.replay import replay  # noqa: E402
from worker.quant.statistics import probabilities  # noqa: E402

GOLDEN = ROOT / "tests" / "data" / "golden"
DEMO = ROOT / "infra" / "demo_model"

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

#: The largest difference of a probability from the reference's. In float32 a GPU adds up in another order.
GOLDEN_TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}

#: Sizes (N, K) of four-bit Linears, and rows that are given to them.
LINEARS, ROWS = ((256, 128), (1024, 1024), (1024, 4096)), (1, 17, 900)

#: Pairs that calibrate the demo model here: enough to run every line, not to be its best.
CALIBRATION_PAIRS = 32

Check = tuple[str, float, float]  # name, error, bound


def golden(device: torch.device, scratch: Path) -> Iterator[Check]:
    """The reference's answers, each set in one batch."""
    for path in sorted(GOLDEN.glob("ve_*.json")):
        recorded = json.loads(path.read_text(encoding="utf-8"))
        folder = scratch / path.stem
        shutil.copytree(GOLDEN / "ofa_mini", folder)
        (folder / "configuration.json").write_text(json.dumps(recorded["configuration"]), encoding="utf-8")
        (folder / "ans2label.json").write_text(json.dumps(recorded["ans2label"]), encoding="utf-8")
        pairs = [
            Question(
                picture(GOLDEN / "images" / case["image"]), case["image"].encode(), case["text"], case.get("text2")
            )
            for case in recorded["cases"]
        ]
        expected = torch.tensor([list(case["probs"].values()) for case in recorded["cases"]])
        for name, dtype in DTYPES.items():
            found = probabilities(load(folder, device, dtype), pairs)
            yield f"golden {path.stem} {name}", float((found - expected).abs().max()), GOLDEN_TOLERANCE[name]


def picture(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


@torch.inference_mode()
def linears(device: torch.device, shapes: Sequence[tuple[int, int]]) -> Iterator[Check]:
    """Quantized Linears against exact arithmetic: the largest relative error over numbers of rows."""
    generator = torch.Generator().manual_seed(0)
    for n, k in shapes:
        weight = quantize(torch.randn(n, k, generator=generator), 128)
        exact, bias = dequantize(weight).double(), torch.randn(n, generator=generator)
        inputs = [torch.randn(rows, k, generator=generator) for rows in ROWS]
        for name, dtype in DTYPES.items():
            linear = Int4Linear(weight, bias).to(device, dtype)
            for few_rows in (False, True):
                kernel, worst = with_kernel(linear, few_rows), 0.0
                for x in inputs:
                    given = x.to(dtype)
                    expected = F.linear(given.double(), exact, bias.to(dtype).double())
                    found = kernel(given.to(device)).cpu().double()
                    worst = max(worst, float((found - expected).norm() / expected.norm()))
                rows = "few" if few_rows else "many"
                yield f"int4 {n}x{k} {name}, {rows} rows", worst, KERNEL_TOLERANCE[dtype]
    codes = [torch.randint(-127, 128, (rows, 64), generator=generator, dtype=torch.int8) for rows in (5, 900)]
    for one in codes:
        product = int8.product(one.to(device), codes[0].to(device)).cpu().int()
        wrong = (product - one.int() @ codes[0].int().T).abs().max()
        yield f"int8 product of {len(one)} rows", float(wrong), 0.0


def demo(device: torch.device, scratch: Path) -> Iterator[Check]:
    """The demo model by recipe: reference pairs answered here as on the CPU, where the weights were made."""
    calibration = []
    with (DEMO / "heldout.jsonl").open(encoding="utf-8") as file:
        for _, line in zip(range(CALIBRATION_PAIRS), file, strict=False):
            values = json.loads(line)
            calibration.append(Question(picture(DEMO / values["image"]), values["image"].encode(), values["text"]))
    for recipe in ("awq-int4", "int8-dynamic"):
        folder = scratch / recipe
        quantize_checkpoint(DEMO / "weights", recipe, calibration, folder, measure_on=())
        for name, dtype in DTYPES.items():
            drift = replay(load(folder, device, dtype))
            yield f"demo {recipe} {name}", drift.worst, drift.allowed


def machine(device: torch.device) -> dict[str, Any]:
    about: dict[str, Any] = {"device": str(device), "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "cuda": torch.version.cuda,
        }
    return about


def main() -> int:
    """Check, time, print, and say by the exit status whether every answer was right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=420, help="no further measurement begins after so many")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, as on a machine without a GPU")
    arguments = parser.parse_args()
    started, device = time.monotonic(), torch.device(arguments.device)
    torch.backends.cudnn.allow_tf32 = False
    tiny = arguments.tiny or device.type == "cpu"
    if tiny:
        # Threads of so small a network would spend their time waiting for each other.
        torch.set_num_threads(1)
    shape, sizes = (TINY, LINEARS[:1]) if tiny else (LARGE, LINEARS)
    checks: list[Check] = []
    with tempfile.TemporaryDirectory(prefix="concord-gpu-") as scratch:
        for part in (golden(device, Path(scratch)), linears(device, sizes), demo(device, Path(scratch))):
            for name, error, bound in part:
                checks.append((name, error, bound))
                print(f"{'ok  ' if error <= bound else 'WRONG'} {name}: {error:.2e}, at most {bound:g}", flush=True)
    results = []
    for key, value in speed(shape, device, lambda: arguments.seconds - (time.monotonic() - started)):
        results.append((key, value))
        if key.endswith(DRIFT):
            checks.append((key, value, GOLDEN_TOLERANCE["bf16"]))
        print(f"[{time.monotonic() - started:5.0f} s] {key}", flush=True)
    print("\n".join(lines(results)))
    # A comparison with what is not a number is false, which must not pass for agreement.
    wrong = [name for name, error, bound in checks if not error <= bound]
    summary = {
        "check": "gpu",
        **machine(device),
        "ok": not wrong,
        "wrong": wrong,
        "errors": {name: float(f"{error:.2e}") for name, error, _ in checks},
        "shape": shape.name,
        "speed": dict(results),
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(summary))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
