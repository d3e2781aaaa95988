"""Reads the report of a run (db/run_report.py): its headline here, what stands below it by db/run_parts.py."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from sqlalchemy import Connection, text

from db import run_parts
from db.registry import concord_version
from db.run_report import Figure, RunBefore, RunReport

#: Ids that are named where a beginning fits several.
NAMED = 3

RUN = "select * from report.runs where run_id = :run_id"
NEWEST = "select run_id from report.runs order by submitted_at desc limit 1"
#: A catalog's night, or else a source's file.
NEWEST_OF = """
select run_id from report.runs where source = :words order by kind = 'nightly' desc, submitted_at desc limit 1
"""
#: A run that is not over, or was cancelled, has no page of its own that would take the place.
NEWER = """
select exists (
    select from report.runs
    where source = :source and state = 'done'
      and (kind = 'nightly', submitted_at) > (:kind = 'nightly', cast(:submitted_at as timestamptz)))
"""
BEGINNING = "select run_id from report.runs where starts_with(cast(run_id as text), :words) order by 1 limit :limit"

#: A file is compared with the last of its source, whatever its name; a night with the last of its catalog.
BEFORE = """
select * from report.runs
where kind = :kind and source = :source and state = 'done' and submitted_at < :submitted_at
order by submitted_at desc limit 1
"""
JUDGED = """
select count(*) as judged, count(*) filter (where mismatch) as mismatches
from report.verdicts where submitted_at = :submitted_at and run_id = :run_id and status = 'judged'
"""
CHANGES = """
select change, count(*) as pairs from report.run_changes
where run_id = :run_id and submitted_at = :submitted_at group by change
"""
BOUNDS = "select report.wilson_low(:hits, :of) as low, report.wilson_high(:hits, :of) as high"


UNDERWAY = ("planning", "running", "finishing")
COUNTERS = ("planned", "judged", "rejected", "failed", "flagged")
CHANGED = ("newly_contradicting", "newly_agreeing")
Unit = Literal["pairs", "share", "pairs/s", "s"]
Better = Literal["up", "down"] | None
#: The headline figures: name, label, unit, which way is good news, and what is counted.
FIGURES: tuple[tuple[str, str, Unit, Better, str], ...] = (
    ("planned", "planned", "pairs", None, "Pairs that the run handed over."),
    ("judged", "judged", "pairs", None, "Pairs that have a label."),
    ("rejected", "rejected", "pairs", "down", "Pairs with a fault of their own, such as a picture that is not there."),
    ("failed", "failed", "pairs", "down", "Pairs whose attempts were used up; `concord dead` tries them again."),
    ("flagged", "flagged", "pairs", "down", "Judged pairs that are to be reviewed, or were rejected by their policy."),
    ("reused", "reused", "pairs", None, "Items that had not changed and whose last verdict stands."),
    ("defect_rate", "defect rate", "share", "down",
     "Mismatches among the pairs that this run judged: their label is the one that the policy watches for."),
    ("catalog_defect_rate", "defect rate of the catalog", "share", "down",
     "Mismatches among all items of the catalog that have a verdict, those that had not changed included."),
    ("sample_defect_rate", "defect rate of the sample", "share", "down",
     "Mismatches among the unchanged items that were judged again, by which the rate of the catalog can be checked."),
    ("newly_contradicting", "newly contradicting", "pairs", "down",
     "The label is contradiction, and was another when the item was judged last."),
    ("newly_agreeing", "newly agreeing", "pairs", "up",
     "The label is entailment, and was another when the item was judged last."),
    ("pairs_per_s", "pairs a second", "pairs/s", "up", "Settled pairs a second, from the beginning to the end."),
    ("duration", "duration", "s", "down", "From the beginning to the end, waiting included."),
)  # fmt: skip


class NoSuchRun(LookupError):
    """No run, or more than one, is called that; the sentence says what to do."""


@dataclass(frozen=True)
class Ended:
    """How a run will stand when its end work is done."""

    finished_at: datetime
    summary: Mapping[str, Any]
    state: str = "done"


def find_run(connection: Connection, words: str) -> UUID:
    """The run that `words` name: `last`, an id, the beginning of one, or a source, whose newest night or file it is.

    Raises NoSuchRun.
    """
    newest = connection.execute(text(NEWEST)).scalar_one_or_none()
    if newest is None:
        raise NoSuchRun("there has been no run yet; `concord submit` or `concord nightly start` makes one")
    if words == "last":
        return UUID(str(newest))
    if of_source := connection.execute(text(NEWEST_OF), {"words": words}).scalar_one_or_none():
        return UUID(str(of_source))
    beginning = {"words": words.lower(), "limit": NAMED + 1}
    found: list[UUID] = list(connection.execute(text(BEGINNING), beginning).scalars()) if words else []
    if not found:
        raise NoSuchRun(
            f"there is no run {words!r}: give an id, the beginning of one, `last`, or the name of a catalog or source; "
            "`concord sql runs` lists runs"
        )
    if len(found) > 1:
        named = ", ".join(map(str, found[:NAMED])) + (" ..." if len(found) > NAMED else "")
        raise NoSuchRun(f"{words!r} begins the ids of several runs: {named}")
    return found[0]


def is_newest(connection: Connection, report: RunReport) -> bool:
    """Whether no later night of the source or, where it has none, no later file is done."""
    return not connection.execute(text(NEWER), vars(report)).scalar_one()


def read_report(connection: Connection, run_id: UUID, *, ended: Ended | None = None) -> RunReport:
    """All about a run. Raises NoSuchRun.

    `ended` says how the run will stand in a moment, so that its page can be there before word of it goes out.
    """
    row = connection.execute(text(RUN), {"run_id": run_id}).mappings().one_or_none()
    if row is None:
        raise NoSuchRun(f"there is no run {run_id}; `concord sql runs` lists runs")
    run = {**row, **(vars(ended) if ended else {})}
    # What a run that goes on has so far is less of everything: no news, good or bad.
    found = None if run["state"] in UNDERWAY else connection.execute(text(BEFORE), run).mappings().one_or_none()
    before = dict(found) if found else None
    counts = run_parts.counts_of(connection, run)
    judged, mismatches = sum(row.pairs for row in counts), sum(row.pairs for row in counts if row.mismatch)
    histograms, speed = run_parts.histograms(connection, counts), run_parts.speed(connection, run)
    now = {**noted(connection, run, judged, mismatches), "duration": speed.seconds, "pairs_per_s": speed.pairs_per_s}
    watched = {one.polarity for one in histograms}
    worst = run_parts.worst(connection, run)
    return RunReport(
        **{name: run[name] for name in ("kind", "source", "name", "lane", "state", "submitted_at", "finished_at")},
        id=run_id,
        state_note=note_of(run, judged),
        before=RunBefore(before["run_id"], before["name"], before["submitted_at"]) if before else None,
        figures=tuple(figures(connection, now, noted_before(connection, before) if before else {}, watched)),
        history=run_parts.history(connection, run),
        histograms=histograms,
        attributes=run_parts.rates(connection, run),
        errors=run_parts.errors(connection, run),
        speed=speed,
        models=run_parts.models(connection, counts),
        mismatches=mismatches,
        worst=worst,
        filters=tuple(run_parts.filters(worst)),
        sql=run_parts.shown_sql(run),
        concord=concord_version() or "",
    )


def note_of(run: Mapping[str, Any], verdicts: int) -> str:
    """What a reader must know before the figures; of a run that is done and can be seen whole, nothing."""
    settled = f"{run['judged'] + run['rejected'] + run['failed']:,} of {run['planned']:,} pairs are settled"
    if run["judged"] and not verdicts:
        return "The verdicts of this run are no longer kept: their month was dropped. What is left are its counters."
    match run["state"]:
        case state if state in UNDERWAY:
            return f"This run is not over: {settled} so far, and all figures are of those."
        case "cancelled":
            return f"This run was cancelled: {settled}."
        case "failed":
            why = (run["summary"] or {}).get("error")
            return f"This run failed: {settled}." + (f" {why}" if why else "")
    if not run["judged"]:
        return "This run judged no pair." if run["planned"] else "This run had nothing to judge."
    return ""


#: What a figure is noted as: one number, or hits and of how many.
Noted = Mapping[str, float | tuple[int, int] | None]


def noted(connection: Connection, run: Mapping[str, Any], judged: int, mismatches: int) -> dict[str, Any]:
    """What is known of a run; `judged` and `mismatches` are counted from its verdicts."""
    found: dict[str, Any] = {name: run[name] for name in COUNTERS}
    found["defect_rate"] = (mismatches, judged)
    if run["kind"] == "nightly":
        found["reused"] = run["reused"]
    whole = (run["summary"] or {}).get("catalog")
    if whole is not None:
        # As the night's end noted it, and `concord nightly status` says it; later nights have moved on.
        found["catalog_defect_rate"] = (whole["mismatches"], whole["items"] - whole["without_verdict"])
        found["sample_defect_rate"] = (whole["sample_mismatches"], whole["sample"])
        return {**found, **{name: whole[name] for name in CHANGED}}
    changes = {row.change: row.pairs for row in connection.execute(text(CHANGES), run)}
    return {**found, **{name: changes.get(name, 0) for name in CHANGED}}


def noted_before(connection: Connection, run: Mapping[str, Any]) -> dict[str, Any]:
    row = connection.execute(text(JUDGED), run).one()
    seconds = (run["finished_at"] - run["submitted_at"]).total_seconds() if run["finished_at"] else None
    settled = run["judged"] + run["rejected"] + run["failed"]
    found = {"duration": seconds, "pairs_per_s": settled / seconds if seconds else None}
    if run["judged"] and not row.judged:
        # Its month was dropped: of what is counted from verdicts nothing can be said.
        return {**found, **{name: run[name] for name in (*COUNTERS, "reused")}}
    return {**noted(connection, run, row.judged, row.mismatches), **found}


def figures(connection: Connection, now: Noted, before: Noted, watched: set[str]) -> Iterator[Figure]:
    """The headline. Where some pairs' text should not hold, a new contradiction is no bad news by itself."""
    for name, label, unit, better, note in FIGURES:
        if name not in now:
            continue
        (value, low, high), (was, _, _) = rated(connection, now[name]), rated(connection, before.get(name))
        way = None if name in CHANGED and watched - {"should_hold"} else better
        yield Figure(name, label, unit, value, was, low, high, way, note)


Rated = tuple[float | None, float | None, float | None]


def rated(connection: Connection, value: float | tuple[int, int] | None) -> Rated:
    """The value itself or, of hits and of how many, their share; and the 95 % interval of a share."""
    if not isinstance(value, tuple):
        return value, None, None
    hits, of = value
    low, high = connection.execute(text(BOUNDS), {"hits": hits, "of": of}).one()
    return (hits / of if of else None), low, high
