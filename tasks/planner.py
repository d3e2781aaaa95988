"""`celery -A tasks.planner beat`: begins each catalog's night on its schedule, and moves every open night on.

One light process, which needs Postgres and S3 alone. Beat runs its entries itself, since all that they do is write one
row: no message that Redis could lose stands between the hour and the night. A night that was begun is moved on by a
thread of the same process, or of any other of its kind; one at a time has a night's lock.
"""

import logging
import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any
from zoneinfo import ZoneInfo

from celery import Celery
from celery.beat import PersistentScheduler
from celery.schedules import BaseSchedule, crontab, schedstate
from sqlalchemy import Engine

from db import nights, retention
from tasks import nightly
from tasks.catalogs import Catalog, catalog_named, catalogs, cron
from tasks.report_writing import write_pages_of_files
from tasks.settings import settings
from tasks.storing import persist
from worker.errors import ConcordError, first_line

log = logging.getLogger(__name__)

#: Between two looks for nights that nobody moves on.
LOOK_EVERY_S = 5.0
#: How long the end of the process waits for a page that is being written.
STOP_LIMIT_S = 30.0

app = Celery("concord-planner", broker="memory://", set_as_current=False)
app.conf.update(
    # Not sent anywhere: run here and now.
    task_always_eager=True,
    task_ignore_result=True,
    result_expires=None,
    enable_utc=True,
    timezone="UTC",
    beat_scheduler="tasks.planner:Nights",
    beat_max_loop_interval=60,
)


