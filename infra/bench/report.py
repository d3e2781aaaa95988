"""How long the page of a run takes: `python -m infra.bench.report`.

Two nights of the same items, every one judged both times, are made in SQL.

What is timed is what the end of a run and `concord report` do: the figures out of Postgres, a hundred thumbnails out of
S3, and the page. The nights have no summary, so that everything is counted from their verdicts.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, create_engine, text

from db.engine import make_engine
from db.migrations import upgrade
from db.run_reading import read_report
from db.run_report import WORST
from infra.bench.pictures import pictures, upload
from infra.local.stack import Addresses, Stack
from tasks.report_page import render
from tasks.report_pictures import thumbnails
from tasks.report_writing import looking
from tasks.settings import Settings

ITEMS = 100_000
#: Photos as shops have them: their longer side, and their size.
PICTURE_PX = 1_000
PICTURE_BYTES = 60_000
#: The page of so many items is to be there within this time, and to be no larger.
WANTED_S = 10.0
WANTED_BYTES = 3_000_000
STATEMENT_TIMEOUT_S = 60
#: Pages that are made, one after the other.
ROUNDS = 3

MODEL = """
insert into model_version (name, revision, recipe, weights_sha256, prompt, image_px, answers)
values ('bench/ofa', 'v1', 'awq-int4', md5('weights'), 'does the image describe " {} "?', 480, '{}')
"""
NIGHT = """
insert into run (id, kind, source, name, lane, submitted_at, state, planned, judged, rejected, failed, flagged,
                 created_at, finished_at)
values (:run_id, 'nightly', 'bench', :name, 'bulk', :began, 'done', :items, :items * 0.99, :items * 0.01, 0,
        :items * 0.05, :began, :began + interval '10 minutes')
"""
#: One item in a hundred is rejected, one in twenty of the others a mismatch; another part of them each night.
VERDICTS = """
insert into verdict (submitted_at, pair_id, source, ref, run_id, message_id, lane, image, text, attributes, status,
                     label, p_entailment, p_contradiction, p_neutral, answer, policy, policy_version, decision,
                     error_code, error_detail, text_scored, model_version_id, image_sha256, image_etag, image_width,
                     image_height, decode_mode, attempts, decided_at)
select :began, md5(:run_id || n)::uuid, 'bench', 'sku-' || lpad(n::text, 8, '0'), cast(:run_id as uuid),
       md5('message' || n / 64)::uuid, 'bulk', (cast(:pictures as text[]))[1 + place % :many],
       'A red shoe of the summer collection, article ' || n,
       jsonb_build_object('category', 'category ' || n % 12, 'seller', 'seller ' || n % 200, 'size', n % 7),
       case when label is null then 'rejected' else 'judged' end, label,
       case label when 'entailment' then sure when 'neutral' then (1 - sure) / 2 when 'contradiction' then 1 - sure end,
       case label when 'contradiction' then sure when 'neutral' then (1 - sure) / 2 when 'entailment' then 1 - sure end,
       case label when 'neutral' then sure else 0 end, label, 'catalog', 1,
       case when label is null then null when label = 'contradiction' and sure >= 0.5 then 'review' else 'accept' end,
       case when label is null then 'image_not_found' end, case when label is null then 'no such key' end,
       'a red shoe of the summer collection, article ' || n, case when label is not null then :model end,
       decode(md5('picture' || n), 'hex'), md5('etag' || n), 800, 600, 'exact', 0,
       :began + n * interval '5 ms'
from (select *, row_number() over (order by label = 'contradiction' desc nulls last, sure desc) as place
      from (select n, 0.5 + 0.5 * sqrt(abs(hashint4(n + :night)) / 2147483647.0) as sure,
                   case when n % 100 = 99 then null when (n + :night) % 20 = 0 then 'contradiction'
                        when n % 9 = 0 then 'neutral' else 'entailment' end as label
            from generate_series(0, :items - 1) as n) as drawn) as item
"""
BATCHES = """
insert into batch (settled_at, worker, lane, model_version_id, messages, pairs, judged, queue_s, fetch_s, model_s,
                   write_s, tokens, padded_tokens, pictures)
