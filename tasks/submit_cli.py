"""`concord submit`: a file of pairs becomes a run, with a bar meanwhile and, where it is waited for, a summary."""

import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal
from uuid import UUID

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from db import runs
from db.engine import Trouble, trouble
from db.runs import Run
from tasks.console import err, out, progress, verbatim
from tasks.high_water import HighWater
from tasks.pairs_file import LeftOut, PairsFile, noting, once, run_again, run_of, submit_file
from tasks.pairs_formats import FileWrong, Row
from tasks.submit import engine, high_water
from worker.errors import PairRejected

#: How often a waiting command looks at its run.
WAIT_POLL_S = 0.5
#: How often a file that waits for workers says so, and how often one says how far it is where there is no bar.
WAITING_LINE_EVERY_S, LINE_EVERY_S = 60.0, 30.0
#: Rows that are read between two looks at how far the file is.
ROWS_PER_LOOK = 1_000

PairsPath = Annotated[
    Path,
    typer.Argument(
        metavar="PAIRS", exists=True, dir_okay=False, help="A .jsonl, .csv or .parquet file: image, text, ..."
    ),
]


def submit(
    pairs: PairsPath,
    lane: Annotated[Literal["live", "bulk"], typer.Option(help="live is judged first.")] = "bulk",
    source: Annotated[str, typer.Option(help="The tenant or catalog that the pairs belong to.")] = "default",
    wait: Annotated[bool, typer.Option("--wait", help="Until every pair has its verdict.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Judge a file anew that was submitted before.")] = False,
) -> None:
    """Submit a file of pairs. The same command again goes on where the first stopped, and submits nothing twice.

    While the outbox holds more messages than CONCORD_OUTBOX_HIGH_WATER it waits for workers. Exits 1 if a line was no
    pair, if there was no pair at all or, with --wait, if one was rejected or failed.
    """
    database = engine()
    left_out = LeftOut()
    with PairsFile(pairs) as file:
        run = (run_again if again else run_of)(database, file, lane=lane, source=source)
        already = run.planned
        try:
            hand_over(database, run, file, left_out, fresh=again)
        except KeyboardInterrupt:
            err.print(f"{read_run(database, run.id).planned:,} pairs are accepted so far; the same command goes on.")
            raise typer.Exit(130) from None
        except FileWrong:
            stopped = read_run(database, run.id)
            if stopped.planned or left_out.count:
                report(stopped, already, left_out)
            raise
    run = read_run(database, run.id)
    report(run, already, left_out)
    if already and run.planned == already:
        err.print("This file was submitted before; --again judges it anew.")
    if not run.planned and not left_out.count:
        err.print(f"{pairs} holds no pairs.", markup=False)
    if wait:
        run = watch(database, run, "" if again else "; the same command goes on waiting")
        summarize(database, run)
    raise typer.Exit(1 if left_out.count or not run.planned or (wait and run.rejected + run.failed) else 0)


def hand_over(database: Engine, run: Run, file: PairsFile, left_out: LeftOut, *, fresh: bool) -> None:
    """Submit what is left of the file. Raises FileWrong, and KeyboardInterrupt, which leaves the run to be resumed."""
    tide = high_water()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
        console=err,
        disable=not err.is_terminal,
    ) as bar:
        shown = Shown(bar, run, file, tide)
        rows = noting(once(file.rows(), file.where), left_out)
        for accepted in submit_file(database, run, shown.looking(rows), tide, shown.waiting, file.check, fresh):
            shown.accepted += accepted
        shown.look()


