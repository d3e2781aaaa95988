"""The command line: `concord --help`. Each command is a few lines over the module that does the work."""

import json
import logging
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal
from uuid import UUID

import typer
from kombu.exceptions import OperationalError as BrokerAway
from rich.progress import Progress, TaskID
from rich.table import Table
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from db import outbox, registry, runs, verdicts
from db.engine import Trouble, is_outdated, trouble
from db.runs import Run
from tasks import nightly_cli, precision, reports
from tasks.console import err, out, plain, progress, verbatim
from tasks.dead import dead_cli
from tasks.high_water import HighWater
from tasks.settings import settings
from worker.errors import ConcordError, PairRejected, first_line

cli = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Check that images and the texts beside them agree. Settings are environment variables: docs/settings.md.",
)
db_cli = typer.Typer(no_args_is_help=True, help="The database's tables.")
local_cli = typer.Typer(no_args_is_help=True, help="Postgres, Redis and S3 on this machine, for trying Concord out.")
weights_cli = typer.Typer(no_args_is_help=True, help="Checkpoints from the model hub.")
COMMANDS: tuple[Callable[..., None], ...] = (
    precision.quantize,
    precision.compare,
    precision.tune,
    reports.sql,
    reports.erase,
)
for command in COMMANDS:
    cli.command()(command)
db_cli.command("maintain")(reports.maintain)
cli.add_typer(dead_cli, name="dead")
cli.add_typer(db_cli, name="db")
cli.add_typer(local_cli, name="local")
cli.add_typer(nightly_cli.cli, name="nightly")
cli.add_typer(weights_cli, name="weights")

#: How often a waiting command looks at its run.
WAIT_POLL_S = 0.5
#: How often a file that waits for workers says so.
WAITING_LINE_EVERY_S = 60.0
#: Unreadable lines of a file that are printed one by one.
SHOWN_LINES = 5
#: How long `status` waits for workers to answer.
PING_S = 1.0

PairsFile = Annotated[
    Path, typer.Argument(metavar="PAIRS", exists=True, dir_okay=False, help="A .jsonl or .csv file: image, text, ...")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]


@cli.command()
def score(
    pairs: PairsFile,
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder; without it the demo model judges.")] = None,
    exact: Annotated[bool, typer.Option(help="Decode every picture at full size, as the reference does.")] = False,
) -> None:
    """Judge a file of pairs on this machine, with no servers: one JSON line a pair, in order.

    `image` may be a path, which counts from the file's folder. A line holds `id`, `label` and `probs`
    (answer -> probability), or `error_code`. Very large JPEGs are reduced while decoding unless --exact.
    """
    from tasks.pairs_file import read_rows
    from tasks.scoring import load_moderator, score_file

    logging.basicConfig(level=logging.WARNING, format="concord: %(message)s", stream=sys.stderr)
    chosen = settings()
    if exact:
        chosen = chosen.model_copy(update={"exact_images": True})
    moderator = load_moderator(model or chosen.model_dir, chosen.device)
    rows = list(read_rows(pairs))
    with progress(err) as bar:
        task = bar.add_task("scoring", total=len(rows))
        for line in score_file(rows, pairs.parent, moderator, chosen):
            print(json.dumps(line, ensure_ascii=False))
            bar.advance(task)


@cli.command()
def submit(
    pairs: PairsFile,
    lane: Annotated[Literal["live", "bulk"], typer.Option(help="live is judged first.")] = "bulk",
    source: Annotated[str, typer.Option(help="The tenant or catalog that the pairs belong to.")] = "default",
    wait: Annotated[bool, typer.Option("--wait", help="Until every pair has its verdict.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Judge a file anew that was submitted before.")] = False,
) -> None:
    """Submit a file of pairs. The same command again goes on where the first stopped, and submits nothing twice.

    While the outbox holds more messages than CONCORD_OUTBOX_HIGH_WATER it waits for workers. Exits 1 if a line was no
    pair, if there was no pair at all or, with --wait, if one was rejected or failed.
    """
    from tasks.pairs_file import begin, noting, once, read_rows, submit_file
    from tasks.submit import engine, high_water

    unreadable: list[PairRejected] = []
    database = engine()
    run = begin(database, pairs, lane=lane, source=source, again=datetime.now(UTC).isoformat() if again else "")
    already = run.planned
    tide = high_water()
    try:
        with progress(err) as bar:
            task = bar.add_task("submitting", total=None, completed=already)
            rows = noting(once(read_rows(pairs)), unreadable)
            for accepted in submit_file(database, run, rows, tide, waiting_shown(bar, task, tide)):
                bar.advance(task, accepted)
    except KeyboardInterrupt:
        err.print(f"{read_run(database, run.id).planned:,} pairs are accepted so far; the same command goes on.")
        raise typer.Exit(130) from None
    run = read_run(database, run.id)
    new = run.planned - already
    err.print(f"run {run.id}: {new:,} pairs accepted" + (f", {already:,} were before" if already else ""))
    if already and not new:
        err.print("This file was submitted before; --again judges it anew.")
    if not run.planned and not unreadable:
        err.print(f"{pairs} holds no pairs.", markup=False)
    for line in unreadable[:SHOWN_LINES]:
        err.print(line.detail, markup=False)
    if len(unreadable) > SHOWN_LINES:
        err.print(f"... and {len(unreadable) - SHOWN_LINES:,} more lines that are no pairs")
    if wait:
        run = watch(database, run)
        summarize(database, run)
    raise typer.Exit(1 if unreadable or not run.planned or (wait and run.rejected + run.failed) else 0)


