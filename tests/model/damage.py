"""Checkpoints with one thing wrong, from a seed: `python -m tests.model.damage --seed 1 --count 100`.

Each is loaded in this process, whose memory is limited and which ends where one hangs. It ends in one JSON line.
"""

import argparse
import faulthandler
import json
import random
import resource
import shutil
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tests.images.mutations import DAMAGES, memory_of
from tests.line.hostile import ODD, places
from tests.model.golden import write_checkpoint
from worker.errors import CheckpointRefused
from worker.model.checkpoint import load

QUANTIZED = Path(__file__).parents[2] / "infra" / "demo_model" / "awq-int4"
#: Loading takes a tenth of a second. Whatever takes this long on a busy machine hangs.
HANG_S = 60.0
#: Address space beyond what the process has at its start: some times the weights, which have 11 and 2 MB.
SPARE_ADDRESSES = 2 << 30
#: The longest sentence with which a checkpoint is refused.
MAX_SENTENCE_CHARS = 1_500

ODDER = (*ODD, 2**62, 10**15, -(2**63), "F8_E4M3", "I64", "BF16", "F64", "BOOL", "U8", "C64", 1e30)


def spoil(value: Any, choose: random.Random) -> str:
    """Change one place inside, or take it away; the words that say which."""
    way = choose.choice(list(places(value)))
    for key in way[:-1]:
        value = value[key]
    if choose.random() < 0.15:
        del value[way[-1]]
        return f"without {str(way)[:80]}"
    value[way[-1]] = choose.choice(ODDER)
    return f"{str(way)[:80]} is {json.dumps(value[way[-1]])[:40]}"


def json_file(name: str) -> Callable[[Path, random.Random], str]:
    def damage(folder: Path, choose: random.Random) -> str:
        values = json.loads((folder / name).read_text(encoding="utf-8"))
        what = spoil(values, choose)
        (folder / name).write_text(json.dumps(values), encoding="utf-8")
        return what

    return damage


def header(folder: Path, choose: random.Random) -> str:
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    values = json.loads(raw[8 : 8 + length])
    what = spoil(values, choose)
    text = json.dumps(values).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    return what


def bytes_of(name: str) -> Callable[[Path, random.Random], str]:
    def damage(folder: Path, choose: random.Random) -> str:
        path, how = folder / name, choose.choice([one for one in DAMAGES if "another" not in one.__name__])
        raw = path.read_bytes()
        # Where it says what the rest is: at the begin, and at the end of an archive.
        cut = choose.choice([40_000, 2_000])
        head = how(bytearray(raw[:cut]), choose)
        path.write_bytes(bytes(head) + raw[cut:] if choose.random() < 0.7 else raw[:-cut] + bytes(head))
        return how.__name__

    return damage


def merges(folder: Path, choose: random.Random) -> str:
    path = folder / "merges.txt"
    lines = path.read_text(encoding="utf-8").splitlines()
    odd = choose.choice(["a b", "x", "", "a b c", " ", "\0 \0", "é é", "</s> </s>", "zz yy", "\ufeff", "x" * 100_000])
    lines[choose.randrange(len(lines))] = odd
    path.write_text("\n".join(lines), encoding="utf-8")
    return repr(odd[:20])


PLAIN = {
    "header": header, "bytes of model.safetensors": bytes_of("model.safetensors"), "merges.txt": merges,
    **{name: json_file(name) for name in ("config.json", "configuration.json", "vocab.json", "ans2label.json")},
}  # fmt: skip
PICKLED = {"bytes of pytorch_model.bin": bytes_of("pytorch_model.bin")}
STORED = {
    "header": header, "concord.json": json_file("concord.json"), "reference.json": json_file("reference.json"),
    "bytes of reference.png": bytes_of("reference.png"), "bytes of model.safetensors": bytes_of("model.safetensors"),
}  # fmt: skip


def sound(folder: Path) -> dict[str, tuple[Path, dict[str, Callable[[Path, random.Random], str]]]]:
    """Three checkpoints, and what can be wrong with them."""
    plain, pickled = write_checkpoint(folder / "plain"), write_checkpoint(folder / "pickled")
    weights = torch.load(plain / "pytorch_model.bin", weights_only=True)
    safetensors.torch.save_file(weights, plain / "model.safetensors")
    (plain / "pytorch_model.bin").unlink()
    stored = Path(shutil.copytree(QUANTIZED, folder / "stored"))
    manifest = json.loads((stored / "concord.json").read_text(encoding="utf-8"))
    del manifest["files"]  # Whoever changes a file can change its hash.
    (stored / "concord.json").write_text(json.dumps(manifest), encoding="utf-8")
    return {"plain": (plain, PLAIN), "pickled": (pickled, PICKLED), "stored": (stored, STORED)}


def outcome(folder: Path) -> str:
    """`loaded` or `refused`; whatever else is raised is a fault."""
    try:
        load(folder)
    except CheckpointRefused as error:
        if not 20 < len(str(error)) < MAX_SENTENCE_CHARS:
            raise AssertionError(f"a sentence of {len(str(error))} characters: {str(error)[:300]}") from error
        return "refused"
    return "loaded"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    arguments = parser.parse_args()
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        kinds = sound(Path(scratch))
        for folder, _ in kinds.values():
            assert outcome(folder) == "loaded"
        sound_bytes = memory_of("VmHWM")
        resource.setrlimit(resource.RLIMIT_AS, (memory_of("VmSize") + SPARE_ADDRESSES,) * 2)
        damages = [(kind, name) for kind, (_, ways) in kinds.items() for name in ways]
        for number in range(arguments.count):
            kind, name = damages[number % len(damages)]
            choose = random.Random(f"{arguments.seed} {number}")
            folder = Path(scratch, "damaged")
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(kinds[kind][0], folder)
            what = kinds[kind][1][name](folder, choose)
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            try:
                outcomes[outcome(folder)] += 1
            except Exception as error:
                raise AssertionError(f"number {number}, {kind}, {name}: {what}") from error
            faulthandler.cancel_dump_traceback_later()
    # Beyond what sound checkpoints took: torch itself takes more with CUDA's libraries than without.
    more_mb = (memory_of("VmHWM") - sound_bytes) // 10**6
    json.dump({"checkpoints": outcomes.total(), **outcomes, "more_memory_mb": more_mb}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
