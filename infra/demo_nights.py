"""Two nights of the sample catalog, judged once by real workers and kept, so that docs/sql.md has something to show.

`python -m infra.demo_nights` judges them anew: servers of its own, the pictures in S3, one worker with the demo model
in float32 the first night and in awq-int4 the second, and what they wrote into infra/demo_model/nights.jsonl.gz. `load`
puts those rows into a migrated, empty database, the second night yesterday, the first the day before.

Between the nights sellers mend some texts and break others, three pairs leave the catalog, and three come that cannot
be judged: one without a picture, one without a text, one in a bucket that is not there.
"""

import gzip
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, text

from infra.demo import DEMO_MODEL, HELDOUT, POLL_S, point_settings_at, upload, worker
from infra.local.stack import Stack

NIGHTS = DEMO_MODEL / "nights.jsonl.gz"
SOURCE = "demo"
#: When a night begins, by the hour of its day.
HOUR = 2
#: Pairs whose text is another pair's: the first night alone, the second night alone, and both.
MENDED, BROKEN, STILL_WRONG = 24, 18, 12
#: One seller's texts are wrong more often than the others'.
CARELESS, CARELESS_SHARE = "ember", 0.5
LEFT_OUT = 3
#: A bucket on the allow-list that does not exist.
LOST_BUCKET = "concord-lost"
#: The worker's model, night by night.
PRECISIONS = (
    {"CONCORD_MODEL_DIR": str(DEMO_MODEL / "weights"), "CONCORD_RECIPE": "fp32"},
    {"CONCORD_MODEL_DIR": str(DEMO_MODEL / "awq-int4")},
)
#: Digits of a probability that are kept.
DIGITS = 6
#: The tables that are kept, and the columns of each that are not: nothing that is shown depends on them.
TABLES: Mapping[str, set[str]] = {
    "model_version": set(),
    "run": set(),
    "verdict": {"content_hash", "image_etag", "message_id"},
    "batch": set(),
}


def nights() -> list[list[dict[str, Any]]]:
    """The pairs of both nights, their pictures by file name. Always the same."""
    draw = random.Random(0)
    pairs = [json.loads(line) for line in HELDOUT.read_text(encoding="utf-8").splitlines()]
    pairs = [{name: value for name, value in pair.items() if name not in ("id", "label")} for pair in pairs]
    plain = [pair for pair in pairs if pair["policy"] == "catalog"]
    careless = [pair["ref"] for pair in plain if pair["attributes"]["seller"] == CARELESS]
    wrong = MENDED + BROKEN + STILL_WRONG
    refs = draw.sample(careless, int(wrong * CARELESS_SHARE))
    refs += draw.sample([pair["ref"] for pair in plain if pair["ref"] not in careless], wrong - len(refs))
    draw.shuffle(refs)
    swapped = {ref: draw.choice(plain)["text"] for ref in refs}
    first = {*refs[:MENDED], *refs[MENDED + BROKEN :]}
    second = {*refs[MENDED:]}
    left_out = {pair["ref"] for pair in draw.sample(plain, LEFT_OUT)}
    some = plain[0]
    troubles = [
        {**some, "ref": "demo-9001", "image": "pictures/not-uploaded.png"},
        {**some, "ref": "demo-9002", "text": " "},
        {**some, "ref": "demo-9003", "image": f"s3://{LOST_BUCKET}/1.png"},
    ]

    def night(wrong_refs: set[str]) -> list[dict[str, Any]]:
        return [{**pair, "text": swapped[pair["ref"]] if pair["ref"] in wrong_refs else pair["text"]} for pair in pairs]

    return [night(first), [pair for pair in night(second) if pair["ref"] not in left_out] + troubles]


def load(connection: Connection) -> None:
    """The kept rows, as the owner of a migrated database that is empty otherwise."""
    today = datetime.now(UTC).replace(hour=HOUR, minute=0, second=0, microsecond=0)
    with gzip.open(NIGHTS, "rt", encoding="utf-8") as lines:
        for line in lines:
            kept = json.loads(line)
            began = today - timedelta(days=kept["days_ago"])
            row = {
                name: (began + timedelta(seconds=value)).isoformat() if name.endswith("_at") else value
                for name, value in kept["row"].items()
            }
            if kept["table"] == "verdict":
                row["message_id"] = row["pair_id"]
            columns = ", ".join(row)
            statement = (
                f"insert into {kept['table']} ({columns}) overriding system value"
                f" select {columns} from jsonb_populate_record(null::{kept['table']}, cast(:row as jsonb))"
            )
            connection.execute(text(statement), {"row": json.dumps(row)})


def main() -> None:
    """Judge both nights with real workers, and keep what they wrote."""
    folder = Path(tempfile.mkdtemp(prefix="concord-nights-"))
    stack = Stack(folder / ".concord")
    try:
        addresses = stack.up()
        point_settings_at(addresses)
        from db.migrations import upgrade

        upgrade(addresses.owner_database_url, addresses.database_url)
        upload(stack, addresses)
        os.environ.update(
            CONCORD_ALLOWED_BUCKETS=f"{addresses.s3_bucket},{LOST_BUCKET}", CONCORD_MAX_ATTEMPTS="1",
        )  # fmt: skip
        for number, (pairs, precision) in enumerate(zip(nights(), PRECISIONS, strict=True)):
            for pair in pairs:
                if "://" not in pair["image"]:
                    pair["image"] = f"s3://{addresses.s3_bucket}/{pair['image']}"
            file = folder / "catalog.jsonl"
            file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
            os.environ.update(precision)
            with worker(folder / f"worker-{number}.log"):
                judge(file)
        rows = list(written(addresses.owner_database_url))
    finally:
        stack.down()
        shutil.rmtree(folder)
    with gzip.GzipFile(NIGHTS, "wb", mtime=0) as packed:
        packed.writelines(json.dumps(row).encode() + b"\n" for row in rows)
    print(f"{len(rows):,} rows are in {NIGHTS}")


def judge(file: Path) -> None:
    """Submit a night's pairs and wait until every one is settled."""
    from db import runs
    from tasks.pairs_file import begin, read_rows, submit_file
    from tasks.submit import engine

    database = engine()
    run = begin(database, file, lane="bulk", source=SOURCE, again=datetime.now(UTC).isoformat())
    sum(submit_file(database, run, read_rows(file)))
    while run.state != "done":
        time.sleep(POLL_S)
        with database.connect() as connection:
            run = runs.read(connection, run.id)


def written(owner_url: str) -> Iterator[dict[str, Any]]:
    """The rows that the workers wrote, their moments as seconds since their night began."""
    engine = create_engine(owner_url)
    with engine.connect() as connection:
        began = list(connection.execute(text("select submitted_at from run order by submitted_at")).scalars())
        for table, left_out in TABLES.items():
            rows = connection.execute(text(f"select jsonb_strip_nulls(to_jsonb(t)) from {table} as t order by t"))
            for row in rows.scalars():
                moments = {name: datetime.fromisoformat(value) for name, value in row.items() if name.endswith("_at")}
                night = max(n for n, moment in enumerate(began) if n == 0 or min(moments.values()) >= moment)
                since = {name: round((moment - began[night]).total_seconds(), 3) for name, moment in moments.items()}
                scores = {name: round(value, DIGITS) for name, value in row.items() if name.startswith("p_")}
                kept = {name: value for name, value in {**row, **since, **scores}.items() if name not in left_out}
                yield {"table": table, "days_ago": len(began) - night, "row": kept}
    engine.dispose()


if __name__ == "__main__":
    main()
