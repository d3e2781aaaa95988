"""One Celery task a pair: `celery -A infra.bench.others.one_task worker -P threads -c 8`.

The model is loaded once a process; threads fetch while one of them judges. Acknowledged after the row is committed.
"""

import os
import threading
from typing import Any

from celery import Celery

from infra.bench.others import parts

THREADS = 8

app = Celery("one_task", broker=os.environ["BROKER_URL"])
app.conf.update(
    task_acks_late=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=4,
    broker_transport_options=parts.BROKER,
    broker_connection_retry_on_startup=True,
)
moderator, client = parts.moderator(), parts.bucket(THREADS)
target_px = moderator.checkpoint.configuration.patch_image_size
device, own = threading.Lock(), threading.local()


@app.task(name="judge")  # type: ignore[untyped-decorator]
def judge(pair: dict[str, Any]) -> None:
    if not hasattr(own, "connection"):
        own.connection = parts.connect()
    question = parts.question(client, pair, target_px)
    with device:
        (answer,) = moderator.judge([question])
    parts.insert(own.connection, [parts.row("one task", pair, answer)])
