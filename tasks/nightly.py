"""The planner: moves a night on, from its source to its end. Needs Postgres and S3's listing, no Redis and no torch.

Whatever it knows is in the run's row, so that another may go on at any moment: a page's outbox rows, its counters and
the place of the next page commit together, and every step of the end work may be done twice.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID, uuid5

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from db import catalog as items_known
from db import nights, outbox, registry
from db.catalog_source import SourceAway, SourceBroken
from db.engine import make_engine
from db.nights import Night
from db.outbox import OutboxRow
from tasks import nightly_end
from tasks.catalogs import Catalog, CatalogsWrong
from tasks.nightly_end import persist
from tasks.nightly_s3 import Buckets, S3Away
from tasks.nightly_sources import SKIPPED_NAMED, Page, Source, SourceWrong, open_source
from tasks.pairs_file import MAX_MESSAGE_CHARS, chars_of, cut
from tasks.settings import Settings
from tasks.storing import patiently
from tasks.submit import PAIRS_PER_MESSAGE, envelope
from worker.errors import ConcordError, Hold, first_line
from worker.messages import clean_string

log = logging.getLogger(__name__)

#: Ids of nights are derived under this name: two starts of one night are one run.
NIGHTS = UUID("b7c1f4a2-0d0e-4f0e-8d55-3a8f1a0a6c5e")
#: Between two looks at what the workers have settled.
POLL_S = 0.5
FINGERPRINT_BYTES = 16

#: The end work sums up a whole catalog in a statement.
STATEMENT_TIMEOUT_S = 900

Stopping = Callable[[], bool]


@contextmanager
def connected(settings: Settings) -> Iterator[Engine]:
    """Connections for one night: one keeps its lock, another does the work."""
    engine = make_engine(settings.need("database_url"), pool_size=4, statement_timeout_s=STATEMENT_TIMEOUT_S)
    try:
        yield engine
    finally:
        engine.dispose()


def begin(
    engine: Engine,
    catalog: Catalog,
    *,
    now: datetime | None = None,
    everything: bool = False,
    sample: float | None = None,
    again: bool = False,
) -> Night:
    """Tonight's run of this catalog: a new one, or the one that an earlier call began, with that one's options.

    `again` begins another on the same date. Raises ConcordError where no model has started yet, or where another night
    of this catalog is not over.
    """
    now = now or datetime.now(UTC)
    date = catalog.local_date(now)
    with engine.begin() as connection:
        begun = nights.nights_of(connection, catalog.name, date)
        generation = begun if again else max(begun - 1, 0)
        run_id = uuid5(NIGHTS, json.dumps([catalog.name, date, generation]))
        night = nights.open_night(
            connection, run_id, source=catalog.name, name=f"{catalog.name} {date}", lane=catalog.lane,
            options={
                "date": date,
                "generation": generation,
                "all": everything,
                "sample": catalog.sample if sample is None else sample,
                "model": model_of(connection, catalog),
            },
        )  # fmt: skip
        if night is None:
            open_one = nights.newest(connection, catalog.name)
            raise ConcordError(
                f"{open_one.name if open_one else catalog.name} is not over yet: wait for it, or "
                f"`concord nightly cancel {catalog.name}` first"
            )
        return night


def model_of(connection: Connection, catalog: Catalog) -> dict[str, Any]:
    """What the night's verdicts will be made by, as far as fingerprints go. Raises ConcordError."""
    if catalog.model_version is None:
        model = registry.newest_model(connection)
        if model is None:
            raise ConcordError("no model has started on this database yet; start a worker once, then the night")
    else:
        model = registry.model_version(connection, catalog.model_version)
        if model is None:
            raise CatalogsWrong(f"[{catalog.name}] model_version: there is no model version {catalog.model_version}")
    names = ("id", "name", "revision", "recipe", "weights_sha256", "prompt", "image_px")
    return {**{name: model[name] for name in names}, "pinned": catalog.model_version is not None}


