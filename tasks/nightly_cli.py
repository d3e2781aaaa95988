"""`concord nightly ...`: begin a night, see how far it is, stop it and take it up again."""

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from threading import Event, Thread
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from db import nights
from db.catalog_source import SourceAway, SourceBroken
from db.engine import Trouble, trouble
from db.nights import Night
from tasks import nightly
from tasks.catalogs import Catalog, catalog_named, catalogs
from tasks.console import err, out, plain
from tasks.nightly_sources import SourceWrong, open_source
from tasks.settings import settings
from worker.errors import ConcordError

cli = typer.Typer(no_args_is_help=True, help="Catalogs that are checked each night: docs/nightly.md.")

#: How often a waiting command looks at its night.
LOOK_EVERY_S = 0.5
#: Pairs a second are those of the last so many seconds.
RATE_OVER_S = 30.0
#: What goes out at the end of a night; each is where it went, or an object that says why it did not.
SENT = ("results", "page", "webhook", "command")
COUNTERS = ("planned", "judged", "rejected", "failed", "flagged", "reused", "skipped")

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="A catalog's name in the file of catalogs.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON in place of tables.")]
Detach = Annotated[bool, typer.Option("--detach", help="Leave the work to a running `celery -A tasks.planner beat`.")]


@cli.command()
def start(
    source: Source,
    everything: Annotated[bool, typer.Option("--all", help="Judge every item, changed or not.")] = False,
    sample: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of the unchanged that is judged again.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Another night on the same date.")] = False,
    detach: Detach = False,
) -> None:
    """Begin tonight's run of a catalog, or take up the one that began, and move it on to its end.

    Exits 1 where it failed or was cancelled, or its results could not be sent.
    """
    catalog = catalog_named(settings(), source)
    with nightly.connected(settings()) as engine:
        night = nightly.begin(engine, catalog, everything=everything, sample=sample, again=again)
        if night.state in ("cancelled", "failed"):
            raise ConcordError(
                f"{night.name} was {night.state}: `concord nightly resume {source}` takes it up, --again begins another"
            )
        asked = (everything, catalog.sample if sample is None else sample)
        if night.is_open and asked != (has := (night.options["all"], night.options["sample"])):
            err.print(f"{night.name} goes on as it was begun: {'--all, ' if has[0] else ''}--sample {has[1]:g}")
        if not night.is_open:
            err.print(f"{night.name} is {night.state} already; --again begins another night on the same date.")
        move_on(engine, catalog, night, detach)


@cli.command()
def resume(source: Source, detach: Detach = False) -> None:
    """Take the newest night of a catalog up again, after `cancel` or after what made it fail is mended."""
    catalog = catalog_named(settings(), source)
    with nightly.connected(settings()) as engine:
        night = newest(engine, source)
        with engine.begin() as connection:
            if not nights.resume(connection, night.id) and not night.is_open:
                raise ConcordError(f"{night.name} is {night.state}: only a cancelled or failed night can be resumed")
        move_on(engine, catalog, nightly.read(engine, night.id), detach)


@cli.command()
def cancel(source: Source) -> None:
    """Stop planning, keep back what is not published yet, and let what is on its way settle."""
    with nightly.connected(settings()) as engine:
        night = newest(engine, source)
        with engine.begin() as connection:
            if not nights.cancel(connection, night.id):
                raise ConcordError(f"{night.name} is {night.state}: there is nothing to cancel")
        out.print(f"{night.name} is cancelled; `concord nightly resume {source}` takes it up again")


@cli.command()
def status(
    source: Annotated[str | None, typer.Argument(metavar="SOURCE", help="One catalog; without it all.")] = None,
    as_json: AsJson = False,
) -> None:
    """The newest night of each catalog, or of one, with what it came to."""
    known = catalogs(settings())
    if source is not None:
        catalog_named(settings(), source)
        known = {source: known[source]}
    with nightly.connected(settings()) as engine:
        with engine.connect() as connection:
            found = {name: nights.newest(connection, name) for name in known}
        if as_json:
            print(json.dumps([as_dict(known[name], night) for name, night in found.items()], default=plain))
            return
        table = Table("catalog", "schedule", "night", "state", *COUNTERS)
        for name, night in found.items():
            schedule = known[name].schedule
            when = f"{schedule} {known[name].time_zone}" if schedule else "none"
            counts = [f"{getattr(night, counter):,}" for counter in COUNTERS] if night else []
            table.add_row(name, when, *((night.options["date"], night.state) if night else ("none", "-")), *counts)
        out.print(table)
        if source is not None and (night := found[source]):
            tell(night)


