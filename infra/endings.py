"""Ctrl-C, SIGTERM and a closed terminal end a program in order: what it has started is ended before it.

with in_order():             # asked to end, the body gets Ended raised in it, once
    with undisturbed():      # but not in here: an end half done would leave processes behind
        ...
"""

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(BaseException):
    """Somebody asked for the end; `signal` says how. No `except Exception` on the way stops it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


@contextlib.contextmanager
def in_order(farewell: str = "") -> Iterator[None]:
    """Heed the signals inside; asked to end, say farewell behind it and exit with 128 and the signal's number.

    For a whole program, on its main thread. A signal that was ignored before stays so, as under nohup.
    """
    for one in ENDINGS:
        if signal.getsignal(one) is not signal.SIG_IGN:
            signal.signal(one, end)
    try:
        yield
    except Ended as ended:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(farewell, end="\n" if farewell else "", flush=True)
        sys.exit(128 + ended.signal)


def end(number: int, _: object = None) -> NoReturn:
    """A signal's handler. Those that follow would cut short what the first one began."""
    for one in ENDINGS:
        signal.signal(one, signal.SIG_IGN)
    raise Ended(number)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Whoever asks for the end meanwhile is heeded afterwards."""
    late: list[int] = []
    before = {one: signal.getsignal(one) for one in ENDINGS}
    for one, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(one, lambda number, _: late.append(number))
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        for number in late[:1]:
            signal.raise_signal(number)
