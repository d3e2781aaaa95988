"""The check: the producer's ledger against what the servers hold when all is quiet again."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from sqlalchemy import Connection, Engine, text

from infra.chaos.ledger import GUARANTEED, Entry
from infra.chaos.producer import BARE_SOURCE, SOURCE
from infra.chaos.recovery import UNACKED, UNACKED_INDEX, lane_keys

#: Names that a sentence about pairs spells out.
NAMED = 10

VERDICTS = """
select pair_id::text, run_id::text, status, error_code from verdict where source in (:source, :bare_source)
"""

#: One question has one answer, whichever worker was asked, beside whichever other pairs, and however often.
DIFFERING = """
select image, text from verdict where source in (:source, :bare_source) and status = 'judged'
group by image, text having count(distinct label) > 1
"""

RUNS = """
select id::text, name, state, planned, judged, rejected, failed from run where source = :source
"""

LEFT_OVER = """
select (select count(*) from outbox) as outbox, (select count(*) from suspect) as suspects,
       (select count(*) from rejected_message) as rejected_messages
"""


@dataclass(frozen=True)
class Books:
    """What is wrong, by kind: names of pairs, or sentences. `lost_bare` is no fault: see docs/chaos.md."""

    pairs: int
    lost: Sequence[str]
    lost_bare: Sequence[str]
    duplicated: Sequence[str]
    failed: Sequence[str]
    rejected: Sequence[str]
    unasked: Sequence[str]
    differing: Sequence[str]
    runs: Sequence[str]
    outbox_left: int
    suspects_left: int
    rejected_messages: int
    in_redis: Mapping[str, int]

    def problems(self) -> list[str]:
        """A sentence for each kind of thing that is wrong, with names; empty where the books are right."""
        kinds = {
            "accepted pairs have no verdict": self.lost,
            "pairs have more than one verdict": self.duplicated,
            "pairs failed": self.failed,
            "good pairs were rejected": self.rejected,
            "verdicts are of pairs that nobody was told are accepted": self.unasked,
            "questions were answered in two ways": self.differing,
        }
        found = [f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds.items() if names]
        found += self.runs
        left = {
            "rows are left in the outbox": self.outbox_left,
            "rows are left in suspect": self.suspects_left,
            "messages were rejected": self.rejected_messages,
            **{f"entries are left in Redis under {key!r}": count for key, count in self.in_redis.items()},
        }
        return found + [f"{count} {what}" for what, count in left.items() if count]


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def check(entries: Sequence[Entry], engine: Engine, client: "redis.Redis", *, outbox: bool = True) -> Books:
    """Compare. With `outbox` a bare `send_task` has only Redis's guarantee; without, it is held to the full one."""
    refs = {entry.pair_id: entry.ref for entry in entries}
    with engine.connect() as connection:
        sources = {"source": SOURCE, "bare_source": BARE_SOURCE}
        verdicts = [dict(row) for row in connection.execute(text(VERDICTS), sources).mappings()]
        differing = [f"{row.image} {row.text!r}" for row in connection.execute(text(DIFFERING), sources)]
        runs = wrong_runs(connection, entries, verdicts)
        left = connection.execute(text(LEFT_OVER)).one()
    counts = Counter(row["pair_id"] for row in verdicts)
    missing = [entry for entry in entries if entry.pair_id not in counts]

    def named(status: str) -> list[str]:
        return [f"{name_of(row, refs)} ({row['error_code']})" for row in verdicts if row["status"] == status]

    return Books(
        pairs=len(refs),
        lost=[named_entry(entry) for entry in missing if not outbox or entry.way in GUARANTEED],
        lost_bare=[named_entry(entry) for entry in missing if outbox and entry.way not in GUARANTEED],
        duplicated=sorted(refs.get(pair_id, pair_id) for pair_id, count in counts.items() if count > 1),
        failed=named("failed"),
        rejected=named("rejected"),
        unasked=sorted(counts.keys() - refs.keys()),
        differing=differing,
        runs=runs,
        outbox_left=left.outbox,
        suspects_left=left.suspects,
        rejected_messages=left.rejected_messages,
        in_redis=entries_in(client),
    )


def name_of(row: Mapping[str, Any], refs: Mapping[str, str]) -> str:
    return refs.get(row["pair_id"], row["pair_id"])


def named_entry(entry: Entry) -> str:
    return f"{entry.ref} ({entry.pair_id}, by {entry.way})"


def wrong_runs(connection: Connection, entries: Sequence[Entry], verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each run whose counters are not what the ledger and the counted rows say."""
    asked = Counter(entry.run_id for entry in entries if entry.run_id)
    rows = Counter((row["run_id"], row["status"]) for row in verdicts if row["run_id"])
    found = {row["id"]: row for row in connection.execute(text(RUNS), {"source": SOURCE}).mappings()}
    wrong = [f"run {run_id} is not there" for run_id in asked.keys() - found.keys()]
    for run_id, run in found.items():
        wanted = {"state": "done", "planned": asked[run_id]}
        wanted |= {status: rows[run_id, status] for status in ("judged", "rejected", "failed")}
        if differing := {name: (run[name], value) for name, value in wanted.items() if run[name] != value}:
            said = ", ".join(f"{name} is {is_} and should be {value}" for name, (is_, value) in differing.items())
            wrong.append(f"run {run['name']} ({run_id}): {said}")
    return wrong


def entries_in(client: "redis.Redis") -> dict[str, int]:
    """How many messages are in the lanes' queues, by key, and in the hands of workers."""
    return {**queues(client), UNACKED: client.hlen(UNACKED), UNACKED_INDEX: client.zcard(UNACKED_INDEX)}


def waiting_in(client: "redis.Redis") -> int:
    """How many messages no worker has taken."""
    return sum(queues(client).values())


def queues(client: "redis.Redis") -> dict[str, int]:
    return {key.decode(): client.llen(key) for key in lane_keys(client)}


# ---- Connections and memory ------------------------------------------------------------------------------------------

CONNECTIONS = """
select count(*) as open, count(*) filter (where state like 'idle in transaction%') as in_transaction
from pg_stat_activity where application_name = 'concord'
"""


@dataclass(frozen=True)
class Footprint:
    """What the site holds while nothing is going on."""

    postgres_connections: int
    in_transaction: int
    redis_connections: int
    redis_mb: float
    worker_mb: float  # of the largest worker

    def problems(self, before: "Footprint", limits: "Footprint") -> list[str]:
        """A sentence for each measure that is further above `before` than `limits` allows."""
        return [
            f"{name.replace('_', ' ')}: {now:.0f}, and {then:.0f} before"
            for name in self.__dataclass_fields__
            if (now := getattr(self, name)) > (then := getattr(before, name)) + getattr(limits, name)
        ]


def footprint(engine: Engine, client: "redis.Redis", worker_mb: float) -> Footprint:
    with engine.connect() as connection:
        row = connection.execute(text(CONNECTIONS)).one()
    info: dict[str, Any] = client.info()
    redis_mb = info["used_memory"] / 2**20
    return Footprint(row.open, row.in_transaction, info["connected_clients"], redis_mb, worker_mb)
