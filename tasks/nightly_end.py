"""The end of a night: what is known of the items, the comparison, the results to S3, and word of it.

Every step may be done twice, since the process may be killed between any two; only the word may then be sent twice.
"""

import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from db import catalog as items_known
from db import comparison, nights, runs
from db.nights import Night
from db.run_reading import Ended
from tasks import storing
from tasks.catalogs import Catalog
from tasks.nightly_s3 import Buckets
from tasks.nightly_word import call_webhook, run_command
from tasks.report_writing import attempted, write_page
from tasks.settings import Settings
from worker.errors import ConcordError, Hold, first_line

log = logging.getLogger(__name__)

RESULTS_PER_PAGE = 5_000
#: SQLSTATE of a statement that took too long.
TIMED_OUT = "57014"
#: Timeouts of one step before the night fails: a lock in the way is gone by then, a slow statement stays slow.
TIMEOUTS = 3

T = TypeVar("T")


class TooSlow(ConcordError):
    """Concord's database does not finish a statement of the night in time."""


def persist(action: Callable[[], T], stopping: Callable[[], bool]) -> T:
    """As `storing.persist`, but what runs out of time is not tried for ever. Raises TooSlow too."""
    timeouts = 0

    def limited() -> T:
        nonlocal timeouts
        try:
            return action()
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != TIMED_OUT:
                raise
            timeouts += 1
            if timeouts < TIMEOUTS:
                raise
            raise TooSlow(
                f"Concord's database did not finish a statement in time, {TIMEOUTS} times over; `vacuum (analyze) "
                "catalog_state, verdict` and more memory or disk speed for it help, then resume the night"
            ) from None

    return storing.persist(limited, stopping)


def finish(engine: Engine, catalog: Catalog, night: Night, settings: Settings, stopping: Callable[[], bool]) -> None:
    """All that follows the last verdict. Where results, page or word cannot be sent, the night is done all the same,
    and its summary says why. Raises Hold where it is to stop.
    """
    known(engine, night, stopping)
    summary = persist(partial(summarize, engine, catalog, night), stopping)
    summary["results"] = sent(partial(write_results, engine, catalog, night, settings, stopping))
    # The page shows the night as it will stand, and is there when word of it goes out.
    ended = Ended(persist(partial(now, engine), stopping), dict(summary))
    page = partial(write_page, engine, night.id, settings, results=catalog.results, ended=ended)
    summary["page"] = attempted(night.name, partial(persist, page, stopping))
    summary["webhook"] = sent(partial(call_webhook, catalog, summary))
    summary["command"] = sent(partial(run_command, catalog, summary, stopping))

    def done() -> None:
        with engine.begin() as connection:
            nights.finish(connection, night.id, summary, ended.finished_at)
            items_known.forget_objects(connection, night.id)

    persist(done, stopping)
    log.info("%s is done", night.name)


def now(engine: Engine) -> datetime:
    """The database's time, by which runs begin and end."""
    with engine.connect() as connection:
        moment: datetime = connection.execute(text("select now()")).scalar_one()
    return moment


def known(engine: Engine, night: Night, stopping: Callable[[], bool]) -> None:
    """Carry the night's verdicts over, a page a transaction, and mark what its source no longer had."""
    model = None if night.options["model"]["pinned"] else night.options["model"]["id"]

    def page(after: UUID) -> UUID | None:
        with engine.begin() as connection:
            return items_known.carry_over(connection, night, after, model)

    def gone() -> None:
        with engine.begin() as connection:
            items_known.mark_gone(connection, night)

    after: UUID | None = UUID(int=0)
    while after is not None:
        after = persist(partial(page, after), stopping)
    persist(gone, stopping)


def summarize(engine: Engine, catalog: Catalog, night: Night) -> dict[str, Any]:
    """The night in numbers: the whole catalog, by each attribute, and some items that stopped agreeing."""
    with engine.connect() as connection:
        night = nights.read(connection, night.id)
        (whole,) = comparison.compare(connection, night)
        by = {name: comparison.compare(connection, night, name) for name in catalog.compare_by}
        examples = comparison.newly_contradicting(connection, night)
        labels = runs.label_counts(connection, night)
    counters = ("planned", "judged", "rejected", "failed", "flagged", "reused", "skipped")
    return {
        "run": str(night.id),
        "source": night.source,
        "date": night.options["date"],
        **{name: getattr(night, name) for name in counters},
        "skipped_rows": (night.position or {}).get("skipped", []),
        "labels": labels,
        "catalog": rated(whole),
        "by": {name: [rated(row) for row in rows if row["value"] is not None] for name, rows in by.items()},
        "newly_contradicting": examples,
    }


def rated(row: dict[str, Any]) -> dict[str, Any]:
    """With the share of mismatches among the items that have a verdict, and that of the sample."""
    with_verdict = row["items"] - row["without_verdict"]
    return {
        **row,
        "defect_rate": row["mismatches"] / with_verdict if with_verdict else None,
        "sample_defect_rate": row["sample_mismatches"] / row["sample"] if row["sample"] else None,
    }


def sent(action: Callable[[], Any]) -> Any:
    """What it returns; where it cannot be done, why."""
    try:
        return action()
    except Hold:
        raise
    except (ConcordError, OSError, ValueError) as error:
        log.error("%s", first_line(error))
        return {"error": first_line(error)}
    except Exception as error:
        # Of a library, say: what is wrong with the results is no reason to lose the night.
        log.exception("a night's end goes on without a part of it")
        return {"error": f"{type(error).__name__}: {first_line(error)}"}


def write_results(
    engine: Engine, catalog: Catalog, night: Night, settings: Settings, stopping: Callable[[], bool]
) -> list[str] | None:
    """The night's verdicts as files in S3, by way of this machine's disk; returns their addresses."""
    if catalog.results is None:
        return None
    buckets = Buckets(settings)
    stem = f"{catalog.results.rstrip('/')}/{night.source}/{night.options['date']}/{night.id}"
    addresses = []
    with tempfile.TemporaryDirectory(prefix="concord-results-") as folder:
        for ending, write in (("jsonl", write_jsonl), ("parquet", write_parquet)):
            path = Path(folder, f"results.{ending}")
            if not write(path, pages(engine, night, stopping)):
                log.warning("no Parquet: pip install '.[parquet]' in Concord's folder")
                continue
            buckets.upload(path, f"{stem}.{ending}")
            addresses.append(f"{stem}.{ending}")
    return addresses


def pages(engine: Engine, night: Night, stopping: Callable[[], bool]) -> Iterator[list[dict[str, Any]]]:
    after = None

    def page() -> list[dict[str, Any]]:
        with engine.connect() as connection:
            return comparison.results(connection, night, after, RESULTS_PER_PAGE)

    while rows := persist(page, stopping):
        yield [{**row, "pair_id": str(row["pair_id"])} for row in rows]
        after = rows[-1]["pair_id"]


def write_jsonl(path: Path, found: Iterator[list[dict[str, Any]]]) -> bool:
    with path.open("w", encoding="utf-8") as file:
        for rows in found:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return True


def write_parquet(path: Path, found: Iterator[list[dict[str, Any]]]) -> bool:
    """False where pyarrow is not installed."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        return False
    names = ("pair_id", "ref", "status", "label", "p_entailment", "p_contradiction", "p_neutral", "decision",
             "error_code", "error_detail")  # fmt: skip
    schema = arrow.schema([(name, arrow.float64() if name.startswith("p_") else arrow.string()) for name in names])
    with parquet.ParquetWriter(path, schema) as writer:
        for rows in found:
            writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
    return True
