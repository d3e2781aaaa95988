"""No password and no key is ever said: in logs, errors, events, rows, Redis, banners, reports or command lines.

One run of the whole line with secrets of its own, through everything that can go wrong; whatever it says is kept by
the place where it was said, and looked through in the end.
"""

import base64
import json
import re
import secrets
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import psycopg
import pytest
import redis
from celery import Celery
from celery.result import AsyncResult
from psycopg import sql

from infra.local.postgres import OWNER
from tasks.app import app
from tasks.settings import settings
from tasks.submit import Pair, envelope, submit, uuid7
from tests.line.site import ROOT, Site, Worker, eventually
from tests.submit_env import configured, environment
from worker.messages import TASK_NAME

#: Between the two halves of each password: what URLs, shells and reports read as something else.
ODD = "/@:#?[%41&+ '\"\\ö"
CONCORD = ("-c", "from tasks.cli import main; main()")
CELERY = ("-m", "celery", "-A", "tasks")
#: Tables and views of Concord's, each partition by way of its parent.
TABLES = """
select oid::regclass::text from pg_class
where relkind in ('r', 'p', 'v', 'm') and not relispartition
      and relnamespace::regnamespace::text !~ '^(pg_|information_)'
"""


@dataclass(frozen=True)
class Secret:
    """A password of two random halves of letters and digits, which stay the same however the whole is escaped."""

    halves: tuple[str, ...] = field(default_factory=lambda: (secrets.token_hex(8), secrets.token_hex(8)))

    @property
    def plain(self) -> str:
        return ODD.join(self.halves)

    @property
    def in_url(self) -> str:
        return quote(self.plain, safe="")


