"""`concord report`: the page of a run as a file, or the same figures for a terminal."""

import json
import sys
import webbrowser
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from db.run_reading import NoSuchRun, find_run, read_report
from db.run_report import RunReport
from tasks.console import err, out
from tasks.report_text import show
from tasks.report_writing import date_of, folder_of, looking, page_of, path_of, write_file
from tasks.reports import flat, read_name, signed_in
from tasks.settings import Settings, settings
from worker.errors import ConcordError

#: Characters of a run's id in the name of a file.
ID_CHARS = 8
#: A file name that stands for standard output.
STDOUT = Path("-")


def report(
    run: Annotated[
        str,
        typer.Argument(
            parser=read_name,
            metavar="RUN",
            help="An id, the beginning of one, `last`, or the name of a catalog or source.",
        ),
    ] = "last",
    into: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where the page goes; - is the standard output.")
    ] = None,
    browse: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    no_pictures: Annotated[bool, typer.Option("--no-pictures", help="A page without pictures.")] = False,
    as_text: Annotated[bool, typer.Option("--text", help="Tables for a terminal in place of a page.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same figures as one JSON object.")] = False,
) -> None:
    """Write the page of a run, and say where it is: what newly contradicts, by which rates, and how the run went.

    Without --out it goes to CONCORD_REPORT_DIR, or else to this folder. What is on it: docs/report.md.
    """
    if (as_text and as_json) or ((as_text or as_json) and (into or browse or no_pictures)):
        raise typer.BadParameter("--text and --json are in place of a page, and of each other")
    if browse and into == STDOUT:
        raise typer.BadParameter("--open needs a file: leave --out - away")
    chosen = settings()
    with signed_in(chosen.need("database_url")) as engine, looking(engine) as connection:
        try:
            found = read_report(connection, find_run(connection, run))
        except NoSuchRun as error:
            raise ConcordError(str(error)) from None
    if as_json:
        print(json.dumps(asdict(found), default=flat, ensure_ascii=False))
    elif as_text:
        show(found, out)
    else:
        write(
            found, page_of(found, chosen, pictures=not no_pictures), into, chosen, webbrowser.open if browse else None
        )


def write(
    found: RunReport, html: str, into: Path | None, chosen: Settings, browse: Callable[[str], bool] | None
) -> None:
    if into == STDOUT:
        # Whatever the terminal's encoding is, the page says that it is UTF-8.
        sys.stdout.buffer.write(html.encode())
        return
    path = (into or default_path(found, chosen)).absolute()
    try:
        write_file(path, html)
    except OSError as error:
        raise ConcordError(f"{path} cannot be written ({error.strerror}): name another file with --out") from None
    out.print(str(path), markup=False)
    if browse and not browse(path.as_uri()):
        err.print("no browser could be started; the page is in that file")


def default_path(found: RunReport, chosen: Settings) -> Path:
    if chosen.report_dir is not None:
        return chosen.report_dir / path_of(found)
    return Path(f"{folder_of(found.source)}-{date_of(found)}-{str(found.id)[:ID_CHARS]}.html")
