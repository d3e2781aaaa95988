"""The client of an HTTP batching server, which is the queue too: what it has to ask is in its memory alone.

128 requests at a time, so that the next batch waits while one is judged; rows are written as many at a time as have
come. A request that fails is counted and not sent again; the client waits until the server is there and goes on.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import psycopg
import urllib3

from infra.bench.others import parts

AT_ONCE = 128
ROWS = 64
LOOK_EVERY_S = 0.1


class Asking:
    """Asks one server, from threads of its own."""

    def __init__(self, url: str, connection: psycopg.Connection[Any]) -> None:
        self.url, self.connection = url, connection
        self.http = urllib3.PoolManager(maxsize=AT_ONCE, block=True, retries=False, timeout=120)
        self.is_up, self.closed = threading.Event(), threading.Event()
        self.is_up.set()

    def ask_all(self, pairs: Sequence[Mapping[str, str]]) -> int:
        """How many of these requests failed; the answers to the others are in Postgres."""
        answers: SimpleQueue[parts.Row | None] = SimpleQueue()
        with ThreadPoolExecutor(1) as writing, ThreadPoolExecutor(AT_ONCE) as asking:
            written = writing.submit(self.write, answers)
            failed = sum(row is None for row in asking.map(lambda pair: self.ask(pair, answers), pairs))
            answers.put(None)
            written.result()
        return failed

    def ask(self, pair: Mapping[str, str], answers: "SimpleQueue[parts.Row | None]") -> parts.Row | None:
        while not self.is_up.wait(LOOK_EVERY_S):
            if self.closed.is_set():
                return None
            self.look()
        try:
            response = self.http.request("POST", f"{self.url}/predict", json=dict(pair))
        except urllib3.exceptions.HTTPError:
            self.is_up.clear()
            return None
        if response.status != 200:
            return None
        row: parts.Row = tuple(response.json()["row"])
        answers.put(row)
        return row

    def look(self) -> None:
        try:
            if self.http.request("GET", f"{self.url}/health").status == 200:
                self.is_up.set()
        except urllib3.exceptions.HTTPError:
            pass

    def write(self, answers: "SimpleQueue[parts.Row | None]") -> None:
        rows: list[parts.Row] = []
        for row in iter(answers.get, None):
            rows.append(row)
            if len(rows) == ROWS or answers.empty():
                parts.insert(self.connection, rows)
                rows = []
        if rows:
            parts.insert(self.connection, rows)
