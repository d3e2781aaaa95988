"""A worker that fetches no picture and asks no model: all that is round them is real.

    python -m infra.bench.no_op -A tasks worker -Q live,bulk ...

It is `celery worker`, and every pair is answered at once, always alike.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

CONTENT_HASH_BYTES = 16


def answer_at_once() -> None:
    """Have workers of this process look at nothing; call it before the first message."""
    from PIL import Image

    from tasks import moderate
    from tasks.settling import Case, Picture
    from worker.images import DecodedImage
    from worker.moderator import Judgement

    picture = Picture(DecodedImage(Image.new("RGB", (1, 1)), bytes(32), 1, 1, "exact", ()), '"0"')

    def look(cases: Sequence[Case], *_: Any) -> None:
        for case in cases:
            case.picture = picture

    def prepare(cases: Sequence[Case], *_: Any) -> None:
        for case in cases:
            case.content_hash = os.urandom(CONTENT_HASH_BYTES)

    def ask(cases: Sequence[Case], *_: Any) -> None:
        for case in cases:
            case.answer = Judgement(
                label="entailment",
                answer="yes",
                probs={"yes": 0.9, "no": 0.05, "it is not possible to tell": 0.05},
                p_entailment=0.9,
                p_contradiction=0.05,
                p_neutral=0.05,
                text_scored=case.pair.text,
                premise_scored=None,
                flags=(),
                tokens=16,
                padded_tokens=16,
            )

    moderate.look, moderate.prepare, moderate.ask = look, prepare, ask  # type: ignore[assignment]


def main() -> None:
    from celery.__main__ import main as celery

    sys.argv[0] = "celery"
    answer_at_once()
    celery()


if __name__ == "__main__":
    main()
