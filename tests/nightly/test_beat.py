"""The planner beside beat: it finds open nights and moves them on; beat looks after the database too."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import planner
from tasks.planner import Nights, Planner, app
from tests.line.site import eventually
from tests.nightly.shop import Shop
from tests.submit_env import configured

FILE = """
[shop]
query = "select sku as ref, image, title as text from product"
images = []
schedule = "30 2 * * *"
"""


@pytest.fixture
def file(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(planner, "stopped", threading.Event())
    path = tmp_path / "catalogs.toml"
    path.write_text(FILE)
    with configured(database_url=shop.database.url, catalogs_file=str(path)):
        yield path


def test_an_open_night_that_nobody_moves_on_is_found(shop: Shop, file: Path) -> None:
    shop.fill(20)
    night = shop.begin()
    thread = Planner(look_every_s=0.01)
    thread.start()
    try:
        with shop.working():
            shop.is_in(night, "done")
        again = shop.begin(again=True)
        with shop.working():
            shop.is_in(again, "done")
    finally:
        planner.stopped.set()
        thread.join()
    assert shop.run(night).judged == 20


def test_the_planner_outlives_a_file_that_is_wrong_for_a_while(shop: Shop, file: Path) -> None:
    shop.fill(20)
    night = shop.begin()
    file.write_text("[shop")
    thread = Planner(look_every_s=0.01)
    thread.start()
    try:
        eventually(lambda: thread.is_alive(), "the planner is up")
        file.write_text(FILE)
        with shop.working():
            shop.is_in(night, "done")
    finally:
        planner.stopped.set()
        thread.join()


def test_beat_reads_its_schedule_from_the_file_and_remembers_when_it_ran(
    shop: Shop, file: Path, tmp_path: Path
) -> None:
    scheduler = Nights(app, schedule_filename=str(tmp_path / "beat"))
    assert set(scheduler.schedule) == {"maintain", "nightly shop"}
    assert scheduler.tick() > 0
    last = scheduler.schedule["nightly shop"].last_run_at
    scheduler.close()
    planner.stopped.clear()
    later = Nights(app, schedule_filename=str(tmp_path / "beat"))
    assert later.schedule["nightly shop"].last_run_at == last
    later.close()


def test_beat_does_not_start_on_a_file_that_is_wrong(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text("[shop")
    with pytest.raises(SystemExit):
        Nights(app, schedule_filename=str(tmp_path / "beat"))
    assert "beat cannot start" in caplog.text


def test_beat_without_a_file_of_catalogs_looks_after_the_database_alone(
    shop: Shop, file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shop.fill(1)
    night = shop.begin()
    with configured(database_url=shop.database.url):
        scheduler = Nights(app, schedule_filename=str(tmp_path / "beat"))
        assert set(scheduler.schedule) == {"maintain"}
        assert not any(isinstance(thread, Planner) for thread in scheduler.beside)
        scheduler.close()
    assert "CONCORD_CATALOGS_FILE is not set" in caplog.text
    assert shop.run(night).state == "planning"


def test_beat_does_not_start_on_a_file_that_is_not_there(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A name that is mistyped is no wish for a beat without nights."""
    file.unlink()
    with pytest.raises(SystemExit):
        Nights(app, schedule_filename=str(tmp_path / "beat"))
    assert "beat cannot start: " in caplog.text and "No such file" in caplog.text


def test_beat_does_not_start_without_a_database(file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with configured(catalogs_file=str(file)), pytest.raises(SystemExit):
        Nights(app, schedule_filename=str(tmp_path / "beat"))
    assert "beat cannot start: CONCORD_DATABASE_URL" in caplog.text


def test_a_night_that_cannot_begin_is_logged_and_beat_goes_on(
    shop: Shop, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shop.sql("delete from model_version")
    app.tasks["concord.nightly"].apply(("shop",))
    assert "shop does not begin: no model has started" in caplog.text


def test_beat_makes_the_months_ahead(shop: Shop, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        app.tasks["concord.maintain"].apply()
    assert "made 0 months, dropped none" in caplog.text
