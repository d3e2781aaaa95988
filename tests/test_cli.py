"""The command line: every command explains itself, every error is one sentence, and exit statuses say what happened."""

import json
import shutil
import socket
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import typer
from sqlalchemy import Engine, text

from db import outbox, registry
from db.engine import make_engine
from db.outbox import OutboxRow, Rejected
from db.verdicts import Settlement, Verdict, settle
from tasks import cli
from tasks.submit import high_water
from tests.command_line import Concord, Ran, command_line
from tests.conftest import Database
from tests.model.golden import GOLDEN, recorded, write_checkpoint
from tests.shared import emptied_database
from tests.submit_env import configured

database = emptied_database

COMMANDS = (
    "quantize", "compare", "tune", "score", "submit", "verdict", "status",
    "dead list", "dead show", "dead redrive", "dead drop",
    "sql", "report", "erase", "chaos", "bench",
    "nightly start", "nightly status", "nightly watch", "nightly cancel", "nightly resume", "nightly check",
    "db upgrade", "db maintain", "local up", "local down", "local status", "local psql", "weights fetch",
)  # fmt: skip


@pytest.fixture
def concord(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Concord:
    """The command line in this process: `concord("verdict", "--ref", "sku-1")`."""
    return command_line(monkeypatch, capsys)


@pytest.fixture
def line(database: Database, redis_url: str) -> Iterator[Engine]:
    """Settings for a migrated database and a Redis; gives an engine to look with."""
    engine = make_engine(database.url)
    with configured(database_url=database.url, broker_url=redis_url):
        yield engine
    engine.dispose()


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address where nothing listens."""
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    rows = [{"ref": f"sku-{n}", "image": "s3://shop/1.jpg", "text": f"shoe {n}"} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def commands() -> Iterator[tuple[str, Any]]:
    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        inside = getattr(command, "commands", None)
        if inside is None:
            yield name, command
        for part, inner in (inside or {}).items():
            yield from walk(f"{name} {part}".strip(), inner)

    yield from walk("", typer.main.get_command(cli.cli))


def test_the_commands_are_all_there() -> None:
    assert sorted(name for name, _ in commands()) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_every_option_says_what_it_is_for(concord: Concord, name: str) -> None:
    command = dict(commands())[name]
    assert command.help
    for parameter in command.params:
        assert getattr(parameter, "help", None), parameter.name
    shown = concord(*name.split(), "--help")
    assert shown.status == 0
    assert " ".join(command.help.split()[:3]) in " ".join(shown.out.split())


@pytest.mark.parametrize("arguments", [[], ["dead"], ["db"], ["local"], ["weights"]])
def test_without_a_command_the_help_is_shown(concord: Concord, arguments: list[str]) -> None:
    shown = concord(*arguments)
    assert "Commands" in shown.out + shown.err


def sentence(ran: Ran) -> str:
    """The one line that an error is."""
    assert ran.status == 2
    assert ran.out == ""
    assert ran.err.startswith("concord: ")
    assert ran.err.count("\n") == 1
    return ran.err


def test_without_settings_a_command_says_which_it_needs_and_how_to_get_it(concord: Concord) -> None:
    with configured():
        said = sentence(concord("status"))
    assert "CONCORD_DATABASE_URL is not set" in said
    assert "concord local up" in said


def test_a_wrong_setting_is_named(concord: Concord) -> None:
    with configured(max_pairs="many"):
        assert "CONCORD_MAX_PAIRS" in sentence(concord("status"))


@pytest.mark.parametrize("arguments", [["status"], ["verdict", "--ref", "sku-1"], ["db", "upgrade"]])
def test_a_database_that_is_away_is_said_to_be(concord: Concord, nowhere: str, arguments: list[str]) -> None:
    with configured(database_url=f"postgresql+psycopg://user:password@{nowhere}/concord"):
        said = sentence(concord(*arguments))
    assert "the database does not answer" in said
    assert "password" not in said


@pytest.mark.parametrize("arguments", [["status"], ["verdict", "--ref", "sku-1"]])
def test_a_database_without_tables_wants_an_upgrade(
    concord: Concord, empty_database: Database, arguments: list[str]
) -> None:
    with configured(database_url=empty_database.url):
        assert "`concord db upgrade`" in sentence(concord(*arguments))


def test_upgrading_makes_the_tables_once(concord: Concord, empty_database: Database, redis_url: str) -> None:
    with configured(database_url=empty_database.url, owner_database_url=empty_database.owner_url, broker_url=redis_url):
        first = concord("db", "upgrade")
        assert (first.status, first.err) == (0, "")
        assert concord("db", "upgrade") == first
        assert concord("status").status == 0


def test_status_counts_what_waits_in_each_lane(concord: Concord, line: Engine, pairs: Path) -> None:
    concord("submit", pairs, "--lane", "bulk")
    shown = json.loads(concord("status", "--json").out)
    assert {row["lane"]: (row["messages"], row["in_redis"]) for row in shown["lanes"]} == {
        "live": (0, 0),
        "bulk": (1, 0),
    }
    assert (shown["workers"], shown["model"]) == ([], None)
    assert "celery -A tasks worker" in concord("status").out


def test_status_without_redis_still_says_what_the_database_knows(
    concord: Concord, database: Database, nowhere: str
) -> None:
    with configured(database_url=database.url, broker_url=f"redis://{nowhere}/0"):
        ran = concord("status")
    assert ran.status == 0
    assert "Redis is away" in ran.out


def settle_all(engine: Engine, **fields: Any) -> list[Verdict]:
    """Play the worker: every pair in the outbox is rejected, unless `fields` say otherwise."""
    with engine.begin() as connection:
        bodies = [json.loads(body) for body in connection.execute(text("select body from outbox")).scalars()]
        rows = [
            Verdict(
                **{
                    "submitted_at": datetime.fromisoformat(body["submitted_at"]), "pair_id": UUID(pair["id"]),
                    "source": body["source"], "run_id": body["run_id"] and UUID(body["run_id"]),
                    "message_id": UUID(body["message_id"]), "lane": "bulk", "status": "rejected", "attempts": 0,
                    "ref": pair["ref"], "text": pair["text"], "error_code": "image_not_found", **fields,
                }
            )
            for body in bodies
            for pair in body["pairs"]
        ]  # fmt: skip
        settle(connection, Settlement(rows, done=[(UUID(body["message_id"]), 0) for body in bodies]))
    return rows


def test_submitting_a_file_twice_submits_it_once_and_says_so(concord: Concord, line: Engine, pairs: Path) -> None:
    first = concord("submit", pairs)
    assert first.status == 0
    assert "3 pairs accepted" in first.err
    again = concord("submit", pairs)
    assert again.status == 0
    assert "0 pairs accepted, 3 were before" in " ".join(again.err.split())
    assert "--again" in again.err
    with line.connect() as connection:
        assert connection.execute(text("select count(*) from run")).scalar_one() == 1
    assert "3 pairs accepted" in concord("submit", pairs, "--again").err


def test_lines_that_are_no_pairs_are_told_and_counted_and_the_exit_status_is_1(
    concord: Concord, line: Engine, pairs: Path
) -> None:
    with pairs.open("a") as file:
        file.write("\nno pair" * 7)
    ran = concord("submit", pairs)
    assert ran.status == 1
    assert "3 pairs accepted" in ran.err
    assert [f"line {n} is not a pair" in ran.err for n in (4, 8, 9)] == [True, True, False]
    assert "2 more lines" in ran.err
    again = concord("submit", pairs)
    assert (again.status, "line 4 is not a pair" in again.err) == (1, True), "they are no pairs the second time either"


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_a_pair_is_said_to_be_that(concord: Concord, line: Engine, tmp_path: Path, content: str) -> None:
    path = tmp_path / "nothing.jsonl"
    path.write_text(content)
    ran = concord("submit", path)
    assert ran.status == 1
    assert "nothing.jsonl holds no pairs" in " ".join(ran.err.split())


def overfill(line: Engine) -> None:
    """More messages in the outbox than its mark."""
    high_water().mark = 3
    with line.begin() as connection:
        outbox.add(connection, [OutboxRow(uuid4(), "bulk", {}) for _ in range(4)])


@pytest.mark.parametrize("worker_runs", [True, False])
def test_a_file_that_waits_for_workers_says_so_and_whether_one_runs(
    concord: Concord, line: Engine, pairs: Path, monkeypatch: pytest.MonkeyPatch, worker_runs: bool
) -> None:
    overfill(line)
    if worker_runs:
        with line.begin() as connection:
            outbox.take_lease(connection, "a worker")

    def sleep(seconds: float) -> None:
        """Meanwhile workers settle what waits."""
        with line.begin() as connection:
            connection.execute(text("delete from outbox"))
        high_water().next_look = 0.0

    monkeypatch.setattr("tasks.pairs_file.time.sleep", sleep)
    ran = concord("submit", pairs)
    said = " ".join(ran.err.split())
    assert "the outbox holds 4 messages, CONCORD_OUTBOX_HIGH_WATER is 3: waiting for workers" in said
    assert ("and none runs; start one" in said) == (not worker_runs)
    assert (ran.status, "3 pairs accepted" in said) == (0, True)


def test_control_c_while_waiting_for_workers_keeps_what_was_accepted(
    concord: Concord, line: Engine, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overfill(line)

    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tasks.pairs_file.time.sleep", sleep)
    ran = concord("submit", pairs)
    assert (ran.status, "the same command goes on" in ran.err) == (130, True)
    with line.begin() as connection:
        connection.execute(text("delete from outbox"))
    high_water().next_look = 0.0
    assert "3 pairs accepted" in concord("submit", pairs).err


def test_waiting_ends_with_a_summary_and_with_status_1_when_a_pair_was_rejected(
    concord: Concord, line: Engine, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.submit_cli.time.sleep", lambda seconds: settle_all(line))
    ran = concord("submit", pairs, "--wait")
    assert ran.status == 1
    assert "0 of 3 pairs judged" in ran.out
    assert "image_not_found" in ran.out


def test_waiting_ends_with_status_0_when_every_pair_was_judged(
    concord: Concord, line: Engine, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with line.begin() as connection:
        model = registry.register_model(
            connection, name="mini", revision="1", recipe="fp32", weights_sha256="", prompt="", image_px=64, answers={}
        )
    judged = {"status": "judged", "error_code": None, "label": "neutral", "decision": "accept", "policy": "catalog"}
    settle = partial(settle_all, line, **judged, model_version_id=model)
    monkeypatch.setattr("tasks.submit_cli.time.sleep", lambda seconds: settle())
    ran = concord("submit", pairs, "--wait")
    assert ran.status == 0
    assert "3 of 3 pairs judged" in ran.out
    assert "neutral" in ran.out


def test_a_verdict_is_found_by_id_and_by_ref(concord: Concord, line: Engine, pairs: Path) -> None:
    concord("submit", pairs)
    rows = settle_all(line)
    by_id = json.loads(concord("verdict", rows[1].pair_id, "--json").out)
    by_ref = json.loads(concord("verdict", "--ref", rows[1].ref, "--json").out)
    assert [row["ref"] for row in by_id["verdicts"]] == [rows[1].ref]
    assert by_ref["verdicts"] == by_id["verdicts"]
    shown = concord("verdict", rows[1].pair_id)
    assert shown.status == 0
    assert "image_not_found" in shown.out


def test_a_producers_words_are_neither_markup_nor_orders_to_the_terminal(
    concord: Concord, line: Engine, pairs: Path
) -> None:
    concord("submit", pairs)
    settle_all(line, error_detail="[/red] [bold]\x1b[2J")
    shown = concord("verdict", "--ref", "sku-1")
    assert shown.status == 0
    assert "[/red] [bold]\ufffd[2J" in shown.out


def test_a_pair_whose_message_could_not_be_read_is_found_too(concord: Concord, line: Engine) -> None:
    pair_id = uuid4()
    record = Rejected("live", "unknown_version", "message version 9", b"{}", pair_ids=[pair_id])
    with line.begin() as connection:
        settle(connection, Settlement(rejected=[record]))
    ran = concord("verdict", pair_id)
    assert ran.status == 0
    assert "unknown_version" in ran.out


def test_an_unknown_pair_has_exit_status_1_and_a_sentence(concord: Concord, line: Engine) -> None:
    ran = concord("verdict", uuid4())
    assert (ran.status, ran.out) == (1, "")
    assert "concord status" in ran.err
    assert concord("verdict", "--ref", "sku-404").status == 1


@pytest.mark.parametrize("arguments", [[], ["sku-1"], [str(uuid4()), "--ref", "sku-1"]])
def test_verdict_wants_either_an_id_or_a_ref(concord: Concord, line: Engine, arguments: list[str]) -> None:
    ran = concord("verdict", *arguments)
    assert ran.status == 2
    assert "--ref" in ran.err


def test_a_file_that_is_not_there_is_said_to_be_missing(concord: Concord) -> None:
    with configured():
        ran = concord("submit", "nowhere.jsonl")
    assert ran.status == 2
    assert "nowhere.jsonl" in " ".join(ran.err.split())


def test_scoring_gives_one_line_a_pair_in_order_with_the_references_probabilities(
    concord: Concord, tmp_path: Path
) -> None:
    cases = recorded("plain")["cases"]
    shutil.copytree(GOLDEN / "images", tmp_path / "images")
    rows = [
        {"id": f"case {n}", "image": f"images/{case['image']}", "text": case["text"]} for n, case in enumerate(cases)
    ]
    bad = [
        {"id": "gone", "image": "images/gone.jpg", "text": "a shoe"},
        {"ref": "web", "image": "http://shop/1.jpg", "text": "a shoe"},
        {"image": "images/square.jpg", "text": "  "},
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join([*map(json.dumps, rows), "no pair", *map(json.dumps, bad)]))
    with configured():
        ran = concord("score", "--exact", "--model", write_checkpoint(tmp_path / "model"), file)
    assert ran.status == 0, ran.err
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert [line.get("id") for line in lines] == [*(row["id"] for row in rows), None, "gone", "web", None]
    for case, scored in zip(cases, lines, strict=False):
        assert scored["probs"] == pytest.approx(case["probs"], abs=1e-5)
        assert scored["label"] in ("entailment", "contradiction", "neutral")
    codes = [line.get("error_code") for line in lines[len(cases) :]]
    assert codes == ["invalid_pair", "image_not_found", "image_not_s3", "text_empty"]


def test_scoring_with_a_folder_that_holds_no_checkpoint_is_refused_with_a_sentence(
    concord: Concord, tmp_path: Path, pairs: Path
) -> None:
    with configured():
        assert "config.json is missing" in sentence(concord("score", "--model", tmp_path, pairs))
