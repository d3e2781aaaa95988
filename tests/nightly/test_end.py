"""The end of a night: the comparison with what was known before, the results, and word of it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from db import comparison
from tasks import nightly_end
from tests.nightly.shop import Shop


def put(shop: Shop, **titles: str) -> None:
    """Set products' titles; what they say is what they are judged."""
    for sku, title in titles.items():
        shop.sql(
            """insert into product values (:sku, 's3://b/k', :title, jsonb_build_object('category', left(:sku, 1)))
               on conflict (sku) do update set title = excluded.title""",
            sku=sku, title=title,
        )  # fmt: skip


def summary(night: Any) -> dict[str, Any]:
    assert night.state == "done"
    found: dict[str, Any] = night.summary
    return found


def test_a_night_is_compared_with_what_was_known_before_it(shop: Shop) -> None:
    put(shop, a1="agrees", a2="agrees", a3="contradiction", b1="neutral", b2="agrees", b3="agrees", b4="contradiction")
    first = summary(shop.night(sample=0))["catalog"]
    assert (first["items"], first["first"], first["first_mismatches"], first["unchanged"]) == (7, 7, 2, 0)
    put(shop, a1="a contradiction", a3="agrees now", b1="still neutral", b5="a contradiction", b6="new")
    shop.sql("delete from product where sku = 'b3'")
    shop.workers.answer = lambda pair: "failed model_failed" if pair["ref"] == "b6" else answer(pair)
    answer = type(shop.workers).__dataclass_fields__["answer"].default
    second = summary(shop.night(sample=0, again=True))
    assert {name: second["catalog"][name] for name in (
        "items", "judged", "first", "first_mismatches", "newly_contradicting", "newly_agreeing", "unchanged",
        "without_verdict", "gone", "mismatches",
    )} == {"items": 8, "judged": 4, "first": 1, "first_mismatches": 1, "newly_contradicting": 1, "newly_agreeing": 1,
           "unchanged": 4, "without_verdict": 1, "gone": 1, "mismatches": 3}  # fmt: skip
    assert [item["ref"] for item in second["newly_contradicting"]] == ["a1"]
    by = {row["value"]: row for row in second["by"]["category"]}
    assert [(by[name]["items"], by[name]["mismatches"], by[name]["gone"]) for name in "ab"] == [(3, 1, 0), (5, 2, 1)]
    assert by["a"]["defect_rate"] == pytest.approx(1 / 3)
    third = summary(shop.night(sample=0, again=True))["catalog"]
    assert (third["gone"], third["newly_contradicting"], third["items"]) == (0, 0, 8), "told once"


def test_every_item_is_in_exactly_one_of_the_kinds(shop: Shop) -> None:
    kinds = ("first", "newly_contradicting", "newly_agreeing", "newly_undecided", "unchanged", "without_verdict")
    opinions = ["agrees", "contradiction", "neutral", "rejected image_corrupt", "failed model_failed"]
    shop.workers.answer = lambda pair: pair["text"].split(",")[0]
    for night in range(4):
        for n in range(30):
            turn = (n * 7 + night * (n % 5)) % 5
            put(shop, **{f"p{n:02}": f"{opinions[turn]},{night if n % 3 else 0}".replace("agrees", "entailment")})
        whole = summary(shop.night(sample=0.3, again=True))["catalog"]
        assert sum(whole[kind] for kind in kinds) == whole["items"] == 30


def test_under_a_rule_that_forbids_the_claim_entailment_is_the_mismatch(shop: Shop) -> None:
    put(shop, a="agrees", b="contradiction")
    query = "select sku as ref, image, title as text, 'prohibited' as policy from product"
    night = summary(shop.night(shop.catalog(query=query)))
    assert night["catalog"]["mismatches"] == 1
    assert night["catalog"]["flagged"] == 1


