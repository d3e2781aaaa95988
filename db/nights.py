"""Nights: the nightly runs over catalogs, from their opening to their end.

A night is a row of `run` of kind `nightly`. Its planner moves it on: planning, running (all is planned), finishing (no
row of the outbox is left), done. Workers only count into it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from db import runs
from db.runs import Run

#: `not_before` of what a cancelled night had not published yet: for ever, in a year that Python can still read.
PARKED_UNTIL = "9000-01-01 00:00+00"
OPEN_STATES = ("planning", "running", "finishing")


@dataclass(frozen=True)
class Night(Run):
    """A nightly run; `position` is where its planner goes on, `options` what it was begun with."""

    flagged: int
    reused: int
    skipped: int
    position: dict[str, Any] | None
    options: dict[str, Any]
    summary: dict[str, Any] | None
    created_at: datetime
    finished_at: datetime | None

    @property
    def is_open(self) -> bool:
        # A worker of an older version may have called it done with its last pair.
        return self.state in OPEN_STATES or (self.state == "done" and self.summary is None)


COLUMNS = f"{runs.COLUMNS}, flagged, reused, skipped, position, options, summary, created_at, finished_at"

OPEN = f"""
with made as (
    insert into run (id, kind, source, name, lane, submitted_at, options)
    values (:id, 'nightly', :source, :name, :lane, now(), cast(:options as jsonb))
    on conflict do nothing returning {COLUMNS}),
parked as (
    delete from outbox using run, made
    where outbox.run_id = run.id and run.kind = 'nightly' and run.source = made.source
      and outbox.published_at is null and outbox.not_before = '{PARKED_UNTIL}'),
listed as (
    delete from catalog_object using run, made
    where catalog_object.run_id = run.id and run.kind = 'nightly' and run.source = made.source)
select {COLUMNS} from made
"""
READ = f"select {COLUMNS} from run where id = :id"


def open_night(
    connection: Connection, run_id: UUID, *, source: str, name: str, lane: str, options: Mapping[str, Any]
) -> Night | None:
    """The night of this id: a new one, or the one that an earlier call began.

    None where another night of the source is not over. What earlier nights of the source still kept, messages of a
    cancelled one and listings, is given up.
    """
    parameters = {"id": run_id, "source": source, "name": name, "lane": lane, "options": json.dumps(options)}
    row = connection.execute(text(OPEN), parameters).one_or_none()
    if row is None:
        # A statement of its own, which sees what another call committed while the insert waited for it.
        row = connection.execute(text(READ), {"id": run_id}).one_or_none()
    return Night(**row._mapping) if row else None


def read(connection: Connection, run_id: UUID) -> Night:
    """The night as it stands. Raises sqlalchemy.exc.NoResultFound."""
    row = connection.execute(text(READ), {"id": run_id}).one()
    return Night(**row._mapping)


def nights_of(connection: Connection, source: str, date: str) -> int:
    """How many nights of this source have begun on this local date."""
    statement = """select count(*) from run
        where kind = 'nightly' and source = :source and options ->> 'date' = :date"""
    return int(connection.execute(text(statement), {"source": source, "date": date}).scalar_one())


def newest(connection: Connection, source: str) -> Night | None:
    """The night of this source that began last."""
    statement = f"""select {COLUMNS} from run where kind = 'nightly' and source = :source
        order by created_at desc limit 1"""
    row = connection.execute(text(statement), {"source": source}).one_or_none()
    return Night(**row._mapping) if row else None


def open_nights(connection: Connection) -> list[Night]:
    """The nights that are not over, the oldest first."""
    statement = f"""select {COLUMNS} from run where kind = 'nightly'
        and (state in ('planning', 'running', 'finishing') or (state = 'done' and summary is null))
        order by created_at"""
    return [Night(**row._mapping) for row in connection.execute(text(statement))]


ADVANCE = """
update run set planned = planned + :planned, reused = reused + :reused, skipped = skipped + :skipped,
               position = cast(:after as jsonb),
               state = case when cast(:after as jsonb) @> '{"end": true}' then 'running' else state end