def as_dict(catalog: Catalog, night: Night | None) -> dict[str, Any]:
    about = {"source": catalog.name, "schedule": catalog.schedule, "time_zone": str(catalog.time_zone)}
    if night is None:
        return {**about, "night": None}
    names = ("id", "state", *COUNTERS, "created_at", "finished_at", "summary")
    return {**about, "night": {"date": night.options["date"], **{name: getattr(night, name) for name in names}}}


@cli.command()
def watch(source: Source) -> None:
    """Show the newest night of a catalog until it is over. Exits 1 where it failed or was cancelled."""
    with nightly.connected(settings()) as engine:
        night = newest(engine, source)
        try:
            with shown(night) as show:
                while night.is_open:
                    time.sleep(LOOK_EVERY_S)
                    night = looked(engine, night)
                    show(night)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        tell(night)
        raise typer.Exit(exit_status(night))


@cli.command()
def check(source: Source) -> None:
    """See that a catalog's source can be read, and show its first items. Plans nothing."""
    catalog = catalog_named(settings(), source)
    opened = open_source(catalog, settings())
    try:
        opened.check()
        page = opened.page(None)
    except (SourceWrong, SourceBroken, SourceAway) as error:
        raise ConcordError(f"{source}: {error}") from None
    finally:
        opened.close()
    for item in page.items[:3]:
        out.print(json.dumps(item, ensure_ascii=False), markup=False)
    more = "" if page.position is None else " on the first page"
    out.print(f"{len(page.items):,} items{more}, {page.left_out:,} rows that name none, {page.repeats:,} repeated refs")
    for sentence in page.skipped:
        err.print(sentence, markup=False)


def newest(engine: Engine, source: str) -> Night:
    with engine.connect() as connection:
        night = nights.newest(connection, source)
    if night is None:
        raise ConcordError(f"{source} has had no night yet; `concord nightly start {source}` begins one")
    return night


def move_on(engine: Engine, catalog: Catalog, night: Night, detach: bool) -> None:
    """Drive the night in a thread and show it; where another process drives it, only show it."""
    if detach:
        out.print(f"{night.name} is {night.state}: run {night.id}")
        return
    logging.basicConfig(level=logging.WARNING, format="concord: %(message)s", stream=sys.stderr)
    stop = Event()
    thread = Thread(target=drive, args=(engine, catalog, night, stop), daemon=True)
    thread.start()
    try:
        with shown(night) as show:
            while night.is_open:
                thread.join(LOOK_EVERY_S)
                night = looked(engine, night)
                show(night)
                if not thread.is_alive():
                    # Another process has the night's lock, or had it a moment ago.
                    time.sleep(LOOK_EVERY_S)
                    thread = Thread(target=drive, args=(engine, catalog, night, stop), daemon=True)
                    thread.start()
    except KeyboardInterrupt:
        stop.set()
        thread.join()
        err.print(f"{night.name} stands where it is; the same command goes on, or a running planner does.")
        raise typer.Exit(130) from None
    thread.join()
    tell(night)
    raise typer.Exit(exit_status(night))


def drive(engine: Engine, catalog: Catalog, night: Night, stop: Event) -> None:
    nightly.drive(engine, catalog, night, settings(), stop.is_set)


def looked(engine: Engine, night: Night) -> Night:
    """The night as it stands; as it was, where the database is away at present."""
    try:
        return nightly.read(engine, night.id)
    except SQLAlchemyError as error:
        if trouble(error) is not Trouble.AWAY:
            raise
        return night