def drive(
    engine: Engine, catalog: Catalog, night: Night, settings: Settings, stopping: Stopping, *, poll_s: float = POLL_S
) -> Night:
    """Move the night on until it is over, `stopping` says so, or another process is at it; returns it as it stands."""
    with Lock(engine, night.id) as lock:
        while not stopping():
            if not persist(lock.is_held, stopping):
                break
            night = persist(partial(read, engine, night.id), stopping)
            if not night.is_open:
                break
            try:
                if night.state == "planning":
                    plan(engine, catalog, night, settings, stopping, poll_s)
                elif night.state == "finishing":
                    nightly_end.finish(engine, catalog, night, settings, stopping)
                elif not persist(partial(begin_finishing, engine, night.id), stopping):
                    time.sleep(poll_s)
            except Hold:
                break
            except Exception as error:
                # A night ends whatever happens: the next one is not to wait for it.
                if not isinstance(error, ConcordError | SourceBroken | SourceAway):
                    log.exception("%s fails", night.name)
                log.error("%s fails: %s", night.name, first_line(error))
                persist(partial(fail, engine, night.id, first_line(error)), stopping)
        return persist(partial(read, engine, night.id), lambda: False)


def read(engine: Engine, run_id: UUID) -> Night:
    with engine.connect() as connection:
        return nights.read(connection, run_id)


def begin_finishing(engine: Engine, run_id: UUID) -> bool:
    with engine.begin() as connection:
        return nights.begin_finishing(connection, run_id)


def fail(engine: Engine, run_id: UUID, why: str) -> None:
    with engine.begin() as connection:
        nights.fail(connection, run_id, clean_string(why))


class Lock:
    """One process at a time moves a night on. It lives as long as its connection, so a killed one keeps nothing."""

    def __init__(self, engine: Engine, run_id: UUID) -> None:
        self.engine, self.run_id = engine, run_id
        self.connection: Connection | None = None

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def is_held(self) -> bool:
        """Whether it is ours, or could be made so. Raises SQLAlchemy's errors where the database is away."""
        if self.connection is not None:
            try:
                self.connection.exec_driver_sql("select 1")
                return True
            except SQLAlchemyError:
                self.drop()
        self.connection = self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        if not nights.take_lock(self.connection, self.run_id):
            self.drop()
        return self.connection is not None

    def drop(self) -> None:
        if self.connection is not None:
            # Not back to the pool, where the lock would live on.
            self.connection.invalidate()
            self.connection.close()
            self.connection = None


@contextmanager
def opened(catalog: Catalog, settings: Settings) -> Iterator[Source]:
    source = open_source(catalog, settings)
    try:
        yield source
    finally:
        source.close()


def plan(engine: Engine, catalog: Catalog, night: Night, settings: Settings, stopping: Stopping, poll_s: float) -> None:
    """Read the source from where the night stands to its end; returns early where the night is no longer as it was.

    Raises what `Source` and `Buckets` do, and Hold where it is to stop.
    """
    tries = partial(patiently, lambda error: isinstance(error, SourceAway | S3Away), stopping, catalog.patience_s)
    with opened(catalog, settings) as source:
        if night.position is None:
            tries()(source.check)
        tries()(partial(list_objects, engine, catalog, night, settings, stopping))
        place = (night.position or {}).get("next")
        while not stopping():
            if not has_room(engine, catalog, night, stopping, poll_s):
                return
            page = tries()(partial(source.page, place))
            skipped = named(night, page)
            position = {"next": page.position, "end": page.position is None, "skipped": skipped}
            if page.position is None and not night.planned + night.reused + len(page.items):
                raise SourceWrong(nothing_there(night.skipped + page.left_out, skipped))
            if not persist(partial(commit_page, engine, catalog, night, page, position), stopping):
                return
            if page.position is None:
                return
            night, place = persist(partial(read, engine, night.id), stopping), page.position


def named(night: Night, page: Page) -> list[str]:
    before: list[str] = (night.position or {}).get("skipped", [])
    return [*before, *map(clean_string, page.skipped)][:SKIPPED_NAMED]


