"""A worker whose task counts and does nothing else: what Redis, Celery and worker.batching can carry by themselves.

    python -m infra.bench.counting FILE -A tasks worker -Q live,bulk ...

It has the settings and the consumer of any worker, and an application of its own, without a model, a relay or Postgres.
When it ends it writes a line of JSON to FILE: distinct ids, batches, and the seconds from the start of the first batch
to the end of the last.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_shutdown

from worker import kombu_guards
from worker.batching import Batch, MicroBatchTask, Outcome
from worker.messages import TASK_NAME

kombu_guards.install()

app = Celery("counting")
app.config_from_object("celeryconfig")
app.conf.update(imports=())


class Count(MicroBatchTask):
    """Takes the place of the task that moderates."""

    name = TASK_NAME

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.spans: list[tuple[float, float]] = []

    def process(self, batch: Batch) -> list[Outcome]:
        for delivery in batch.deliveries:
            payload: Any = delivery.payload
            self.ids.update([pair["id"] for pair in payload["pairs"]])
        self.spans.append((batch.started_at, time.monotonic()))
        return [Outcome("done")] * len(batch.deliveries)

    def counted(self) -> dict[str, float]:
        begins, ends = zip(*self.spans, strict=True)
        return {"distinct": len(self.ids), "batches": len(self.spans), "seconds": max(ends) - min(begins)}


task = app.register_task(Count())


def main() -> None:
    from celery.__main__ import main as celery

    from infra.bench.counting import task as counting  # not this module's own, which is called __main__

    file = Path(sys.argv.pop(1))
    sys.argv[0] = "celery"
    sys.argv[sys.argv.index("-A") + 1] = "infra.bench.counting"
    worker_shutdown.connect(lambda **_: file.write_text(json.dumps(counting.counted())), weak=False)
    celery()


if __name__ == "__main__":
    main()
