"""A message in a worker's hand: what Celery's headers and its body say, read before it is put into a batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from celery.app.task import Task
from celery.worker import state as worker_state
from celery.worker.request import Request
from celery.worker.strategy import hybrid_to_proto2, proto1_to_proto2

from worker.errors import CodedError, ErrorCode, MessageRejected
from worker.kombu_guards import ABANDONED, NOT_JSON

#: A message counts as a pair for each of these bytes of it, where it has fewer pairs: what a worker holds is bounded,
#: also where a pair of ten megabytes comes after the other.
BYTES_OF_A_PAIR = 65_536
#: What Celery's messages may ask for when the task has run: to run others.
NOT_CARRIED_OUT = ("callbacks", "errbacks", "chain", "chord")


@dataclass(eq=False)
class Delivery:
    """A message in hand. `refusal` is set where it cannot be carried out; `payload` is the task's one argument.

    `redelivered`: it was handed out before, and may have been judged. `suspect`: that worker may have died of it, so
    it is taken alone. `published_at`: seconds since the epoch, where the relay or a producer of ours sent it.
    """

    message: Any
    lane: str
    payload: object = None
    pairs: int = 1
    request: Request | None = None
    refusal: CodedError | None = None
    withdrawn: Literal["expired", "revoked"] | None = None
    not_before: datetime | None = None
    redelivered: bool = False
    suspect: bool = False
    published_at: float | None = None

    @property
    def task_id(self) -> str | None:
        """Celery's id of the message, also of one that Celery could make nothing of."""
        if self.request is not None:
            return str(self.request.id)
        named = (self.message.headers or {}).get("id")
        return named if isinstance(named, str) else None

    @property
    def expires_at(self) -> datetime | None:
        return self.request.expires if self.request else None

    @property
    def wants_result(self) -> bool:
        return bool(self.request and not self.request.ignore_result)

    @property
    def weight(self) -> int:
        """The pairs as which it counts."""
        return max(self.pairs, len(self.message.body or b"") // BYTES_OF_A_PAIR)

    @property
    def body(self) -> bytes:
        """The message's bytes as they came."""
        raw = self.message.body
        return raw if isinstance(raw, bytes) else str(raw).encode("utf-8", "backslashreplace")


def read_delivery(message: Any, body: Any, task: Task, app: Any, consumer: Any) -> Delivery:
    """Make a delivery of a message, whatever it is; what is none of Celery's is refused."""
    try:
        return read_celerys(message, body, task, app, consumer)
    except Exception as error:
        if message.content_type == NOT_JSON:
            return refused(message, ErrorCode.NOT_JSON, "it is not JSON")
        return refused(message, ErrorCode.INVALID_MESSAGE, f"not a Celery message: {type(error).__name__}: {error}")


def read_celerys(message: Any, body: Any, task: Task, app: Any, consumer: Any) -> Delivery:
    """Make a delivery of a Celery message of either protocol. Raises anything where it is none."""
    decoded = False
    headers, utc = message.headers, app.uses_utc_timezone()
    if body is not None or "args" in message.payload:
        read = hybrid_to_proto2 if "args" in message.payload else proto1_to_proto2
        body, headers, decoded, utc = read(message, message.payload if "args" in message.payload else body)
    request = Request(
        message, app=app, hostname=consumer.hostname, eventer=consumer.event_dispatcher, task=task, utc=utc,
        connection_errors=consumer.connection_errors, body=body or message.body, headers=headers, decoded=decoded,
    )  # fmt: skip
    if not (isinstance(request.id, str) and request.id.isprintable() and isinstance(request.name, str)):
        raise ValueError("its id or its name is not plain text")
    args, kwargs, embed = request._payload
    delivery = Delivery(message, lane_of(message), request=request)
    delivery.redelivered = bool((message.delivery_info or {}).get("redelivered"))
    delivery.suspect = message.headers.get(ABANDONED) is True
    if len(args) != 1 or kwargs:
        delivery.refusal = MessageRejected(ErrorCode.INVALID_MESSAGE, f"{task.name} takes one argument, a JSON object")
        return delivery
    delivery.payload = args[0]
    pairs = args[0].get("pairs") if isinstance(args[0], Mapping) else None
    delivery.pairs = max(1, len(pairs)) if isinstance(pairs, list) else 1
    again = published_again(message.headers, args[0])
    published_at = message.headers.get("published_at")
    delivery.published_at = published_at if isinstance(published_at, float) else None
    delivery.redelivered |= again > 0
    # Not at the first time: a Redis that lost its data would have its whole window taken one by one.
    delivery.suspect |= again > 1
    if request.eta and request.eta > datetime.now(UTC):
        delivery.not_before = request.eta
    if options := [name for name in NOT_CARRIED_OUT if (embed or {}).get(name)]:
        delivery.refusal = CodedError(
            ErrorCode.UNSUPPORTED_OPTION,
            f"{task.name} does not carry out link, link_error, chain or chord (this message has {', '.join(options)}): "
            "submit without, and read the verdicts with AsyncResult.get() or in SQL",
        )
    return delivery


def published_again(headers: Mapping[str, Any], payload: object) -> int:
    """How often the relay has published this attempt of the message beyond the first time."""
    publishes = headers.get("publishes")
    attempts = payload.get("attempts") if isinstance(payload, Mapping) else None
    if type(publishes) is not int or type(attempts) is not int:
        return 0
    return max(0, publishes - attempts - 1)


def lane_of(message: Any) -> str:
    """The queue that the message came through."""
    info = message.delivery_info or {}
    return str(info.get("routing_key") or info.get("exchange") or "")


def refused(message: Any, code: ErrorCode, detail: str) -> Delivery:
    """A message that Celery could make nothing of, to be recorded and acknowledged like any other."""
    return Delivery(message, lane_of(message), refusal=MessageRejected(code, detail[:2_000]))


def withdrawn(request: Request | None) -> Literal["expired", "revoked"] | None:
    """Whether the producer has taken the message back: by `expires`, or by revoke."""
    if request is None:
        return None
    if request.expires and datetime.now(UTC) > request.expires:
        return "expired"
    return "revoked" if request.id in worker_state.revoked else None
