"""celery-batches: `celery -A infra.bench.others.batches worker -P threads -c 2`.

A message a pair; 64 of them, or what has come in 50 ms, are one call. Two calls at a time: one fetches while the other
judges. Acknowledged after the rows are committed, or after the call has raised.
"""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery import Celery
from celery_batches import Batches

from infra.bench.others import parts

THREADS = 16

app = Celery("batches", broker=os.environ["BROKER_URL"])
app.conf.update(
    task_acks_late=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=128,
    broker_transport_options=parts.BROKER,
    broker_connection_retry_on_startup=True,
)
moderator, client = parts.moderator(), parts.bucket(THREADS)
target_px = moderator.checkpoint.configuration.patch_image_size
pool, device, own = ThreadPoolExecutor(THREADS), threading.Lock(), threading.local()


@app.task(name="judge", base=Batches, flush_every=64, flush_interval=0.05)  # type: ignore[untyped-decorator]
def judge(requests: Sequence[Any]) -> None:
    if not hasattr(own, "connection"):
        own.connection = parts.connect()
    pairs = [request.args[0] for request in requests]
    questions = list(pool.map(lambda pair: parts.question(client, pair, target_px), pairs))
    with device:
        answers = moderator.judge(questions)
    rows = [parts.row("celery-batches", pair, answer) for pair, answer in zip(pairs, answers, strict=True)]
    parts.insert(own.connection, rows)
