"""Regenerate test pairs with their pictures: `python -m infra.demo_model.generate --pairs 6000 --out DIR`.

Every scene gives three pairs, one a label, so that labels come in exact thirds; a fifth of all pairs are asked under
the `prohibited` policy. The content's sha256 is known for the sizes in SHA256, and checked.
"""

import argparse
import hashlib
import json
import sys
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from infra.demo_model.scenes import LABELS, SEEDS, scene_at, state

#: Of ten scenes, these are asked under `prohibited` for the pair with this label; the first four show such a product.
PROHIBITED_ENTAILMENT, PROHIBITED_CONTRADICTION, SHOWS_PROHIBITED = range(0, 3), range(3, 6), range(0, 4)

#: Pair ids derive from this name space, so that the same pair has the same id on every machine.
PAIR_IDS = uuid.uuid5(uuid.NAMESPACE_DNS, "demo.concord")

SELLERS = ("acme", "borealis", "cobalt", "dovetail", "ember", "fjord", "gallery")

#: Number of pairs -> sha256 of pixels and statements with the test seed, by Pillow 13 and NumPy 2 on x86-64.
SHA256: dict[int, str] = {
    60: "d3d9ab1642823dfacad9215945d56b0c68c9a02dfc38550b2690c39e975fb2fe",
    600: "05fe8451297f9d79d401111ff18c56ff1d0a59d228dd91cd8766ad711723e91a",
    6000: "38716e66f2367bd29d1387283093c15d4f6daf19dc506d8ed149c65add3dba9b",
}


@dataclass(frozen=True)
class HeldOutPair:
    """One line of a pairs file, its picture beside it: `pixels` (S, S, 3) uint8."""

    line: dict[str, Any]
    pixels: np.ndarray


def held_out_pairs(count: int, seed: int = SEEDS["test"]) -> Iterator[HeldOutPair]:
    """The first `count` pairs of a seed, three a scene in the order of LABELS."""
    for number in range(-(-count // 3)):
        tenth = number % 10
        scene, rng = scene_at(seed, number, prohibited=tenth in SHOWS_PROHIBITED)
        asked = {"entailment": tenth in PROHIBITED_ENTAILMENT, "contradiction": tenth in PROHIBITED_CONTRADICTION}
        for place, label in enumerate(LABELS[: count - 3 * number]):
            claim = state(rng, scene, label, "prohibited" if asked.get(label) else "catalog")
            ref = f"demo-{number:04d}-{place + 1}"
            attributes = {"category": claim.category, "seller": SELLERS[number % len(SELLERS)], "kind": claim.kind}
            line = {
                "id": str(uuid.uuid5(PAIR_IDS, f"{seed}/{ref}")),
                "ref": ref,
                "image": f"pictures/demo-{number:04d}.png",
                "text": claim.text,
                "policy": claim.policy,
                "attributes": attributes,
                "label": label,
            }
            yield HeldOutPair(line, scene.pixels)


def digest(pairs: Iterable[HeldOutPair]) -> str:
    """sha256 over each pair's pixels and its line."""
    content = hashlib.sha256()
    for pair in pairs:
        content.update(pair.pixels.tobytes())
        content.update(json.dumps(pair.line, sort_keys=True).encode())
    return content.hexdigest()


def write(pairs: Iterable[HeldOutPair], out: Path, name: str = "pairs.jsonl") -> None:
    """Write the lines, and the pictures beside them."""
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    written = set()
    with (out / name).open("w", encoding="utf-8") as lines:
        for pair in pairs:
            picture = out / pair.line["image"]
            if picture not in written:
                Image.fromarray(pair.pixels).save(picture, optimize=True)
                written.add(picture)
            lines.write(json.dumps(pair.line) + "\n")


def main() -> None:
    """Write pairs.jsonl and pictures/ into a folder, and check their hash where it is known."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--pairs", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=SEEDS["test"], help="the test scenes' seed unless given")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="pairs.jsonl", help="file name of the lines")
    arguments = parser.parse_args()
    pairs = list(held_out_pairs(arguments.pairs, arguments.seed))
    write(pairs, arguments.out, arguments.name)
    found, known = digest(pairs), SHA256.get(arguments.pairs) if arguments.seed == SEEDS["test"] else None
    print(f"{len(pairs)} pairs in {arguments.out / arguments.name}, sha256 {found}")
    if known not in (None, found):
        sys.exit(f"The content differs from the known one ({known}): is it Pillow 13 and NumPy 2 on x86-64?")


if __name__ == "__main__":
    main()
