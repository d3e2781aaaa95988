"""`concord dead`: pairs that have failed are listed, shown, handed over again (redriven), or given up (dropped)."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from itertools import groupby
from typing import Annotated, Any
from uuid import UUID

import typer
from rich.prompt import Confirm
from rich.table import Table
from sqlalchemy import Connection, Engine

from db import dead_letters, outbox
from db.dead_letters import DeadLetter, Selection
from db.outbox import OutboxRow
from tasks.console import err, out, plain, progress, verbatim
from tasks.submit import PAIRS_PER_MESSAGE, Lane, chunked, engine, envelope, uuid7
from worker.errors import ConcordError
from worker.messages import TEXT_REPLACED

dead_cli = typer.Typer(no_args_is_help=True, help="Dead letters: pairs that failed, their attempts used up.")

#: Rows of one transaction.
PAIRS_PER_PAGE = 1_024
#: More pairs than this are asked about before they are redriven or dropped.
UNASKED = 1
#: The states of pairs to which each does nothing.
LEFT_ALONE = {"redrive": ("under_way", "incomplete"), "drop": ("under_way",)}
#: Characters that are listed of a group's example.
EXAMPLE_CHARS = 160
AGE_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}

#: What one transaction does with the failed rows that it holds; returns what became of how many.
Act = Callable[[Connection, Sequence[DeadLetter]], Counter[str]]


def read_age(written: str) -> timedelta:
    """`90s`, `30m`, `2h`, `3d` or `1w`."""
    found = re.fullmatch(r"(\d{1,5})([smhdw])", written.strip())
    if found is None:
        raise typer.BadParameter(f"{written!r} is no age: write 90s, 30m, 2h, 3d or 1w")
    return timedelta(seconds=int(found[1]) * AGE_UNITS_S[found[2]])


def age_of(moment: datetime, now: datetime) -> str:
    """How long ago, in the largest unit of which it is two or more."""
    seconds = max(0.0, (now - moment).total_seconds())
    unit = next((unit for unit, length in reversed(AGE_UNITS_S.items()) if seconds >= 2 * length), "s")
    return f"{seconds / AGE_UNITS_S[unit]:,.0f} {unit}"


PairIds = Annotated[list[UUID] | None, typer.Argument(metavar="PAIR_ID", help="These pairs alone.")]
Code = Annotated[str | None, typer.Option(metavar="CODE", help="Failed with this error code.")]
InRun = Annotated[UUID | None, typer.Option("--run", metavar="RUN_ID", help="Of this run.")]
Source = Annotated[str | None, typer.Option(metavar="NAME", help="Of this source.")]
Ref = Annotated[str | None, typer.Option(metavar="NAME", help="Of this ref, the producer's own name for a pair.")]
Older = Annotated[
    timedelta | None, typer.Option(parser=read_age, metavar="AGE", help="Failed longer ago than this: 90s, 2h, 3d.")
]
Newer = Annotated[
    timedelta | None, typer.Option(parser=read_age, metavar="AGE", help="Failed within the last 90s, 2h, 3d.")
]
AtMost = Annotated[int | None, typer.Option("--limit", min=1, help="At most so many, the oldest failures first.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask, however many they are.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of tables and sentences.")]


def select(older: timedelta | None, newer: timedelta | None, **conditions: Any) -> Selection:
    """What a command's options select, of what has failed until now: a pair that is redriven, and fails again before
    the command ends, is not redriven twice.
    """
    with engine().connect() as connection:
        now = dead_letters.now(connection)
    return Selection(now - (older or timedelta()), now - newer if newer is not None else None, **conditions)


@dead_cli.command("list")
def list_(
    code: Code = None,
    run: InRun = None,
    source: Source = None,
    ref: Ref = None,
    older: Older = None,
    newer: Newer = None,
    limit: Annotated[int, typer.Option(min=0, help="Pairs that are listed one by one, the last failures first.")] = 20,
    as_json: AsJson = False,
) -> None:
    """What has failed: how many pairs by code, source and run, and the last ones of them.

    Ages count from when the pair failed, not from when it was submitted.
    """
    selection = select(older, newer, code=code, run_id=run, source=source, ref=ref)
    with engine().connect() as connection:
        now = dead_letters.now(connection)
        groups = dead_letters.groups(connection, selection)
        pairs = dead_letters.newest(connection, selection, limit)
    if as_json:
        print(json.dumps({"groups": groups, "pairs": pairs}, default=plain, ensure_ascii=False))
    elif not groups:
        out.print("No failed pair.")
    else:
        out.print(table_of_groups(groups, now))
        if pairs:
            out.print(table_of_pairs(pairs, now))


def table_of_groups(groups: Sequence[dict[str, Any]], now: datetime) -> Table:
    names = ("error_code, and the newest", "source", "run", "pairs", "under way", "oldest", "newest")
    table = Table(*names, show_lines=True)
    table.columns[2].no_wrap = True
    for column in table.columns[3:]:
        column.justify = "right"
    for row in groups:
        example = f"{row['error_code']}\n{row['example']}: {row['detail'] or ''}"[:EXAMPLE_CHARS]
        run = f"{row['run_name'] or ''}\n{row['run_id']}".strip() if row["run_id"] else "-"
        numbers = (f"{row['pairs']:,}", f"{row['under_way']:,}", age_of(row["oldest"], now), age_of(row["newest"], now))
        table.add_row(*map(verbatim, (example, row["source"], run, *numbers)))
    return table


def table_of_pairs(pairs: Sequence[dict[str, Any]], now: datetime) -> Table:
    table = Table("pair", "ref", "error_code", "attempts", "failed", "state")
    for row in pairs:
        attempts = str(row["attempts"] + 1)
        cells = (row["pair_id"], row["ref"] or "-", row["error_code"], attempts, age_of(row["decided_at"], now))
        table.add_row(*map(verbatim, (*cells, row["state"])))
    return table


@dead_cli.command()
def show(
    pair_id: Annotated[UUID, typer.Argument(help="A pair's id.")],
    as_json: AsJson = False,
) -> None:
    """Everything about one failed pair: its error, its attempts, its message, and whether it is under way again.

    Exits 1 where no verdict of the pair is failed.
    """
    with engine().connect() as connection:
        found = dead_letters.find(connection, pair_id)
    if as_json:
        print(json.dumps({"failed": found}, default=plain, ensure_ascii=False))
    for row in found if not as_json else []:
        title = f"{row['ref'] or row['pair_id']}, {plain(row['submitted_at'])}"
        table = Table(show_header=False, title=verbatim(title))
        for name, value in row.items():
            if value not in (None, [], {}):
                table.add_row(name, verbatim(value))
        out.print(table)
    if not found:
        err.print(f"No failed verdict of {pair_id}. `concord verdict {pair_id}` shows what there is.", markup=False)
        raise typer.Exit(1)


@dead_cli.command()
def redrive(
    pair_ids: PairIds = None,
    code: Code = None,
    run: InRun = None,
    source: Source = None,
    ref: Ref = None,
    older: Older = None,
    newer: Newer = None,
    limit: AtMost = None,
    lane: Annotated[Lane | None, typer.Option(help="The lane to go by; without: each pair's own.")] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Hand failed pairs over again: attempts start anew, and the new verdict takes the failed one's place.

    Pairs that are under way again already are left alone. Exits 1 where a pair cannot be redriven, because its text or
    its picture's address is not kept, or where one that was named has not failed.
    """
    selection = select(older, newer, code=code, run_id=run, source=source, ref=ref, pair_ids=pair_ids)
    came_to = work_off("redrive", selection, limit, yes, partial(hand_over, lane=lane))
    if as_json:
        names = ("redriven", "messages", "under_way", "incomplete", "not_failed")
        print(json.dumps({name: came_to[name] for name in names}))
    else:
        out.print(f"pairs redriven: {came_to['redriven']:,}, in messages: {came_to['messages']:,}")
        say("under way already", came_to["under_way"])
        say("not to be redriven, their text or their picture's address is not kept", came_to["incomplete"])
        say("named, but not failed", came_to["not_failed"])
    raise typer.Exit(1 if came_to["incomplete"] or came_to["not_failed"] else 0)


