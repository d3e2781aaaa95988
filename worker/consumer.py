"""Celery's consumer, but what it would drop is recorded, and a Redis that refuses is not asked without a pause."""

import logging
import time
from typing import Any

from celery.worker.consumer import Consumer as CeleryConsumer

from worker.batching import Deliveries, MicroBatchTask
from worker.delivery import refused
from worker.errors import ErrorCode
from worker.kombu_guards import NOT_JSON

log = logging.getLogger(__name__)

#: Before the next try to consume from a Redis that answers and refuses.
REFUSED_PAUSE_S = 2.0


class Strategies(dict[str, Any]):
    """What is done with a message, by its task's name; anything else in the name's place is an unknown task."""

    def __getitem__(self, name: object) -> Any:
        if not isinstance(name, str):
            raise KeyError(repr(name))
        return super().__getitem__(name)


class Consumer(CeleryConsumer):
    """Celery's consumer, but a message it cannot read is recorded before it is acknowledged, never dropped."""

    Strategies = Strategies

    def update_strategies(self) -> None:
        """Celery's own tasks (chord_unlock, map ...) are in every application, and nobody's message is to run them."""
        super().update_strategies()
        for name, task in self.app.tasks.items():
            if not isinstance(task, MicroBatchTask):
                self.strategies.pop(name, None)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Celery comes back at once: a Redis that answers, and refuses, would be asked several times a second."""
        super().on_connection_error_after_connected(exc)
        if isinstance(exc, self.channel_errors):
            log.warning("Redis answers and refuses: %s; trying again in %s s", exc, REFUSED_PAUSE_S)
            time.sleep(REFUSED_PAUSE_S)

    @property
    def deliveries(self) -> Deliveries | None:
        tasks = (task for task in self.app.tasks.values() if isinstance(task, MicroBatchTask))
        return next((task._deliveries for task in tasks if task._deliveries is not None), None)

    def stop(self) -> None:
        super().stop()
        if self.deliveries is not None:
            self.deliveries.give_back()

    def record(self, message: Any, code: ErrorCode, detail: str) -> None:
        if self.deliveries is None:
            raise RuntimeError("no micro-batch task is registered")
        self.deliveries.add(refused(message, code, detail))

    def on_unknown_message(self, body: Any, message: Any) -> None:
        self.record(message, ErrorCode.INVALID_MESSAGE, "not a Celery message: no task name")

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        self.record(message, ErrorCode.UNKNOWN_TASK, f"no task of the name {str(exc)[:200]} here")

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        self.record(message, ErrorCode.INVALID_MESSAGE, f"Celery refused it: {exc}")

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        why = "it is not JSON" if message.content_type == NOT_JSON else f"it could not be decoded: {exc}"
        self.record(message, ErrorCode.NOT_JSON, why)
