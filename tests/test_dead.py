"""`concord dead`: what it lists and shows, what a redrive hands over, what is asked first, and the exit statuses."""

import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
import typer
from sqlalchemy import Engine, text

from db import dead_letters
from db.verdicts import Settlement, Verdict, settle
from tasks import dead
from tests import test_cli
from tests.db.rows import THIS_MONTH, a_run, all_of, judged, model, pair_id
from tests.db.test_dead_letters import counters, stored, whole
from tests.shared import emptied_database
from tests.test_cli import Concord
from worker.messages import decode

database, concord, line = emptied_database, test_cli.concord, test_cli.line


def apply(engine: Engine, *verdicts: Verdict) -> None:
    with engine.begin() as connection:
        settle(connection, Settlement(verdicts))


def handed_over(engine: Engine) -> list[tuple[str, dict[str, Any]]]:
    """Lanes and bodies of the messages in the outbox."""
    with engine.connect() as connection:
        return [(row["lane"], json.loads(row["body"])) for row in all_of(connection, "outbox")]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What the person types when asked."""
    return lambda words: monkeypatch.setattr(sys, "stdin", io.StringIO(words))


@pytest.mark.parametrize(
    ("written", "seconds"), [("90s", 90), ("30m", 1_800), ("2h", 7_200), ("3d", 259_200), (" 1w ", 604_800), ("0s", 0)]
)
def test_ages_are_read(written: str, seconds: int) -> None:
    assert dead.read_age(written) == timedelta(seconds=seconds)


@pytest.mark.parametrize("written", ["", "3", "3y", "-1d", "1.5h", "d", "2h3m", "999999999w"])
def test_what_is_no_age_is_refused_with_examples(written: str) -> None:
    with pytest.raises(typer.BadParameter, match="write 90s"):
        dead.read_age(written)


@pytest.mark.parametrize(
    ("ago", "said"),
    [
        ({}, "0 s"),
        ({"seconds": 119}, "119 s"),
        ({"minutes": 119}, "119 m"),
        ({"hours": 47}, "47 h"),
        ({"days": 13}, "13 d"),
        ({"days": 15}, "2 w"),
        ({"hours": -1}, "0 s"),
    ],
)
def test_ages_are_said_in_a_unit_that_fits(ago: dict[str, int], said: str) -> None:
    now = datetime.now(UTC)
    assert dead.age_of(now - timedelta(**ago), now) == said


def test_nothing_failed_is_said_and_is_well(concord: Concord, line: Engine) -> None:
    assert (concord("dead", "list").status, concord("dead", "list").out) == (0, "No failed pair.\n")
    for verb in ("redrive", "drop"):
        ran = concord("dead", verb, "--code", "model_failed")
        assert (ran.status, ran.err) == (0, "")
        assert ": 0" in ran.out


def test_the_list_has_groups_and_the_last_failures(concord: Concord, line: Engine) -> None:
    with line.begin() as connection:
        run = a_run(connection, planned=2)
    detail = "S3 answered [red]503[/bold]\x1b[2J"
    apply(
        line,
        *(whole(number, run_id=run.id, error_detail=detail, attempts=4) for number in (1, 2)),
        whole(3, source="emea", error_code="model_failed"),
    )
    found = json.loads(concord("dead", "list", "--json").out)
    assert [(row["error_code"], row["run_id"], row["pairs"]) for row in found["groups"]] == [
        ("image_fetch_failed", str(run.id), 2),
        ("model_failed", None, 1),
    ]
    assert {row["pair_id"] for row in found["pairs"]} == {str(pair_id(number)) for number in (1, 2, 3)}
    shown = concord("dead", "list")
    assert shown.status == 0
    for words in ("image_fetch_failed", "emea", str(run.id), run.name, "sku-3", str(pair_id(2)), "[red]503[/bold]"):
        assert words in shown.out
    assert "\x1b" not in shown.out
    assert (
        json.loads(concord("dead", "list", "--json", "--limit", 1, "--source", "emea").out)["groups"][0]["pairs"] == 1
    )
    assert len(json.loads(concord("dead", "list", "--json", "--limit", 1).out)["pairs"]) == 1


def test_ages_restrict_what_is_listed(concord: Concord, line: Engine) -> None:
    apply(line, whole(1), whole(2))
    with line.begin() as connection:
        older = text("update verdict set decided_at = now() - interval '3 hours' where pair_id = :pair_id")
        connection.execute(older, {"pair_id": pair_id(1)})

    def listed(*arguments: str) -> list[str]:
        return [row["ref"] for row in json.loads(concord("dead", "list", "--json", *arguments).out)["pairs"]]

    assert listed("--older", "2h") == ["sku-1"]
    assert listed("--newer", "2h") == ["sku-2"]
    assert listed("--older", "2h", "--newer", "4h") == ["sku-1"]
    assert concord("dead", "list", "--older", "soon").status == 2


def test_a_failed_pair_is_shown_in_full(concord: Concord, line: Engine) -> None:
    apply(line, whole(1, error_detail="S3 answered 503", attempts=4))
    shown = concord("dead", "show", pair_id(1))
    assert shown.status == 0
    for words in ("sku-1", "image_fetch_failed", "S3 answered 503", "s3://shop/1.jpg", "message_id", "dead"):
        assert words in shown.out
    (row,) = json.loads(concord("dead", "show", pair_id(1), "--json").out)["failed"]
    assert (row["attempts"], row["state"], row["text"]) == (4, "dead", "shoe 1")


def test_showing_what_has_not_failed_has_exit_status_1_and_a_sentence(concord: Concord, line: Engine) -> None:
    apply(line, judged(model(line), 1))
    for wanted in (pair_id(1), uuid4()):
        ran = concord("dead", "show", wanted)
        assert (ran.status, ran.out) == (1, "")
        assert f"concord verdict {wanted}" in ran.err
    assert concord("dead", "show", "sku-1").status == 2


def test_a_redrive_hands_over_the_pair_as_it_was_submitted_under_its_own_key(concord: Concord, line: Engine) -> None:
    run_id = uuid4()
    attributes = {"category": "shoes", "sizes": [38, 39.5], "seller": {"id": 2**60}}
    one = whole(
        1, run_id=run_id, source="emea", lane="bulk", premise="it is a shoe", policy="prohibited",
        attributes=attributes, flags=["text_replaced"], attempts=4,
        submitted_at=THIS_MONTH + timedelta(microseconds=123_456),
    )  # fmt: skip
    apply(line, one)
    ran = concord("dead", "redrive", pair_id(1))
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == "pairs redriven: 1, in messages: 1\n"
    ((lane, body),) = handed_over(line)
    read = decode(body, now=datetime.now(UTC), oldest=THIS_MONTH)
    assert (lane, read.source, read.run_id, read.submitted_at) == ("bulk", "emea", run_id, one.submitted_at)
    assert (read.attempts, read.fresh, read.replaced) == (0, False, frozenset({one.pair_id}))
    (pair,) = read.pairs
    names = ("ref", "image", "text", "premise", "policy", "attributes")
    assert [getattr(pair, name) for name in names] == [getattr(one, name) for name in names]
    assert pair.id == one.pair_id


def test_pairs_of_one_envelope_share_messages_of_at_most_64(concord: Concord, line: Engine) -> None:
    later = {"submitted_at": THIS_MONTH + timedelta(seconds=1)}
    apply(
        line,
        *(whole(number) for number in range(130)),
        whole(130, source="emea"), whole(131, run_id=uuid4()), whole(132, lane="bulk"), whole(133, **later),
    )  # fmt: skip
    ran = json.loads(concord("dead", "redrive", "--yes", "--json").out)
    assert ran == {"redriven": 134, "messages": 7, "under_way": 0, "incomplete": 0, "not_failed": 0}
    bodies = [body for _, body in handed_over(line)]
    assert sorted(len(body["pairs"]) for body in bodies) == [1, 1, 1, 1, 2, 64, 64]
    assert {UUID(pair["id"]) for body in bodies for pair in body["pairs"]} == {pair_id(number) for number in range(134)}


def test_the_lane_can_be_chosen(concord: Concord, line: Engine) -> None:
    apply(line, whole(1, lane="live"), whole(2, lane="bulk"))
    concord("dead", "redrive", "--yes", "--lane", "bulk")
    ((lane, body),) = handed_over(line)
    assert (lane, len(body["pairs"])) == ("bulk", 2)


def test_a_redrive_twice_hands_over_once(concord: Concord, line: Engine) -> None:
    apply(line, *(whole(number) for number in range(3)))
    assert json.loads(concord("dead", "redrive", "--yes", "--json", "--ref", "sku-1").out)["redriven"] == 1
    second = json.loads(concord("dead", "redrive", "--yes", "--json").out)
    assert (second["redriven"], second["under_way"]) == (2, 1)
    third = concord("dead", "redrive", "--yes")
    assert third.status == 0
    assert "under way already: 3" in third.err
    assert len(handed_over(line)) == 2


def test_redrives_at_the_same_moment_hand_over_once(
    concord: Concord, line: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead, "PAIRS_PER_PAGE", 7)
    apply(line, *(whole(number) for number in range(100)))
    selection = dead.select(None, None)

    def work(_: int) -> None:
        for _ in dead.pages(line, selection, None, partial(dead.hand_over, lane=None)):
            pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    times = Counter(pair["id"] for _, body in handed_over(line) for pair in body["pairs"])
    assert times == {str(pair_id(number)): 1 for number in range(100)}


def test_pairs_without_text_or_picture_are_counted_and_left_alone(concord: Concord, line: Engine) -> None:
    apply(line, whole(2, text=None), whole(3, image=None, error_code="unstorable"))
    apply(line, whole(1))
    ran = concord("dead", "redrive", "--limit", 1)
    assert ran.status == 1
    assert "pairs redriven: 1" in ran.out
    assert "is not kept: 2" in ran.err
    ((_, body),) = handed_over(line)
    assert [pair["ref"] for pair in body["pairs"]] == ["sku-1"]


@pytest.mark.parametrize("verb", ["redrive", "drop"])
def test_a_named_pair_that_has_not_failed_is_told_and_the_exit_status_is_1(
    concord: Concord, line: Engine, verb: str
) -> None:
    apply(line, whole(1), judged(model(line), 2))
    ran = concord("dead", verb, "--yes", pair_id(1), pair_id(2), uuid4())
    assert ran.status == 1
    assert re.match(r"pairs (redriven|dropped): 1\b", ran.out)
    assert "named, but not failed: 2" in ran.err
    assert concord("dead", verb, "sku-1").status == 2


@pytest.mark.parametrize("verb", ["redrive", "drop"])
def test_many_are_asked_about_first(concord: Concord, line: Engine, verb: str, answer: Callable[[str], None]) -> None:
    apply(line, *(whole(number) for number in range(3)))
    before = stored(line)
    for words in ("n\n", "\n", ""):
        answer(words)
        ran = concord("dead", verb, "--limit", 2)
        assert (ran.status, ran.out) == (2, "")
        assert f"{verb.capitalize()} 2 failed pairs?" in ran.err
        assert "nothing was done" in ran.err
    assert stored(line) == before
    answer("y\n")
    ran = concord("dead", verb, "--limit", 2)
    assert ran.status == 0
    assert re.match(r"pairs (redriven|dropped): 2\b", ran.out)


@pytest.mark.parametrize("verb", ["redrive", "drop"])
def test_one_pair_is_not_asked_about(concord: Concord, line: Engine, verb: str) -> None:
    apply(line, whole(1))
    assert concord("dead", verb, pair_id(1)).status == 0


def test_a_limit_takes_the_oldest_failures_first_across_pages(
    concord: Concord, line: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead, "PAIRS_PER_PAGE", 2)
    apply(line, *(whole(number) for number in range(6)))
    with line.begin() as connection:
        for number in range(6):
            older = text("update verdict set decided_at = decided_at - make_interval(hours => :hours) where ref = :ref")
            connection.execute(older, {"hours": number, "ref": f"sku-{number}"})
    concord("dead", "redrive", "--limit", 1)
    assert json.loads(concord("dead", "redrive", "--yes", "--limit", 3, "--json").out)["redriven"] == 3
    refs = {pair["ref"] for _, body in handed_over(line) for pair in body["pairs"]}
    assert refs == {"sku-5", "sku-4", "sku-3", "sku-2"}


def test_dropped_pairs_are_rejected_with_their_error_kept_and_their_run_follows(concord: Concord, line: Engine) -> None:
    with line.begin() as connection:
        run = a_run(connection, planned=3)
    apply(line, *(whole(number, run_id=run.id, error_detail=f"trouble {number}") for number in range(3)))
    concord("dead", "redrive", pair_id(0))
    ran = json.loads(concord("dead", "drop", "--yes", "--json", "--run", run.id).out)
    assert ran == {"dropped": 2, "under_way": 1, "not_failed": 0}
    assert {(row["ref"], row["status"], row["error_code"], row["error_detail"]) for row in stored(line)} == {
        ("sku-0", "failed", "image_fetch_failed", "trouble 0"),
        ("sku-1", "rejected", "dropped", "image_fetch_failed: trouble 1"),
        ("sku-2", "rejected", "dropped", "image_fetch_failed: trouble 2"),
    }
    assert counters(line) == [(0, 2, 1, "done")]
    assert concord("dead", "drop").status == 0, "nothing is left to drop"
    assert counters(line) == [(0, 2, 1, "done")]


def test_what_fails_again_meanwhile_is_redriven_once(
    concord: Concord, line: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a trouble that lasts would keep the command going for ever."""
    monkeypatch.setattr(dead, "PAIRS_PER_PAGE", 1)
    rows = [whole(number) for number in range(3)]
    apply(line, *rows)
    take = dead_letters.take

    def and_fail(*arguments: Any) -> Any:
        """Play a worker that is quick to fail what was just handed over."""
        with line.begin() as connection:
            for outbox_row in all_of(connection, "outbox"):
                ids = {pair["id"] for pair in json.loads(outbox_row["body"])["pairs"]}
                again = [replace(row, message_id=outbox_row["message_id"]) for row in rows if str(row.pair_id) in ids]
                settle(connection, Settlement(again, done=[(outbox_row["message_id"], 0)]))
        return take(*arguments)

    monkeypatch.setattr(dead_letters, "take", and_fail)
    assert json.loads(concord("dead", "redrive", "--yes", "--json").out)["redriven"] == 3


def test_ctrl_c_keeps_what_is_done(concord: Concord, line: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead, "PAIRS_PER_PAGE", 1)
    apply(line, *(whole(number) for number in range(3)))
    take, calls = dead_letters.take, iter(range(10))

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return take(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(dead_letters, "take", interrupted)
        ran = concord("dead", "redrive", "--yes")
    assert ran.status == 130
    assert "goes on with the rest" in ran.err
    assert len(handed_over(line)) == 1
    assert json.loads(concord("dead", "redrive", "--yes", "--json").out)["redriven"] == 2
