"""The end of a night: what is known of the items, the comparison, the results to S3, and word of it.

Every step may be done twice, since the process may be killed between any two; only the word may then be sent twice.
"""

import json
import logging
import math
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from db import catalog as items_known
from db import comparison, nights
from db.nights import Night
from tasks import storing
from tasks.catalogs import Catalog
from tasks.nightly_s3 import Buckets
from tasks.settings import Settings
from worker.errors import ConcordError, Hold, first_line

log = logging.getLogger(__name__)

RESULTS_PER_PAGE = 5_000
WEBHOOK_TIMEOUT_S = 10.0
WEBHOOK_ATTEMPTS = 4
#: Before the second attempt; doubles with each further one.
WEBHOOK_FIRST_WAIT_S = 1.0
COMMAND_TIMEOUT_S = 300.0
#: Of the normal distribution, for 95 in 100.
Z = 1.959964
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
    """All that follows the last verdict. Where results or word cannot be sent, the night is done all the same, and its
    summary says why. Raises Hold where it is to stop.
    """
    known(engine, night, stopping)
    summary = persist(partial(summarize, engine, catalog, night), stopping)
    summary["results"] = sent(partial(write_results, engine, catalog, night, settings, stopping))
    summary["webhook"] = sent(partial(call_webhook, catalog, summary))
    summary["command"] = sent(partial(run_command, catalog, summary))

    def done() -> None:
        with engine.begin() as connection:
            nights.finish(connection, night.id, summary)
            items_known.forget_objects(connection, night.id)

    persist(done, stopping)
    log.info("%s is done", night.name)


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
    counters = ("planned", "judged", "rejected", "failed", "flagged", "reused", "skipped")
    return {
        "run": str(night.id),
        "source": night.source,
        "date": night.options["date"],
        **{name: getattr(night, name) for name in counters},
        "skipped_rows": (night.position or {}).get("skipped", []),
        "catalog": rated(whole),
        "by": {name: [rated(row) for row in rows if row["value"] is not None] for name, rows in by.items()},
        "newly_contradicting": examples,
    }


def rated(row: dict[str, Any]) -> dict[str, Any]:
    """With the share of mismatches among the items that have a verdict, and the sample's with its error bars."""
    with_verdict = row["items"] - row["without_verdict"]
    low, high = wilson(row["sample_mismatches"], row["sample"])
    return {
        **row,
        "defect_rate": row["mismatches"] / with_verdict if with_verdict else None,
        "sample_defect_rate": row["sample_mismatches"] / row["sample"] if row["sample"] else None,
        "sample_low": low,
        "sample_high": high,
    }


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a share that `hits` of `trials` were seen to have.

    Wilson, "Probable inference, the law of succession, and statistical inference", 1927: it stays within 0 and 1, and
    is right for small samples too.
    """
    if not trials:
        return 0.0, 1.0
    share, square = hits / trials, Z * Z
    middle = (share + square / (2 * trials)) / (1 + square / trials)
    half = Z / (1 + square / trials) * math.sqrt(share * (1 - share) / trials + square / (4 * trials * trials))
    return max(0.0, middle - half), min(1.0, middle + half)


def sent(action: Callable[[], Any]) -> Any:
    """What it returns; where it cannot be done, why."""
    try:
        return action()
    except Hold:
        raise
    except (ConcordError, URLError, OSError, ValueError) as error:
        log.error("%s", first_line(error))
        return {"error": first_line(error)}


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


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect could lead past the check of the address."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def call_webhook(catalog: Catalog, summary: dict[str, Any]) -> str | None:
    """POST the summary. Raises URLError after the last attempt; the address, which may hold a token, is in no error."""
    url = catalog.webhook_url()
    if url is None:
        return None
    request = urllib.request.Request(
        url, json.dumps(summary).encode(), {"Content-Type": "application/json", "User-Agent": "concord"}
    )
    # Nor through a proxy of the environment's, for an address on this very machine.
    loopback = urlsplit(url).scheme == "http"
    opener = urllib.request.build_opener(NoRedirect, *([urllib.request.ProxyHandler({})] if loopback else []))
    tries = Retrying(
        retry=retry_if_exception_type((URLError, OSError)),
        stop=stop_after_attempt(WEBHOOK_ATTEMPTS),
        wait=wait_exponential(multiplier=WEBHOOK_FIRST_WAIT_S),
        reraise=True,
    )

    def post() -> str:
        try:
            with opener.open(request, timeout=WEBHOOK_TIMEOUT_S) as answer:
                return f"HTTP {answer.status}"
        except HTTPError as error:
            error.close()
            raise URLError(f"the webhook answered HTTP {error.code}") from None
        except HTTPException as error:
            # Its words may be the answer's, or the address's.
            raise URLError(f"the webhook's answer is not HTTP: {type(error).__name__}") from None

    return tries(post)


def run_command(catalog: Catalog, summary: dict[str, Any]) -> str | None:
    """Run the catalog's command with the summary on its standard input; what it prints as errors goes where ours go.

    Raises ConcordError, which does not quote its arguments, and OSError.
    """
    if catalog.command is None:
        return None
    text = json.dumps(summary)
    try:
        done = subprocess.run(
            catalog.command, input=text, text=True, stdout=subprocess.DEVNULL, timeout=COMMAND_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ConcordError(f"the command took over {COMMAND_TIMEOUT_S:.0f} s and was ended") from None
    if done.returncode:
        raise ConcordError(f"the command ended with exit status {done.returncode}")
    return "exit status 0"
