"""Word of a night that is over: the webhook, and the command.

Both are somebody else's. Neither may hold the planner up, fill its memory or its log, or learn more than the summary.
"""

import json
import logging
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from threading import Thread
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from tasks.catalogs import Catalog
from tasks.console import CONTROLS
from tasks.settings import passed_on
from worker.errors import ConcordError, Hold

log = logging.getLogger(__name__)

#: One attempt at the webhook, from looking up its name to the last header of its answer.
WEBHOOK_LIMIT_S = 10.0
WEBHOOK_ATTEMPTS = 4
#: Before the second attempt; doubles with each further one.
WEBHOOK_FIRST_WAIT_S = 1.0
COMMAND_LIMIT_S = 300.0
#: What a command writes up to here goes to the log.
OUTPUT_BYTES = 4_000
#: What a command is told of the night in its environment, by the summary's field.
OF_THE_NIGHT = {"CONCORD_RUN_ID": "run", "CONCORD_SOURCE": "source", "CONCORD_DATE": "date"}
#: Between two looks at a command that writes nothing.
LOOK_EVERY_S = 0.1

Stopping = Callable[[], bool]


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect could lead past the check of the address, and take the summary elsewhere."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Attempt:
    """One attempt at an address, which can be cut off: a timeout of each read alone would never end a server that
    sends a byte now and then.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.lines: list[socket.socket] = []

    def note(self, line: socket.socket) -> None:
        # Its own handle of the line: TLS takes the other one over.
        self.lines.append(line.dup())
        if self.is_over:
            self.cut()

    def cut(self) -> None:
        self.is_over = True
        for line in self.lines:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for line in self.lines:
            line.close()


class Noted(HTTPConnection):
    """A connection that its attempt can cut, also while TLS shakes hands."""

    attempt: Attempt

    def connect(self) -> None:
        super().connect()
        self.attempt.note(self.sock)


class NotedTls(HTTPSConnection, Noted):
    pass


class Noting(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """Opens both kinds of addresses by connections that are noted."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__()
        self.attempt = attempt

    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(self.noted(Noted), request)

    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(self.noted(NotedTls), request)

    def noted(self, kind: type[Noted]) -> Any:
        def made(*arguments: Any, **options: Any) -> Noted:
            connection = kind(*arguments, **options)
            connection.attempt = self.attempt
            return connection

        return made


def call_webhook(catalog: Catalog, summary: dict[str, Any]) -> str | None:
    """POST the summary. Raises URLError after the last attempt; the address, which may hold a token, is in no error.

    Of the answer nothing is read but its status and headers.
    """
    url = catalog.webhook_url()
    if url is None:
        return None
    body = json.dumps(summary).encode()
    tries = Retrying(
        retry=retry_if_exception_type(OSError),
        stop=stop_after_attempt(WEBHOOK_ATTEMPTS),
        wait=wait_exponential(multiplier=WEBHOOK_FIRST_WAIT_S),
        reraise=True,
    )
    return tries(post_in_time, url, body)


def post_in_time(url: str, body: bytes) -> str:
    """One attempt, on a thread that is left behind where it does not end in time. Raises URLError."""
    attempt, came_to = Attempt(), Future[str]()

    def work() -> None:
        try:
            came_to.set_result(post(url, body, attempt))
        except BaseException as error:
            came_to.set_exception(error)
        finally:
            attempt.close()

    Thread(target=work, daemon=True).start()
    try:
        return came_to.result(WEBHOOK_LIMIT_S)
    except TimeoutError:
        attempt.cut()
        raise URLError(f"the webhook did not answer within {WEBHOOK_LIMIT_S:g} s") from None


def post(url: str, body: bytes, attempt: Attempt) -> str:
    """Raises URLError, whose words are ours or the system's, never the answer's or the address's."""
    headers = {"Content-Type": "application/json", "User-Agent": "concord"}
    request = urllib.request.Request(url, body, headers)
    handlers: list[urllib.request.BaseHandler] = [NoRedirect(), Noting(attempt)]
    if urlsplit(url).scheme == "http":
        # Nor through a proxy of the environment's, for an address on this very machine.
        handlers.append(urllib.request.ProxyHandler({}))
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=WEBHOOK_LIMIT_S) as answer:
            return f"HTTP {answer.status}"
    except HTTPError as error:
        error.close()
        raise URLError(f"the webhook answered HTTP {error.code}") from None
    except HTTPException as error:
        raise URLError(f"the webhook's answer is not HTTP: {type(error).__name__}") from None
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        words = str(reason).replace(str(urlsplit(url).hostname), "...")
        raise URLError(f"the webhook: {words or type(reason).__name__}") from None


def run_command(catalog: Catalog, summary: dict[str, Any], stopping: Stopping) -> str | None:
    """Run the catalog's command with the summary on its standard input; what it writes goes to the log, cut.

    It is given none of the planner's environment but `passed_on`, since that holds passwords. Where it does not end in
    time it is ended, with all that it started. Raises ConcordError, which does not quote its arguments, OSError, and
    Hold where the planner is to stop.
    """
    if catalog.command is None:
        return None
    of_the_night = {name: summary[field] for name, field in OF_THE_NIGHT.items()}
    with tempfile.TemporaryFile() as given:
        given.write(json.dumps(summary).encode())
        given.seek(0)
        process = subprocess.Popen(
            catalog.command,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**passed_on(), **of_the_night},
            start_new_session=True,
        )
    with process:
        said, is_over = heard(process, COMMAND_LIMIT_S, stopping)
        if not is_over:
            os.killpg(process.pid, signal.SIGKILL)
    failed = not is_over or bool(process.returncode)
    if said:
        words = CONTROLS.sub("\ufffd", said.decode(errors="replace")).strip()
        log.log(logging.WARNING if failed else logging.INFO, "the command of %s wrote: %s", catalog.name, words)
    if not is_over:
        if stopping():
            raise Hold
        raise ConcordError(f"the command took over {COMMAND_LIMIT_S:.0f} s and was ended")
    if failed:
        raise ConcordError(f"the command ended with exit status {process.returncode}")
    return "exit status 0"


def heard(process: subprocess.Popen[bytes], limit_s: float, stopping: Stopping) -> tuple[bytes, bool]:
    """The first OUTPUT_BYTES that it writes, and whether it ended by itself; the rest is read and let go.

    What it leaves running may write on: nobody waits for that.
    """
    assert process.stdout is not None
    said, is_open, end = b"", True, time.monotonic() + limit_s
    while time.monotonic() < end and not stopping():
        if is_open and select.select([process.stdout], [], [], LOOK_EVERY_S)[0]:
            piece = os.read(process.stdout.fileno(), 65_536)
            said, is_open = said + piece[: OUTPUT_BYTES - len(said)], bool(piece)
        elif process.poll() is not None:
            return said, True
        elif not is_open:
            time.sleep(LOOK_EVERY_S)
    return said, process.poll() is not None