@contextmanager
def shown(night: Night) -> Iterator[Any]:
    """A live display on standard error; nothing at all where that is no terminal."""
    looks: list[tuple[float, int]] = [(time.monotonic(), night.settled)]

    def show(now: Night) -> None:
        looks.append((time.monotonic(), now.settled))
        while looks[-1][0] - looks[0][0] > RATE_OVER_S:
            looks.pop(0)
        live.update(display(now, rate(looks)))

    if not err.is_terminal:
        yield lambda _: None
        return
    with Live(display(night, 0.0), console=err, refresh_per_second=4) as live:
        yield show


def rate(looks: list[tuple[float, int]]) -> float:
    """Pairs a second between the first look and the last."""
    (began, first), (ended, last) = looks[0], looks[-1]
    return (last - first) / (ended - began) if ended > began else 0.0


def display(night: Night, pairs_per_s: float) -> Group:
    """One look at a night: its state, a bar, its counters, its speed, and when it may end."""
    left = night.planned - night.settled
    end = "-"
    if night.state == "running" and pairs_per_s > 0:
        ends_at = datetime.fromtimestamp(time.time() + left / pairs_per_s, UTC).astimezone()
        end = f"about {ends_at:%H:%M:%S}"
    table = Table.grid(padding=(0, 2))
    table.add_row(night.name, night.state, f"{pairs_per_s:,.0f} pairs/s", f"end: {end}")
    counts = Table(*COUNTERS)
    counts.add_row(*(f"{getattr(night, counter):,}" for counter in COUNTERS))
    return Group(table, ProgressBar(total=max(night.planned, 1), completed=night.settled, width=80), counts)


def tell(night: Night) -> None:
    """What the night came to, in tables."""
    summary = night.summary or {}
    if "error" in summary:
        out.print(f"{night.name} failed: {summary['error']}", markup=False)
        out.print(
            f"Mend that and `concord nightly resume {night.source}`, or leave it to the next night.", markup=False
        )
        return
    if "catalog" not in summary:
        out.print(f"{night.name} is {night.state}", markup=False)
        return
    whole = summary["catalog"]
    names = (
        "items",
        "first",
        "newly_contradicting",
        "newly_agreeing",
        "newly_undecided",
        "unchanged",
        "without_verdict",
        "gone",
    )
    out.print(f"{night.name}: " + ", ".join(f"{name} {summary[name]:,}" for name in COUNTERS), markup=False)
    table = Table("", *(name.replace("_", " ") for name in (*names, "mismatches")), box=SIMPLE)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.min_width = max(map(len, str(column.header).split()))
    groups = [("whole catalog", whole)]
    groups += [(f"{name} {row['value']}", row) for name, rows in summary["by"].items() for row in rows[:10]]
    for title, row in groups:
        table.add_row(Text(title), *(f"{row[name]:,}" for name in names), share(row))
    out.print(table)
    if whole["sample"]:
        out.print(f"mismatches in the sample of the unchanged: {sampled(whole)}", markup=False)
    if summary["rejected"] or summary["failed"]:
        since = f"--source {night.source} --since {night.submitted_at:%Y-%m-%d}"
        out.print(f"why items were rejected or failed: concord sql errors_by_code {since}", markup=False)
    if night.skipped:
        out.print(f"{night.skipped:,} rows of the source were left out, or repeated a ref")
        for sentence in summary["skipped_rows"]:
            out.print(f"  {sentence}", markup=False)
    for item in summary["newly_contradicting"]:
        out.print(f"  {item['ref']}: {item['label_before']} -> {item['label']}", markup=False)
    for what in SENT:
        if (came_to := summary.get(what)) is not None:
            out.print(f"{what}: {plain(came_to)}", markup=False)


def share(row: dict[str, Any]) -> str:
    return "-" if row["defect_rate"] is None else f"{row['mismatches']:,} ({row['defect_rate']:.1%})"


def sampled(row: dict[str, Any]) -> str:
    """The unchanged, by their sample: the share of mismatches with its 95 % interval."""
    return f"{row['sample_defect_rate']:.1%} ({row['sample_low']:.1%} to {row['sample_high']:.1%}) of {row['sample']:,}"


def exit_status(night: Night) -> int:
    summary = night.summary or {}
    unsent = any(isinstance(summary.get(what), dict) for what in SENT)
    return 0 if night.state == "done" and not unsent else 1