select :began + n * interval '350 ms', 'gpu' || n % 2, 'bulk', :model, 1, 64, 63, 0.1, 0.2, 0.3, 0.02, 640, 700, 64
from generate_series(1, :items / 64) as n
"""


@contextmanager
def servers() -> Iterator[Addresses]:
    folder = Path(tempfile.mkdtemp(prefix="concord-bench-"))
    stack = Stack(folder / ".concord")
    try:
        addresses = stack.up()
        upgrade(addresses.owner_database_url, addresses.database_url)
        yield addresses
    finally:
        stack.down()
        shutil.rmtree(folder)


def fill(addresses: Addresses, items: int) -> UUID:
    """Two nights of `items` pairs, last night's id."""
    named = upload(addresses, "report", pictures(WORST, PICTURE_PX, PICTURE_BYTES))
    engine = create_engine(addresses.owner_database_url, isolation_level="AUTOCOMMIT")
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    with engine.connect() as connection:
        connection.exec_driver_sql(MODEL, execution_options={"no_parameters": True})
        model = connection.execute(text("select max(id) from model_version")).scalar_one()
        for night in (0, 1):
            began = today - timedelta(days=2 - night)
            run_id = UUID(int=night + 1)
            values = {
                "run_id": run_id, "name": f"bench {began:%Y-%m-%d}", "began": began, "items": items, "model": model,
                "night": night, "pictures": list(named), "many": len(named),
            }  # fmt: skip
            connection.execute(text(NIGHT), values)
            connection.execute(text(VERDICTS), {**values, "run_id": str(run_id)})
            connection.execute(text(BATCHES), values)
        connection.execute(text("vacuum analyze verdict, batch, run, model_version"))
    engine.dispose()
    return run_id


def measure(seconds: float, say: Callable[[str], object]) -> dict[str, Any]:
    """Seconds and bytes of the page, the slowest of three; it takes what it takes, whatever `seconds` says."""
    with servers() as addresses:
        say(f"two nights of {ITEMS:,} verdicts")
        run_id = fill(addresses, ITEMS)
        chosen = settings_of(addresses)
        engine = make_engine(addresses.database_url, statement_timeout_s=STATEMENT_TIMEOUT_S)
        found = []
        for _ in range(ROUNDS):
            found.append(timed(engine, run_id, chosen))
            say(", ".join(f"{name} {value:,}" for name, value in found[-1].items()))
        engine.dispose()
    slowest = max(found, key=lambda one: one["seconds"])
    return {
        "bench": "report",
        "items": ITEMS,
        **slowest,
        "target": {"seconds": WANTED_S, "bytes": WANTED_BYTES},
        "met": slowest["seconds"] < WANTED_S and slowest["bytes"] < WANTED_BYTES and slowest["pictures"] == WORST,
    }


def settings_of(addresses: Addresses) -> Settings:
    return Settings.model_validate(
        {
            "database_url": addresses.database_url,
            "s3_endpoint_url": addresses.s3_endpoint_url,
            "s3_access_key_id": addresses.s3_access_key_id,
            "s3_secret_access_key": addresses.s3_secret_access_key,
            "allowed_buckets": (addresses.s3_bucket,),
        }
    )


def timed(engine: Engine, run_id: UUID, chosen: Settings) -> dict[str, Any]:
    """One page: seconds of all and of each part, its bytes, and how many pictures are in it."""
    began = time.monotonic()
    with looking(engine) as connection:
        report = read_report(connection, run_id)
    read = time.monotonic()
    found = thumbnails(report.worst, chosen)
    fetched = time.monotonic()
    html = render(report, found).encode()
    ended = time.monotonic()
    return {
        "seconds": round(ended - began, 2),
        "sql_s": round(read - began, 2),
        "pictures_s": round(fetched - read, 2),
        "html_s": round(ended - fetched, 2),
        "bytes": len(html),
        "pictures": sum(bool(picture.data_uri) for picture in found.values()),
    }


def main() -> None:
    """Print the figures as one line of JSON."""
    print(json.dumps(measure(0.0, partial(print, file=sys.stderr))))


if __name__ == "__main__":
    main()
