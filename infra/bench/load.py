"""A producer at full load: `python -m infra.bench.load PAIRS.jsonl`, until SIGTERM.

The bulk lane of the outbox never runs dry, and a live pair comes every now and then. The settings are those of any
producer. At its end it says how many pairs were accepted.
"""

import json
import sys
import time
from itertools import cycle, islice
from pathlib import Path

from db import outbox
from infra.endings import in_order, undisturbed
from tasks.submit import PAIRS_PER_MESSAGE, Pair, engine, submit

#: Messages of the bulk lane below which more are submitted: some seconds of work, far more than Redis is asked for.
KEPT_WAITING = 64
#: Messages that are submitted at a time.
AT_ONCE = 16
#: Between two live pairs, and two looks at the outbox.
PAUSE_S = 0.25
#: What of a line is the pair's; its id is new each time.
FIELDS = ("image", "text", "premise", "policy", "ref")


class Load:
    """What has been submitted so far."""

    def __init__(self, file: Path) -> None:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        self.pairs = cycle([Pair(**{name: row[name] for name in FIELDS if name in row}) for row in rows])
        self.accepted = 0

    def turn(self) -> None:
        """Fill up what is missing of the bulk lane, and add a live pair."""
        with engine().connect() as connection:
            waiting = outbox.backlog(connection)["bulk"]["messages"]
        if waiting < KEPT_WAITING:
            bulk = list(islice(self.pairs, AT_ONCE * PAIRS_PER_MESSAGE))
            self.accepted += len(submit(bulk, lane="bulk", source="soak").pair_ids)
        self.accepted += len(submit([next(self.pairs)], lane="live", source="soak").pair_ids)


def main() -> None:
    load = Load(Path(sys.argv[1]))
    try:
        while True:
            with undisturbed():  # accepted is counted
                load.turn()
            time.sleep(PAUSE_S)
    finally:
        print(json.dumps({"accepted": load.accepted}), flush=True)


if __name__ == "__main__":
    with in_order():
        main()