def waiting_shown(bar: Progress, task: TaskID, tide: HighWater) -> Callable[[int], None]:
    """What shows that a file waits for workers: a line at first and every minute, and the bar's own words."""
    next_line = 0.0

    def show(held: int) -> None:
        nonlocal next_line
        bar.update(task, description="waiting for workers" if held else "submitting")
        if held and time.monotonic() >= next_line:
            next_line = time.monotonic() + WAITING_LINE_EVERY_S
            none = "" if tide.worker_runs() else ", and none runs; start one with `celery -A tasks worker -Q live,bulk`"
            err.print(f"{tide.sentence(held)}: waiting for workers{none}", markup=False)

    return show


def watch(database: Engine, run: Run) -> Run:
    """Show a run's progress until its last pair is settled; a database that goes away meanwhile is waited for."""
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
        err.print("The pairs are accepted and will be judged; the same command goes on waiting.")
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


@cli.command()
def verdict(
    pair_id: Annotated[str | None, typer.Argument(help="A pair's id.")] = None,
    ref: Annotated[str | None, typer.Option(help="The producer's own name for the pair.")] = None,
    source: Annotated[str, typer.Option(help="The source that the ref belongs to.")] = "default",
    as_json: AsJson = False,
) -> None:
    """Everything about one pair's verdict, or, by --ref, about every verdict of that name, the newest first."""
    from tasks.submit import engine

    if (pair_id is None) == (ref is None):
        raise typer.BadParameter("give either a pair's id or --ref")
    try:
        wanted = UUID(pair_id) if pair_id else None
    except ValueError:
        raise typer.BadParameter(f"{pair_id} is not a pair's id; to look a name up, use --ref {pair_id}") from None
    with engine().connect() as connection:
        found = verdicts.find(connection, pair_id=wanted, ref=ref, source=source)
        refused = verdicts.find_rejected(connection, wanted) if wanted else []
    if as_json:
        print(json.dumps({"verdicts": found, "rejected": refused}, default=plain, ensure_ascii=False))
    for row in [*found, *refused] if not as_json else []:
        moment = plain(row.get("submitted_at") or row.get("received_at"))
        title = verbatim(f"{row.get('ref') or row.get('pair_id') or wanted}, {moment}")
        table = Table(show_header=False, title=title)
        for name, value in row.items():
            if value not in (None, [], {}):
                table.add_row(name, verbatim(value))
        out.print(table)
    if not found and not refused:
        err.print(f"No verdict of {pair_id or ref!r} yet. `concord status` shows what is waiting.", markup=False)
        raise typer.Exit(1)


@cli.command()
def status(as_json: AsJson = False) -> None:
    """What waits in which lane and how long, which workers are up, and which model judges."""
    from tasks.app import app
    from tasks.submit import engine, queue_length, redis_errors

    with engine().connect() as connection:
        lanes = outbox.backlog(connection)
        model = registry.newest_model(connection)
    workers: list[str] | None
    try:
        for lane, row in lanes.items():
            row["in_redis"] = queue_length(lane)
        workers = sorted(app.control.inspect(timeout=PING_S).ping() or {})
    except redis_errors() as error:
        workers, why = None, first_line(error)
    if as_json:
        print(json.dumps({"lanes": list(lanes.values()), "workers": workers, "model": model}, default=plain))
        return
    table = Table("lane", "messages waiting", "oldest", "of them retries", "in Redis")
    for row in lanes.values():
        oldest = f"{row['oldest_s']:,.0f} s" if row["messages"] else "-"
        in_redis = f"{row['in_redis']:,}" if "in_redis" in row else "Redis is away"
        table.add_row(row["lane"], f"{row['messages']:,}", oldest, f"{row['retrying']:,}", in_redis)
    out.print(table)
    if workers is None:
        out.print(f"workers: unknown, Redis is away or refuses: {why}", markup=False)
    else:
        up = ", ".join(workers) or "none; start one with `celery -A tasks worker -Q live,bulk`"
        out.print(f"workers: {up}", markup=False)
    if model:
        out.print(f"model: {model['name']} {model['revision']} ({model['recipe']}), {model['image_px']} px")
    else:
        out.print("model: none has started on this database yet")


@db_cli.command("upgrade")
def db_upgrade() -> None:
    """Make the tables, or bring them to this version's; harmless when there is nothing to do."""
    from db.migrations import upgrade

    chosen = settings()
    owner = chosen.owner_database_url or chosen.need("database_url")
    out.print(f"the database is at version {upgrade(owner, chosen.database_url)}")


