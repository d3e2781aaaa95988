"""What must neither hold a night up for ever, nor tell a secret, nor be counted wrongly."""

import gzip
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from db import catalog_source, comparison, dead_letters, nights, runs
from db.catalog_source import SourceAway, SourceBroken, SqlSource
from db.dead_letters import Selection
from db.engine import make_engine
from tasks import nightly, nightly_sources, nightly_word
from tasks.dead import hand_over
from tasks.planner import LocalCrontab, app
from tests.line.site import eventually
from tests.nightly.shop import Shop
from tests.submit_env import configured

SECRET = "secret-word"
JSONL = b'{"ref": "a", "image": "s3://b/k", "text": "agrees"}\n'


def summary(night: Any) -> dict[str, Any]:
    assert night.summary is not None
    found: dict[str, Any] = night.summary
    return found


# ---- Nights that could not end ---------------------------------------------------------------------------------------


@pytest.fixture
def hurried(shop: Shop) -> Iterator[Shop]:
    """The shop with a second for each statement."""
    unhurried, shop.engine = shop.engine, make_engine(shop.database.url, pool_size=6, statement_timeout_s=1)
    yield shop
    shop.engine.dispose()
    shop.engine = unhurried


@pytest.mark.parametrize(("module", "name"), [(comparison, "COMPARE"), (nights, "ADVANCE")], ids=["end", "planning"])
def test_a_statement_that_is_too_slow_each_time_fails_the_night(
    hurried: Shop, module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurried.fill(3)
    night = hurried.begin()
    with hurried.working(), monkeypatch.context() as patch:
        patch.setattr(module, name, "select pg_sleep(9)")
        failed = hurried.drive(hurried.catalog(), night)
    assert failed.state == "failed"
    assert "did not finish a statement in time, 3 times over" in summary(failed)["error"]
    with hurried.engine.begin() as connection:
        assert nights.resume(connection, night.id)
    assert hurried.drive_to_end(night).state == "done"


def test_a_night_fails_whatever_the_reason_is_written_in(shop: Shop) -> None:
    night = shop.begin()
    nightly.fail(shop.engine, night.id, "no \0 text \ud800 at all")
    assert (shop.run(night).state, summary(shop.run(night))["error"]) == ("failed", "no \ufffd text \ufffd at all")


@contextmanager
def freezing(host: str, port: int) -> Iterator[tuple[str, threading.Event]]:
    """A way to a server, which stands still once the event is set: nothing comes through, and nothing ends."""
    frozen, listener = threading.Event(), socket.create_server(("127.0.0.1", 0))
    open_ones = [listener]

    def carry(one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65_536):
                if frozen.is_set():
                    return
                other.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection((host, port))
                open_ones.extend((client, server))
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=carry, args=ends, daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", frozen
    finally:
        for one in open_ones:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        thread.join()


def test_a_source_that_freezes_in_the_middle_of_a_page_is_away(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_source, "ANSWER_LIMIT_S", 0.2)
    at = urlsplit(shop.database.url)
    with freezing(str(at.hostname), at.port or 5432) as (address, frozen):
        login = f"{at.username}:{at.password}@" if at.password else f"{at.username}@"
        source = SqlSource(f"postgresql://{login}{address}{at.path}", "select sku as ref from product", timeout_s=1)
        assert source.nameless() == (0, 0)
        statement = catalog_source.run

        def frozen_now(*arguments: Any) -> Any:
            frozen.set()
            return statement(*arguments)

        monkeypatch.setattr(catalog_source, "run", frozen_now)
        with pytest.raises(SourceAway):
            source.nameless()


def test_a_listing_does_not_outlive_its_night_by_more_than_the_next(shop: Shop) -> None:
    shop.sql("insert into product values ('a', :image, 'x')", image=shop.bucket.put("a", b"1"))
    catalog = shop.catalog(images=[f"s3://{shop.bucket.name}/"])
    night = shop.begin(catalog)
    nightly.list_objects(shop.engine, catalog, night, shop.settings, lambda: False)
    nightly.fail(shop.engine, night.id, "as if")
    assert shop.sql("select count(*) as rows from catalog_object")[0]["rows"] == 2
    shop.night(catalog, again=True)
    assert shop.sql("select count(*) as rows from catalog_object")[0]["rows"] == 0


def test_a_ref_that_fills_pages_is_never_read_as_more_than_two(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.sql("alter table product drop constraint product_pkey")
    shop.sql("insert into product select 'm', 'i', 't' from generate_series(1, 500)")
    shop.sql("insert into product values ('a', 'i', 't'), ('z', 'i', 't'), ('z', 'i', 't')")
    source = nightly_sources.Sql(shop.catalog().sql_source(shop.settings), rows_per_page=7)
    statement, most = catalog_source.stream, [0]

    def counted(*arguments: Any) -> Iterator[Any]:
        most.append(0)
        for row in statement(*arguments):
            most[-1] += 1
            yield row

    monkeypatch.setattr(catalog_source, "stream", counted)
    pages = [source.page(None)]
    while (place := pages[-1].position) is not None:
        pages.append(source.page(place))
    assert [item["ref"] for page in pages for item in page.items] == ["a", "m", "z"]
    assert sum(page.repeats for page in pages) == 500
    assert max(most) <= 2 * 7


def test_a_line_without_end_does_not_fill_the_memory(shop: Shop) -> None:
    body = gzip.compress(JSONL + b'{"ref": "b", "text": "' + b"x" * 60_000_000)
    catalog = shop.catalog(manifest=shop.bucket.put("m.jsonl.gz", body))
    tracemalloc.start()
    try:
        night = shop.drive(catalog, shop.begin(catalog))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert night.state == "failed"
    assert "line 2 is longer than 4,000,000 characters" in summary(night)["error"]
    assert most < 40_000_000


# ---- Secrets, and what producers wrote -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "password",
    [f"a{sign}{SECRET}" for sign in "@/?#:% [&="] + [f"{SECRET}{sign}b" for sign in "@/?#:% [&="] + [f"@{SECRET}/x@"],
)
@pytest.mark.parametrize("form", ["postgresql://u:{}@127.0.0.1:1/d", "host=127.0.0.1 port=1 user=u password={}"])
def test_no_password_is_in_an_error_however_it_is_spelt(password: str, form: str) -> None:
    with pytest.raises((SourceAway, SourceBroken)) as caught:
        SqlSource(form.format(password), "select 1").check()
    assert SECRET not in str(caught.value)


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that says this to whoever calls."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client:
                    client.recv(65_536)
                    client.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@pytest.mark.parametrize(
    "webhook",
    ["http://{}/SECRET", "http://{}/a SECRET", "http://{}/a\nSECRET", "http://x:SECRET@{}/", "http://127.0.0.1:SECRET/",
     "http://127.0.0.1:0/SECRET", "http://[SECRET/", "https://{}/SECRET", "SECRET", "http://{}/ü-SECRET"],
)  # fmt: skip
def test_a_webhook_that_cannot_be_told_ends_no_night_and_is_quoted_nowhere(
    shop: Shop, webhook: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nightly_word, "WEBHOOK_FIRST_WAIT_S", 0.001)
    shop.fill(1)
    with answering(f"{SECRET} is no status line\r\n\r\n".encode()) as address:
        night = shop.night(shop.catalog(webhook=webhook.replace("SECRET", SECRET).format(address)))
    assert night.state == "done"
    assert "error" in summary(night)["webhook"]
    assert SECRET not in str(night.summary) + caplog.text


@pytest.mark.parametrize(
    ("script", "says"), [("exit 3", "the command ended with exit status 3"), ("sleep 9", "the command took over 0 s")]
)
def test_a_command_that_fails_does_not_show_its_arguments(
    shop: Shop, script: str, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nightly_word, "COMMAND_LIMIT_S", 0.3)
    shop.fill(1)
    night = shop.night(shop.catalog(command=["sh", "-c", script, SECRET]))
    assert says in summary(night)["command"]["error"]
    assert SECRET not in str(night.summary) + caplog.text


@pytest.mark.parametrize("line", [f"{SECRET}", f'{{"ref": "{SECRET}", ): "', f'["{SECRET}): x"]', f'"{SECRET}"'])
def test_what_a_line_says_that_is_no_item_is_not_in_the_summary(shop: Shop, line: str) -> None:
    address = shop.bucket.put("m.jsonl", JSONL + line.encode() + b"\n")
    night = shop.night(shop.catalog(manifest=address))
    (sentence,) = summary(night)["skipped_rows"]
    assert sentence.startswith("line 2 is not a pair (") and sentence.endswith(")")
    assert SECRET not in str(shop.sql("select summary::text || position::text as kept from run"))


# ---- What is counted, and when it begins -----------------------------------------------------------------------------


def test_a_rejection_between_two_verdicts_hides_no_contradiction(shop: Shop) -> None:
    shop.fill(1)
    shop.night(sample=0)
    shop.workers.answer = lambda pair: "rejected image_not_found"
    between = summary(shop.night(everything=True, again=True))["catalog"]
    assert (between["without_verdict"], between["first"]) == (1, 0)
    shop.workers.answer = lambda pair: "contradiction"
    whole = summary(shop.night(again=True))["catalog"]
    assert (whole["first"], whole["newly_contradicting"]) == (0, 1)


def test_a_pair_that_is_redriven_after_its_night_counts_in_its_run_and_is_planned_once_more(shop: Shop) -> None:
    shop.fill(3)
    shop.workers.answer = lambda pair: "failed model_failed" if pair["ref"] == "sku-000001" else "entailment"
    night = shop.night(sample=0)
    shop.workers.answer = lambda pair: "entailment"
    with shop.engine.begin() as connection:
        letters = dead_letters.take(connection, Selection(dead_letters.now(connection)), None, 10)
        assert hand_over(connection, letters, None)["redriven"] == 1
    assert shop.workers.turn() == 1
    after = shop.run(night)
    assert (after.state, after.judged, after.failed) == ("done", 3, 0)
    assert summary(after)["failed"] == 1, "what the night came to stays"
    again = shop.night(sample=0, again=True)
    assert (again.planned, again.judged, summary(again)["catalog"]["without_verdict"]) == (1, 1, 0)


Open = Callable[..., Any]


@pytest.mark.parametrize(
    ("open_run", "given"),
    [(nights.open_night, {"options": {"date": "2026-03-28"}}), (runs.open_run, {})], ids=["night", "file"],
)  # fmt: skip
def test_of_two_that_begin_one_run_at_one_moment_both_have_it(shop: Shop, open_run: Open, given: Any) -> None:
    run_id, had = uuid4(), []
    given = {"source": "shop", "name": "shop", "lane": "bulk", **given}

    def second() -> None:
        with shop.engine.begin() as connection:
            had.append(open_run(connection, run_id, **given))

    with shop.engine.connect() as connection:
        open_run(connection, run_id, **given)
        thread = threading.Thread(target=second)
        thread.start()
        try:
            eventually(lambda: shop.sql("select 1 from pg_locks where not granted"), "the second waits for the first")
        finally:
            connection.commit()
            thread.join()
    assert [run.id for run in had] == [run_id]


ZONES = ("Europe/Berlin", "America/Havana", "Africa/Cairo", "Australia/Lord_Howe", "America/Sao_Paulo", "Asia/Beirut")


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("schedule", ["30 2 * * *", "0 0 * * *", "59 23 * * *", "*/15 * * * *", "30 0 * * *"])
def test_from_whatever_moment_what_is_due_next_is_ahead(zone: str, schedule: str) -> None:
    """Also in an hour that the clock shows twice: beat would ask again and again, without a pause."""
    local = LocalCrontab(schedule, zone)
    for first in ((2018, 2, 17), (2018, 11, 3), (2026, 4, 4), (2026, 10, 24), (2026, 10, 29)):
        for minutes in range(0, 72 * 60, 37):
            moment = datetime(*first, tzinfo=UTC) + timedelta(minutes=minutes)
            assert local.next_after(moment) > moment


FILE = """
[shop]
query = "select sku as ref, image, title as text from product"
images = []
schedule = "59 23 * * *"
time_zone = "Europe/Berlin"
"""


@pytest.fixture
def beat(shop: Shop, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "catalogs.toml"
    path.write_text(FILE)
    with configured(database_url=shop.database.url, catalogs_file=str(path)):
        yield path


def test_a_night_that_begins_late_past_midnight_is_that_of_the_date_on_which_it_was_due(
    shop: Shop, beat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.fill(1)

    class Late(datetime):
        at = datetime(2026, 3, 27, 23, 3, tzinfo=UTC)

        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return cls.at

    monkeypatch.setattr("tasks.planner.datetime", Late)
    for at in (Late.at, Late.at + timedelta(hours=23, minutes=56, seconds=1)):
        Late.at = at
        app.tasks["concord.nightly"].apply(("shop",))
        shop.sql("update run set state = 'done', summary = '{}'")
    dates = [row["date"] for row in shop.sql("select options ->> 'date' as date from run order by created_at")]
    assert dates == ["2026-03-27", "2026-03-28"], "none is left out"


def test_a_file_of_catalogs_that_is_wrong_at_the_hour_is_said(
    shop: Shop, beat: Path, caplog: pytest.LogCaptureFixture
) -> None:
    beat.write_text("[shop")
    app.tasks["concord.nightly"].apply(("shop",))
    assert "shop does not begin: " in caplog.text and "table declaration" in caplog.text
