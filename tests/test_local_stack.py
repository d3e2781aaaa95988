"""The local servers: private, found again, gone when told to, and clear about what is wrong."""

import contextlib
import json
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import boto3
import botocore.exceptions
import psutil
import psycopg
import pytest
import redis
import sqlalchemy
from redis.backoff import NoBackoff
from redis.retry import Retry

from infra.local import LocalStackError, Stack
from infra.local.postgres import APP, OWNER
from infra.local.redis import Redis
from infra.local.state import State
from tests.conftest import Bucket, Database


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[Redis]:
    """A Redis that this test alone starts and breaks: the quickest of the three to start."""
    server = Redis(tmp_path, State(tmp_path / "state.json"))
    yield server
    server.kill()


def test_up_again_finds_the_same_servers_at_the_same_addresses(stack: Stack) -> None:
    before = {server.name: server.pid for server in stack.status()}
    addresses = stack.addresses()
    assert stack.up() == addresses
    assert {server.name: server.pid for server in stack.status()} == before


def test_another_process_finds_the_running_servers(stack: Stack) -> None:
    script = "import sys, pathlib, infra.local; print(infra.local.Stack(pathlib.Path(sys.argv[1])).up().redis_url)"
    command = [sys.executable, "-c", script, str(stack.folder)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == stack.addresses().redis_url


def test_the_written_settings_are_the_addresses_and_nobody_else_may_read_them(stack: Stack) -> None:
    written = dict(line.split("=", 1) for line in (stack.folder / "env").read_text().splitlines())
    assert {name: value.strip("'") for name, value in written.items()} == stack.addresses().environment()


def test_nobody_else_may_read_a_file_that_holds_a_password_or_a_key(stack: Stack) -> None:
    """Found by what stands in them: a file that comes later is looked at as well."""
    secrets = [secret.encode() for secret in json.loads((stack.folder / "state.json").read_text())["secrets"].values()]
    private = {stack.folder / "env", stack.folder / "state.json", stack.redis.data / "redis.conf"}
    for path in [file for file in stack.folder.rglob("*") if file.is_file() and "postgres" not in file.parts]:
        with contextlib.suppress(FileNotFoundError):  # the servers are at work
            if any(secret in path.read_bytes() for secret in secrets):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
                private.discard(path)
    assert private == set()
    assert stat.S_IMODE(stack.postgres.data.stat().st_mode) == 0o700


def test_no_secret_stands_in_a_command_line_or_in_the_repr_of_the_addresses(stack: Stack) -> None:
    addresses = stack.addresses()
    secrets = [stack.s3.secret_access_key] + [
        str(sqlalchemy.make_url(url).password)
        for url in (addresses.database_url, addresses.owner_database_url, addresses.redis_url)
    ]
    shown = [repr(addresses)]
    for server in stack.servers:
        process = server.running()
        assert process is not None
        shown += process.cmdline()
    assert not [secret for secret in secrets for text in shown if secret in text]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_shell_of_postgres_has_no_password_on_its_command_line(stack: Stack) -> None:
    command_line = r"""\! tr '\0' ' ' < /proc/$PPID/cmdline"""
    concord = [sys.executable, "-c", "from tasks.cli import main; main()", "local", "psql"]
    folder = stack.folder.parent
    shown = subprocess.run([*concord, "-c", command_line], cwd=folder, capture_output=True, text=True, check=True)
    assert f"postgresql://{OWNER}@127.0.0.1:{stack.postgres.port}/concord" in shown.stdout
    assert stack.postgres.state.secret(OWNER) not in shown.stdout


def test_redis_refuses_whoever_has_no_password(stack: Stack) -> None:
    no_retry = Retry(NoBackoff(), 0)
    with redis.Redis(port=stack.redis.port, retry=no_retry) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


@pytest.mark.parametrize("login", ["user=postgres", f"user={OWNER}", f"user={APP}", f"user={OWNER} password=guess"])
def test_postgres_refuses_whoever_has_no_password(stack: Stack, login: str) -> None:
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(f"host=127.0.0.1 port={stack.postgres.port} dbname=concord {login}")


@pytest.mark.parametrize(
    ("key_id", "secret"), [("concord-local", "guess"), ("somebody", "guess")], ids=["wrong secret", "unknown key"]
)
def test_s3_refuses_foreign_keys(bucket: Bucket, key_id: str, secret: str) -> None:
    bucket.put("a.txt", b"a")
    foreigner = boto3.client(
        "s3",
        endpoint_url=bucket.endpoint_url,
        region_name=bucket.region,
        aws_access_key_id=key_id,
        aws_secret_access_key=secret,
    )
    with pytest.raises(botocore.exceptions.ClientError) as refusal:
        foreigner.get_object(Bucket=bucket.name, Key="a.txt")
    assert refusal.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403


@pytest.mark.parametrize(("port", "folder"), [("s3", "/"), ("filer", "/buckets/")])
def test_s3_and_the_filer_behind_it_refuse_whoever_has_no_key(
    stack: Stack, bucket: Bucket, port: str, folder: str
) -> None:
    bucket.put("a.txt", b"a")
    url = f"http://127.0.0.1:{stack.s3.state.port(port)}{folder}{bucket.name}/a.txt"
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(url)
    with refusal.value:
        assert refusal.value.code in (401, 403, 404)


def test_the_parts_behind_s3_answer_no_browser(stack: Stack) -> None:
    """The master would give a token to write to whoever asks."""
    for port in ("master", "filer"):
        with pytest.raises(urllib.error.HTTPError, match="404") as refusal:
            urllib.request.urlopen(f"http://127.0.0.1:{stack.s3.state.port(port)}/dir/assign")
        refusal.value.close()


def test_what_the_application_may_do_in_a_fresh_database_is_only_what_was_granted(empty_database: Database) -> None:
    engine = sqlalchemy.create_engine(empty_database.url)
    with engine.connect() as connection, pytest.raises(sqlalchemy.exc.ProgrammingError, match="permission denied"):
        connection.execute(sqlalchemy.text("create table mine (n int)"))
    engine.dispose()


def test_each_test_has_a_redis_database_of_its_own(stack: Stack, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as own, redis.Redis.from_url(stack.redis.url()) as shared:
        own.set("key", "value")
        assert shared.get("key") is None


def test_down_leaves_no_process_and_up_has_the_data_again(tmp_path: Path) -> None:
    stack = Stack(tmp_path / ".concord")
    with stack as addresses:
        processes = [server.running() for server in stack.servers]
        stack.s3.client.put_object(Bucket=addresses.s3_bucket, Key="kept.txt", Body=b"kept")
        with redis.Redis.from_url(addresses.redis_url) as client:
            client.set("kept", "kept")
        with stack.postgres.connect() as connection:
            connection.execute("create table kept as select 'kept' as word")
    assert not [process for process in psutil.process_iter() if str(tmp_path) in _command_line(process)]
    assert [process for process in processes if process is not None and process.is_running()] == []
    assert [server.pid for server in stack.status()] == [None, None, None]

    with stack as again:
        assert again == addresses
        body = stack.s3.client.get_object(Bucket=addresses.s3_bucket, Key="kept.txt")["Body"]
        assert body.read() == b"kept"
        with redis.Redis.from_url(addresses.redis_url) as client:
            assert client.get("kept") == b"kept"
        with stack.postgres.connect() as connection:
            assert connection.execute("select word from kept").fetchone() == ("kept",)


def test_a_killed_server_comes_back_on_its_port_with_its_data(own_redis: Redis) -> None:
    own_redis.start()
    url = own_redis.url()
    with redis.Redis.from_url(url) as client:
        client.set("kept", "kept")
        client.execute_command("WAITAOF", 1, 0, 5000)  # the append-only file is synced once a second
        own_redis.kill()
        own_redis.start()
        assert own_redis.url() == url
        assert client.get("kept") == b"kept"


def test_a_wiped_server_starts_empty_with_the_same_password(own_redis: Redis) -> None:
    own_redis.start()
    url = own_redis.url()
    with redis.Redis.from_url(url) as client:
        client.set("gone", "gone")
        own_redis.start(wipe=True)
        assert own_redis.url() == url
        assert client.get("gone") is None


def test_a_stale_pid_file_is_not_believed_and_its_process_is_left_alone(own_redis: Redis) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    with stranger:
        own_redis.pid_file.parent.mkdir(parents=True)
        own_redis.pid_file.write_text(f"{stranger.pid}\n")
        assert own_redis.running() is None
        own_redis.start()
        process = own_redis.running()
        assert process is not None
        assert process.pid != stranger.pid

        own_redis.pid_file.write_text(f"{stranger.pid}\n")
        own_redis.stop()
        own_redis.kill()
        assert stranger.poll() is None
        process.kill()
        process.wait()
        stranger.communicate(b"\n")
    assert stranger.returncode == 0


def test_a_port_that_something_else_has_taken_is_replaced(own_redis: Redis) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", own_redis.port))
        other.listen()
        taken = own_redis.port
        own_redis.start()
        assert own_redis.port != taken
    own_redis.check()


def test_a_server_that_cannot_start_says_why_with_the_end_of_its_log(own_redis: Redis) -> None:
    (own_redis.data / "appendonlydir").mkdir(parents=True)
    (own_redis.data / "appendonlydir" / "appendonly.aof.manifest").write_text("not a manifest\n")
    with pytest.raises(LocalStackError, match="redis ended while starting") as refusal:
        own_redis.start()
    assert str(own_redis.log) in str(refusal.value)
    assert "Invalid AOF manifest" in str(refusal.value)
    assert own_redis.running() is None


def test_servers_that_this_up_started_are_stopped_when_another_cannot_start(
    tmp_path: Path, own_redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Redis(tmp_path / "broken", State(tmp_path / "broken" / "state.json"))
    (broken.data / "appendonlydir").mkdir(parents=True)
    (broken.data / "appendonlydir" / "appendonly.aof.manifest").write_text("not a manifest\n")
    monkeypatch.setattr(Stack, "servers", (own_redis, broken))
    with pytest.raises(LocalStackError, match="broken"):
        Stack(tmp_path).up()
    assert own_redis.log.exists()
    assert [own_redis.running(), broken.running()] == [None, None]


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