def forms(word: str) -> list[str]:
    """A word as it may stand in a text: as it is, in hexadecimal, and in base64, which has three spellings by the place
    of its first byte; the characters at both ends depend on the neighbours and are left out.
    """
    found = [word, word.encode().hex()]
    for before in range(3):
        encoded = base64.b64encode(b"\0" * before + word.encode()).decode()
        found.append(encoded[-(-before * 8 // 6) : (before + len(word)) * 8 // 6])
    return found


def said(word: str, text: str) -> bool:
    return any(form in text for form in forms(word))


@dataclass
class Heard:
    """What was said, by where it was said."""

    texts: dict[str, str] = field(default_factory=dict)

    def add(self, place: str, text: str) -> None:
        self.texts[place] = self.texts.get(place, "") + text

    def command(self, place: str, arguments: Sequence[str], **chosen: object) -> None:
        """Run Python with these arguments to its end; both of its outputs."""
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=environment(**chosen), capture_output=True, text=True
        )
        self.add(place, done.stdout + done.stderr)

    def error(self, place: str, call: Callable[[], object]) -> None:
        """Do what must fail; the whole traceback."""
        with pytest.raises(Exception) as caught:
            call()
        self.add(place, "".join(traceback.format_exception(caught.value)))


@pytest.fixture
def heard() -> Heard:
    return Heard()


@dataclass(frozen=True)
class Logins:
    """The site's servers with a login of its own at each, and the settings that name them."""

    site: Site
    stack: Any
    postgres: Secret
    broker: Secret
    results: Secret
    wrong: Secret
    settings: dict[str, str]

    @property
    def words(self) -> list[str]:
        """What must never be said: the stack's own passwords and keys as they are, of these the halves."""
        kept: dict[str, str] = json.loads((self.stack.folder / "state.json").read_text())["secrets"]
        own = (self.postgres, self.broker, self.results, self.wrong)
        return [*kept.values(), *(half for secret in own for half in secret.halves)]

    def let_into_redis(self) -> None:
        """Redis forgets its users when it restarts."""
        with redis.Redis.from_url(self.stack.redis.url()) as client:
            for user, secret in (("broker", self.broker), ("results", self.results)):
                client.acl_setuser(
                    user, enabled=True, passwords=[f"+{secret.plain}"], keys="*", channels="*", commands=["+@all"]
                )


@pytest.fixture
def logins(site: Site, stack: Any) -> Iterator[Logins]:
    postgres, broker, results = Secret(), Secret(), Secret()
    role = f"line_{secrets.token_hex(4)}"
    redis_port, database = stack.redis.port, site.redis_url.rpartition("/")[2]
    chosen = {
        **site.settings,
        "database_url": f"postgresql+psycopg://{role}:{postgres.in_url}@127.0.0.1:{stack.postgres.port}/line",
        "broker_url": f"redis://broker:{broker.in_url}@127.0.0.1:{redis_port}/{database}",
        "result_url": f"redis://results:{results.in_url}@127.0.0.1:{redis_port}/{database}",
        "allowed_buckets": "line,there-is-no-such-bucket",
        "max_attempts": "2",
        "retry_delay_s": "0",
    }
    with stack.postgres.connect(OWNER, "line") as owner:
        name = sql.Identifier(role)
        owner.execute(sql.SQL("create role {} login password {}").format(name, sql.Literal(postgres.plain)))
        owner.execute(sql.SQL("grant concord_worker to {}").format(name))
    own = Logins(replace(site, settings=chosen), stack, postgres, broker, results, Secret(), chosen)
    own.let_into_redis()
    with configured(**chosen):
        yield own
    with stack.postgres.connect(OWNER, "line") as owner:
        owner.execute(sql.SQL("drop role {}").format(name))
    with redis.Redis.from_url(stack.redis.url()) as client:
        client.acl_deluser("broker", "results")


@contextmanager
def events(url: str, heard: Heard) -> Iterator[None]:
    """Everything that workers tell those who watch them."""
    watcher = Celery(broker=url)
    keep = {"*": lambda event: heard.add("task events", json.dumps(event, default=repr))}
    with watcher.connection_for_read() as connection:
        receiver = watcher.events.Receiver(connection, handlers=keep)
        thread = threading.Thread(target=receiver.capture, kwargs={"wakeup": False})
        thread.start()
        yield
        receiver.should_stop = True  # looked at once a second
        thread.join()


def listen_to_rows(logins: Logins, heard: Heard) -> None:
    """All rows of all tables, bytes as hexadecimal."""
    url = logins.stack.postgres.url(OWNER, "line").replace("+psycopg", "", 1)
    with psycopg.connect(url, autocommit=True) as owner:
        for (table,) in owner.execute(TABLES).fetchall():
            for (row,) in owner.execute(f"select t::text from {table} as t".encode()):
                heard.add(f"table {table}", f"{row}\n")


def listen_to_redis(logins: Logins, heard: Heard) -> None:
    """All keys of the site's database with what they hold."""
    readers = {
        b"string": lambda client, key: client.get(key),
        b"list": lambda client, key: client.lrange(key, 0, -1),
        b"hash": lambda client, key: client.hgetall(key),
        b"set": lambda client, key: client.smembers(key),
        b"zset": lambda client, key: client.zrange(key, 0, -1, withscores=True),
    }
    with redis.Redis.from_url(logins.site.redis_url) as client:
        for key in client.scan_iter():
            heard.add("Redis", f"{key!r}: {readers[client.type(key)](client, key)!r}\n")


def pair(ref: str, image: str = "s3://line/square.jpg") -> Pair:
    return Pair(ref=ref, image=image, text="two dogs on a boat")


def judge(logins: Logins, heard: Heard, canary: str, folder: Path) -> None:
    """What goes well, and what is the pairs' own fault, by every way in."""
    asked = submit([pair(canary)], wants_result=True)
    results = Celery(broker=logins.settings["broker_url"], backend=logins.settings["result_url"])
    heard.add("result", str(AsyncResult(str(asked.message_ids[0]), app=results).get(timeout=60)))
    others = ("s3://line/none.jpg", "s3://elsewhere/1.jpg", "s3://there-is-no-such-bucket/1.jpg")
    accepted = submit([pair(f"{canary}-{n}", image) for n, image in enumerate(others)])
    rows = logins.site.verdicts(accepted.pair_ids)
    assert sorted(row["status"] for row in rows.values()) == ["failed", "rejected", "rejected"]
    with redis.Redis.from_url(logins.site.redis_url) as client:
        client.lpush("live", f"no JSON, but {canary}")
    (folder / "pairs.jsonl").write_text(
        json.dumps({"ref": f"{canary}-file", "image": "s3://line/square.jpg", "text": "a dog"})
    )
    heard.command("concord submit", [*CONCORD, "submit", str(folder / "pairs.jsonl"), "--wait"], **logins.settings)


def ask(logins: Logins, heard: Heard, canary: str) -> None:
    """Every command that reports something."""
    commands = {
        "concord status": [*CONCORD, "status"],
        "concord status --json": [*CONCORD, "status", "--json"],
        "concord verdict": [*CONCORD, "verdict", "--ref", canary],
        "concord verdict --json": [*CONCORD, "verdict", "--ref", canary, "--json"],
        "concord db upgrade": [*CONCORD, "db", "upgrade"],
        "celery report": [*CELERY, "report"],
        "celery inspect conf": [*CELERY, "inspect", "conf", "--timeout", "5"],
        "celery inspect stats": [*CELERY, "inspect", "stats", "--timeout", "5"],
        "celery inspect report": [*CELERY, "inspect", "report", "--timeout", "5"],
    }
    owner = {"owner_database_url": logins.stack.postgres.url(OWNER, "line")}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: heard.command(name, commands[name], **logins.settings, **owner), commands))
    for command in ("status", "up"):
        local = [sys.executable, *CONCORD, "local", command]
        done = subprocess.run(local, cwd=logins.stack.folder.parent, capture_output=True, text=True, check=True)
        heard.add(f"concord local {command}", done.stdout + done.stderr)
    heard.add("settings", repr(settings()) + str(settings()) + repr(settings().s3_secret_access_key))


