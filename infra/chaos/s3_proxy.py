"""A proxy before S3 that spoils its answers: errors, resets, half bodies, slowness. On 127.0.0.1 alone.

Requests are handed on as they came, the Host header among them, so that the signature over it still holds.
"""

import contextlib
import http.client
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from infra.local.state import HOST

#: What the proxy can do to an answer; `mixed` draws one of them each time.
KINDS = ("500", "503", "reset", "half", "slow")
#: S3's own words for the two errors.
ERRORS = {"500": "InternalError", "503": "SlowDown"}
#: Seconds by which a slow answer is late.
SLOW_S = 1.5
#: How long S3 itself may take.
UPSTREAM_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Trouble:
    """What happens to this share of the answers."""

    how: str
    share: float = 1.0


class S3Proxy(ThreadingHTTPServer):
    """Serves on threads of its own from entry to exit; `trouble` may be set at any moment."""

    daemon_threads = True
    #: A worker's threads all connect at once.
    request_queue_size = 128

    def __init__(self, upstream_url: str, seed: int = 0) -> None:
        super().__init__((HOST, 0), Handler)
        self.upstream = urlsplit(upstream_url).netloc
        self.trouble: Trouble | None = None
        self.done: Counter[str] = Counter()  # answers by what was done to them; `passed` are whole
        self.stopping = threading.Event()
        self.chance = random.Random(f"{seed}/answers")
        self.connections: set[socket.socket] = set()

    @property
    def endpoint_url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, name="s3-proxy", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stopping.set()
        self.shutdown()
        self.server_close()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def troubled(self, trouble: Trouble) -> Iterator[None]:
        """Spoil answers inside."""
        self.trouble = trouble
        try:
            yield
        finally:
            self.trouble = None

    def fate(self) -> str:
        """What is to happen to the next answer."""
        trouble = self.trouble
        if trouble is None or self.chance.random() >= trouble.share:
            return "passed"
        return self.chance.choice(KINDS) if trouble.how == "mixed" else trouble.how

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        # Without the polite end that the base class begins with, so that a reset is one.
        self.connections.discard(request)
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A worker that was killed, or S3 being away: either way the connection ends, and that is all."""


class Handler(BaseHTTPRequestHandler):
    """One connection of a client; it keeps one connection to S3."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: S3Proxy
    upstream: http.client.HTTPConnection | None = None

    def do_GET(self) -> None:
        fate = self.server.fate()
        self.server.done[fate] += 1
        match fate:
            case "500" | "503":
                self.refuse(int(fate), ERRORS[fate])
            case "reset":
                self.reset()
            case "slow":
                self.server.stopping.wait(SLOW_S)
                self.hand_on()
            case _:
                self.hand_on(half=fate == "half")

    do_HEAD = do_GET

    def hand_on(self, *, half: bool = False) -> None:
        """Ask S3 the same and give its answer; `half` of the body, where it has one, and then nothing more."""
        if self.upstream is None:
            self.upstream = http.client.HTTPConnection(self.server.upstream, timeout=UPSTREAM_TIMEOUT_S)
        self.upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            self.upstream.putheader(name, value)
        self.upstream.endheaders()
        answer = self.upstream.getresponse()
        body = answer.read()
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if half else body)
        self.close_connection = self.close_connection or half

    def refuse(self, status: int, code: str) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>please try again</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reset(self) -> None:
        # Closed with nothing to linger for, a connection ends with RST.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def finish(self) -> None:
        if self.upstream is not None:
            self.upstream.close()
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line a picture would be all that one sees."""
