"""Who can reach the line from outside while it works: nobody."""

import contextlib
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.submit import Pair, submit
from tests.line.site import Site, Worker

LOOPBACK = "127.0.0.1"


def family(process: psutil.Process) -> list[psutil.Process]:
    """A process and all that it has started."""
    return [process, *process.children(recursive=True)]


def open_addresses(process: psutil.Process) -> Iterator[str]:
    """The addresses that a process can be reached at over IP; its Unix sockets are found closed to other accounts."""
    for socket in process.net_connections("inet"):
        # A UDP socket has no state: bound is open.
        if socket.status == psutil.CONN_LISTEN or (socket.status == psutil.CONN_NONE and socket.laddr):
            yield socket.laddr.ip
    for socket in process.net_connections("unix"):
        if socket.laddr:
            # To connect is to write. A name that is no file would be open to everybody.
            assert not stat.S_IMODE(Path(socket.laddr).stat().st_mode) & stat.S_IWOTH, socket.laddr


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not show other accounts' sockets")
def test_nothing_can_be_reached_from_another_machine_or_account_while_pairs_are_judged(
    site: Site, stack: Any, worker: Worker
) -> None:
    servers = {server.name: server.running() for server in stack.servers}
    assert None not in servers.values()
    processes = {name: family(process) for name, process in servers.items()}
    processes |= {"worker": family(psutil.Process(worker.process.pid)), "producer": [psutil.Process()]}

    accepted = submit([Pair(image="s3://line/square.jpg", text=f"{n} dogs on a boat") for n in range(64)])
    listening: dict[str, set[str]] = {name: set() for name in processes}
    for name, members in processes.items():
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):  # Postgres ends processes of its own when it likes
                listening[name].update(open_addresses(member))
    site.verdicts(accepted.pair_ids)

    assert {name: listening[name] for name in servers} == {name: {LOOPBACK} for name in servers}
    assert listening["worker"] == set()
    assert listening["producer"] <= {LOOPBACK}
