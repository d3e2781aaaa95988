"""Where the commands write: results to standard output, bars and sentences to standard error."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

#: Columns of a table that is written to a file or a pipe.
WIDTH = 120
#: Control characters but for tabs and new lines.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

err = Console(stderr=True, soft_wrap=True, highlight=False)
out = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else WIDTH)


@contextmanager
def progress(console: Console) -> Iterator[Progress]:
    """A progress bar on standard error; nothing at all where that is no terminal."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        yield bar


def plain(value: Any) -> str:
    """A value of a row as text."""
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="milliseconds")
    if isinstance(value, float):
        return f"{value:.6f}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def verbatim(value: Any) -> Text:
    """A value of a row for a table: brackets in a producer's words are no markup, nor do they steer the terminal."""
    return Text(CONTROLS.sub("\ufffd", plain(value)))
