"""`concord nightly ...`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from db import nights
from tasks.cli import cli
from tasks.nightly_cli import display, rate
from tests.line.site import eventually
from tests.nightly.shop import Shop
from tests.submit_env import configured
from worker.errors import ConcordError

#: In the zone of the catalogs that the shop makes: around midnight another would have another date.
FILE = """
[shop]
query = "select sku as ref, image, title as text, attributes from product"
images = []
schedule = "30 2 * * *"
time_zone = "UTC"
pairs_ahead = 128

[empty]
table = "catalog_item"
images = []
"""


@pytest.fixture(autouse=True)
def configuration(shop: Shop, tmp_path: Path) -> Iterator[None]:
    path = tmp_path / "catalogs.toml"
    path.write_text(FILE)
    with configured(database_url=shop.database.url, catalogs_file=str(path)):
        yield


def concord(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["nightly", *arguments])


def status(source: str) -> dict[str, Any]:
    (found,) = json.loads(concord("status", source, "--json").stdout)
    return dict(found)


def test_start_moves_the_night_to_its_end_and_tells_what_it_came_to(shop: Shop) -> None:
    shop.fill(300)
    shop.sql("update product set title = 'contradiction' where sku < 'sku-000010'")
    with shop.working():
        result = concord("start", "shop")
    assert result.exit_code == 0, result
    assert "whole catalog" in result.stdout and "category odd" in result.stdout
    shop.sql("update product set title = 'contradiction' where sku = 'sku-000020'")
    with shop.working():
        second = concord("start", "shop", "--again", "--sample", "0")
    assert "sku-000020: entailment -> contradiction" in second.stdout
    night = status("shop")["night"]
    assert (night["state"], night["planned"], night["reused"]) == ("done", 1, 299)


def test_start_of_a_night_that_is_done_says_so_and_shows_it(shop: Shop) -> None:
    shop.fill(3)
    with shop.working():
        concord("start", "shop")
        result = concord("start", "shop")
    assert result.exit_code == 0
    assert "--again begins another" in result.stderr
    assert shop.sql("select count(*) as rows from run")[0]["rows"] == 1


def test_start_says_where_the_night_goes_on_otherwise_than_it_is_asked_to(shop: Shop) -> None:
    shop.fill(3)
    concord("start", "shop", "--sample", "0.2", "--detach")
    assert "shop" not in concord("start", "shop", "--sample", "0.2", "--detach").stderr
    assert "goes on as it was begun: --sample 0.2" in concord("start", "shop", "--all", "--detach").stderr


def test_what_was_rejected_is_told_with_where_to_look(shop: Shop) -> None:
    shop.fill(3)
    shop.workers.answer = lambda pair: "rejected image_not_found"
    with shop.working():
        told = concord("start", "shop").stdout
    assert "planned 3, judged 0, rejected 3, failed 0" in told
    assert "concord sql errors_by_code --source shop --since " in told


def test_a_night_that_fails_exits_1_and_can_be_resumed(shop: Shop) -> None:
    result = concord("start", "shop")
    assert result.exit_code == 1
    assert "failed: the source is empty" in result.stdout
    with pytest.raises(ConcordError, match="was failed: `concord nightly resume shop`"):
        raise concord("start", "shop").exception or AssertionError
    shop.fill(3)
    with shop.working():
        assert concord("resume", "shop").exit_code == 0
    assert status("shop")["night"]["judged"] == 3


def test_cancel_stops_the_night_and_watch_says_how_it_ended(shop: Shop) -> None:
    shop.fill(2_500)
    assert concord("start", "shop", "--detach").exit_code == 0
    night = shop.begin()
    with shop.driving(shop.catalog(pairs_ahead=128), night):
        eventually(shop.outbox, "the first page")
        assert concord("cancel", "shop").exit_code == 0
    watched = concord("watch", "shop")
    assert (watched.exit_code, "is cancelled" in watched.stdout) == (1, True)
    with pytest.raises(ConcordError, match="there is nothing to cancel"):
        raise concord("cancel", "shop").exception or AssertionError
    with shop.working():
        assert concord("resume", "shop").exit_code == 0
    assert status("shop")["night"]["judged"] == 2_500


def test_watch_shows_a_night_that_another_process_drives(shop: Shop) -> None:
    shop.fill(300)
    night = shop.begin()
    with shop.driving(shop.catalog(), night), shop.working():
        result = concord("watch", "shop")
    assert result.exit_code == 0
    assert "whole catalog" in result.stdout


def test_status_shows_every_catalog(shop: Shop) -> None:
    shop.fill(3)
    with shop.working():
        concord("start", "shop")
    table = concord("status").stdout
    assert "30 2 * * *" in table and "done" in table and "empty" in table
    both = json.loads(concord("status", "--json").stdout)
    assert [row["source"] for row in both] == ["shop", "empty"]
    assert both[1]["night"] is None


def test_check_reads_the_source_and_plans_nothing(shop: Shop) -> None:
    shop.fill(5)
    result = concord("check", "shop")
    assert result.exit_code == 0
    assert '"ref": "sku-000000"' in result.stdout
    assert "5 items, 0 rows that name none, 0 repeated refs" in result.stdout
    assert shop.sql("select count(*) as rows from run")[0]["rows"] == 0
    shop.sql("alter table product rename title to name")
    with pytest.raises(ConcordError, match='shop: column "title" does not exist'):
        raise concord("check", "shop").exception or AssertionError


@pytest.mark.parametrize("command", ["start", "resume", "watch", "cancel", "status", "check"])
def test_a_catalog_that_is_not_there_is_said(command: str) -> None:
    with pytest.raises(
        ConcordError, match=r"there is no catalog 'nobody'; there are empty, shop|nobody has had no night"
    ):
        raise concord(command, "nobody").exception or AssertionError


def test_the_live_display_says_how_fast_and_until_when(shop: Shop) -> None:
    from rich.console import Console

    shop.fill(3)
    night = shop.begin()
    with shop.driving(shop.catalog(), night):
        shop.is_in(night, "running")
    console = Console(width=120)
    with console.capture() as captured:
        console.print(display(shop.run(night), rate([(0.0, 0), (2.0, 1_000)])))
    assert "500 pairs/s" in captured.get() and "end: about " in captured.get()
    assert rate([(1.0, 5)]) == 0.0
    with shop.engine.connect() as connection:
        assert nights.messages_ahead(connection, night.id) == 1