where id = :id and state = 'planning' and position is not distinct from cast(:before as jsonb)
"""


def advance(
    connection: Connection,
    night: Night,
    position: Mapping[str, Any],
    *,
    planned: int = 0,
    reused: int = 0,
    skipped: int = 0,
) -> bool:
    """Count a page in the transaction that writes its rows to the outbox, and note where to go on: `position`, whose
    `end` says that this was the last page.

    False where the night is not as `night` says: it was cancelled, or another has planned this page; the transaction
    must not go on.
    """
    before = None if night.position is None else json.dumps(night.position)
    counts = {"planned": planned, "reused": reused, "skipped": skipped}
    parameters = {"id": night.id, "before": before, "after": json.dumps(position), **counts}
    return connection.execute(text(ADVANCE), parameters).rowcount == 1


#: Counters may fall short for ever, where somebody deleted a message; rows of the outbox cannot.
BEGIN_FINISHING = """
update run set state = 'finishing'
where id = :id and (state = 'running' or (state = 'done' and summary is null))
  and not exists (select from outbox where outbox.run_id = run.id)
"""


def begin_finishing(connection: Connection, run_id: UUID) -> bool:
    """Whether every pair of the night is settled, and its end work begins."""
    return connection.execute(text(BEGIN_FINISHING), {"id": run_id}).rowcount == 1


def messages_ahead(connection: Connection, run_id: UUID) -> int:
    """Messages of the run that are not settled yet."""
    statement = text("select count(*) from outbox where run_id = :id")
    return int(connection.execute(statement, {"id": run_id}).scalar_one())


def finish(connection: Connection, run_id: UUID, summary: Mapping[str, Any], at: datetime) -> None:
    """The night is done, since `at`."""
    statement = """update run set state = 'done', summary = cast(:summary as jsonb), finished_at = :at
        where id = :id and state = 'finishing'"""
    connection.execute(text(statement), {"id": run_id, "summary": json.dumps(summary), "at": at})


def fail(connection: Connection, run_id: UUID, error: str) -> None:
    """The night ends here, for this reason; what is planned is judged all the same."""
    statement = """update run set state = 'failed', finished_at = now(),
            summary = jsonb_build_object('error', cast(:error as text))
        where id = :id and state in ('planning', 'running', 'finishing')"""
    connection.execute(text(statement), {"id": run_id, "error": error})


#: The run first, as the planner's page does: one of the two waits for the other.
CANCEL = "update run set state = 'cancelled', finished_at = now() where id = :id and state in ('planning', 'running')"
PARK = f"update outbox set not_before = '{PARKED_UNTIL}' where run_id = :id and published_at is null"


def cancel(connection: Connection, run_id: UUID) -> bool:
    """Stop planning and keep back what is not published yet; what is on its way is judged.

    False where the night is over, or at its end work.
    """
    if not connection.execute(text(CANCEL), {"id": run_id}).rowcount:
        return False
    connection.execute(text(PARK), {"id": run_id})
    return True


RESUME = """
update run set state = case when position @> '{"end": true}' then 'running' else 'planning' end,
               finished_at = null, summary = null
where id = :id and state in ('cancelled', 'failed')
"""
UNPARK = f"update outbox set not_before = now() where run_id = :id and not_before = '{PARKED_UNTIL}'"


def resume(connection: Connection, run_id: UUID) -> bool:
    """Take a cancelled or failed night up where it stopped; the caller has seen that it is its source's newest."""
    if not connection.execute(text(RESUME), {"id": run_id}).rowcount:
        return False
    connection.execute(text(UNPARK), {"id": run_id})
    return True


def take_lock(connection: Connection, run_id: UUID) -> bool:
    """Become the one that moves this night on, for as long as this connection lives."""
    statement = text("select pg_try_advisory_lock(hashtextextended(:id, 0))")
    return bool(connection.execute(statement, {"id": f"night {run_id}"}).scalar_one())
