"""A large catalog: the planner's memory does not grow with it, and what has not changed costs little."""

import gc
import time
from typing import Any

import pytest

from tests.nightly.shop import Shop

ITEMS = 100_000
#: What the planner may hold more at the end of a large night than at a fifth of it.
GROWTH_MB = 30


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_thousand_items_are_planned_judged_and_summed_up_in_flat_memory(shop: Shop) -> None:
    psutil = pytest.importorskip("psutil")

    class Nothing(list[Any]):
        """The stand-in workers are in this process too: what they note would be taken for the planner's."""

        def __iadd__(self, other: Any) -> "Nothing":
            return self

    shop.fill(ITEMS)
    shop.workers.judged = Nothing()
    catalog, night = shop.catalog(), shop.begin(sample=0)
    resident: list[tuple[int, float]] = []
    with shop.driving(catalog, night), shop.working():
        while (now := shop.run(night)).is_open:
            resident.append((now.settled, psutil.Process().memory_info().rss / 2**20))
            time.sleep(0.5)
    assert (now.state, now.planned, now.judged) == ("done", ITEMS, ITEMS)
    gc.collect()
    early = next(megabytes for settled, megabytes in resident if settled > ITEMS / 5)
    assert max(megabytes for _, megabytes in resident) < early + GROWTH_MB
    assert now.summary is not None
    assert now.summary["catalog"]["items"] == ITEMS

    shop.sql("update product set title = 'another thing' where right(sku, 2) = '07'")
    second = shop.night(catalog, sample=0.01, again=True)
    assert second.summary is not None
    changed = second.planned - second.summary["catalog"]["sample"]
    assert (second.state, changed, second.reused) == ("done", ITEMS // 100, ITEMS - second.planned)
    assert 800 < second.summary["catalog"]["sample"] < 1_200