def nothing_there(rows: int, skipped: Sequence[str]) -> str:
    if rows:
        return f"the source names no item; {rows:,} rows are none, the first: {skipped[0]}"
    return "the source is empty; a catalog without a single item is taken for a mistake"


def list_objects(engine: Engine, catalog: Catalog, night: Night, settings: Settings, stopping: Stopping) -> None:
    """Write down the ETags of what lies under the catalog's prefixes, unless that is done."""

    def is_listed() -> bool:
        with engine.connect() as connection:
            return items_known.is_listed(connection, night.id)

    def write(found: Sequence[tuple[str, str]]) -> None:
        with engine.begin() as connection:
            items_known.add_objects(connection, night.id, found)

    if not catalog.images or persist(is_listed, stopping):
        return
    buckets = Buckets(settings)
    for address in catalog.images:
        for found in buckets.listing(address):
            if found:
                persist(partial(write, found), stopping)
    persist(partial(write, [("", "")]), stopping)


def has_room(engine: Engine, catalog: Catalog, night: Night, stopping: Stopping, poll_s: float) -> bool:
    """Wait until the workers are less than `pairs_ahead` behind; False where the night is no longer being planned."""

    def look() -> tuple[str, int]:
        with engine.connect() as connection:
            return nights.read(connection, night.id).state, nights.messages_ahead(connection, night.id)

    while not stopping():
        state, messages = persist(look, stopping)
        if state != "planning" or (messages + 1) * PAIRS_PER_MESSAGE <= catalog.pairs_ahead:
            return state == "planning"
        time.sleep(poll_s)
    return False


def commit_page(engine: Engine, catalog: Catalog, night: Night, page: Page, position: Mapping[str, Any]) -> bool:
    """One transaction: what the page's items are, the messages of those to be judged, and where to go on."""
    with engine.connect() as connection:
        images = [item["image"] for item in page.items if isinstance(item.get("image"), str)]
        etags = items_known.etags(connection, night.id, images) if catalog.images else {}
        seen = [
            {
                "ref": item["ref"],
                "fingerprint": fingerprint(item, etags.get(str(item.get("image"))), night.options["model"]),
                "attributes": compared(item, catalog.compare_by),
            }
            for item in page.items
        ]
        why = items_known.see(connection, night, seen)
        chosen = [item for item in page.items if why.get(item["ref"])]
        outbox.add(connection, messages(night, chosen))
        repeats = page.repeats + len(page.items) - len(why)
        is_ours = nights.advance(
            connection, night, position,
            planned=len(chosen), reused=len(why) - len(chosen), skipped=page.left_out + repeats,
        )  # fmt: skip
        if is_ours:
            connection.commit()
        return is_ours


def fingerprint(item: Mapping[str, Any], etag: str | None, model: Mapping[str, Any]) -> bytes:
    """Of all that the item's scores and its rule depend on, as far as it is known without reading the picture."""
    asked = [item.get(name) for name in ("image", "text", "premise", "policy")]
    by = [model[name] for name in ("weights_sha256", "recipe", "prompt", "image_px")]
    return hashlib.blake2b(json.dumps([asked, etag, by]).encode(), digest_size=FINGERPRINT_BYTES).digest()


def compared(item: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    """The attributes that nights are compared by, as text."""
    attributes = item.get("attributes")
    if not isinstance(attributes, dict):
        return {}
    return {name: str(attributes[name])[:200] for name in names if attributes.get(name) is not None}


def messages(night: Night, chosen: Sequence[Mapping[str, Any]]) -> Iterator[OutboxRow]:
    """The page's messages, smaller ones where items are wide; ids follow from the night and the refs."""
    for chunk in cut(chosen, PAIRS_PER_MESSAGE, MAX_MESSAGE_CHARS, chars_of):
        pairs = [{**item, "id": str(uuid5(night.id, f"item {item['ref']}"))} for item in chunk]
        message_id = uuid5(night.id, f"message {chunk[0]['ref']}")
        fresh = bool(night.options["all"])  # asked for by hand, of what has a verdict
        body = envelope(message_id, night.submitted_at, pairs, night.source, fresh, night.id)
        yield OutboxRow(message_id, night.lane, body)
