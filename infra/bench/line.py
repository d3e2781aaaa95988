"""From `submit` to the verdicts in Postgres, with a model that does nothing and pictures that nobody fetches.

Everything else is as it always is: the producer writes to the outbox, the relay of the one worker publishes within its
window, the worker reads, settles and acknowledges. Producer, worker and servers share the machine's cores. The pace is
that of verdicts, from the first `submit` to the last commit.
"""

import math
import time
from collections.abc import Callable

from infra.bench.queue import PAIRS_A_MESSAGE, a_pair
from infra.bench.site import Site, Window, spent

TARGET_PAIRS_PER_S = 4_000
#: Messages that are submitted in one transaction.
AT_ONCE = 32

VERDICTS = """
select count(*) as verdicts, count(distinct (submitted_at, pair_id)) as distinct_pairs,
       extract(epoch from max(decided_at))::float8 as ended_at
from verdict where status = 'judged'
"""


def measure(seconds: float, say: Callable[[str], None]) -> dict[str, object]:
    """Pairs a second of one producer and one worker, over `seconds` times the target's pairs."""
    messages = math.ceil(seconds * TARGET_PAIRS_PER_S / PAIRS_A_MESSAGE)
    everything = messages * PAIRS_A_MESSAGE
    with Site() as site, site.worker(("infra.bench.no_op",)):
        submit_all(AT_ONCE)  # everything is loaded, every statement prepared
        site.await_settled(AT_ONCE * PAIRS_A_MESSAGE)
        say(f"{everything:,} pairs are submitted and judged")
        before, began = site.cpu_seconds(), time.time()
        submit_all(messages)
        submitted_in_s = time.time() - began
        site.await_settled(everything + AT_ONCE * PAIRS_A_MESSAGE)
        (found,) = site.ask(VERDICTS)
        after, took = site.cpu_seconds(), found.ended_at - began
        window = Window(began, time.time())
        stages = site.stages(window)
    rate = everything / took
    complete = found.verdicts == found.distinct_pairs == everything + AT_ONCE * PAIRS_A_MESSAGE
    return {
        "target": f"at least {TARGET_PAIRS_PER_S:,} pairs/s, one verdict a pair",
        "met": rate >= TARGET_PAIRS_PER_S and complete,
        "pairs_per_s": round(rate),
        "pairs": everything,
        "verdicts": found.verdicts,
        "submitted_pairs_per_s": round(everything / submitted_in_s),
        **stages,
        "busy_cores": spent(before, after, took),
    }


def submit_all(messages: int) -> None:
    """So many messages, into the bulk lane."""
    from tasks.submit import submit

    for start in range(0, messages, AT_ONCE):
        count = min(AT_ONCE, messages - start) * PAIRS_A_MESSAGE
        submit([a_pair(n) for n in range(count)], lane="bulk", source="bench")