@local_cli.command("up")
def local_up() -> None:
    """Start the servers, or find them running; their data and addresses stay in .concord/ from one time to the next."""
    from db.migrations import upgrade
    from infra.local.stack import Stack

    stack = Stack()
    with err.status("starting Postgres, Redis and S3"):
        addresses = stack.up()
        upgrade(addresses.owner_database_url, addresses.database_url)
    out.print(
        "Postgres, Redis and S3 are up, on 127.0.0.1 only. Their addresses and passwords are in .concord/env, which\n"
        "concord and celery read when they are run in this folder. Stop the servers with `concord local down`."
    )


@local_cli.command("down")
def local_down() -> None:
    """Stop the servers; the data stays in .concord/."""
    from infra.local.stack import Stack

    with err.status("stopping"):
        Stack().down()
    out.print("The servers are down. Their data is in .concord/; `concord local up` opens it again.")


@local_cli.command("status")
def local_status() -> None:
    """Which of the servers run, and where their logs are."""
    from infra.local.stack import Stack

    if not (stack := Stack()).folder.exists():
        out.print("There are no servers in this folder; `concord local up` makes them.")
        return
    table = Table("server", "state", "port", "log")
    for server in stack.status():
        table.add_row(server.name, f"up, pid {server.pid}" if server.pid else "down", str(server.port), str(server.log))
    out.print(table)


@local_cli.command("psql", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def local_psql(context: typer.Context) -> None:
    """Postgres's own shell on the local database, as its owner; what follows goes to psql, such as -c 'select 1'."""
    from infra.local.stack import Stack

    raise typer.Exit(Stack().postgres.psql(context.args))


@cli.command()
def chaos(
    pairs: Annotated[int, typer.Option(min=1, help="Pairs that are submitted.")] = 2_000,
    seed: Annotated[int, typer.Option(help="The same seed breaks the same parts at the same moments.")] = 1,
    kill: Annotated[
        str, typer.Option(metavar="PARTS", help="What may break: worker, redis, postgres, s3, relay.")
    ] = "worker,redis,postgres,s3,relay",
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 3,
    duration: Annotated[float | None, typer.Option(min=1, help="Seconds; unset: what the pairs take.")] = None,
    no_outbox: Annotated[
        bool, typer.Option("--no-outbox", help="All pairs by a bare send_task, to see that the check can fail.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Break a site of its own while pairs go through it, then check that none is lost: docs/chaos.md.

    Exits 1 where anything is not as it must be, and names the pairs. The last line is one JSON object.
    """
    from infra.chaos.run import Order, parts_of, report, run

    try:
        parts = parts_of(kill)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--kill") from None
    outcome = run(Order(pairs, seed, parts, not no_outbox, workers, duration), err)
    report(outcome, err, None if as_json else out)
    raise typer.Exit(1 if outcome.problems else 0)


@weights_cli.command("fetch")
def weights_fetch(
    model_id: Annotated[str, typer.Argument(help="For example iic/ofa_visual-entailment_snli-ve_large_en.")],
    revision: Annotated[str, typer.Option(help="A tag or commit of the model; never a branch, which moves.")],
    into: Annotated[Path, typer.Option("--out", help="The folder to make.")] = Path("weights"),
    label: Annotated[
        list[str] | None, typer.Option(metavar="ANSWER=LABEL", help="What an answer of an unknown wording means.")
    ] = None,
) -> None:
    """Download a checkpoint at a pinned revision, verify it, and convert it once to safetensors."""
    from worker.weights import fetch

    if wrong := [pair for pair in label or [] if "=" not in pair]:
        raise typer.BadParameter(
            f"--label takes ANSWER=LABEL, for example --label 'it is so=entailment'; got {wrong[0]}"
        )
    labels = dict(pair.rpartition("=")[::2] for pair in label or [])
    fetch(model_id, revision, into, labels=labels or None)
    out.print(
        f"{model_id} at {revision} is in {into}. Next: "
        f"concord quantize --model {into} --calibration PAIRS.jsonl --out {into}-awq-int4",
        markup=False,
    )


def explain(error: SQLAlchemyError) -> str:
    """An error of the database in a sentence that says what to do."""
    first_line = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
    if trouble(error) is Trouble.AWAY:
        return f"the database does not answer ({first_line}). `concord local up` starts one on this machine"
    if is_outdated(error):
        return f"the database lacks what this version needs ({first_line}). Run `concord db upgrade`"
    return f"the database refused: {first_line}"


def main() -> None:
    """Entry point: errors of ours are one line on standard error and exit status 2."""
    try:
        cli()
    except ConcordError as error:
        message = str(error)
    except ModuleNotFoundError as error:
        extra = {"psutil": "local", "pyarrow": "parquet"}.get(error.name or "", "worker")
        message = (
            f"this command needs {error.name}, which is not installed: pip install '.[{extra}]' in Concord's folder"
        )
    except SQLAlchemyError as error:
        message = explain(error)
    except BrokerAway as error:
        message = f"Redis does not answer ({error}). `concord local up` starts one on this machine"
    else:
        return
    err.print(f"concord: {message}", markup=False)
    raise SystemExit(2)
