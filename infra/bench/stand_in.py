"""A worker whose device is a stand-in: everything but the device is real, and the device takes a fixed time.

    python -m infra.bench.stand_in BATCH_SECONDS SIDE_PX -A tasks worker -Q live,bulk ...

It is `celery worker` with the demo model's tokenizer, prompts and answers, reading pictures of SIDE_PX as other
checkpoints do. Where the model would be asked, each slice of 64 pairs or less takes BATCH_SECONDS and no CPU, as on a
GPU that is fed; the answers are always the same.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

#: Pairs that a GPU would take at once (worker.moderator.MAX_SLICE).
SLICE_PAIRS = 64


@dataclass(frozen=True)
class Device:
    """What stands in: seconds for a slice, and the side of the pictures that it reads, in pixels."""

    slice_s: float
    side_px: int

    @property
    def pairs_per_s(self) -> float:
        """What it judges where it never waits."""
        return SLICE_PAIRS / self.slice_s

    @property
    def program(self) -> Sequence[str]:
        """What follows `python -m` in place of `celery`."""
        return __name__, str(self.slice_s), str(self.side_px)


def stand_in(device: Device) -> None:
    """Have workers of this process judge with `device`; call it before tasks.moderate is imported."""
    from tasks import scoring
    from worker.moderator import Judgement, Moderator, Prepared

    load = scoring.worker_moderator

    class StandIn(Moderator):
        def score(self, prepared: Sequence[Prepared]) -> list[Any]:
            slices = -(-len(prepared) // SLICE_PAIRS)
            time.sleep(slices * device.slice_s)
            answers = self.checkpoint.answers.names
            probs = {name: float(name == answers[0]) for name in answers}
            return [
                Judgement(
                    label=self.checkpoint.labels[0],
                    answer=answers[0],
                    probs=probs,
                    p_entailment=1.0,
                    p_contradiction=0.0,
                    p_neutral=0.0,
                    text_scored=one.prompt.text,
                    premise_scored=one.prompt.premise,
                    flags=one.prompt.flags,
                    tokens=len(one.prompt.ids),
                    padded_tokens=len(one.prompt.ids),
                )
                for one in prepared
            ]

    def load_stand_in(settings: Any) -> Moderator:
        checkpoint = load(settings).checkpoint
        configuration = replace(checkpoint.configuration, patch_image_size=device.side_px)
        return StandIn(replace(checkpoint, configuration=configuration), "cpu")

    scoring.worker_moderator = load_stand_in


def main() -> None:
    from celery.__main__ import main as celery

    device = Device(float(sys.argv.pop(1)), int(sys.argv.pop(1)))
    if __name__ == "__main__":
        # Celery names itself by the module that is run.
        sys.argv[0] = "celery"
    stand_in(device)
    celery()


if __name__ == "__main__":
    main()
