"""The command line: `concord --help`. Each command is a few lines over the module that does the work."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated
from uuid import UUID

import typer
from kombu.exceptions import OperationalError as BrokerAway
from rich.table import Table
from sqlalchemy.exc import SQLAlchemyError

from db import outbox, registry, verdicts
from db.engine import Trouble, is_outdated, trouble
from tasks import nightly_cli, precision, report, reports, submit_cli
from tasks.console import err, out, plain, progress, verbatim
from tasks.dead import dead_cli
from tasks.settings import settings
from worker.errors import ConcordError, first_line

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
    report.report,
    reports.sql,
    reports.erase,
    submit_cli.submit,
)
for command in COMMANDS:
    cli.command()(command)
db_cli.command("maintain")(reports.maintain)
cli.add_typer(dead_cli, name="dead")
cli.add_typer(db_cli, name="db")
cli.add_typer(local_cli, name="local")
cli.add_typer(nightly_cli.cli, name="nightly")
cli.add_typer(weights_cli, name="weights")

#: Which extra of Concord's brings what a command may find missing; `worker` brings the rest.
EXTRAS = {"psutil": "local", "pyarrow": "parquet", "jinja2": "report", "pygal": "report"}
#: How long `status` waits for workers to answer.
PING_S = 1.0

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]


@cli.command()
def score(
    pairs: submit_cli.PairsPath,
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


@cli.command()
def bench(
    name: Annotated[
        str, typer.Argument(help="worker, scale, live, queue, submit, line, writer, images, model, comparison; all.")
    ],
    seconds: Annotated[
        float | None, typer.Option(min=1, help="How long each measurement takes; unset: its own length.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The JSON line alone.")] = False,
    out_folder: Annotated[
        Path | None,
        typer.Option("--out", file_okay=False, help="Folder whose speed.md and speed.json are brought up to date."),
    ] = None,
) -> None:
    """Measure a part on servers of its own, on this machine: docs/benchmarks/speed.md.

    Exits 1 where a target is missed. The last line is one JSON object.
    """
    from infra.bench.bench import ALL, BENCHES, run, run_all
    from infra.endings import in_order

    if name not in (ALL, *BENCHES):
        raise typer.BadParameter(f"there are {', '.join(BENCHES)}, and {ALL}", param_hint="NAME")
    with in_order():
        if name == ALL:
            met = run_all(seconds, as_json, out_folder, err)
        else:
            met = run(name, seconds, as_json, out_folder, err, out)
    raise typer.Exit(0 if met else 1)


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
        extra = EXTRAS.get(error.name or "", "worker")
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
