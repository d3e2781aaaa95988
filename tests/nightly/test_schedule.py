"""The file of catalogs, and the hour at which a night begins in its own zone."""

import pickle
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from tasks import planner
from tasks.catalogs import Catalog, CatalogsWrong, read_catalogs, secret
from tasks.planner import LocalCrontab, Nights, app, entries
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


#: Where clocks change, and around when: at two or three in the morning, at midnight to either side, by half an hour,
#: and by a whole day that was left out.
CHANGES = [
    ("Europe/Berlin", (2026, 3, 29)), ("Europe/Berlin", (2026, 10, 25)),
    ("America/Santiago", (2026, 4, 5)), ("America/Santiago", (2026, 9, 6)),
    ("Africa/Cairo", (2026, 4, 24)), ("Africa/Cairo", (2026, 10, 30)),
    ("America/Havana", (2026, 3, 8)), ("America/Havana", (2026, 11, 1)),
    ("Asia/Beirut", (2026, 3, 29)), ("Asia/Beirut", (2026, 10, 25)),
    ("Australia/Lord_Howe", (2026, 4, 5)), ("Australia/Lord_Howe", (2026, 10, 4)),
    ("Pacific/Apia", (2011, 12, 30)),
]  # fmt: skip
HOURS = ["0 0", "30 0", "0 1", "30 1", "0 2", "30 2", "30 3", "30 22", "0 23", "30 23", "59 23"]
TICK = timedelta(minutes=10)


def ticks(day: tuple[int, int, int]) -> list[datetime]:
    """Moments at which a beat looks, from noon two days before a date to noon two days after it."""
    first = datetime(*day, 12, tzinfo=UTC) - timedelta(days=2, minutes=7)
    return [first + n * TICK for n in range(4 * 24 * 6)]


def begun(schedule: str, zone: str, looks: list[datetime], patch: pytest.MonkeyPatch) -> list[str]:
    """The dates of the nights that a beat begins that looks at these moments, and did at none between."""
    local = LocalCrontab(schedule, zone)
    catalog = Catalog(name="shop", query="select 1", images=[], time_zone=ZoneInfo(zone))
    dates, last = [], looks[0]
    for now in looks[1:]:
        patch.setattr(LocalCrontab, "now", lambda self, now=now: now)
        if local.is_due(last).is_due:
            due = local.last_due(now)
            assert due is not None
            dates.append(catalog.local_date(due))
            last = now
    return dates


def dates_between(zone: str, schedule: str, looks: list[datetime]) -> list[str]:
    """Every date that its clock showed, but for those whose hour is before the first look, or after the last."""
    clock = ZoneInfo(zone)
    minute, hour = map(int, schedule.split()[:2])
    shown = [moment.astimezone(clock) for moment in looks]
    dates = sorted({moment.date() for moment in shown})
    at = [datetime(one.year, one.month, one.day, hour, minute, tzinfo=clock) for one in dates]
    return [one.isoformat() for one, due in zip(dates, at, strict=True) if looks[0] < due.astimezone(UTC) <= looks[-1]]