class Shown:
    """What is shown while a file is handed over: a bar on a terminal, elsewhere a line every now and then."""

    def __init__(self, bar: Progress, run: Run, file: PairsFile, tide: HighWater) -> None:
        self.bar, self.run, self.file, self.tide = bar, run, file, tide
        self.task = bar.add_task("submitting", total=1.0, said="")
        self.accepted = 0
        #: When the first new pair was read, and at which share of the file.
        self.began_at, self.began_done = time.monotonic(), 0.0
        self.next_line = self.began_at + LINE_EVERY_S
        self.next_waiting_line = self.began_at

    def looking(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The same rows, with a look now and then."""
        pairs = 0
        for number, row in enumerate(rows, 1):
            if not isinstance(row, PairRejected):
                if pairs == self.run.planned:
                    self.began_at, self.began_done = time.monotonic(), self.file.done()
                pairs += 1
            if number % ROWS_PER_LOOK == 0:
                self.look(skipping=pairs <= self.run.planned)
            yield row

    def look(self, skipping: bool = False) -> None:
        said = self.pace()
        doing = "skipping what is accepted" if skipping else "submitting"
        self.bar.update(self.task, completed=self.file.done(), description=doing, said=said)
        if self.bar.disable and time.monotonic() >= self.next_line:
            self.next_line = time.monotonic() + LINE_EVERY_S
            err.print(f"{doing}: {self.file.done():.0%} of {self.file.path.name}, {said}", markup=False)

    def pace(self) -> str:
        """Pairs accepted, how many a second, and how long the rest takes at that pace."""
        said = f"{self.run.planned + self.accepted:,} pairs"
        seconds, share = time.monotonic() - self.began_at, self.file.done() - self.began_done
        if self.accepted and seconds > 0 and share > 0:
            left = timedelta(seconds=round(seconds * (1 - self.file.done()) / share))
            said += f", {self.accepted / seconds:,.0f} a second, {left} left"
        return said

    def waiting(self, held: int) -> None:
        """That the file waits for workers: a line at first and every minute, and the bar's own words."""
        doing, said = ("waiting for workers", f"{held:,} messages wait") if held else ("submitting", self.pace())
        self.bar.update(self.task, description=doing, said=said)
        if held and time.monotonic() >= self.next_waiting_line:
            self.next_waiting_line = time.monotonic() + WAITING_LINE_EVERY_S
            runs_one = self.tide.worker_runs()
            none = "" if runs_one else ", and none runs; start one with `celery -A tasks worker -Q live,bulk`"
            err.print(f"{self.tide.sentence(held)}: waiting for workers{none}", markup=False)


def report(run: Run, already: int, left_out: LeftOut) -> None:
    """What was accepted, and what of the file was no pair."""
    new = run.planned - already
    err.print(f"run {run.id}: {new:,} pairs accepted" + (f", {already:,} were before" if already else ""))
    for line in left_out.first:
        err.print(line.detail, markup=False)
    if left_out.count > len(left_out.first):
        err.print(f"... and {left_out.count - len(left_out.first):,} more lines that are no pairs")


def watch(database: Engine, run: Run, farewell: str) -> Run:
    """Show a run's progress until its last pair is settled; a database that goes away meanwhile is waited for.

    Ctrl-C ends it, with a sentence that ends in `farewell`.
    """
    try:
        with progress(err) as bar:
            task = bar.add_task("judging", total=run.planned)
            while run.settled < run.planned:
                time.sleep(WAIT_POLL_S)
                try:
                    run = read_run(database, run.id)
                except SQLAlchemyError as error:
                    if trouble(error) is not Trouble.AWAY:
                        raise
                bar.update(task, completed=run.settled)
            bar.update(task, completed=run.settled)
    except KeyboardInterrupt:
        err.print(f"The pairs are accepted and will be judged{farewell}.")
        raise typer.Exit(130) from None
    return run


def read_run(database: Engine, run_id: UUID) -> Run:
    with database.connect() as connection:
        return runs.read(connection, run_id)


def summarize(database: Engine, run: Run) -> None:
    """What a run came to: labels and decisions by policy, and what went wrong."""
    with database.connect() as connection:
        labels, troubles = runs.labels(connection, run), runs.troubles(connection, run)
    out.print(f"{run.judged:,} of {run.planned:,} pairs judged")
    table = Table("policy", "label", "decision", "pairs")
    table.columns[3].justify = "right"
    for row in labels:
        table.add_row(row["policy"], row["label"], row["decision"], f"{row['pairs']:,}")
    if labels:
        out.print(table)
    if troubles:
        table = Table("status", "error_code", "pairs", "for example", "detail")
        for row in troubles:
            names = ("status", "error_code", "pairs", "example", "detail")
            table.add_row(*(verbatim(row[name] or "") for name in names))
        out.print(table)