def break_postgres(logins: Logins, heard: Heard, worker: Worker, canary: str) -> None:
    logins.stack.postgres.kill()
    heard.error("submit without Postgres", lambda: submit([pair(canary)]))
    heard.command("concord status without Postgres", [*CONCORD, "status"], **logins.settings)
    body = envelope(uuid7(), datetime.now(UTC), [pair(f"{canary}-without-postgres").model_dump(mode="json")])
    app.send_task(TASK_NAME, args=[body], queue="live", ignore_result=True)
    worker.says("the relay waits")
    worker.says("trying again in")
    logins.stack.postgres.start()
    judged = "select * from verdict where ref = :ref"
    eventually(lambda: logins.site.query(judged, ref=f"{canary}-without-postgres"), "the verdict of a bare send_task")


def break_redis(logins: Logins, heard: Heard, worker: Worker, canary: str) -> None:
    logins.stack.redis.kill()
    accepted = submit([pair(f"{canary}-without-redis")])
    heard.command("concord status without Redis", [*CONCORD, "status"], **logins.settings)
    logins.stack.redis.start()
    worker.says("invalid username-password pair")
    logins.let_into_redis()
    logins.site.verdicts(accepted.pair_ids)


def wrong_settings(logins: Logins) -> list[tuple[str, dict[str, str], str]]:
    """Settings that do not work, each with what a worker says that is started with it."""
    chosen, wrong = logins.settings, logins.wrong
    postgres = chosen["database_url"].replace(logins.postgres.in_url, wrong.in_url)
    broker = chosen["broker_url"].replace(logins.broker.in_url, wrong.in_url)
    no_url = chosen["broker_url"].replace(logins.broker.in_url, wrong.plain)
    return [
        ("the password for Postgres", {"database_url": postgres}, "trying again in"),
        ("the password for Redis", {"broker_url": broker}, "invalid username-password pair"),
        # Without keys in the settings boto3 finds those in the environment, and says much about it at level debug.
        ("the key for S3", {"s3_access_key_id": "", "s3_secret_access_key": ""}, "S3 gives nothing from line"),
        ("the URL of Redis", {"broker_url": no_url}, "not of the form redis://"),
    ]


def start_wrongly(logins: Logins, heard: Heard, what: str, chosen: dict[str, str], words: str) -> None:
    """A worker that cannot work, as far as the words that say why, and a command with the same settings."""
    own = {**logins.settings, **chosen}
    heard.command(f"concord status, {what} is wrong", [*CONCORD, "status"], **own)
    command = [sys.executable, *CELERY, "worker", "-Q", "live,bulk", "-l", "debug", "-E"]
    keys = {"AWS_ACCESS_KEY_ID": logins.settings["s3_access_key_id"], "AWS_SECRET_ACCESS_KEY": logins.wrong.plain}
    variables = {**environment(**own), **keys, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        worker = Worker(process)
        try:
            worker.says(words)
        finally:
            worker.kill()
            heard.add(f"worker, {what} is wrong", "".join(worker.lines))


@pytest.mark.timeout(300)
def test_a_whole_run_with_everything_that_can_go_wrong_says_no_secret(
    logins: Logins, heard: Heard, tmp_path: Path
) -> None:
    canary = Secret().halves[0]
    with logins.site.worker("-E", "-l", "debug") as worker:
        with events(logins.site.redis_url, heard):
            judge(logins, heard, canary, tmp_path)
            ask(logins, heard, canary)
            break_postgres(logins, heard, worker, canary)
        break_redis(logins, heard, worker, canary)
        for server in logins.stack.servers:
            heard.add("command lines", " ".join(server.running().cmdline()))
        heard.add("command lines", " ".join(psutil.Process(worker.process.pid).cmdline()))
    heard.add("worker", "".join(worker.lines))

    # With no worker it stays in Redis, until one comes that has a wrong key for S3.
    submit([pair(f"{canary}-left")])
    listen_to_redis(logins, heard)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda one: start_wrongly(logins, heard, *one), wrong_settings(logins)))
    listen_to_rows(logins, heard)
    listen_to_redis(logins, heard)
    for log in (logins.stack.folder / "logs").glob("*.log*"):
        heard.add(log.name, log.read_text(errors="replace"))

    # What should be there is there, and the search finds it in each of its spellings.
    assert "redis://broker:**@" in heard.texts["worker"] and "redis://results:**@" in heard.texts["worker"]
    assert "Found credentials in environment variables" in heard.texts["worker, the key for S3 is wrong"]
    assert "redis://results:***" in heard.texts["celery inspect conf"]
    assert {"task-received", "worker-heartbeat"} <= set(re.findall(r'"type": "([\w-]+)"', heard.texts["task events"]))
    assert {"table verdict", "table rejected_message", "Redis", "result", "concord verdict"} <= {
        place for place, text in heard.texts.items() if said(canary, text)
    }
    assert [(place, word) for place, text in heard.texts.items() for word in logins.words if said(word, text)] == []
