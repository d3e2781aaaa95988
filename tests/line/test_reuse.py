"""Content that was judged before: answered from that verdict, or judged anew where it has to be."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from db.originals import REUSED
from infra.local.postgres import OWNER
from tasks.submit import Pair, submit
from tests.line.broken_worker import EXITS, broken, waits_for
from tests.line.site import Site, Worker
from tests.line.test_line import PICTURE

SCORES = ("label", "answer", "p_entailment", "p_contradiction", "p_neutral", "content_hash", "model_version_id")
DAYS = 7

numbers = itertools.count()


def verdict_of(site: Site, pair: Pair, **options: Any) -> dict[str, Any]:
    (row,) = site.verdicts(submit([pair], **options).pair_ids).values()
    assert row["status"] == "judged"
    return row


def pair(text: str, **fields: Any) -> Pair:
    return Pair(image=PICTURE, text=text, **fields)


def scores(row: dict[str, Any]) -> list[Any]:
    return [row[name] for name in SCORES]


def test_what_would_end_the_process_is_not_judged_again_and_new_thresholds_decide_on_its_scores(
    site: Site, stack: Any
) -> None:
    """Before any other test's worker is up: policies are read when a worker starts."""
    policy = "insert into policy (name, version, polarity, review_at) values ('reuse', %s, 'should_hold', %s)"
    with stack.postgres.connect(OWNER, "line") as connection:
        connection.execute(policy, (1, None))
        with site.worker(reuse_days=DAYS):
            first = verdict_of(site, pair(EXITS, policy="reuse"))
        connection.execute(policy, (2, 0.0))
        with site.worker(program=broken(), reuse_days=DAYS):
            again = verdict_of(site, pair(EXITS, policy="reuse"))
    assert scores(again) == scores(first)
    assert (first["flags"], again["flags"]) == ([], [REUSED])
    assert (first["policy_version"], first["decision"]) == (1, "accept")
    assert (again["policy_version"], again["decision"]) == (2, "review")


@pytest.fixture(scope="module")
def reusing(site: Site) -> Iterator[Worker]:
    """A worker that says in its log what its model is asked."""
    with site.worker(program=broken(), reuse_days=DAYS) as worker:
        yield worker


@pytest.fixture
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One that nobody has asked about, and whose judging is written into the log."""
    path = tmp_path_factory.getbasetemp() / f"r{next(numbers)}"
    path.touch()
    return waits_for(path)


def times_judged(site: Site, worker: Worker, text: str, tmp_path: Path) -> int:
    """How often the model was asked about a text, once all that it said is read."""
    last = tmp_path / f"last{next(numbers)}"
    last.touch()
    verdict_of(site, pair(waits_for(last)))
    worker.says(f"in the model: {waits_for(last)}")
    return sum(line.rstrip().endswith(f"in the model: {text}") for line in worker.lines)


def test_the_same_content_again_is_not_judged_again(site: Site, reusing: Worker, text: str, tmp_path: Path) -> None:
    first = verdict_of(site, pair(text, ref="a", attributes={"seller": "one"}))
    again = verdict_of(site, pair(text.upper(), ref="b", attributes={"seller": "two"}), lane="bulk", source="other")
    assert scores(again) == scores(first)
    assert (first["flags"], again["flags"]) == ([], [REUSED])
    assert (again["ref"], again["source"], again["text"]) == ("b", "other", text.upper())
    assert (again["text_scored"], again["attributes"]) == (first["text_scored"], {"seller": "two"})
    assert times_judged(site, reusing, text, tmp_path) == 1
    (batch,) = site.query(
        "select judged, reused, tokens, padded_tokens, model_s, pictures from batch where settled_at = :at",
        at=again["decided_at"],
    )
    assert batch == {"judged": 1, "reused": 1, "tokens": 0, "padded_tokens": 0, "model_s": 0.0, "pictures": 1}


@pytest.mark.parametrize("other", [{"text": "another"}, {"premise": "a shop"}, {"image": "s3://line/big.jpg"}], ids=str)
@pytest.mark.usefixtures("reusing")
def test_other_content_is_judged(site: Site, text: str, other: dict[str, Any]) -> None:
    verdict_of(site, pair(text))
    row = verdict_of(site, Pair(**{"image": PICTURE, "text": text, **other}))
    assert REUSED not in row["flags"]


@pytest.mark.usefixtures("reusing")
def test_another_policy_decides_for_itself_on_the_same_scores(site: Site, text: str) -> None:
    catalog = verdict_of(site, pair(text))
    prohibited = verdict_of(site, pair(text, policy="prohibited"))
    assert scores(prohibited) == scores(catalog)
    assert prohibited["flags"] == [REUSED]
    assert catalog["decision"] == ("review" if catalog["p_contradiction"] >= 0.5 else "accept")
    p = prohibited["p_entailment"]
    assert prohibited["decision"] == ("reject" if p >= 0.5 else "review" if p >= 0.2 else "accept")
    assert (prohibited["policy"], prohibited["policy_version"]) == ("prohibited", 1)


def test_a_fresh_judgement_is_one_and_stands_for_its_content_from_then_on(
    site: Site, reusing: Worker, text: str, tmp_path: Path
) -> None:
    first = verdict_of(site, pair(text))
    fresh = verdict_of(site, pair(text), fresh=True)
    assert (fresh["flags"], fresh["content_hash"]) == ([], first["content_hash"])
    assert times_judged(site, reusing, text, tmp_path) == 2
    site.query(
        "update verdict set decided_at = decided_at - interval '8 days' where pair_id = :id", id=first["pair_id"]
    )
    assert verdict_of(site, pair(text))["flags"] == [REUSED]


def test_an_answers_age_is_that_of_its_original(site: Site, reusing: Worker, text: str, tmp_path: Path) -> None:
    first = verdict_of(site, pair(text))
    assert verdict_of(site, pair(text))["flags"] == [REUSED]
    site.query(
        "update verdict set decided_at = decided_at - interval '8 days' where pair_id = :id", id=first["pair_id"]
    )
    anew = verdict_of(site, pair(text))
    assert anew["flags"] == []
    assert scores(anew) == scores(first)
    assert times_judged(site, reusing, text, tmp_path) == 2


def test_equal_content_of_a_batch_is_judged_once(site: Site, reusing: Worker, text: str, tmp_path: Path) -> None:
    pairs = [pair(one, ref=str(n)) for n, one in enumerate([text, "a lone word", text, text, "a lone word", text])]
    rows = site.verdicts(submit(pairs).pair_ids)
    assert {ref: row["flags"] for ref, row in rows.items()} == {
        ref: [REUSED] if ref in ("2", "3", "4", "5") else [] for ref in rows
    }
    assert scores(rows["0"]) == scores(rows["2"]) == scores(rows["3"]) == scores(rows["5"]) != scores(rows["1"])
    assert times_judged(site, reusing, text, tmp_path) == 1
    (batch,) = site.query("select judged, reused from batch where settled_at = :at", at=rows["0"]["decided_at"])
    assert batch == {"judged": 6, "reused": 4}