@dead_cli.command()
def drop(
    pair_ids: PairIds = None,
    code: Code = None,
    run: InRun = None,
    source: Source = None,
    ref: Ref = None,
    older: Older = None,
    newer: Newer = None,
    limit: AtMost = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Give failed pairs up: they become rejected, as `dropped`, and cannot be redriven any more.

    Their texts and their errors stay. Pairs that are under way again are left alone. Exits 1 where a pair that was
    named has not failed.
    """
    selection = select(older, newer, code=code, run_id=run, source=source, ref=ref, pair_ids=pair_ids)
    came_to = work_off("drop", selection, limit, yes, give_up)
    if as_json:
        print(json.dumps({name: came_to[name] for name in ("dropped", "under_way", "not_failed")}))
    else:
        out.print(f"pairs dropped: {came_to['dropped']:,}")
        say("left alone, under way again", came_to["under_way"])
        say("named, but not failed", came_to["not_failed"])
    raise typer.Exit(1 if came_to["not_failed"] else 0)


def say(what: str, pairs: int) -> None:
    if pairs:
        err.print(f"{what}: {pairs:,}")


def work_off(verb: str, selection: Selection, limit: int | None, yes: bool, act: Act) -> Counter[str]:
    """Count, ask, and act page by page; returns what became of how many. Raises ConcordError where nobody said yes."""
    database = engine()
    with database.connect() as connection:
        groups = dead_letters.groups(connection, selection)
        named = set(selection.pair_ids or ())
        not_failed = named - dead_letters.pair_ids(connection, selection) if named else set()
    matched = sum(row["pairs"] - sum(row[state] for state in LEFT_ALONE[verb]) for row in groups)
    wanted = matched if limit is None else min(limit, matched)
    if wanted > UNASKED and not yes:
        ask(f"{verb.capitalize()} {wanted:,} failed pairs?")
    came_to = Counter(not_failed=len(not_failed))
    try:
        with progress(err) as bar:
            task = bar.add_task(verb, total=wanted)
            for pairs, counts in pages(database, selection, limit, act):
                came_to.update(counts)
                bar.advance(task, pairs)
    except KeyboardInterrupt:
        err.print("What is done stays done; the same command goes on with the rest.")
        raise typer.Exit(130) from None
    return came_to


def ask(question: str) -> None:
    """Raises ConcordError unless the answer is yes."""
    try:
        agreed = Confirm.ask(question, console=err, default=False)
    except EOFError:
        agreed = False
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if not agreed:
        raise ConcordError("nothing was done. --yes does it without asking")


def pages(database: Engine, selection: Selection, limit: int | None, act: Act) -> Iterator[tuple[int, Counter[str]]]:
    """Act on the failed pairs that are not under way again, the oldest failures first, one transaction a page; yields
    how many of each page count towards the limit, and what became of all.
    """
    after, left = None, limit
    while left is None or left > 0:
        with database.begin() as connection:
            size = PAIRS_PER_PAGE if left is None else min(PAIRS_PER_PAGE, left)
            letters = dead_letters.take(connection, selection, after, size)
            idle = [letter for letter in letters if not letter.is_under_way]
            counts = act(connection, idle)
        if not letters:
            return
        counts["under_way"] += len(letters) - len(idle)
        done = len(idle) - counts["incomplete"]
        yield done, counts
        after = letters[-1]
        left = None if left is None else left - done


def hand_over(connection: Connection, letters: Sequence[DeadLetter], lane: Lane | None) -> Counter[str]:
    """Write the outbox rows of the pairs that can be judged, and note in the failed rows that they are under way."""
    whole = [letter for letter in letters if not letter.is_incomplete]
    messages = list(messages_of(whole, lane))
    outbox.add(connection, [row for row, _ in messages])
    dead_letters.mark(connection, {row.message_id: carried for row, carried in messages})
    return Counter(redriven=len(whole), messages=len(messages), incomplete=len(letters) - len(whole))


def messages_of(letters: Sequence[DeadLetter], lane: Lane | None) -> Iterator[tuple[OutboxRow, list[DeadLetter]]]:
    """Messages of pairs with one envelope, under the pairs' own keys, so that the verdicts find the failed rows."""

    def envelope_of(letter: DeadLetter) -> tuple[datetime, str, str, str]:
        return letter.submitted_at, letter.source, str(letter.run_id), lane or letter.lane

    for (submitted_at, source, _, through), alike in groupby(sorted(letters, key=envelope_of), key=envelope_of):
        for carried in chunked(alike, PAIRS_PER_MESSAGE):
            message_id = uuid7()
            pairs = [pair_of(letter) for letter in carried]
            body = envelope(message_id, submitted_at, pairs, source, run_id=carried[0].run_id)
            if replaced := [str(letter.pair_id) for letter in carried if TEXT_REPLACED in letter.flags]:
                body["replaced"] = replaced
            yield OutboxRow(message_id, through, body), carried


def pair_of(letter: DeadLetter) -> dict[str, Any]:
    """The pair as it was submitted."""
    fields = {name: getattr(letter, name) for name in ("ref", "image", "text", "premise", "policy", "attributes")}
    return {"id": str(letter.pair_id), **{name: value for name, value in fields.items() if value is not None}}


def give_up(connection: Connection, letters: Sequence[DeadLetter]) -> Counter[str]:
    dead_letters.drop(connection, letters)
    return Counter(dropped=len(letters))
