"""A `celery worker` whose model does what a text says: what a worker survives is tried on a real one.

    python -m tests.line.broken_worker ROOM BRPOP_S -A tasks worker ...

More than ROOM tokens at once (pairs times padded length) are out of memory; so are more than ROOM // 16 pictures.
A text EXITS ends the process; HANGS never comes back, STALLS neither, and lets no other thread run meanwhile; LOSES
has the device fail from then on; `waits_for(path)` comes back once that file is there; `unread_until(path)` too, and
holds its batch in the tokenizer. Each says so in the log first. A picture of CRASHES pixels makes the decoder read
address 0. A BRPOP that leaves a lane out lasts BRPOP_S seconds.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

EXITS = "ends the process"
HANGS = "never comes back"
STALLS = "holds the interpreter"
LOSES = "loses the device"
CRASHES = (13, 17)
#: The status of a process that EXITS ended.
EXIT_STATUS = 9
#: The least length to which a prompt is padded, so that as many pictures fit as shortest prompts.
SHORTEST = 16

_WAITS, _UNREAD = "waits for ", "is not read before "


def waits_for(path: Path) -> str:
    """A text that holds its batch in the model until there is such a file."""
    return f"{_WAITS}{path}"


def unread_until(path: Path) -> str:
    """A text that holds its batch in the tokenizer until there is such a file."""
    return f"{_UNREAD}{path}"


def broken(room: int = sys.maxsize, brpop_s: int = 1) -> Sequence[str]:
    """For `Site.worker(program=...)`."""
    return __name__, str(room), str(brpop_s)


def obey(text: str) -> None:
    """What a text wants to happen while it is in the model."""
    if text not in (EXITS, HANGS, STALLS, LOSES) and not text.startswith(_WAITS):
        return
    print(f"in the model: {text}", flush=True)
    if text == EXITS:
        os._exit(EXIT_STATUS)
    if text == HANGS:
        threading.Event().wait()
    if text == STALLS:
        ctypes.PyDLL(None).sleep(3_600)  # PyDLL, unlike CDLL, keeps the interpreter's lock
    if text == LOSES:
        lose_device()
    wait_until_there(text.removeprefix(_WAITS))


def wait_until_there(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)


def lose_device() -> None:
    from worker.moderator import Moderator

    Moderator._device_answers = lambda self: False  # type: ignore[method-assign]
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def limited(step: Callable[..., Any], size: Callable[[Any], int], room: int) -> Callable[..., Any]:
    """A step of the model that runs out of memory where its first argument is too large."""
    import torch

    def within(model: Any, first: Any, *others: Any) -> Any:
        if size(first) > room:
            print(f"no room for {tuple(first.shape)}", flush=True)
            raise torch.OutOfMemoryError(f"no room for {tuple(first.shape)}")
        return step(model, first, *others)

    return within


def break_model(room: int) -> None:
    from worker.model.ofa import OFA
    from worker.moderator import Moderator

    OFA.encode = limited(OFA.encode, lambda ids: ids.numel(), room)  # type: ignore[method-assign]
    OFA.trunk = limited(OFA.trunk, lambda pixels: len(pixels), room // SHORTEST)  # type: ignore[method-assign]
    judge = Moderator._judge_slice

    def obediently(moderator: Moderator, slice_: Sequence[Any], features: Any) -> Any:
        for item in slice_:
            obey(item.prepared.question.text)
        return judge(moderator, slice_, features)

    Moderator._judge_slice = obediently  # type: ignore[method-assign]


def break_tokenizer() -> None:
    from worker import moderator

    make_prompt = moderator.make_prompt

    def in_time(text: str, *others: Any) -> Any:
        if text.startswith(_UNREAD):
            print(f"in the tokenizer: {text}", flush=True)
            wait_until_there(text.removeprefix(_UNREAD))
        return make_prompt(text, *others)

    moderator.make_prompt = in_time


def break_decoder() -> None:
    from PIL.ImageFile import ImageFile

    load = ImageFile.load

    def read_nothing(image: ImageFile) -> Any:
        if image.size == CRASHES:
            os.write(2, b"in the decoder: a crash\n")
            ctypes.string_at(0)
        return load(image)

    ImageFile.load = read_nothing  # type: ignore[method-assign]


def wait_for_open_lanes(brpop_s: int) -> None:
    from kombu.transport.redis import Channel

    start = Channel._brpop_start

    def brpop_start(channel: Any, timeout: int | None = None) -> None:
        cycle = channel._queue_cycle
        start(channel, timeout if all(map(cycle.is_open, cycle.items)) else brpop_s)

    Channel._brpop_start = brpop_start


def main() -> None:
    from celery.__main__ import main as celery

    break_model(room=int(sys.argv.pop(1)))
    wait_for_open_lanes(brpop_s=int(sys.argv.pop(1)))
    break_tokenizer()
    break_decoder()
    celery()


if __name__ == "__main__":
    main()
