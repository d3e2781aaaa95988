"""Makes the page of a run and puts it where pages go: a folder of this machine, and S3.

Needs neither torch nor the command line: the end of a night and the planner call it, and `concord report` does.
"""

import hashlib
import logging
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import UUID

from sqlalchemy import Connection, Engine

from db import run_reading, runs
from db.run_reading import Ended
from db.run_report import RunReport
from tasks.nightly_s3 import Buckets
from tasks.report_pictures import thumbnails
from tasks.settings import Settings
from worker.errors import ConcordError, Hold, first_line

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/html; charset=utf-8"
#: The newest run's page of each source has a second name, which stays the same from day to day.
LATEST = "latest.html"
#: Characters of a source in a path.
SOURCE_CHARS = 80
#: Characters that tell longer ones apart.
HASH_CHARS = 8


class NotInstalled(ConcordError):
    """What makes pages is not installed here."""


@contextmanager
def looking(engine: Engine) -> Iterator[Connection]:
    """All statements see the same moment, so that the figures of a run that goes on add up; nothing can be written."""
    with engine.connect().execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True) as connection:
        yield connection


def page_of(report: RunReport, settings: Settings, *, pictures: bool = True) -> str:
    """The run's page as HTML. Raises NotInstalled."""
    try:
        from tasks.report_page import render
    except ModuleNotFoundError as error:
        raise NotInstalled(f"a page needs {error.name}: pip install '.[report]' in Concord's folder") from None
    return render(report, thumbnails(report.worst, settings) if pictures else {})


def write_page(
    engine: Engine, run_id: UUID, settings: Settings, *, results: str | None = None, ended: Ended | None = None
) -> list[str] | None:
    """Write the page of a run to all places that there are, and return them; None where there is none.

    `results` is the S3 address of a catalog's results, beside which its page goes. Raises ConcordError, OSError and
    SQLAlchemy's errors; a page is never left half written.
    """
    prefix = results or settings.report_s3
    if prefix is None and settings.report_dir is None:
        return None
    with looking(engine) as connection:
        report = run_reading.read_report(connection, run_id, ended=ended)
        names = [path_of(report)]
        if run_reading.is_newest(connection, report):
            names.append(f"{folder_of(report.source)}/{LATEST}")
    html = page_of(report, settings)
    written = []
    if (folder := settings.report_dir) is not None:
        # First, so that it is there also where S3 refuses.
        written += [str(write_file(folder / name, html)) for name in names]
    if prefix is not None:
        written += [upload(f"{prefix.rstrip('/')}/{name}", html, settings) for name in names]
    return written


def path_of(report: RunReport) -> str:
    """source/date/id.html, as a night's results have it."""
    return f"{folder_of(report.source)}/{date_of(report)}/{report.id}.html"


def date_of(report: RunReport) -> str:
    """A night is of the date in its catalog's own zone, which its name ends with; a file of the day in UTC."""
    night = re.fullmatch(r".* (\d{4}-\d\d-\d\d)", report.name, re.DOTALL) if report.kind == "nightly" else None
    return night[1] if night else f"{report.submitted_at:%Y-%m-%d}"


def folder_of(source: str) -> str:
    """The source as the name of a folder: what a producer writes leads nowhere else."""
    plain = quote(source, safe=" ")
    if len(plain) > SOURCE_CHARS:
        # Two long names that begin alike are two folders: a letter of Chinese is nine characters.
        of_all = hashlib.sha256(source.encode()).hexdigest()[:HASH_CHARS]
        plain = f"{re.sub('%.?$', '', plain[: SOURCE_CHARS - HASH_CHARS - 1])}-{of_all}"
    return plain if plain.strip(".") else plain.replace(".", "%2E") or "%"


def write_file(path: Path, html: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(html, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def upload(address: str, html: str, settings: Settings) -> str:
    with tempfile.TemporaryDirectory(prefix="concord-page-") as folder:
        path = Path(folder, "page.html")
        path.write_text(html, encoding="utf-8")
        Buckets(settings).upload(path, address, CONTENT_TYPE)
    return address


def attempted(run: str, write: Any) -> Any:
    """What it returns; where there is no page, why, and None where nothing makes pages here. Whatever is wrong with a
    page, its run has ended all the same. Raises Hold where the process is to stop.
    """
    try:
        return write()
    except Hold:
        raise
    except NotInstalled as error:
        log.warning("no page of %s: %s", run, error)
        return None
    except Exception as error:
        if not isinstance(error, ConcordError | OSError):
            log.exception("the page of %s", run)
        log.error("the page of %s is not written: %s", run, first_line(error))
        return {"error": first_line(error)}


def write_pages_of_files(engine: Engine, settings: Settings) -> int:
    """Write the page of every submitted file that is judged since a day and has none; returns how many were due.

    What came of it is noted in the run, so that each is tried once.
    """
    if settings.report_dir is None and settings.report_s3 is None:
        return 0
    with engine.connect() as connection:
        due = runs.without_page(connection)
    for run in due:
        page = attempted(run.name, lambda run_id=run.id: write_page(engine, run_id, settings))
        with engine.begin() as connection:
            runs.note_page(connection, run, page)
    return len(due)
