"""`concord report`: a page, tables or JSON of one run, and what it says where there is none."""

import json
import secrets
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, create_engine, make_url, text

from db.engine import make_engine
from db.verdicts import Settlement, settle
from tasks import report_writing
from tasks.report_writing import SOURCE_CHARS, folder_of, write_pages_of_files
from tasks.settings import settings
from tests.command_line import Concord, Ran, command_line
from tests.conftest import Bucket, Database
from tests.db import rows
from tests.shared import emptied_database
from tests.submit_env import configured

database = emptied_database

#: Of an S3 that is never asked, since no bucket is allowed.
KEYS = {"s3_access_key_id": "nobody", "s3_secret_access_key": "nothing"}
RUN = UUID("aaaa0000-0000-4000-8000-000000000001")


@pytest.fixture
def concord(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Concord:
    """`concord report ...` in this process."""
    return command_line(monkeypatch, capsys, "report")


@pytest.fixture
def engine(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Settings of a site without S3, in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    engine = make_engine(database.url)
    with configured(database_url=database.url, **KEYS):
        yield engine
    engine.dispose()


def fill(engine: Engine, run_id: UUID = RUN, **fields: Any) -> None:
    """A file of three pairs: one agrees, one is a mismatch that tries to be more than text, one was rejected."""
    model = rows.model(engine)
    with engine.begin() as connection:
        connection.execute(
            text(
                "insert into run (id, kind, source, name, lane, submitted_at, state, planned, finished_at) values"
                " (:id, 'submit', :source, 'pairs.jsonl', 'bulk', :at, 'done', 3, now())"
            ),
            {"id": run_id, "source": "emea", "at": rows.THIS_MONTH, **fields},
        )
        about = {"run_id": run_id, "attributes": {"category": "[red]shoes[/red]"}, "image": "s3://shop/1.png"}
        wrong = {"label": "contradiction", "p_contradiction": 0.9, "p_entailment": 0.05, "decision": "review"}
        words = {"ref": "<script>alert(1)</script>", "text": "[bold]\x1b[2J a shoe"}
        first = run_id.int % 1000 * 3
        verdicts = (
            rows.judged(model, first, ref="agrees", **about),
            rows.rejected(first + 1, ref="broken", run_id=run_id),
            replace(rows.judged(model, first + 2, **about), **wrong, **words),
        )
        settle(connection, Settlement(verdicts))


def sentence(ran: Ran) -> str:
    """The one line that an error is."""
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("concord: ") and ran.err.count("\n") == 1
    return ran.err


def test_without_an_option_the_page_is_a_file_of_this_folder_and_its_name_is_printed(
    concord: Concord, engine: Engine, tmp_path: Path
) -> None:
    fill(engine)
    ran = concord("emea")
    assert (ran.status, ran.err) == (0, "")
    path = Path(ran.out.strip())
    assert path == tmp_path / f"emea-{rows.THIS_MONTH:%Y-%m-%d}-aaaa0000.html"
    html = path.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>") or html.startswith("<!DOCTYPE html>")
    assert "<script>alert(1)" not in html
    assert "is not on the allow-list" in html, "the reason why there is no picture"
    assert not list(tmp_path.glob("*.part"))


def test_the_same_run_gives_the_same_page_again(concord: Concord, engine: Engine, tmp_path: Path) -> None:
    fill(engine)
    for name in ("first.html", "second.html"):
        assert concord(RUN, "--out", name).status == 0
    assert (tmp_path / "first.html").read_bytes() == (tmp_path / "second.html").read_bytes()


def test_a_page_goes_to_the_folder_of_pages_and_may_leave_pictures_out(
    concord: Concord, engine: Engine, tmp_path: Path, database: Database
) -> None:
    fill(engine)
    with configured(database_url=database.url, report_dir=tmp_path / "pages", **KEYS):
        ran = concord("aaaa", "--no-pictures")
    path = tmp_path / "pages" / "emea" / f"{rows.THIS_MONTH:%Y-%m-%d}" / f"{RUN}.html"
    assert ran.out.strip() == str(path)
    assert "allow-list" not in path.read_text(encoding="utf-8")


def test_a_page_may_go_to_the_output(concord: Concord, engine: Engine, tmp_path: Path) -> None:
    fill(engine)
    assert concord("last", "--out", "-").out.lower().startswith("<!doctype html>")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("opens", [True, False])
def test_a_browser_is_asked_to_open_the_file(
    concord: Concord, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens: bool
) -> None:
    fill(engine)
    asked: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: asked.append(address) or opens)
    ran = concord("last", "--open", "--out", "a page.html")
    assert asked == [(tmp_path / "a page.html").as_uri()]
    assert (ran.status, "no browser" in ran.err) == (0, not opens)


def test_the_same_figures_are_tables_on_a_terminal(concord: Concord, engine: Engine) -> None:
    fill(engine)
    ran = concord("last", "--text")
    assert (ran.status, ran.err) == (0, "")
    for shown in (
        "pairs.jsonl, done",
        "defect rate",
        "50.00%",
        "text_empty",
        "contradiction",
        "mini 1 (fp32)",
        "review from",
    ):
        assert shown in ran.out
    assert "[red]shoes[/red]" in ran.out and "[bold]\ufffd[2J a shoe" in ran.out, "as it was written, and no orders"


def test_a_strangers_name_of_an_attribute_gives_a_terminal_no_orders(concord: Concord, engine: Engine) -> None:
    fill(engine)
    with engine.begin() as connection:
        connection.execute(text("update verdict set attributes = :a"), {"a": json.dumps({"[b]\x1b[2Jcolor": ""})})
    ran = concord("last", "--text")
    assert "\x1b" not in ran.out
    assert "[b]\ufffd[2Jcolor" in ran.out and "(empty)" in ran.out


def test_a_page_that_cannot_be_written_says_why_and_what_to_do(
    concord: Concord, engine: Engine, tmp_path: Path
) -> None:
    fill(engine)
    assert "name another file with --out" in sentence(concord("last", "--out", tmp_path))
    assert "not UTF-8" in concord("\udcff").err


def test_the_same_figures_are_one_json_object(concord: Concord, engine: Engine) -> None:
    fill(engine)
    told = json.loads(concord("last", "--json").out)
    assert (told["id"], told["mismatches"], told["worst"][0]["ref"]) == (str(RUN), 1, "<script>alert(1)</script>")
    assert {one["name"]: one["value"] for one in told["figures"]}["defect_rate"] == 0.5


@pytest.mark.parametrize(
    "arguments", [["--text", "--json"], ["--text", "--open"], ["--json", "--out", "x"], ["--open", "--out", "-"]]
)
def test_options_that_do_not_go_together_are_refused(concord: Concord, engine: Engine, arguments: list[str]) -> None:
    ran = concord("last", *arguments)
    assert (ran.status, ran.out) == (2, "")


def test_a_run_that_is_not_there_is_told_and_so_is_a_beginning_of_several(concord: Concord, engine: Engine) -> None:
    assert "there has been no run yet" in sentence(concord())
    fill(engine)
    fill(engine, UUID("aaaa0000-0000-4000-8000-000000000002"))
    assert "`concord sql runs` lists runs" in sentence(concord(uuid4()))
    assert "begins the ids of several runs" in sentence(concord("aaaa"))


def test_without_what_makes_pages_the_extra_is_named_and_tables_are_there(
    concord: Concord, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(engine)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "tasks.report_page", raising=False)
    assert "pip install '.[report]'" in sentence(concord("last"))
    assert concord("last", "--text").status == 0


def test_a_reader_writes_a_page_and_a_producer_is_told_that_it_may_not(
    concord: Concord, engine: Engine, database: Database
) -> None:
    fill(engine)
    owner = create_engine(database.owner_url, isolation_level="AUTOCOMMIT")
    login, password = f"someone_{secrets.token_hex(4)}", secrets.token_hex(16)
    with owner.connect() as connection:
        connection.execute(text(f"create role {login} login password '{password}'"))
        url = make_url(database.url).set(username=login, password=password).render_as_string(False)
        try:
            with configured(database_url=url):
                connection.execute(text(f"grant concord_producer to {login}"))
                assert "permission denied" in sentence(concord("last"))
                connection.execute(text(f"grant concord_reader to {login}"))
                assert concord("last").status == 0
        finally:
            connection.execute(text(f"drop role {login}"))
    owner.dispose()


# ---- Pages of files that were judged ---------------------------------------------------------------------------------


def noted(engine: Engine) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(text("select summary from run order by id")).scalars())


