"""Carrying a schedule out on a running site, each fault on a thread of its own."""

import contextlib
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import psutil
from redis.exceptions import RedisError

from infra.chaos.books import waiting_in
from infra.chaos.recovery import (
    UNTOUCHED_S,
    Held,
    Watched,
    had_begun,
    held_by_workers,
    left_behind,
    pairs_waiting,
    watch_for,
)
from infra.chaos.s3_proxy import Trouble
from infra.chaos.schedule import Fault
from infra.chaos.site import MAX_PAIRS, Site
from infra.chaos.workers import START_S, STOP_S, Worker
from infra.local import Server

#: How long a kill waits for a worker that is in the middle of its work, or for a Redis that has this many messages to
#: lose; after that any worker will do, and any moment.
WORK_LIMIT_S = 15.0
MESSAGES_TO_LOSE = 4
#: A worker that took this much of a core while it was looked at is at work.
LOOK_S = 0.1
BUSY_SHARE = 0.3
POLL_S = 0.1


class Faults:
    """What was done so far, and what the site has recovered from. `say` is told of each fault as it happens."""

    def __init__(self, site: Site, say: Callable[[str], None]) -> None:
        self.site, self.say = site, say
        self.chance = random.Random(f"{site.seed}/victims")
        self.threads: list[threading.Thread] = []
        self.giving_up = threading.Event()
        self.done: Counter[tuple[str, str]] = Counter()
        self.watched: list[Watched] = []
        self.told_of: list[Watched] = []
        self.problems: list[str] = []
        self.ended: list[Worker] = []
        self.died_in_a_batch = 0
        #: Pairs in the hands of all workers at each fault of Redis, together.
        self.held_when_redis_went = 0
        #: Pairs that waited in Redis when it lost its data, and that no worker had had.
        self.wiped_waiting = 0
        #: When something happened that leaves messages in hand untouched, in seconds since the epoch.
        self.disturbed: list[float] = []
        #: One fault at a time of each part.
        self.locks = {part: threading.Lock() for part in ("worker", "redis", "postgres", "s3", "relay")}

    def begin(self, fault: Fault) -> None:
        thread = threading.Thread(target=self.carry_out, args=(fault,), name=f"fault {fault.part}", daemon=True)
        self.threads.append(thread)
        thread.start()

    @property
    def going_on(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)

    def give_up(self) -> None:
        """End what is going on: everything frozen or down is brought back at once."""
        self.giving_up.set()
        for thread in self.threads:
            thread.join()

    def newly_recovered(self) -> list[Watched]:
        """Faults from which the site has recovered since the last call."""
        found = [one for one in self.watched if one.recovered_s is not None and one not in self.told_of]
        self.told_of += found
        return found

    def rest(self, seconds: float) -> None:
        self.giving_up.wait(seconds)

    def carry_out(self, fault: Fault) -> None:
        try:
            with self.locks[fault.part]:
                if self.giving_up.is_set():
                    return
                match fault.part:
                    case "worker":
                        self.end_worker(fault)
                    case "relay":
                        self.freeze_holder(fault)
                    case "s3":
                        self.spoil_s3(fault)
                    case _:
                        self.end_server(fault)
        except Exception as error:
            self.problems.append(f"the fault could not be carried out: {fault} ({type(error).__name__}: {error})")

    # ---- Workers -----------------------------------------------------------------------------------------------------

    def end_worker(self, fault: Fault) -> None:
        worker = self.victim()
        if worker is None:
            self.problems.append(f"no worker was up to be ended: {fault}")
            return
        before = self.in_hand()
        worker.signal(signal.SIGKILL if fault.how == "kill" else signal.SIGTERM)
        self.done["worker", fault.how] += 1
        self.ended.append(worker)
        self.say(f"{fault.how} {worker.name}")
        if fault.how == "kill":
            self.after_death(worker)
        else:
            self.watched.append(watch_for(f"{worker.name} told to end", before))
            self.disturbed.append(time.time())
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(STOP_S)
            self.disturbed.append(time.time())

    def after_death(self, worker: Worker) -> None:
        """Find out whether a batch was in work: nobody else touches what the dead worker held."""
        worker.process.wait()
        died_at, at_death = time.time(), self.in_hand()
        self.disturbed.append(died_at)
        self.watched.append(watch_for(f"{worker.name} killed", at_death))
        self.rest(UNTOUCHED_S)
        others = [at for at in self.disturbed if at != died_at]
        self.died_in_a_batch += had_begun(left_behind(at_death, self.in_hand(), died_at, others), MAX_PAIRS)

    def victim(self) -> Worker | None:
        """A worker that is at work; after a while any that is up."""
        deadline = time.monotonic() + WORK_LIMIT_S
        while time.monotonic() < deadline and not self.giving_up.is_set():
            if workers := self.site.supervisor.ready():
                worker = self.chance.choice(workers)
                if self.in_hand() and is_busy(worker):
                    return worker
            self.rest(POLL_S)
        deadline += START_S
        while time.monotonic() < deadline and not self.giving_up.is_set():
            if workers := self.site.supervisor.ready():
                return self.chance.choice(workers)
            self.rest(POLL_S)
        return None

    def in_hand(self) -> Sequence[Held]:
        """What workers hold; nothing that anybody knows of while Redis is away."""
        try:
            return held_by_workers(self.site.redis)
        except RedisError:
            return ()

    def freeze_holder(self, fault: Fault) -> None:
        worker = self.holder()
        if worker is None:
            self.problems.append(f"nobody held the lease: {fault}")
            return
        others = [other for other in self.site.supervisor.ready() if other is not worker]
        self.disturbed.append(time.time())
        self.watched.append(watch_for(f"{worker.name} frozen with the lease", self.in_hand()))
        with worker.frozen():
            self.done["relay", fault.how] += 1
            self.say(f"freeze {worker.name}, which holds the lease, for {fault.lasts_s:.0f} s")
            self.rest(fault.lasts_s)
            holder = self.site.lease_holder()
        self.say(f"thaw {worker.name}")
        stayed = any(other.ready and not other.frozen_at for other in others)
        if stayed and holder == worker.process.pid and not self.giving_up.is_set():
            self.problems.append(f"{worker.name} kept the lease while it was frozen for {fault.lasts_s:.0f} s")

    def holder(self) -> Worker | None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and not self.giving_up.is_set():
            pid = self.site.lease_holder()
            worker = self.site.supervisor.by_pid(pid) if pid else None
            if worker is not None and worker.ready:
                return worker
            self.rest(POLL_S)
        return None

    # ---- Servers -----------------------------------------------------------------------------------------------------

    def end_server(self, fault: Fault) -> None:
        server: Server = {"redis": self.site.stack.redis, "postgres": self.site.stack.postgres}[fault.part]
        if fault.part == "redis":
            self.await_messages()
        in_hand, port = self.in_hand(), server.port
        if fault.part == "redis":
            self.held_when_redis_went += sum(len(held.pair_ids) for held in in_hand)
            self.wiped_waiting += pairs_waiting(self.site.redis) if fault.how == "wipe" else 0
        self.say(f"{fault.how} {fault.part} for {fault.lasts_s:.1f} s")
        self.done[fault.part, fault.how] += 1
        with self.disturbing() if fault.part == "redis" else contextlib.nullcontext():
            if fault.how == "freeze":
                with frozen(server):
                    self.watched.append(watch_for(f"{fault.part} frozen", in_hand))
                    self.rest(fault.lasts_s)
            else:
                server.stop() if fault.how == "stop" else server.kill()
                self.watched.append(watch_for(f"{fault.part}: {fault.how}", in_hand))
                self.rest(fault.lasts_s)
                server.start(wipe=fault.how == "wipe")
        self.say(f"{fault.part} is back")
        if server.port != port:
            self.problems.append(f"another program has taken {fault.part}'s port meanwhile: this run says nothing")

    def await_messages(self) -> None:
        """Wait, for a while, until Redis has something to lose: messages that no worker has taken."""
        deadline = time.monotonic() + WORK_LIMIT_S
        while time.monotonic() < deadline and not self.giving_up.is_set():
            with contextlib.suppress(RedisError):
                if waiting_in(self.site.redis) >= MESSAGES_TO_LOSE:
                    return
            self.rest(POLL_S)

    @contextlib.contextmanager
    def disturbing(self) -> Iterator[None]:
        self.disturbed.append(time.time())
        try:
            yield
        finally:
            self.disturbed.append(time.time())

    def spoil_s3(self, fault: Fault) -> None:
        with self.site.proxy.troubled(Trouble(fault.how, fault.share)):
            self.say(f"S3 answers {fault.how}, {fault.share:.0%}, for {fault.lasts_s:.0f} s")
            self.done["s3", fault.how] += 1
            self.rest(fault.lasts_s)
        self.say("S3 is well again")


def is_busy(worker: Worker) -> bool:
    """Whether the process works, by the time of the CPU that it takes."""
    try:
        process = psutil.Process(worker.process.pid)
        before = sum(process.cpu_times()[:2])
        time.sleep(LOOK_S)
        return float(sum(process.cpu_times()[:2]) - before) > BUSY_SHARE * LOOK_S
    except psutil.Error:
        return False


@contextlib.contextmanager
def frozen(server: Server) -> Iterator[None]:
    """The server and its children stopped by SIGSTOP inside."""
    process = server.running()
    members = [process, *process.children(recursive=True)] if process else []
    try:
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.suspend()
        yield
    finally:
        for member in reversed(members):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.resume()
