"""The views of schema `report` (db/views, db/report_rows.py): one function that reads any of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime, timedelta
from typing import Any, get_type_hints
from uuid import UUID

from sqlalchemy import Connection, text

from db import report_rows as rows

#: Rows that are fetched at a time, so that memory does not grow with what is read.
PAGE_ROWS = 2_000


@dataclass(frozen=True)
class Report:
    """A view: its row, the columns that a range of time is laid on, and the order in which its rows are read."""

    row: type[Any]
    moments: Sequence[str]
    order: str

    @property
    def types(self) -> dict[str, Any]:
        """The type of each column, in their order."""
        hints = get_type_hints(self.row)
        return {field.name: hints[field.name] for field in fields(self.row)}


REPORTS: Mapping[str, Report] = {
    "daily_labels": Report(rows.DailyLabels, ("day",), "day, source, policy, status, label, decision"),
    "run_summary": Report(rows.RunSummary, ("submitted_at",), "submitted_at desc"),
    "run_changes": Report(rows.RunChanges, ("submitted_at",), "submitted_at desc, change, ref"),
    "mismatches": Report(rows.Mismatches, ("submitted_at",), "p_trouble desc, submitted_at"),
    "review_queue": Report(rows.ReviewQueue, ("submitted_at",), "p_trouble desc, submitted_at"),
    "dead_letters": Report(rows.DeadLetters, ("submitted_at",), "decided_at desc"),
    "throughput": Report(rows.Throughput, ("hour",), "hour, lane"),
    "latency": Report(rows.Latency, ("hour",), "hour, lane"),
    "errors_by_code": Report(rows.ErrorsByCode, ("day",), "day, pairs desc, error_code"),
    "defect_rate": Report(rows.DefectRate, ("day",), "day, source, policy, attribute, mismatches desc, value"),
    "model_comparison": Report(rows.ModelComparison, ("new_submitted_at", "old_submitted_at"), "moved desc, ref"),
    "score_histogram": Report(rows.ScoreHistogram, ("day",), "day, source, policy, model_version_id, from_score"),
    "runs": Report(rows.Runs, ("submitted_at",), "submitted_at desc"),
    "models": Report(rows.Models, (), "model_version_id"),
    "policies": Report(rows.Policies, (), "policy, policy_version"),
    "batches": Report(rows.Batches, ("settled_at",), "settled_at"),
    "verdicts": Report(rows.Verdicts, ("submitted_at",), "submitted_at, pair_id"),
}


class NotInReport(ValueError):
    """The view has no such column to choose by."""


def read(
    connection: Connection,
    name: str,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    source: str | None = None,
    run_id: UUID | None = None,
    limit: int | None = None,
) -> Iterator[Any]:
    """Rows of a view, from `since` to before `until`, as its dataclass.

    Without `since` every month is read. Raises KeyError for an unknown name, and NotInReport where the view has neither
    the source nor the run that is asked for.
    """
    report = REPORTS[name]
    wanted: dict[str, Any] = {}
    conditions = []
    for column, value in (("source", source), ("run_id", run_id)):
        if value is not None:
            if column not in report.types:
                raise NotInReport(f"{name} has no column {column}")
            conditions.append(f"{column} = :{column}")
            wanted[column] = value
    for column in report.moments:
        is_day = report.types[column] is date
        if since is not None:
            conditions.append(f"{column} >= :since")
            wanted["since"] = since.astimezone(UTC).date() if is_day else since
        if until is not None:
            # A day is read whole if any moment of it lies before `until`.
            conditions.append(f"{column} <= :until" if is_day else f"{column} < :until")
            wanted["until"] = (until.astimezone(UTC) - timedelta(microseconds=1)).date() if is_day else until
    where = f"where {' and '.join(conditions)}" if conditions else ""
    statement = text(
        f"select {', '.join(report.types)} from report.{name} {where} order by {report.order} limit :limit"
    )
    paged = statement.execution_options(stream_results=True, yield_per=PAGE_ROWS)
    for row in connection.execute(paged, {**wanted, "limit": limit}):
        yield report.row(*row)


PURPOSES = """
select c.relname as name, obj_description(c.oid) as purpose
from pg_class as c where c.relnamespace = 'report'::regnamespace and c.relkind = 'v'
"""


def purposes(connection: Connection) -> dict[str, str]:
    """What each view is for, by name, in the order of REPORTS: the database's own comments."""
    found = {row.name: row.purpose or "" for row in connection.execute(text(PURPOSES))}
    return {name: found[name] for name in REPORTS if name in found}


COLUMNS = """
select a.attname as name, format_type(a.atttypid, a.atttypmod) as type,
       coalesce(col_description(a.attrelid, a.attnum), '') as meaning
from pg_attribute as a
where a.attrelid = cast('report.' || quote_ident(:name) as regclass) and a.attnum > 0 and not a.attisdropped
order by a.attnum
"""


def columns(connection: Connection, name: str) -> list[tuple[str, str, str]]:
    """A view's columns: name, type, and what the database says of it."""
    return [(row.name, row.type, row.meaning) for row in connection.execute(text(COLUMNS), {"name": name})]