def test_files_that_were_judged_get_their_pages_once(
    engine: Engine, database: Database, bucket: Bucket, tmp_path: Path
) -> None:
    fill(engine)
    keys = {"s3_access_key_id": bucket.access_key_id, "s3_secret_access_key": bucket.secret_access_key}
    places = {"report_dir": tmp_path / "pages", "report_s3": f"s3://{bucket.name}/pages/"}
    with configured(database_url=database.url, s3_endpoint_url=bucket.endpoint_url, **keys, **places):
        assert write_pages_of_files(engine, settings()) == 1
        assert write_pages_of_files(engine, settings()) == 0
    name = f"emea/{rows.THIS_MONTH:%Y-%m-%d}/{RUN}.html"
    (summary,) = noted(engine)
    assert summary["labels"] == {"entailment": 1, "contradiction": 1}
    assert summary["page"] == [
        str(tmp_path / "pages" / name), str(tmp_path / "pages" / "emea" / "latest.html"),
        f"s3://{bucket.name}/pages/{name}", f"s3://{bucket.name}/pages/emea/latest.html",
    ]  # fmt: skip
    stored = bucket.client.get_object(Bucket=bucket.name, Key=f"pages/{name}")
    assert stored["ContentType"] == "text/html; charset=utf-8"
    html = stored["Body"].read()
    assert html == (tmp_path / "pages" / name).read_bytes() == (tmp_path / "pages/emea/latest.html").read_bytes()


