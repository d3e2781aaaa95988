"""Word of a night that is over: what the webhook and the command are told, and what they cannot do to the planner."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from tasks import nightly_word
from tasks.catalogs import Catalog
from tasks.nightly_word import call_webhook, run_command
from tests.line.site import eventually
from tests.nightly.shop import Shop
from worker.errors import ConcordError, Hold

SECRET = "secret-word"
#: Of a night's summary, what this module reads of it.
SUMMARY = {"run": "0d0c6a1e-6f0a-5b39-a5a7-0c5c4c7f4a51", "source": "shop", "date": "2026-03-29", "planned": 1}


def catalog(**fields: Any) -> Catalog:
    return Catalog(**{"name": "shop", "query": "select 1", "images": [], **fields})


def summary(night: Any) -> dict[str, Any]:
    assert night.state == "done"
    found: dict[str, Any] = night.summary
    return found


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nightly_word, "WEBHOOK_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(nightly_word, "LOOK_EVERY_S", 0.01)


# ---- The webhook -----------------------------------------------------------------------------------------------------


class Hook(HTTPServer):
    """Notes what is posted to it; answers with each of `answers` in turn, the last for ever."""

    def __init__(self, *answers: int) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.answers, self.bodies = list(answers), list[dict[str, Any]]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook?token={SECRET}"


class Answering(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        answers = self.server.answers
        self.send_response(answers.pop(0) if len(answers) > 1 else answers[0])
        self.send_header("Location", self.server.url)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hook(request: pytest.FixtureRequest) -> Iterator[Hook]:
    server = Hook(*request.param)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("hook", [(200,)], indirect=True)
def test_the_webhook_is_told_the_summary(shop: Shop, hook: Hook) -> None:
    shop.fill(1)
    night = summary(shop.night(shop.catalog(webhook=hook.url)))
    assert night["webhook"] == "HTTP 200"
    assert [(body["source"], body["judged"], body["catalog"]["items"]) for body in hook.bodies] == [("shop", 1, 1)]


@pytest.mark.parametrize(
    ("hook", "calls", "comes_to"),
    [((503, 500, 200), 3, "HTTP 200"), ((500,), 4, "500"), ((301,), 4, "301"), ((302,), 4, "302"), ((303,), 4, "303"),
     ((307,), 4, "307"), ((308,), 4, "308")],
    indirect=["hook"],
)  # fmt: skip
def test_a_webhook_that_fails_is_called_again_a_few_times_and_redirects_are_not_followed(
    hook: Hook, calls: int, comes_to: str
) -> None:
    asked = catalog(webhook=hook.url)
    try:
        said = str(call_webhook(asked, SUMMARY))
    except URLError as error:
        said = str(error)
    assert comes_to in said
    assert len(hook.bodies) == calls
    assert SECRET not in said


def test_a_webhook_that_fails_is_said_and_the_night_is_done(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    shop.fill(1)
    night = summary(shop.night(shop.catalog(webhook=f"http://127.0.0.1:1/{SECRET}")))
    assert "Connection refused" in night["webhook"]["error"]
    assert SECRET not in json.dumps(night) + caplog.text


def test_a_webhook_without_tls_is_called_on_this_machine_only(shop: Shop) -> None:
    shop.fill(1)
    night = summary(shop.night(shop.catalog(webhook="http://hooks.example/x")))
    assert "only https://" in night["webhook"]["error"]


Say = Callable[[socket.socket], None]


@contextmanager
def serving(say: Say) -> Iterator[int]:
    """A server that says this to each caller until it has gone; its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def answer(client: socket.socket) -> None:
        with client, suppress(OSError):
            client.recv(65_536)
            say(client)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threads.append(threading.Thread(target=answer, args=(listener.accept()[0],)))
                threads[-1].start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for one in (thread, *threads):
            one.join(5)
            assert not one.is_alive(), "the caller has hung up"


def for_ever(piece: bytes, first: bytes = b"") -> Say:
    def say(client: socket.socket) -> None:
        client.sendall(first)
        while True:
            client.sendall(piece)
            time.sleep(0.01)

    return say


def silence(client: socket.socket) -> None:
    while client.recv(65_536):
        pass


#: A record of TLS that says that 16 kB follow, and then a byte now and then.
SLOW_TLS = for_ever(b"\0", b"\x16\x03\x03\x40\x00")


@pytest.mark.parametrize(
    ("scheme", "say"),
    [("http", silence), ("http", for_ever(b"x")), ("http", for_ever(b"X: y\r\n", b"HTTP/1.1 200 OK\r\n")),
     ("http", for_ever(b"HTTP/1.1 100 Continue\r\n\r\n")), ("https", silence), ("https", SLOW_TLS)],
    ids=["silence", "status", "headers", "continue", "tls silence", "tls"],
)  # fmt: skip
def test_a_server_that_never_ends_its_answer_is_cut_off(scheme: str, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nightly_word, "WEBHOOK_LIMIT_S", 0.3)
    monkeypatch.setattr(nightly_word, "WEBHOOK_ATTEMPTS", 2)
    with serving(say) as port, pytest.raises(URLError) as caught:
        call_webhook(catalog(webhook=f"{scheme}://127.0.0.1:{port}/{SECRET}"), SUMMARY)
    assert SECRET not in str(caught.value)


