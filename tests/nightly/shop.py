"""A shop whose catalog is checked at night: its products, its settings, and a stand-in for the workers."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, create_engine, text

from db import outbox
from db.engine import make_engine
from db.nights import Night
from db.verdicts import Settlement, Verdict, settle
from tasks import nightly
from tasks.catalogs import Catalog
from tasks.settings import Settings
from tests.conftest import Bucket, Database
from tests.db.rows import model
from tests.line.site import eventually

#: Looks are quick here, since nothing else is waited for.
POLL_S = 0.01

Answer = Callable[[Mapping[str, Any]], str]


def by_text(pair: Mapping[str, Any]) -> str:
    """The stand-in's opinion: a text says itself what it is."""
    for label in ("contradiction", "neutral"):
        if label in pair["text"]:
            return label
    return "entailment"


@dataclass
class Workers:
    """Settles what is due in the outbox, with the label that `answer` gives, or as its error code says."""

    engine: Engine
    model_version_id: int
    answer: Answer = by_text
    judged: list[str] = field(default_factory=list)
    fresh: set[bool] = field(default_factory=set)

    def turn(self, messages: int = 100) -> int:
        """Settle some messages; returns how many."""
        with self.engine.begin() as connection:
            rows = outbox.claim(connection, "bulk", messages)
            for row in rows:
                found = [self.verdict(row.body, pair) for pair in row.body["pairs"]]
                settle(connection, Settlement(found, done=[(row.message_id, row.attempts)]))
            self.judged += [pair["ref"] for row in rows for pair in row.body["pairs"]]
            self.fresh |= {row.body["fresh"] for row in rows}
        return len(rows)

    def verdict(self, body: Mapping[str, Any], pair: Mapping[str, Any]) -> Verdict:
        label = self.answer(pair)
        asked = Verdict(
            submitted_at=body["submitted_at"], pair_id=UUID(pair["id"]), source=body["source"],
            message_id=UUID(body["message_id"]), lane="bulk", status="judged", attempts=0, ref=pair["ref"],
            run_id=UUID(body["run_id"]), image=pair.get("image"), text=pair.get("text"),
            attributes=pair.get("attributes", {}), policy=pair.get("policy", "catalog"),
        )  # fmt: skip
        if label.startswith(("rejected ", "failed ")):
            status, code = label.split()
            return Verdict(**{**vars(asked), "status": status, "error_code": code})
        p = {f"p_{name}": 0.8 if name == label else 0.1 for name in ("entailment", "contradiction", "neutral")}
        decision = "review" if label == "contradiction" else "accept"
        made = {"label": label, "decision": decision, "policy_version": 1, "model_version_id": self.model_version_id}
        return Verdict(**{**vars(asked), **p, **made})


@dataclass
class Shop:
    """One catalog over the table `product`, in a database of its own."""

    database: Database
    bucket: Bucket
    settings: Settings
    engine: Engine
    workers: Workers

    def catalog(self, **fields: Any) -> Catalog:
        source = {"query": "select sku as ref, image, title as text, attributes from product"}
        given = {name for name in ("query", "table", "manifest") if name in fields}
        return Catalog(**{"name": "shop", "images": [], "patience_s": 0, **({} if given else source), **fields})

    def sql(self, statement: str, **parameters: Any) -> list[dict[str, Any]]:
        """Run a statement as the owner."""
        owner = create_engine(self.database.owner_url)
        try:
            with owner.begin() as connection:
                result = connection.execute(text(statement), parameters)
                return [dict(row) for row in result.mappings()] if result.returns_rows else []
        finally:
            owner.dispose()

    def fill(self, products: int) -> None:
        """Products `sku-000000` ... that all agree, of two categories."""
        self.sql(
            """insert into product select 'sku-' || lpad(n::text, 6, '0'), 's3://shop/' || n, 'a thing',
                   jsonb_build_object('category', case n % 2 when 0 then 'even' else 'odd' end)
               from generate_series(0, :last) as n""",
            last=products - 1,
        )

    def begin(self, catalog: Catalog | None = None, **options: Any) -> Night:
        return nightly.begin(self.engine, catalog or self.catalog(), **options)

    def drive(self, catalog: Catalog, night: Night, stopping: Callable[[], bool] = lambda: False) -> Night:
        return nightly.drive(self.engine, catalog, night, self.settings, stopping, poll_s=POLL_S)

    def night(self, catalog: Catalog | None = None, **options: Any) -> Night:
        """A whole night, with the workers beside it."""
        catalog = catalog or self.catalog()
        night = self.begin(catalog, **options)
        with self.working():
            return self.drive(catalog, night)

    def drive_to_end(self, night: Night) -> Night:
        with self.working():
            return self.drive(self.catalog(), night)

    @contextmanager
    def working(self) -> Iterator[None]:
        """The workers take what is due, until the end of the block."""
        stop = threading.Event()

        def work() -> None:
            while not stop.wait(POLL_S):
                while self.workers.turn():
                    pass

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    @contextmanager
    def driving(self, catalog: Catalog, night: Night) -> Iterator[threading.Event]:
        """The planner is at it, on a thread, until the end of the block."""
        stop = threading.Event()
        thread = threading.Thread(target=self.drive, args=(catalog, night, stop.is_set))
        thread.start()
        try:
            yield stop
        finally:
            stop.set()
            thread.join()

    def run(self, night: Night) -> Night:
        return nightly.read(self.engine, night.id)

    def is_in(self, night: Night, state: str) -> None:
        eventually(lambda: self.run(night).state == state, f"the night is {state}")

    def outbox(self) -> int:
        return int(self.sql("select count(*) as rows from outbox")[0]["rows"])


def open_shop(database: Database, bucket: Bucket) -> Shop:
    settings = Settings(
        database_url=database.url,
        s3_endpoint_url=bucket.endpoint_url,
        s3_access_key_id=bucket.access_key_id,
        s3_secret_access_key=bucket.secret_access_key,
    )
    engine = make_engine(database.url, pool_size=6)
    shop = Shop(database, bucket, settings, engine, Workers(engine, model(engine)))
    shop.sql(
        """drop table if exists product;
           create table product (sku text collate "C" primary key, image text, title text,
                                 attributes jsonb not null default '{}');
           grant select on product to public"""
    )
    return shop