class LocalCrontab(BaseSchedule):  # type: ignore[misc]
    """A crontab on the clock of a zone.

    A time that the clock skips in spring comes as much later as it is set forward; one that it shows twice in autumn
    comes the first time. Celery's crontab does the arithmetic, on a clock without a zone.
    """

    def __init__(self, schedule: str, zone: str) -> None:
        super().__init__()
        self.schedule, self.zone = schedule, zone

    @cached_property
    def clock(self) -> crontab:
        made = cron(self.schedule)
        made.nowfun, made.tz = self.now, UTC
        return made

    @cached_property
    def local(self) -> ZoneInfo:
        return ZoneInfo(self.zone)

    def now(self) -> datetime:
        return datetime.now(UTC)

    def next_after(self, moment: datetime) -> datetime:
        """The first moment after this one at which it is due."""
        shown = moment.astimezone(self.local).replace(tzinfo=UTC, fold=0)
        while True:
            last, delta, _ = self.clock.remaining_delta(shown)
            shown = last + delta
            # In an hour that the clock shows again, what is to come on its face has been already.
            due: datetime = shown.replace(tzinfo=self.local, fold=0).astimezone(UTC)
            if due > moment:
                return due

    def last_due(self, moment: datetime) -> datetime | None:
        """The last moment up to this one at which it was due, if it was within a year."""
        for days in (1, 7, 31, 366):
            found, due = None, self.next_after(moment - timedelta(days=days))
            while due <= moment:
                found, due = due, self.next_after(due)
            if found is not None:
                return found
        return None

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        return self.next_after(last_run_at) - self.now()

    def is_due(self, last_run_at: datetime) -> Any:
        """Due also where the hour passed while no beat ran."""
        wait_s = self.remaining_estimate(last_run_at).total_seconds()
        if wait_s > 0:
            return schedstate(False, wait_s)
        return schedstate(True, max(0.0, self.remaining_estimate(self.now()).total_seconds()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalCrontab) and (self.schedule, self.zone) == (other.schedule, other.zone)

    def __hash__(self) -> int:
        return hash((self.schedule, self.zone))

    def __repr__(self) -> str:
        return f"{self.schedule} {self.zone}"

    def __reduce__(self) -> Any:
        return LocalCrontab, (self.schedule, self.zone)


def entries(known: Mapping[str, Catalog]) -> dict[str, dict[str, Any]]:
    """Beat's schedule: one entry for each catalog that has one."""
    return {
        f"nightly {catalog.name}": {
            "task": begin.name,
            "schedule": LocalCrontab(catalog.schedule, str(catalog.time_zone)),
            "args": (catalog.name,),
        }
        for catalog in known.values()
        if catalog.schedule
    }


@app.task(name="concord.nightly")  # type: ignore[untyped-decorator]
def begin(source: str) -> None:
    """Begin tonight's run of a catalog; the planner does the rest. A database that is away is waited for."""
    try:
        catalog = catalog_named(settings(), source)
        now = datetime.now(UTC)
        # Of the date on which it was due: one that begins late, past midnight, is not the next date's.
        due = LocalCrontab(catalog.schedule, str(catalog.time_zone)).last_due(now) if catalog.schedule else None
        with nightly.connected(settings()) as engine:
            night = persist(lambda: nightly.begin(engine, catalog, now=due or now), stopped.is_set)
            log.info("%s is %s", night.name, night.state)
    except ConcordError as error:
        log.error("%s does not begin: %s", source, error)


@app.task(name="concord.maintain")  # type: ignore[untyped-decorator]
def maintain() -> None:
    """Months ahead are made, and what is no longer kept goes: as `concord db maintain` does."""
    with nightly.connected(settings()) as engine:
        done = persist(lambda: retention.maintain(engine), stopped.is_set)
    log.info("made %d months, dropped %s", done.made, ", ".join(done.dropped) or "none")


#: Set when the process is to end.
stopped = threading.Event()


class Planner(threading.Thread):
    """Looks for open nights and moves each on, on a thread of its own."""

    def __init__(self, look_every_s: float = LOOK_EVERY_S) -> None:
        super().__init__(name="planner", daemon=True)
        self.look_every_s = look_every_s
        self.driving: dict[str, threading.Thread] = {}

    def run(self) -> None:
        with nightly.connected(settings()) as engine:
            while not stopped.wait(self.look_every_s):
                try:
                    self.look(engine)
                except Exception as error:
                    # Whatever is away comes back; nights keep what they are.
                    log.warning("the planner waits: %s", first_line(error))
        for thread in self.driving.values():
            thread.join(STOP_LIMIT_S)

    def look(self, engine: Engine) -> None:
        """Start a thread for each open night that has none here."""
        self.driving = {source: thread for source, thread in self.driving.items() if thread.is_alive()}
        with engine.connect() as connection:
            found = nights.open_nights(connection)
        known = catalogs(settings()) if found else {}
        for night in found:
            if night.source in known and night.source not in self.driving:
                thread = threading.Thread(target=self.drive, args=(known[night.source], night), daemon=True)
                self.driving[night.source] = thread
                thread.start()

    def drive(self, catalog: Catalog, night: nights.Night) -> None:
        try:
            with nightly.connected(settings()) as engine:
                nightly.drive(engine, catalog, night, settings(), stopped.is_set)
        except Exception as error:
            log.warning("%s waits: %s", night.name, first_line(error))


class Pages(threading.Thread):
    """Writes the pages of submitted files once they are judged, where pages have a place; nights write their own."""

    def __init__(self, look_every_s: float = LOOK_EVERY_S) -> None:
        super().__init__(name="pages", daemon=True)
        self.look_every_s = look_every_s

    def run(self) -> None:
        with nightly.connected(settings()) as engine:
            while not stopped.wait(self.look_every_s):
                try:
                    write_pages_of_files(engine, settings())
                except Exception as error:
                    log.warning("pages wait: %s", first_line(error))


MAINTAIN = {"task": maintain.name, "schedule": LocalCrontab("45 3 * * *", "UTC")}


class Nights(PersistentScheduler):  # type: ignore[misc]
    """Beat's schedule out of the file of catalogs, with the planner, and what writes pages, beside it."""

    beside: tuple[threading.Thread, ...] = ()

    def setup_schedule(self) -> None:
        try:
            settings().need("database_url")
            has_catalogs = settings().catalogs_file is not None
            known = catalogs(settings()) if has_catalogs else {}
            self.app.conf.beat_schedule = {"maintain": MAINTAIN, **entries(known)}
        except ConcordError as error:
            log.critical("beat cannot start: %s", error)
            raise SystemExit(1) from None
        super().setup_schedule()
        self.beside = (Planner(), Pages()) if has_catalogs else (Pages(),)
        if not has_catalogs:
            log.warning("CONCORD_CATALOGS_FILE is not set, which names no catalog: beat begins no night")
        for thread in self.beside:
            thread.start()

    def close(self) -> None:
        stopped.set()
        for thread in self.beside:
            thread.join(STOP_LIMIT_S)
        super().close()
