"""`concord ...` in the process of a test: what it prints, and how it ends."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tasks import cli


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


Concord = Callable[..., Ran]


def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *command: str) -> Concord:
    """What calls `concord`, or one of its commands, with the arguments that it is given."""

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["concord", *command, *map(str, arguments)])
        status = 0
        try:
            cli.main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
        return Ran(status, *capsys.readouterr())

    return run