def test_the_sample_tells_of_the_unchanged_with_its_error_bars(shop: Shop) -> None:
    shop.fill(400)
    shop.night(sample=0)
    shop.workers.answer = lambda pair: "contradiction" if int(pair["ref"][-1]) < 2 else "entailment"
    whole = summary(shop.night(sample=0.5, again=True))["catalog"]
    assert whole["sample"] == whole["judged"] > 100
    assert whole["sample_changed"] == whole["sample_mismatches"] == whole["newly_contradicting"]
    assert whole["sample_low"] < whole["sample_defect_rate"] < whole["sample_high"]
    assert whole["sample_defect_rate"] == pytest.approx(whole["sample_mismatches"] / whole["sample"])


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    # Of Newcombe, "Two-sided confidence intervals for the single proportion", 1998, table I.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718),
     (0, 0, 0.0, 1.0)],
)  # fmt: skip
def test_the_interval_is_wilsons(shop: Shop, hits: int, trials: int, low: float, high: float) -> None:
    night = shop.begin()
    shop.sql(
        """insert into catalog_state (source, ref, seen_in, judged_in, planned_as, planned_fingerprint, policy, label,
                                      label_before, p_entailment, p_contradiction, flags)
           select 'shop', n::text, :run, :run, case when n > 0 then 'sample' else 'new' end, '', 'catalog',
                  case when n > :hits then 'entailment' else 'contradiction' end, 'neutral', 0, 1, '{}'
           from generate_series(0, :trials) as n""",
        run=night.id, hits=hits, trials=trials,
    )  # fmt: skip
    with shop.engine.connect() as connection:
        (whole,) = comparison.compare(connection, night)
    assert (whole["sample"], whole["sample_mismatches"]) == (trials, hits)
    assert (whole["sample_low"], whole["sample_high"]) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_an_end_that_is_cut_short_anywhere_and_done_again_comes_to_the_same(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(shop, **{f"p{n}": "agrees" for n in range(50)})
    shop.night(sample=0)
    put(shop, **{f"p{n}": "contradiction" for n in range(20)})
    monkeypatch.setattr("db.catalog.VERDICTS_PER_PAGE", 3)
    night = shop.begin(sample=0, again=True)
    with shop.driving(shop.catalog(), night):
        shop.is_in(night, "running")
    while shop.workers.turn():
        pass
    steps = iter(range(1, 40))
    whole = nightly_end.persist

    class Killed(BaseException):
        """As by a signal: nothing that the code does about errors is done."""

    def cut_short(action: Any, stopping: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return whole(action, stopping)

    monkeypatch.setattr(nightly_end, "persist", cut_short)
    kills = 0
    while shop.run(night).is_open:
        left = next(steps)
        try:
            shop.drive(shop.catalog(), night)
        except Killed:
            kills += 1
    found = summary(shop.run(night))["catalog"]
    assert kills > 5
    assert (found["judged"], found["newly_contradicting"], found["unchanged"]) == (20, 20, 30)


# ---- Results ---------------------------------------------------------------------------------------------------------


def test_the_results_are_in_s3_as_jsonl_and_as_parquet(shop: Shop, tmp_path: Path) -> None:
    put(shop, a="agrees", b="contradiction")
    shop.sql("insert into product values ('c', 's3://b/k', 'c')")
    shop.workers.answer = lambda pair: "rejected image_corrupt" if pair["ref"] == "c" else (
        "contradiction" if pair["ref"] == "b" else "entailment")  # fmt: skip
    night = shop.night(shop.catalog(results=f"s3://{shop.bucket.name}/results/"))
    addresses = summary(night)["results"]
    stem = f"s3://{shop.bucket.name}/results/shop/{night.options['date']}/{night.id}"
    assert addresses == [f"{stem}.jsonl", f"{stem}.parquet"]
    key = addresses[0].removeprefix(f"s3://{shop.bucket.name}/")
    body = shop.bucket.client.get_object(Bucket=shop.bucket.name, Key=key)["Body"].read()
    rows = {row["ref"]: row for row in map(json.loads, body.splitlines())}
    assert {ref: (row["label"], row["decision"], row["error_code"]) for ref, row in rows.items()} == {
        "a": ("entailment", "accept", None), "b": ("contradiction", "review", None), "c": (None, None, "image_corrupt"),
    }  # fmt: skip
    assert rows["b"]["p_contradiction"] == 0.8
    file = tmp_path / "results.parquet"
    shop.bucket.client.download_file(shop.bucket.name, key.replace(".jsonl", ".parquet"), str(file))
    table = pytest.importorskip("pyarrow.parquet").read_table(file)
    assert {row["ref"]: row for row in table.to_pylist()} == rows


def test_results_that_cannot_be_written_are_said_and_the_night_is_done(shop: Shop) -> None:
    put(shop, a="agrees")
    shop.settings = shop.settings.model_copy(update={"s3_access_key_id": "nobody"})
    night = shop.night(shop.catalog(results=f"s3://{shop.bucket.name}/results/"))
    assert "S3 answered InvalidAccessKeyId" in summary(night)["results"]["error"]


def test_whatever_is_wrong_with_the_results_the_night_is_done(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what no code of ours knows: here a profile of S3 keys that is not there."""
    put(shop, a="agrees")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    night = shop.night(shop.catalog(results=f"s3://{shop.bucket.name}/results/"))
    assert "ProfileNotFound: The config profile (nobody) could not be found" in summary(night)["results"]["error"]


def test_results_come_in_pages(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.fill(23)
    monkeypatch.setattr(nightly_end, "RESULTS_PER_PAGE", 5)
    night = shop.night()
    pages = list(nightly_end.pages(shop.engine, night, lambda: False))
    assert [len(page) for page in pages] == [5, 5, 5, 5, 3]
    assert len({row["pair_id"] for page in pages for row in page}) == 23
    with shop.engine.connect() as connection:
        assert comparison.results(connection, night, pages[-1][-1]["pair_id"], 5) == []


def test_there_is_no_number_that_json_cannot_hold(shop: Shop) -> None:
    put(shop, a="agrees")
    numbers: list[float] = []
    json.loads(json.dumps(summary(shop.night())), parse_float=lambda number: numbers.append(float(number)))
    assert all(map(math.isfinite, numbers))
