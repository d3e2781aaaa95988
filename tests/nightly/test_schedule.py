"""The file of catalogs, and the hour at which a night begins in its own zone."""

import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from tasks.catalogs import CatalogsWrong, read_catalogs, secret
from tasks.planner import LocalCrontab, app, entries
from tasks.settings import SettingsWrong
from tests.submit_env import configured

WHOLE = """
[shop]
query = "select sku as ref, image, title as text from product"
dsn = "env:SHOP_DSN"
images = ["s3://shop/"]
schedule = "30 2 * * *"
time_zone = "Europe/Berlin"
sample = 0.05

[partners]
manifest = "s3://partners/items.jsonl.gz"
images = []
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "catalogs.toml"
        path.write_text(text)
        return path

    return write


def test_a_file_of_catalogs_is_read(write: Write) -> None:
    found = read_catalogs(write(WHOLE))
    assert set(found) == {"shop", "partners"}
    assert (found["shop"].sample, found["shop"].lane, str(found["shop"].time_zone)) == (0.05, "bulk", "Europe/Berlin")
    assert set(entries(found)) == {"nightly shop"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[shop\n", "Expected ']' at the end of a table declaration (at line 1"),
        ("sample = 1\n", "sample stands outside any catalog"),
        ("[shop]\nimages = []", "[shop] Value error, give exactly one of query, table and manifest"),
        ('[shop]\nquery = "select 1"', "[shop] images: Field required"),
        ('[shop]\nquery = "x"\nimages = ["shop"]', "[shop] images.0: String should match"),
        ('[shop]\nquery = "x"\nimages = []\nsampel = 1', "[shop] sampel: Extra inputs are not permitted"),
        ('[shop]\nquery = "x"\nimages = []\nsample = 2', "[shop] sample: Input should be less than or equal to 1"),
        ('[shop]\nquery = "x"\nimages = []\nschedule = "daily"', "[shop] schedule: Value error, a schedule has five"),
        ('[shop]\nquery = "x"\nimages = []\nschedule = "61 2 * * *"', "[shop] schedule: Value error, "),
        ('[shop]\nquery = "x"\nimages = []\ntime_zone = "Berlin"', "[shop] time_zone: Value error, 'Berlin' is no"),
        ('[shop]\nmanifest = "s3://b/m.xml"\nimages = []', "[shop] manifest: Value error, a manifest's name ends with"),
        ('[shop]\ntable = "a.b.c"\nimages = []', "[shop] table: Value error, write the table as"),
        ('[shop]\nmanifest = "s3://b/m.csv"\nimages = []\ndsn = "secret-word"', "[shop] Value error, a manifest has"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_file_is_said_with_its_place(write: Write, text: str, says: str) -> None:
    path = write(text)
    with pytest.raises(CatalogsWrong) as caught:
        read_catalogs(path)
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)
    assert "secret-word" not in str(caught.value)


def test_secrets_stand_in_the_environment_in_a_file_or_in_the_catalog(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dsn").write_text("from a file\n")
    where = [f"file:{tmp_path}/dsn", "env:SHOP_DSN", "postgresql://itself"]
    text = "".join(f'[c{n}]\nquery = "x"\nimages = []\ndsn = "{dsn}"\n' for n, dsn in enumerate(where))
    monkeypatch.setenv("SHOP_DSN", "from the environment")
    read = [secret(catalog.dsn) for catalog in read_catalogs(write(text)).values() if catalog.dsn]
    assert read == ["from a file", "from the environment", "postgresql://itself"]
    monkeypatch.delenv("SHOP_DSN")
    (tmp_path / "dsn").unlink()
    for catalog, error in zip(read_catalogs(write(text)).values(), (CatalogsWrong, SettingsWrong), strict=False):
        assert catalog.dsn
        with pytest.raises(error):
            secret(catalog.dsn)
    assert "itself" not in repr(read_catalogs(write(text)))


BERLIN, NEW_YORK = ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York")


def nights(schedule: LocalCrontab, first: datetime, last: datetime) -> list[datetime]:
    """Every moment at which it is due, as beat asks: after each run for the next."""
    found, moment = [], first
    while (moment := schedule.next_after(moment)) < last:
        found.append(moment)
    return found


@pytest.mark.parametrize(
    ("zone", "around"),
    [
        (BERLIN, datetime(2026, 3, 29, 12, tzinfo=BERLIN)),  # 02:00 -> 03:00
        (BERLIN, datetime(2026, 10, 25, 12, tzinfo=BERLIN)),  # 03:00 -> 02:00
        (NEW_YORK, datetime(2026, 3, 8, 12, tzinfo=NEW_YORK)),
        (NEW_YORK, datetime(2026, 11, 1, 12, tzinfo=NEW_YORK)),
        (ZoneInfo("Australia/Lord_Howe"), datetime(2026, 4, 5, 12, tzinfo=ZoneInfo("Australia/Lord_Howe"))),
        (ZoneInfo("UTC"), datetime(2026, 3, 29, 12, tzinfo=UTC)),
    ],
)
@pytest.mark.parametrize("hour", ["30 2", "0 2", "0 3", "30 1", "59 23", "0 0"])
def test_each_local_date_has_one_night_also_where_the_clock_changes(
    zone: ZoneInfo, around: datetime, hour: str
) -> None:
    schedule = LocalCrontab(f"{hour} * * *", zone.key)
    first = (around - timedelta(days=3)).replace(hour=12).astimezone(UTC)
    last = (around + timedelta(days=3)).replace(hour=12).astimezone(UTC)
    dates = [moment.astimezone(zone).date() for moment in nights(schedule, first, last)]
    assert dates == [(first.astimezone(zone) + timedelta(days=n)).date() for n in range(1, 7)] or (
        hour == "59 23" and dates == [(first.astimezone(zone) + timedelta(days=n)).date() for n in range(6)]
    )


def test_a_time_that_the_clock_skips_comes_later_and_one_that_it_shows_twice_comes_first() -> None:
    schedule = LocalCrontab("30 2 * * *", "Europe/Berlin")
    spring = schedule.next_after(datetime(2026, 3, 28, 12, tzinfo=UTC))
    assert spring == datetime(2026, 3, 29, 1, 30, tzinfo=UTC), "03:30 on the new clock"
    autumn = schedule.next_after(datetime(2026, 10, 24, 12, tzinfo=UTC))
    assert autumn == datetime(2026, 10, 25, 0, 30, tzinfo=UTC), "02:30 for the first time"
    assert schedule.next_after(autumn) == datetime(2026, 10, 26, 1, 30, tzinfo=UTC)


def test_some_days_of_the_week_or_month_only() -> None:
    mondays = LocalCrontab("0 4 * * 1", "Europe/Berlin")
    found = nights(mondays, datetime(2026, 3, 20, tzinfo=UTC), datetime(2026, 4, 7, tzinfo=UTC))
    assert [moment.astimezone(BERLIN).isoformat() for moment in found] == [
        "2026-03-23T04:00:00+01:00", "2026-03-30T04:00:00+02:00", "2026-04-06T04:00:00+02:00",
    ]  # fmt: skip
    firsts = LocalCrontab("0 4 1 * *", "Europe/Berlin")
    assert firsts.next_after(datetime(2026, 3, 20, tzinfo=UTC)) == datetime(2026, 4, 1, 2, tzinfo=UTC)


def test_an_hour_that_passed_while_no_beat_ran_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = LocalCrontab("30 2 * * *", "Europe/Berlin")
    monkeypatch.setattr(LocalCrontab, "now", lambda self: datetime(2026, 3, 30, 9, tzinfo=UTC))
    due = schedule.is_due(datetime(2026, 3, 28, 12, tzinfo=UTC))
    assert due.is_due
    assert due.next == 15.5 * 3600
    assert not schedule.is_due(datetime(2026, 3, 30, 8, tzinfo=UTC)).is_due


def test_a_schedule_survives_beats_own_file() -> None:
    schedule = LocalCrontab("30 2 * * *", "Europe/Berlin")
    assert pickle.loads(pickle.dumps(schedule)) == schedule  # noqa: S301
    assert schedule != LocalCrontab("30 2 * * *", "Europe/Paris")
    assert repr(schedule) == "30 2 * * * Europe/Berlin"


def test_beat_begins_a_night_in_its_own_process_and_twice_makes_one(shop: object, write: Write) -> None:
    from tests.nightly.shop import Shop

    assert isinstance(shop, Shop)
    shop.fill(3)
    path = write(WHOLE.replace('dsn = "env:SHOP_DSN"\n', ""))
    with configured(database_url=shop.database.url, catalogs_file=str(path)):
        for _ in range(2):
            app.tasks["concord.nightly"].apply(("shop",))
    rows = shop.sql("select kind, source, state from run")
    assert rows == [{"kind": "nightly", "source": "shop", "state": "planning"}]