def test_a_name_that_is_not_found_in_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = threading.Event()

    def never(*_: Any, **__: Any) -> Any:
        found.wait()
        raise OSError

    monkeypatch.setattr(nightly_word, "WEBHOOK_LIMIT_S", 0.05)
    monkeypatch.setattr(nightly_word, "WEBHOOK_ATTEMPTS", 1)
    monkeypatch.setattr(socket, "getaddrinfo", never)
    try:
        with pytest.raises(URLError, match="did not answer within"):
            call_webhook(catalog(webhook="https://hooks.example/x"), SUMMARY)
    finally:
        found.set()


def test_the_body_of_an_answer_is_not_read() -> None:
    endless = for_ever(b"x" * 1_000_000, b"HTTP/1.1 200 OK\r\n\r\n")
    with serving(endless) as port:
        assert call_webhook(catalog(webhook=f"http://127.0.0.1:{port}/"), SUMMARY) == "HTTP 200"


def test_the_host_of_an_address_is_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nightly_word, "WEBHOOK_ATTEMPTS", 1)

    def quoting(address: str, *_: Any, **__: Any) -> Any:
        raise OSError(f"certificate is not valid for {address}")

    monkeypatch.setattr(socket, "getaddrinfo", quoting)
    with pytest.raises(URLError, match=r"certificate is not valid for \.\.\.") as caught:
        call_webhook(catalog(webhook=f"https://{SECRET}.example/x"), SUMMARY)
    assert SECRET not in str(caught.value)


# ---- The command -----------------------------------------------------------------------------------------------------


def run(*command: str, stopping: Callable[[], bool] = lambda: False) -> str | None:
    return run_command(catalog(command=list(command)), SUMMARY, stopping)


def test_the_command_reads_the_summary(shop: Shop, tmp_path: Path) -> None:
    shop.fill(1)
    heard = tmp_path / "heard.json"
    night = summary(shop.night(shop.catalog(command=["sh", "-c", f"cat > {heard}"])))
    assert night["command"] == "exit status 0"
    assert json.loads(heard.read_text())["catalog"]["items"] == 1


@pytest.mark.parametrize("command", [["false"], ["/no/such/program"]])
def test_a_command_that_fails_is_said_and_the_night_is_done(shop: Shop, command: list[str]) -> None:
    shop.fill(1)
    assert "error" in summary(shop.night(shop.catalog(command=command)))["command"]


def test_the_command_has_none_of_the_planners_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONCORD_DATABASE_URL", "CONCORD_S3_SECRET_ACCESS_KEY", "SHOP_DSN", "PGPASSWORD", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("LANG", "C.UTF-8")
    run("sh", "-c", f"env -0 > {tmp_path}/env; ls /proc/self/fd > {tmp_path}/files")
    given = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().split("\0") if line)
    of_the_shell = {"PWD", "OLDPWD", "SHLVL", "_"}
    assert {name for name in given if name not in of_the_shell} <= {
        "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "CONCORD_RUN_ID", "CONCORD_SOURCE", "CONCORD_DATE",
    }  # fmt: skip
    assert (given["PATH"], given["HOME"], given["LANG"]) == (os.environ["PATH"], os.environ["HOME"], "C.UTF-8")
    assert [given[f"CONCORD_{name}"] for name in ("RUN_ID", "SOURCE", "DATE")] == [
        SUMMARY["run"], "shop", "2026-03-29",
    ]  # fmt: skip
    assert len((tmp_path / "files").read_text().split()) <= 4, "its three, and the folder that is listed"


@pytest.mark.parametrize(
    "script",
    ["sleep 60", "sleep 60 & wait", "exec >&- 2>&-; sleep 60", "trap '' TERM; yes", "cat; sleep 60 & sleep 60"],
)
def test_a_command_that_does_not_end_is_ended_with_all_that_it_started(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    psutil = pytest.importorskip("psutil")
    monkeypatch.setattr(nightly_word, "COMMAND_LIMIT_S", 0.3)
    with pytest.raises(ConcordError, match="the command took over 0 s and was ended"):
        run("sh", "-c", f"echo $$ > {tmp_path}/group; {script}", SECRET)
    group = int((tmp_path / "group").read_text())
    eventually(lambda: not any(is_of(one, group) for one in psutil.process_iter()), "all of them are gone")


def is_of(process: Any, group: int) -> bool:
    """Whether it is of the group, and no zombie that waits for init."""
    with suppress(OSError, ProcessLookupError):
        return os.getpgid(process.pid) == group and process.status() != "zombie"
    return False


def test_a_planner_that_stops_does_not_wait_for_the_command() -> None:
    with pytest.raises(Hold):
        run("sleep", "60", stopping=lambda: True)


def test_what_a_command_leaves_running_is_not_waited_for() -> None:
    assert run("sh", "-c", "sleep 2 & exit 0") == "exit status 0"


@pytest.mark.parametrize(("status", "level"), [(0, "INFO"), (3, "WARNING")])
def test_what_a_command_writes_goes_to_the_log_and_no_further_than_a_page(
    status: int, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    script = f"echo to the output; echo to the errors >&2; head -c 50000000 /dev/zero | tr '\\0' '\\033'; exit {status}"
    with caplog.at_level("INFO"), suppress(ConcordError):
        run("sh", "-c", script)
    (record,) = [one for one in caplog.records if "wrote" in one.getMessage()]
    said = record.getMessage()
    assert record.levelname == level
    assert said.startswith("the command of shop wrote: to the output\nto the errors\n")
    assert len(said) < nightly_word.OUTPUT_BYTES + 100
    assert "\033" not in said


def test_a_summary_that_is_longer_than_a_pipe_holds_up_no_command_that_does_not_read_it() -> None:
    long = {**SUMMARY, "by": ["x" * 1_000_000]}
    assert run_command(catalog(command=["true"]), long, lambda: False) == "exit status 0"
