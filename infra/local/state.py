"""What a local stack remembers between runs: its ports and its secrets, chosen once."""

import json
import secrets
import socket
import threading
from collections.abc import Iterable
from pathlib import Path

HOST = "127.0.0.1"

#: Octets of randomness in a password or key.
SECRET_BYTES = 24


def is_free(port: int) -> bool:
    """Whether a server could listen on 127.0.0.1:`port` now. Connections that linger there do not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


class State:
    """Ports and secrets by name, in one JSON file that only its owner may read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # the servers start in parallel and share the file

    def port(self, name: str) -> int:
        """The port called `name`, chosen on the first call."""
        with self._lock:
            state = self._read()
            if name not in state["ports"]:
                state["ports"][name] = self._unused_port(state["ports"].values())
                self._write(state)
            return int(state["ports"][name])

    def choose_again(self, names: Iterable[str]) -> bool:
        """Forget those of the ports that something else has taken meanwhile; True if there were any."""
        with self._lock:
            state = self._read()
            taken = [name for name in names if name in state["ports"] and not is_free(int(state["ports"][name]))]
            for name in taken:
                del state["ports"][name]
            if taken:
                self._write(state)
            return bool(taken)

    def secret(self, name: str) -> str:
        """The secret called `name`, made of URL-safe characters, drawn on the first call."""
        with self._lock:
            state = self._read()
            if name not in state["secrets"]:
                state["secrets"][name] = secrets.token_urlsafe(SECRET_BYTES)
                self._write(state)
            return str(state["secrets"][name])

    def _read(self) -> dict[str, dict[str, str | int]]:
        if not self._path.exists():
            return {"ports": {}, "secrets": {}}
        state: dict[str, dict[str, str | int]] = json.loads(self._path.read_text())
        return state

    def _write(self, state: dict[str, dict[str, str | int]]) -> None:
        write_private(self._path, json.dumps(state, indent=2) + "\n")

    @staticmethod
    def _unused_port(taken: Iterable[str | int]) -> int:
        while True:
            with socket.socket() as probe:
                probe.bind((HOST, 0))
                port: int = probe.getsockname()[1]
            if port not in taken:
                return port


def write_private(path: Path, text: str) -> None:
    """Replace `path` in one step by a file with mode 0600, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    fresh.touch(mode=0o600)
    fresh.write_text(text)
    fresh.replace(path)