@pytest.mark.parametrize(("zone", "day"), CHANGES)
@pytest.mark.parametrize("hour", HOURS)
def test_a_beat_that_looks_on_begins_one_night_for_each_date_of_the_zone(
    zone: str, day: tuple[int, int, int], hour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = ticks(day)
    assert begun(f"{hour} * * *", zone, looks, monkeypatch) == dates_between(zone, hour, looks)


@pytest.mark.parametrize(("zone", "day"), CHANGES)
@pytest.mark.parametrize("hour", ["0 0", "30 2", "30 23"])
@pytest.mark.parametrize("down_h", [3, 20])
def test_a_beat_that_is_down_over_the_hour_begins_that_dates_night_once_it_is_back(
    zone: str, day: tuple[int, int, int], hour: str, down_h: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = ticks(day)
    wanted = dates_between(zone, hour, looks)
    for start in range(24, 72, 5):
        gone = looks[0] + timedelta(hours=start)
        left = [look for look in looks if not gone <= look < gone + timedelta(hours=down_h)]
        assert begun(f"{hour} * * *", zone, left, monkeypatch) == wanted


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


def test_what_was_due_last_is_known_for_as_long_as_a_schedule_may_pause() -> None:
    moment = datetime(2026, 3, 27, 12, tzinfo=UTC)
    assert LocalCrontab("0 4 * * 1", "UTC").last_due(moment) == datetime(2026, 3, 23, 4, tzinfo=UTC)
    assert LocalCrontab("0 4 1 * *", "UTC").last_due(moment) == datetime(2026, 3, 1, 4, tzinfo=UTC)
    assert LocalCrontab("0 4 1 4 *", "UTC").last_due(moment) == datetime(2025, 4, 1, 4, tzinfo=UTC)
    assert LocalCrontab("0 4 29 2 *", "UTC").last_due(moment) is None
    assert LocalCrontab("0 12 * * *", "UTC").last_due(moment) == moment


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


class Clock(datetime):
    """A datetime whose `now` is what the test says."""

    at = datetime(2026, 3, 28, tzinfo=UTC)

    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        return cls.at


def begin_at(shop: object, write: Write, schedule: str, *moments: datetime) -> list[str]:
    """What beat does at these moments, and nights that are over at once; returns the dates of all nights so far."""
    from tests.nightly.shop import Shop

    assert isinstance(shop, Shop)
    text = WHOLE.replace('dsn = "env:SHOP_DSN"\n', "").replace("30 2 * * *", schedule)
    with configured(database_url=shop.database.url, catalogs_file=str(write(text))):
        for Clock.at in moments:
            app.tasks["concord.nightly"].apply(("shop",))
            shop.sql("update run set state = 'done', summary = '{}'")
    return [row["date"] for row in shop.sql("select options ->> 'date' as date from run order by created_at")]


def test_a_schedule_that_is_changed_during_the_day_gives_that_date_no_second_night(
    shop: object, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.planner.datetime", Clock)
    day = datetime(2026, 3, 29, tzinfo=BERLIN)
    assert begin_at(shop, write, "30 2 * * *", day.replace(hour=3, minute=30)) == ["2026-03-29"]
    later = day.replace(hour=14, minute=0, second=1)
    assert begin_at(shop, write, "0 14 * * *", later) == ["2026-03-29"]
    tomorrow = later + timedelta(days=1)
    assert begin_at(shop, write, "0 14 * * *", tomorrow) == ["2026-03-29", "2026-03-30"]
    # Earlier on the clock than the last one was: the next date is next.
    assert begin_at(shop, write, "0 13 * * *", tomorrow + timedelta(minutes=5)) == ["2026-03-29", "2026-03-30"]


def test_a_weeks_night_that_begins_days_late_is_that_of_its_own_date(
    shop: object, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.planner.datetime", Clock)
    wednesday = datetime(2026, 4, 1, 9, tzinfo=BERLIN)
    assert begin_at(shop, write, "0 4 * * 1", wednesday, wednesday + timedelta(days=5)) == ["2026-03-30", "2026-04-06"]


@pytest.mark.parametrize("schedule", ["30 2 * * *", "0 14 * * *"])
def test_beat_takes_a_changed_schedule_over_and_keeps_when_it_ran_last(
    shop: object, write: Write, tmp_path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.nightly.shop import Shop

    assert isinstance(shop, Shop)
    monkeypatch.setattr(planner, "stopped", threading.Event())
    ran = datetime(2026, 3, 29, 0, 30, tzinfo=UTC)
    plain = WHOLE.replace('dsn = "env:SHOP_DSN"\n', "")
    for text in (plain, plain.replace("30 2 * * *", schedule)):
        with configured(database_url=shop.database.url, catalogs_file=str(write(text))):
            beat = Nights(app, schedule_filename=str(tmp_path / "beat"))
            entry = beat.schedule["nightly shop"]
            found = entry.schedule, entry.last_run_at
            entry.last_run_at = ran
            beat.close()
        planner.stopped.clear()
    assert found == (LocalCrontab(schedule, "Europe/Berlin"), ran)
