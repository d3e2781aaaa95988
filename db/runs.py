"""Runs: one submitted file or one night's job. Its pairs share its submitted_at and take their ids from its id."""

import json
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text


@dataclass(frozen=True)
class Run:
    """A row of `run`."""

    id: UUID
    name: str
    lane: str
    source: str
    submitted_at: datetime
    state: str
    planned: int
    judged: int
    rejected: int
    failed: int

    @property
    def settled(self) -> int:
        return self.judged + self.rejected + self.failed


COLUMNS = "id, name, lane, source, submitted_at, state, planned, judged, rejected, failed"

#: The database's clock gives submitted_at, once: a run that is resumed keeps its pairs' keys.
OPEN = f"""
with made as (
    insert into run (id, kind, source, name, lane, submitted_at)
    values (:id, 'submit', :source, :name, :lane, now()) on conflict (id) do nothing returning {COLUMNS})
select {COLUMNS} from made
"""


def open_run(connection: Connection, run_id: UUID, *, name: str, lane: str, source: str) -> Run:
    """The run of this id: a new one, or the one that an earlier call began."""
    parameters = {"id": run_id, "name": name, "lane": lane, "source": source}
    row = connection.execute(text(OPEN), parameters).one_or_none()
    # Read by a statement of its own, which sees what another call committed while the insert waited for it.
    return Run(**row._mapping) if row else read(connection, run_id)


#: A run that was ended early, because its file could not be read on, is opened again when it can; a page that was made
#: of it is made anew at its end.
PLAN = """
update run set planned = planned + :pairs, state = 'planning', finished_at = null, summary = null
where id = :id and planned = :before
"""


def plan(connection: Connection, run_id: UUID, pairs: int, *, before: int) -> bool:
    """Count pairs that this transaction writes to the outbox, after the `before` that were.

    False where there are not that many: somebody else submits the same run, and this transaction must not go on.
    """
    return connection.execute(text(PLAN), {"id": run_id, "pairs": pairs, "before": before}).rowcount == 1


END_PLANNING = """
update run set
    state = case when judged + rejected + failed >= planned then 'done' else 'running' end,
    finished_at = case when judged + rejected + failed >= planned then now() end
where id = :id and state = 'planning'
"""


def end_planning(connection: Connection, run_id: UUID) -> None:
    """Nothing more will be added: the run is done when its last pair is settled."""
    connection.execute(text(END_PLANNING), {"id": run_id})


def read(connection: Connection, run_id: UUID) -> Run:
    """The run as it stands. Raises sqlalchemy.exc.NoResultFound."""
    return Run(**connection.execute(text(f"select {COLUMNS} from run where id = :id"), {"id": run_id}).one()._mapping)


TROUBLES = """
select status, error_code, count(*) as pairs, min(ref) as example, min(error_detail) as detail
from verdict where run_id = :id and submitted_at = :submitted_at and status <> 'judged'
group by status, error_code order by pairs desc
"""


def troubles(connection: Connection, run: Run) -> list[dict[str, Any]]:
    """What went wrong with how many pairs of a run, with an example of each."""
    rows = connection.execute(text(TROUBLES), {"id": run.id, "submitted_at": run.submitted_at}).mappings()
    return [dict(row) for row in rows]


LABELS = """
select policy, label, decision, count(*) as pairs from verdict
where run_id = :id and submitted_at = :submitted_at and status = 'judged'
group by policy, label, decision order by policy, label, decision
"""


def labels(connection: Connection, run: Run) -> list[dict[str, Any]]:
    """How many judged pairs of a run have which policy, label and decision."""
    rows = connection.execute(text(LABELS), {"id": run.id, "submitted_at": run.submitted_at}).mappings()
    return [dict(row) for row in rows]


WITHOUT_PAGE = f"""
select {COLUMNS} from run
where kind = 'submit' and state = 'done' and summary is null and finished_at > now() - interval '1 day'
order by finished_at
"""


def without_page(connection: Connection) -> list[Run]:
    """Files that were judged since a day and of which no page was noted, in the order of their ends."""
    return [Run(**row._mapping) for row in connection.execute(text(WITHOUT_PAGE))]


#: The labels are counted here once, for the pages of runs to come.
NOTE_PAGE = """
update run set summary = jsonb_build_object('page', cast(:page as jsonb), 'labels', cast(:labels as jsonb))
where id = :id and planned = :planned and summary is null
"""


def note_page(connection: Connection, run: Run, page: Any) -> None:
    """Note where the page of a file is, or why there is none; not where pairs came to the run meanwhile."""
    labels = json.dumps(label_counts(connection, run))
    parameters = {"id": run.id, "planned": run.planned, "page": json.dumps(page), "labels": labels}
    connection.execute(text(NOTE_PAGE), parameters)


def label_counts(connection: Connection, run: Run) -> dict[str, int]:
    """How many judged pairs of a run have which label."""
    counts: Counter[str] = Counter()
    for row in labels(connection, run):
        counts[row["label"]] += row["pairs"]
    return dict(counts)
