"""What a night plans, that it plans it once, and that it ends."""

from datetime import UTC, datetime

import pytest
from sqlalchemy import text

from tasks.catalogs import CatalogsWrong
from tests.line.site import eventually
from tests.nightly.shop import Shop
from worker.errors import ConcordError


def test_the_first_night_judges_every_item_and_the_second_none_but_what_changed(shop: Shop) -> None:
    shop.fill(2_500)
    first = shop.night(sample=0)
    assert (first.state, first.planned, first.judged, first.reused) == ("done", 2_500, 2_500, 0)
    shop.sql("update product set title = 'another thing' where sku < 'sku-000025'")
    shop.sql("insert into product values ('sku-new', 's3://shop/new', 'a thing')")
    shop.sql("delete from product where sku = 'sku-000100'")
    shop.workers.judged.clear()
    second = shop.night(sample=0, again=True)
    assert (second.state, second.planned, second.reused) == ("done", 26, 2_474)
    assert sorted(shop.workers.judged) == [*(f"sku-{n:06}" for n in range(25)), "sku-new"]
    assert second.summary is not None
    assert second.summary["catalog"]["gone"] == 1


def test_a_share_of_the_unchanged_is_judged_again_and_is_the_same_however_often_it_is_asked(shop: Shop) -> None:
    shop.fill(3_000)
    shop.night(sample=0)
    night = shop.night(sample=0.1, again=True)
    assert 200 < night.planned < 400
    assert night.reused == 3_000 - night.planned
    again = shop.night(sample=0.1, again=True)
    assert again.planned != night.planned, "another night has another sample"


def test_all_judges_the_unchanged_too(shop: Shop) -> None:
    shop.fill(10)
    shop.night()
    assert shop.night(everything=True, again=True).planned == 10


def test_all_asks_for_new_judgements_and_no_other_night_does(shop: Shop) -> None:
    shop.fill(10)
    assert shop.drive_to_end(shop.begin()).judged == 10
    assert shop.workers.fresh == {False}
    shop.workers.fresh.clear()
    shop.night(sample=1.0, again=True)
    assert shop.workers.fresh == {False}
    shop.workers.fresh.clear()
    shop.night(everything=True, again=True)
    assert shop.workers.fresh == {True}


def test_two_starts_of_one_night_are_one_run(shop: Shop) -> None:
    shop.fill(10)
    first = shop.begin()
    assert shop.begin().id == first.id
    shop.drive_to_end(first)
    assert shop.begin().id == first.id
    assert shop.begin(again=True).id != first.id


def test_the_date_of_a_night_is_that_of_its_zone(shop: Shop) -> None:
    shop.fill(1)
    at = datetime(2026, 3, 28, 23, 30, tzinfo=UTC)
    catalog = shop.catalog(time_zone="Europe/Berlin")
    assert shop.begin(catalog, now=at).options["date"] == "2026-03-29"


def test_another_night_does_not_begin_while_one_is_open(shop: Shop) -> None:
    shop.fill(1)
    shop.begin(now=datetime(2026, 3, 28, tzinfo=UTC))
    with pytest.raises(ConcordError, match="shop 2026-03-28 is not over yet"):
        shop.begin(now=datetime(2026, 3, 29, tzinfo=UTC))


def test_without_any_model_no_night_begins(shop: Shop) -> None:
    shop.sql("delete from model_version")
    with pytest.raises(ConcordError, match="start a worker once"):
        shop.begin()
    with pytest.raises(CatalogsWrong, match="there is no model version 7"):
        shop.begin(shop.catalog(model_version=7))


def test_a_new_model_judges_everything_anew_unless_the_catalog_is_pinned_to_the_old(shop: Shop) -> None:
    shop.fill(20)
    old = shop.workers.model_version_id
    shop.night(sample=0)
    shop.sql(
        """insert into model_version (name, revision, recipe, weights_sha256, prompt, image_px, answers)
           values ('mini', '2', 'fp32', '1', '?', 64, '{}')"""
    )
    assert shop.night(shop.catalog(model_version=old), sample=0, again=True).planned == 0
    assert shop.night(sample=0, again=True).planned == 20


def test_what_another_model_judged_is_planned_again(shop: Shop) -> None:
    """As while workers are being replaced: the night was planned for one model, and another answered."""
    shop.fill(5)
    planned_for = shop.begin()
    newer = shop.sql(
        """insert into model_version
               (name, revision, recipe, weights_sha256, prompt, image_px, answers, last_started_at)
           values ('mini', '2', 'fp32', '1', '?', 64, '{}', now() - interval '1 day') returning id"""
    )[0]["id"]
    shop.workers.model_version_id = newer
    assert shop.drive_to_end(planned_for).judged == 5
    assert shop.night(sample=0, again=True).planned == 5


def test_a_changed_threshold_plans_nothing_and_decides_anew(shop: Shop) -> None:
    shop.fill(10)
    shop.sql("update product set title = 'contradiction' where sku = 'sku-000003'")
    first = shop.night(sample=0)
    assert first.summary is not None
    assert (first.flagged, first.summary["catalog"]["flagged"]) == (1, 1)
    shop.sql("insert into policy (name, version, polarity, review_at) values ('catalog', 2, 'should_hold', 0.95)")
    try:
        second = shop.night(sample=0, again=True)
    finally:
        shop.sql("delete from policy where version = 2")
    assert second.summary is not None
    assert (second.planned, second.summary["catalog"]["flagged"]) == (0, 0)


