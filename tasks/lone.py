"""A message that its worker may have died of is judged alone: whole at first, and pair by pair where a worker has died
of that as well, until the pair that ends workers has had its tries.

Most such messages are innocent. They were in hand when a worker was killed, or Redis forgot them twice; hundreds may
come at once, and pair by pair takes some twenty times as long.
"""

import logging
from collections.abc import Callable, Sequence
from uuid import UUID, uuid5

from sqlalchemy import Engine

from db import suspects
from tasks.settling import Case
from tasks.storing import persist
from worker.errors import DeviceLost, ErrorCode, GivenUp, Hold

log = logging.getLogger(__name__)

#: A pair over which the worker died this often while it was judged alone is failed.
LONE_TRIES = 3
#: So often a message is tried whole.
WHOLE_TRIES = 1


def judge_alone(
    cases: Sequence[Case], judge: Callable[[Sequence[Case]], None], engine: Engine, stopping: Callable[[], bool]
) -> None:
    """Have `judge` answer these cases of one message; a pair that has had its tries is GivenUp.

    A try is committed before it begins and deleted when it ends: what stays counted are tries that the worker did not
    outlive, until the message is settled (tasks/storing.py). Raises Hold where the worker stops between two pairs, and
    what `judge` raises; after DeviceLost the worker ends, so that try stays counted.
    """
    if not cases:
        return
    message = cases[0].message

    def begin(pair_id: UUID) -> int:
        with engine.begin() as connection:
            return suspects.begin(connection, message.submitted_at, pair_id, message.message_id)

    def end(pair_id: UUID) -> None:
        with engine.begin() as connection:
            suspects.end(connection, message.submitted_at, pair_id)

    def attempt(these: Sequence[Case], pair_id: UUID | None, tries: int) -> bool:
        """Judge these under that id's count; False where it has had its tries."""
        assert pair_id is not None
        if persist(lambda: begin(pair_id), stopping) > tries:
            return False
        lives = True
        try:
            judge(these)
        except DeviceLost:
            lives = False  # for as long as it takes to end
            raise
        finally:
            if lives:
                persist(lambda: end(pair_id), stopping)
        return True

    log.warning("a message of %d pairs was in a worker that ended: it is judged alone", len(cases))
    if len(cases) > 1:
        if attempt(cases, uuid5(message.message_id, "whole"), WHOLE_TRIES):
            return
        log.warning("a worker ended while it judged the message %s alone: now pair by pair", message.message_id)
    for case in cases:
        if stopping():
            raise Hold("the worker stops; the pairs of this message that are left would hold it up")
        if not attempt([case], case.pair.id, LONE_TRIES):
            why = f"the worker died {LONE_TRIES} times while it judged this pair"
            log.error("pair %s is failed: %s alone", case.pair.id, why)
            case.answer = GivenUp(ErrorCode.KILLED_WORKER, why)
