"""The paper of the views: what it says of the machine."""

import pytest

from infra.bench.reports_page import SAID, page


@pytest.mark.parametrize(("load", "is_said"), [(0.25, False), (1.0, False), (1.01, True), (7.8, True)])
def test_other_work_is_told_of_where_the_machine_was_busy_before(load: float, is_said: bool) -> None:
    filled = {"rows": 12, "bytes": 1, "seconds": 1}
    result = {**dict.fromkeys(SAID, "known"), "filled": filled, "few_rows": 12, "asked": [],
              "dropped_ms": {"many": [(1, 1)], "few": [(1, 1)]}, "load": load, "load_at_end": 9.9}  # fmt: skip
    text = page(result)
    assert ("other work ran beside" in text) == is_said
    assert f"was {load} at the start and 9.9 at the\nend" in text
