"""One client of S3 in a process of its own, so that its CPU time and memory are its own.

    python -m infra.bench.image_clients concord|boto3 THREADS

Reads a line of JSON a job, and answers each with one. `{"seconds": 5, "addresses": [...]}`: these objects are fetched
over and over, 64 at a time as a batch has them. `{"pictures": 20000, "addresses": [...]}`: so many are fetched and
decoded, and memory is looked at after each batch. Where S3 is, the settings say.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from typing import Any

import psutil

from tasks.settings import settings

#: Pictures of a batch.
AT_ONCE = 64
#: The side of the hub's large checkpoints' input.
TARGET_PX = 480
#: Of the pictures whose memory is looked at, this part comes first and does not count.
WARM_UP = 0.1
MB = 2**20

Fetch = Callable[[Sequence[str]], int]


def concord(threads: int) -> Fetch:
    """As the worker fetches."""
    store = image_store(threads)

    def fetch(addresses: Sequence[str]) -> int:
        loaded = store.load_all(addresses, lambda fetched: len(fetched.data))
        for size in loaded.values():
            if not isinstance(size, int):
                raise size
        return len(loaded)

    return fetch


def boto3_pool(threads: int) -> Fetch:
    """boto3 at its best: one client for all threads, a connection for each, and no checks that it can leave out."""
    import boto3
    from botocore.config import Config

    chosen = settings()
    client = boto3.client(
        "s3",
        endpoint_url=chosen.s3_endpoint_url,
        aws_access_key_id=chosen.need("s3_access_key_id"),
        aws_secret_access_key=chosen.s3_secret_access_key.get_secret_value() if chosen.s3_secret_access_key else None,
        region_name="us-east-1",
        config=Config(
            max_pool_connections=threads, parameter_validation=False, response_checksum_validation="when_required"
        ),
    )
    pool = ThreadPoolExecutor(threads)

    def one(address: str) -> int:
        bucket, _, key = address.removeprefix("s3://").partition("/")
        return len(client.get_object(Bucket=bucket, Key=key)["Body"].read())

    def fetch(addresses: Sequence[str]) -> int:
        return sum(size > 0 for size in pool.map(one, addresses))

    return fetch


def image_store(threads: int) -> Any:
    from tasks.scoring import make_store

    return make_store(settings().model_copy(update={"image_threads": threads}))


def batches(job: Mapping[str, Any]) -> Iterator[list[str]]:
    """The addresses in turn, for ever; of so many that no batch has one twice."""
    addresses = cycle(job["addresses"])
    while True:
        yield list(islice(addresses, AT_ONCE))


def rate(fetch: Fetch, job: Mapping[str, Any]) -> dict[str, float]:
    """GETs in so many seconds, and the CPU time (user and system) that this process took for them."""
    gets, cpu_before, began_at = 0, cpu_s(), time.monotonic()
    for addresses in batches(job):
        gets += fetch(addresses)
        if time.monotonic() >= began_at + job["seconds"]:
            break
    return {"gets": gets, "cpu_s": cpu_s() - cpu_before, "wall_s": time.monotonic() - began_at}


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def growth(threads: int, job: Mapping[str, Any]) -> dict[str, float]:
    """Resident memory while pictures are fetched and decoded: after the warm-up, and the most later, in MB."""
    from worker.decode_image import decode

    store, process = image_store(threads), psutil.Process()
    seen, done = list[float](), 0
    for addresses in batches(job):
        loaded = store.load_all(addresses, lambda fetched: decode(fetched.data, target_px=TARGET_PX, exact=False).width)
        for width in loaded.values():
            if not isinstance(width, int):
                raise width
        done += len(loaded)
        if done >= WARM_UP * job["pictures"]:
            seen.append(process.memory_info().rss / MB)
        if done >= job["pictures"]:
            break
    return {"pictures": done, "after_warm_up_mb": seen[0], "end_mb": seen[-1], "growth_mb": max(seen) - seen[0]}


def main() -> None:
    name, threads = sys.argv[1], int(sys.argv[2])
    fetch = {"concord": concord, "boto3": boto3_pool}[name](threads)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(rate(fetch, job) if "seconds" in job else growth(threads, job)), flush=True)


if __name__ == "__main__":
    main()
