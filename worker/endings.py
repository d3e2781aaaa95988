"""How a worker ends: the first signal lets batches end, the second does not, and a batch that hangs ends it."""

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from celery.worker import state as worker_state

log = logging.getLogger(__name__)

#: How often the watchdog looks.
WATCH_EVERY_S = 1.0
#: Beyond the limit of a hang, how long the interpreter may be held by native code before it counts as held for ever.
STALL_MARGIN_S = 5.0
#: Exit status of a worker that ended itself because a batch hung (sysexits.h: internal software error).
EXIT_HUNG = 70
#: Exit status of a worker whose device no longer answers (sysexits.h: system error).
EXIT_DEVICE_LOST = 71


def is_stopping() -> bool:
    return worker_state.should_stop is not None or worker_state.should_terminate is not None


def leave_at_the_second_signal() -> None:
    """SIGTERM and Ctrl-C let batches end. Whoever signals again, or says SIGQUIT, does not want to wait for that.

    Threads cannot be ended, and Celery would wait for them for as long as the model takes. Nothing is lost: what is
    in hand is not acknowledged, and comes back after visibility_timeout. Called on the main thread, after Celery has
    set its own handlers. Ctrl-C gets Celery's handler of SIGTERM: that of Ctrl-C puts another in its own place, which a
    second Ctrl-C would meet before ours stands again, and which fails with threads.
    """
    handler = partial(on_signal, signal.getsignal(signal.SIGTERM))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, handler)


def on_signal(celerys: Any, number: int, frame: Any) -> None:
    if number == signal.SIGQUIT or is_stopping():
        leave_at_once(number)
    celerys(number, frame)


def leave_at_once(number: int) -> NoReturn:
    # Not by the log: this is a signal handler, and what it interrupted may be writing there.
    os.write(2, f"{signal.Signals(number).name}: this worker ends at once; what it has in hand comes back\n".encode())
    os._exit(128 + number)


class Watchdog(threading.Thread):
    """Calls `look` every second; a thread, since the hub does not turn while a worker that stops awaits its batches."""

    def __init__(self, look: Callable[[], None], hang_limit_s: float) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.look, self.stall_limit_s = look, hang_limit_s + STALL_MARGIN_S

    def run(self) -> None:
        while True:
            # Native code that never lets go of the interpreter stops this thread too. Unless it comes by again in
            # time, a thread that needs no interpreter writes all stacks and ends the process, with status 1.
            faulthandler.dump_traceback_later(self.stall_limit_s, exit=True, file=sys.__stderr__ or 2)
            time.sleep(WATCH_EVERY_S)
            try:
                self.look()
            except Exception:
                log.exception("the watchdog could not look")


def end_hung(limit_s: float) -> NoReturn:
    """Threads cannot be ended: a batch that hangs ends the process, and its messages come back."""
    log.critical("a batch has hung for more than %s s: this worker ends, its messages will be delivered again", limit_s)
    # Celery replaces sys.stderr by a logger, which has no file descriptor.
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    os._exit(EXIT_HUNG)


def end_device_lost(error: Exception) -> NoReturn:
    """Only another process can use the device again."""
    log.critical("%s. This worker ends, its messages will be delivered again", error)
    os._exit(EXIT_DEVICE_LOST)
