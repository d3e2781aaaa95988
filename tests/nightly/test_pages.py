"""The page of a night: it is written at the night's end, beside the results, and never in the night's way."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from db.run_reading import read_report
from tasks import planner, report_writing
from tasks.nightly_cli import exit_status
from tasks.planner import Pages
from tasks.report_writing import page_of
from tests.line.site import eventually
from tests.nightly.shop import Shop
from tests.submit_env import configured


def a_night(shop: Shop, **fields: Any) -> Any:
    if not shop.sql("select from product"):
        shop.fill(20)
    shop.sql("update product set title = 'contradiction' where sku = 'sku-000003'")
    return shop.night(shop.catalog(**fields), again=True)


def at(shop: Shop, folder: Path) -> Shop:
    shop.settings = shop.settings.model_copy(update={"report_dir": folder})
    return shop


def test_a_nights_page_is_beside_its_results_and_in_the_folder_of_pages(shop: Shop, tmp_path: Path) -> None:
    results = f"s3://{shop.bucket.name}/results/"
    night = a_night(at(shop, tmp_path), results=results)
    name = f"shop/{night.options['date']}/{night.id}.html"
    assert set(night.summary["page"]) == {
        f"{results}{name}", f"{results}shop/latest.html", str(tmp_path / name), str(tmp_path / "shop/latest.html"),
    }  # fmt: skip
    assert f"{results}{name}".replace(".html", ".jsonl") in night.summary["results"]
    stored = shop.bucket.client.get_object(Bucket=shop.bucket.name, Key=f"results/{name}")["Body"].read()
    assert stored == (tmp_path / name).read_bytes() == (tmp_path / "shop/latest.html").read_bytes()
    assert exit_status(night) == 0


def test_the_page_written_at_the_end_is_the_page_that_the_run_has_from_then_on(shop: Shop, tmp_path: Path) -> None:
    night = a_night(at(shop, tmp_path))
    page = (tmp_path / f"shop/{night.options['date']}/{night.id}.html").read_text()
    a_night(shop)
    with shop.engine.connect() as connection:
        report = read_report(connection, night.id)
    assert (report.state, report.state_note) == ("done", "")
    assert page_of(report, shop.settings) == page


def test_the_page_is_there_when_word_goes_out(shop: Shop, tmp_path: Path) -> None:
    there: list[bool] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            there.append(all(Path(place).exists() for place in told["page"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            night = a_night(at(shop, tmp_path), webhook=f"http://127.0.0.1:{server.server_port}/")
        finally:
            server.shutdown()
            thread.join()
    assert (night.summary["webhook"], there) == ("HTTP 200", [True])


def test_where_pages_have_no_place_there_is_none(shop: Shop) -> None:
    night = a_night(shop)
    assert (night.state, night.summary["page"], exit_status(night)) == ("done", None, 0)


@pytest.mark.parametrize("fault", [ZeroDivisionError("a fault of ours"), MemoryError(), OSError("the disk is full")])
def test_a_night_whose_page_fails_is_done_all_the_same_and_says_why(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    def broken(*_: Any) -> str:
        raise fault

    monkeypatch.setattr(report_writing, "page_of", broken)
    night = a_night(at(shop, tmp_path), results=f"s3://{shop.bucket.name}/results/")
    assert (night.state, len(night.summary["results"])) == ("done", 2)
    assert night.summary["page"] == {"error": str(fault) or type(fault).__name__}
    assert exit_status(night) == 1, "as for results that cannot be sent"


def test_where_nothing_makes_pages_a_night_goes_as_before(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "tasks.report_page", raising=False)
    night = a_night(at(shop, tmp_path), results=f"s3://{shop.bucket.name}/results/")
    assert (night.state, night.summary["page"], exit_status(night)) == ("done", None, 0)
    assert "pip install '.[report]'" in caplog.text


def test_an_s3_that_refuses_costs_neither_the_night_nor_the_page_of_this_machine(shop: Shop, tmp_path: Path) -> None:
    shop.settings = shop.settings.model_copy(update={"s3_access_key_id": "nobody"})
    night = a_night(at(shop, tmp_path), results=f"s3://{shop.bucket.name}/results/")
    assert night.state == "done"
    assert "InvalidAccessKeyId" in night.summary["page"]["error"]
    assert (tmp_path / "shop/latest.html").exists()


def test_labels_are_noted_for_the_pages_of_nights_to_come(shop: Shop) -> None:
    night = a_night(shop)
    assert night.summary["labels"] == {"entailment": 19, "contradiction": 1}


def test_beside_beat_the_pages_of_files_are_written(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "stopped", threading.Event())
    with configured(database_url=shop.database.url, report_dir=tmp_path):
        thread = Pages(look_every_s=0.01)
        thread.start()
        try:
            shop.sql(
                "insert into run (id, kind, source, name, lane, submitted_at, state, finished_at)"
                " values (gen_random_uuid(), 'submit', 'emea', 'pairs.jsonl', 'bulk', now(), 'done', now())"
            )
            eventually(lambda: (tmp_path / "emea/latest.html").exists(), "a page")
            eventually(lambda: shop.sql("select summary from run")[0]["summary"] is not None, "that it is noted")
        finally:
            planner.stopped.set()
            thread.join()
