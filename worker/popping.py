"""Which queues the next BRPOP asks: a lane that holds enough is closed, and not popped until a batch was taken.

So a full bulk lane does not keep a live message waiting in Redis, and pairs wait where any worker may take them.
"""

import logging
from collections.abc import Callable
from typing import Any

from kombu.utils.scheduling import priority_cycle
from redis.exceptions import RedisError, ResponseError

log = logging.getLogger(__name__)


class OpenLanes(priority_cycle):  # type: ignore[misc]
    """kombu's cycle of a channel's queues in their order, less those that are closed; until `gate` none is.

    A BRPOP that leaves a lane out waits up to a second for the others, which is too long once that lane opens: `reopen`
    has Redis end it.
    """

    def __init__(self, queues: list[str] | None = None) -> None:
        super().__init__(queues)
        self.channel: Any = None
        self.is_open: Callable[[str], bool] = lambda queue: True
        self.left_out: list[str] = []
        self.client_id: int | None = None

    def gate(self, channel: Any, is_open: Callable[[str], bool]) -> None:
        self.channel, self.is_open = channel, is_open

    def consume(self, n: int) -> list[str]:
        """The queues that are asked next. kombu calls this when the channel's connection is about to send BRPOP."""
        queues = super().consume(n)
        chosen = [queue for queue in queues if self.is_open(queue)]
        self.left_out = [queue for queue in queues if queue not in chosen]
        self.client_id = None
        if chosen and self.left_out:
            connection = self.channel.client.connection
            connection.send_command("CLIENT", "ID")
            try:
                self.client_id = connection.read_response()
            except ResponseError as error:
                log.debug("a lane that is closed will be popped a second after it opens: %s", error)
        return chosen

    def reopen(self) -> None:
        """End the BRPOP that waits, if a lane that it left out is open by now."""
        if self.client_id is None or self.channel.closed or not any(map(self.is_open, self.left_out)):
            return
        try:
            with self.channel.conn_or_acquire() as client:
                client.execute_command("CLIENT UNBLOCK", self.client_id)
        except RedisError as error:
            # It ends by itself in a second.
            log.debug("a lane that is open again waits: %s", error)
        self.client_id = None