@pytest.mark.parametrize(
    ("settles_as", "planned"),
    [("failed image_fetch_failed", 1), ("rejected image_corrupt", 0), ("rejected bucket_not_allowed", 1)],
)
def test_what_was_not_the_items_own_fault_is_planned_again_the_next_night(
    shop: Shop, settles_as: str, planned: int
) -> None:
    shop.fill(3)
    shop.workers.answer = lambda pair: settles_as if pair["ref"] == "sku-000001" else "entailment"
    first = shop.night(sample=0)
    assert (first.state, first.judged, first.rejected + first.failed) == ("done", 2, 1)
    assert shop.night(sample=0, again=True).planned == planned


def test_the_planner_is_never_more_than_so_many_pairs_ahead(shop: Shop) -> None:
    shop.fill(5_000)
    catalog = shop.catalog(pairs_ahead=128)
    night = shop.begin(catalog)
    with shop.driving(catalog, night):
        eventually(lambda: shop.run(night).planned, "the first page")
        for _ in range(4):
            assert shop.run(night).planned - shop.run(night).settled <= 1_000 + 128
            before = shop.run(night).planned
            while shop.workers.turn():
                pass
            eventually(lambda before=before: shop.run(night).planned > before, "the next page")  # type: ignore[misc]
        with shop.working():
            shop.is_in(night, "done")
    assert shop.run(night).judged == 5_000


def test_a_planner_that_stops_at_any_page_is_gone_on_with_and_each_item_is_judged_once(shop: Shop) -> None:
    shop.fill(5_000)
    catalog = shop.catalog(pairs_ahead=64)
    night = shop.begin(catalog)
    stops = 0
    with shop.working():
        while shop.run(night).is_open:
            before = shop.run(night).planned
            shop.drive(
                catalog,
                night,
                lambda before=before: shop.run(night).planned > before,  # type: ignore[misc]
            )
            stops += 1
    assert stops > 4
    done = shop.run(night)
    assert (done.state, done.planned, done.judged) == ("done", 5_000, 5_000)
    assert sorted(shop.workers.judged) == [f"sku-{n:06}" for n in range(5_000)]


def test_of_two_planners_one_moves_the_night_on_and_the_other_leaves_it(shop: Shop) -> None:
    shop.fill(10)
    catalog = shop.catalog()
    night = shop.begin(catalog)
    with shop.driving(catalog, night):
        shop.is_in(night, "running")
        assert shop.drive(catalog, night).state == "running", "the second came back at once"
        with shop.working():
            shop.is_in(night, "done")


def test_cancel_keeps_back_what_is_not_published_and_resume_takes_it_up(shop: Shop) -> None:
    from db import nights

    shop.fill(3_000)
    catalog = shop.catalog(pairs_ahead=1_000)
    night = shop.begin(catalog)
    with shop.driving(catalog, night):
        eventually(lambda: shop.outbox() > 8, "some messages")
        assert shop.workers.turn(2) == 2
        with shop.engine.begin() as connection:
            assert nights.cancel(connection, night.id)
            assert not nights.cancel(connection, night.id)
    assert shop.workers.turn() == 0, "nothing is due"
    cancelled = shop.run(night)
    assert (cancelled.state, cancelled.judged) == ("cancelled", 128)
    with shop.engine.begin() as connection:
        assert nights.resume(connection, night.id)
    with shop.working():
        done = shop.drive(catalog, night)
    assert (done.state, done.judged, done.finished_at is not None) == ("done", 3_000, True)


def test_the_night_after_a_cancelled_one_gives_up_what_that_kept(shop: Shop) -> None:
    from db import nights

    shop.fill(100)
    night = shop.begin(now=datetime(2026, 3, 28, tzinfo=UTC))
    with shop.driving(shop.catalog(), night):
        shop.is_in(night, "running")
    with shop.engine.begin() as connection:
        nights.cancel(connection, night.id)
    assert shop.outbox() == 2
    after = shop.begin()
    assert shop.outbox() == 0
    done = shop.drive_to_end(after)
    assert (done.planned, done.judged) == (100, 100)


def test_a_night_ends_though_somebody_deleted_its_messages(shop: Shop) -> None:
    shop.fill(200)
    catalog = shop.catalog()
    night = shop.begin(catalog)
    with shop.driving(catalog, night):
        shop.is_in(night, "running")
        shop.sql("delete from outbox")
        shop.is_in(night, "done")
    done = shop.run(night)
    assert done.summary is not None
    assert (done.planned, done.settled, done.summary["catalog"]["without_verdict"]) == (200, 0, 200)


def test_a_night_that_an_older_worker_called_done_has_its_end_all_the_same(shop: Shop) -> None:
    shop.fill(5)
    night = shop.begin()
    with shop.driving(shop.catalog(), night):
        shop.is_in(night, "running")
    while shop.workers.turn():
        pass
    shop.sql("update run set state = 'done', finished_at = now()")
    assert shop.run(night).is_open
    done = shop.drive(shop.catalog(), night)
    assert done.summary is not None
    assert done.summary["catalog"]["judged"] == 5


def test_the_database_goes_away_and_comes_back_and_the_night_goes_on(shop: Shop) -> None:
    shop.fill(3_000)
    catalog = shop.catalog(pairs_ahead=64)
    night = shop.begin(catalog)
    with shop.driving(catalog, night):
        eventually(lambda: shop.run(night).planned, "the first page")
        with shop.engine.connect() as connection:
            connection.execute(
                text(
                    """select pg_terminate_backend(pid) from pg_stat_activity
                       where datname = current_database() and usename = current_user and pid <> pg_backend_pid()"""
                )
            )
        with shop.working():
            shop.is_in(night, "done")
    assert sorted(shop.workers.judged) == [f"sku-{n:06}" for n in range(3_000)]
