"""`celery -A tasks.planner beat` as a process of its own: it begins nights at their minute, and may be killed."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tasks import planner
from tasks.planner import Nights, app
from tests.line.site import ROOT, Worker, eventually
from tests.nightly.shop import Shop
from tests.submit_env import configured, environment

ITEMS = 1_500

Beat = Callable[[], AbstractContextManager[Worker]]


@pytest.fixture
def catalogs_file(tmp_path: Path) -> Path:
    """One catalog, due every minute, on a clock that is not about to begin another date."""
    zone = "UTC" if 1 <= datetime.now(UTC).hour <= 22 else "Asia/Tokyo"
    path = tmp_path / "catalogs.toml"
    path.write_text(f"""
        [shop]
        query = "select sku as ref, image, title as text from product"
        images = []
        schedule = "* * * * *"
        time_zone = "{zone}"
        pairs_ahead = 128
    """)
    return path


@pytest.fixture
def beat(shop: Shop, catalogs_file: Path, tmp_path: Path) -> Beat:
    own = environment(database_url=shop.database.url, catalogs_file=catalogs_file)

    @contextmanager
    def beat() -> Iterator[Worker]:
        """A beat that runs; stopped in the end, if it still does, and its log shown if the test fails."""
        command = [sys.executable, "-m", "celery", "-A", "tasks.planner", "beat", "-l", "info", "--pidfile", "",
                   "-s", str(tmp_path / "beat")]  # fmt: skip
        process = subprocess.Popen(
            command, cwd=ROOT, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        running = Worker(process)
        try:
            yield running
        finally:
            if process.poll() is None:
                running.stop()
            assert process.stdout is not None
            process.stdout.close()
            print("".join(running.lines[-200:]))

    return beat


def runs(shop: Shop) -> list[dict[str, Any]]:
    return shop.sql("select state, planned, judged from run")


def is_killed_in_the_middle_and_ends(shop: Shop, beat: Beat) -> None:
    """Beat begins the night and is killed while it plans; another goes on, and begins no second one."""
    with beat() as first:
        eventually(shop.outbox, "the first page is planned", 90)
        first.kill()
    assert [run["state"] for run in runs(shop)] == ["planning"]
    with shop.working(), beat():
        eventually(lambda: runs(shop)[0]["state"] == "done", "the night is done")
    assert runs(shop) == [{"state": "done", "planned": ITEMS, "judged": ITEMS}]
    assert sorted(shop.workers.judged) == [f"sku-{n:06}" for n in range(ITEMS)]


def test_an_hour_that_passed_while_no_beat_ran_begins_its_night_once_also_if_beat_is_killed(
    shop: Shop, beat: Beat, catalogs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.fill(ITEMS)
    monkeypatch.setattr(planner, "stopped", Event())
    with configured(database_url=shop.database.url, catalogs_file=catalogs_file):
        before = Nights(app, schedule_filename=str(tmp_path / "beat"))
        before.schedule["nightly shop"].last_run_at = datetime.now(UTC) - timedelta(days=2)
        before.close()
    is_killed_in_the_middle_and_ends(shop, beat)


@pytest.mark.slow
def test_a_night_begins_at_its_minute_and_is_planned_once_also_if_beat_is_killed(shop: Shop, beat: Beat) -> None:
    """A beat that has never run waits for the next minute: nothing is made up for."""
    shop.fill(ITEMS)
    is_killed_in_the_middle_and_ends(shop, beat)


def test_a_beat_that_is_told_to_end_does(beat: Beat) -> None:
    with beat() as running:
        running.says("beat: Starting...")
        assert running.stop() == 0
