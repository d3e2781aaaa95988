"""Writing a batch's settlements: waiting for a database that is away, and finding the one row that it refuses."""

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from db import batches, suspects, verdicts
from db.batches import BatchRow
from db.engine import Trouble, trouble
from db.outbox import Rejected
from db.verdicts import Settlement, Verdict
from worker.errors import ErrorCode, Hold, first_line
from worker.messages import clean_string

log = logging.getLogger(__name__)

#: The longest wait between two tries while the database is away.
MAX_BACK_OFF_S = 15.0

T = TypeVar("T")


def persist(action: Callable[[], T], stopping: Callable[[], bool]) -> T:
    """Do it, and again while the database is away or a neighbour's transaction is in the way.

    Raises Hold when the worker is told to stop meanwhile, and the database's own error where trying again is vain.
    """

    def passing(error: BaseException) -> bool:
        return isinstance(error, SQLAlchemyError) and trouble(error) is not Trouble.DATA

    return patiently(passing, stopping)(action)


def patiently(
    passing: Callable[[BaseException], bool], stopping: Callable[[], bool], patience_s: float = math.inf
) -> Retrying:
    """Tries again, with growing waits, for as long as the trouble is a passing one and the process is to go on.

    Raises Hold where it is told to stop, and the trouble itself once `patience_s` are over.
    """

    def rest(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not stopping():
            time.sleep(min(0.1, seconds))

    def say(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        wait_s = state.next_action.sleep if state.next_action else 0.0
        log.warning("trying again in %.1f s: %s", wait_s, first_line(error))

    def give_up(state: RetryCallState) -> Any:
        error = state.outcome.exception() if state.outcome else None
        if error is not None and not stopping():
            raise error
        raise Hold(f"the process stops while it waits: {error}") from error

    def enough(state: RetryCallState) -> bool:
        return stopping() or (state.seconds_since_start or 0.0) >= patience_s

    return Retrying(
        retry=retry_if_exception(passing),
        wait=wait_random_exponential(multiplier=0.2, max=MAX_BACK_OFF_S),
        stop=enough,
        sleep=rest,
        before_sleep=say,
        retry_error_callback=give_up,
    )


def write(
    engine: Engine,
    settlements: Sequence[Settlement],
    stopping: Callable[[], bool],
    measured: BatchRow | None = None,
) -> None:
    """Commit a batch's settlements, and what was measured of it, in one transaction; halve it where Postgres refuses
    the data of one of them.
    """
    try:
        persist(lambda: write_once(engine, settlements, measured), stopping)
    except SQLAlchemyError as error:
        if len(settlements) > 1:
            middle = len(settlements) // 2
            write(engine, settlements[:middle], stopping)
            write(engine, settlements[middle:], stopping, measured)
        elif len(settlements[0].verdicts) > 0:
            log.warning("Postgres refuses a message's rows: %s", first_line(error))
            persist(lambda: write_once(engine, [storable(engine, settlements[0])], measured), stopping)
        else:
            raise


def write_once(engine: Engine, settlements: Sequence[Settlement], measured: BatchRow | None) -> None:
    started = time.monotonic()
    whole = Settlement(
        verdicts=[row for one in settlements for row in one.verdicts],
        done=[key for one in settlements for key in one.done],
        retries=[row for one in settlements for row in one.retries],
        rejected=[one_rejected for one in settlements for one_rejected in one.rejected],
    )
    with engine.begin() as connection:
        verdicts.settle(connection, whole)
        if suspected := [one for one in settlements if one.suspected]:
            settled = [message_id for one in suspected for message_id, _ in one.done]
            suspects.forget(connection, [*settled, *(row.message_id for one in suspected for row in one.retries)])
        if measured is not None:
            batches.record(connection, replace(measured, write_s=time.monotonic() - started))


def storable(engine: Engine, settlement: Settlement) -> Settlement:
    """The same with each row that Postgres refuses replaced by a bare one that says so, or, where not even that can
    be stored (its month is gone), recorded beside the verdicts.
    """
    rows, rejected = [], list(settlement.rejected)
    for row in settlement.verdicts:
        if (why := refusal(engine, row)) is None:
            rows.append(row)
        elif refusal(engine, bare(row, why)) is None:
            rows.append(bare(row, why))
        else:
            rejected.append(unstored(row, why))
    return replace(settlement, verdicts=rows, rejected=rejected)


def refusal(engine: Engine, row: Verdict) -> str | None:
    """Why Postgres does not take this row; None where it does. Nothing is written."""
    try:
        with engine.connect() as connection:
            verdicts.write(connection, [row])
            connection.rollback()
    except SQLAlchemyError as error:
        if trouble(error) is not Trouble.DATA:
            raise
        why: str = clean_string(first_line(getattr(error, "orig", error)))
        return why
    return None


def unstored(row: Verdict, why: str) -> Rejected:
    """A pair for which there is no place in `verdict`."""
    return Rejected(
        queue=row.lane,
        error_code=ErrorCode.UNSTORABLE,
        error_detail=why,
        body=json.dumps({"ref": row.ref, "image": row.image, "text": row.text}).encode(),
        message_id=row.message_id,
        pair_ids=[row.pair_id],
        source=row.source,
        run_id=row.run_id,
        pairs=1,
    )


def bare(row: Verdict, why: str) -> Verdict:
    """A row that holds only what identifies the pair."""
    return Verdict(
        submitted_at=row.submitted_at,
        pair_id=row.pair_id,
        source=row.source,
        message_id=row.message_id,
        lane=row.lane,
        run_id=row.run_id,
        status="failed",
        attempts=row.attempts,
        error_code=ErrorCode.UNSTORABLE,
        error_detail=why,
    )