def test_without_a_place_for_pages_nothing_is_written_and_nothing_noted(engine: Engine) -> None:
    fill(engine)
    assert write_pages_of_files(engine, settings()) == 0
    assert noted(engine) == [None]


def test_a_page_that_cannot_be_made_is_noted_with_the_reason_and_does_not_hold_up_the_next(
    engine: Engine, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(engine)
    fill(engine, UUID("aaaa0000-0000-4000-8000-000000000002"), source="apac")
    whole = report_writing.page_of

    def broken(report: Any, *given: Any) -> str:
        if report.source == "emea":
            raise ZeroDivisionError("a fault of ours")
        return whole(report, *given)

    monkeypatch.setattr(report_writing, "page_of", broken)
    with configured(database_url=database.url, report_dir=tmp_path / "pages"):
        assert write_pages_of_files(engine, settings()) == 2
        assert write_pages_of_files(engine, settings()) == 0
    first, second = noted(engine)
    assert first["page"] == {"error": "a fault of ours"}
    assert len(second["page"]) == 2


@pytest.mark.parametrize(
    "source", ["..", ".", "../../etc", "/etc", "a/b", "", "x" * 1000, "\u00e9" * 1000, "a\nb", "~"]
)
def test_a_sources_folder_is_one_folder_whatever_a_producer_called_it(source: str, tmp_path: Path) -> None:
    folder = folder_of(source)
    (tmp_path / folder).mkdir()
    assert (tmp_path / folder).resolve().parent == tmp_path.resolve()


def test_long_names_of_sources_that_begin_alike_are_two_folders() -> None:
    first, second = (folder_of("株式会社サンプルのカタログ" + number) for number in "12")
    assert first != second
    for folder in (first, second):
        assert len(folder) <= SOURCE_CHARS and unquote(folder).startswith("株式会社サンプ")


def test_an_older_runs_page_does_not_become_the_latest(engine: Engine, database: Database, tmp_path: Path) -> None:
    fill(engine)
    fill(engine, UUID("aaaa0000-0000-4000-8000-000000000002"), at=rows.THIS_MONTH - timedelta(days=1))
    with configured(database_url=database.url, report_dir=tmp_path / "pages"):
        assert write_pages_of_files(engine, settings()) == 2
    latest = (tmp_path / "pages/emea/latest.html").read_bytes()
    assert latest == (tmp_path / f"pages/emea/{rows.THIS_MONTH:%Y-%m-%d}/{RUN}.html").read_bytes()


def test_a_later_run_that_is_not_done_leaves_the_latest_page_to_the_one_before(
    engine: Engine, database: Database, tmp_path: Path
) -> None:
    fill(engine)
    fill(engine, UUID("aaaa0000-0000-4000-8000-000000000002"), at=rows.THIS_MONTH + timedelta(seconds=1))
    with engine.begin() as connection:
        connection.execute(text("update run set state = 'cancelled' where id <> :id"), {"id": RUN})
    with configured(database_url=database.url, report_dir=tmp_path / "pages"):
        assert write_pages_of_files(engine, settings()) == 1
    assert str(RUN) in (tmp_path / "pages/emea/latest.html").read_text(encoding="utf-8")
