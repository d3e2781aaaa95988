"""A run's report as a page is given it, without a database: the second of the demo's two nights, as it was judged."""

import gzip
import json
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from math import sqrt
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

from db.run_report import (
    BINS,
    WORST,
    Attribute,
    Earlier,
    ErrorCount,
    Figure,
    Filter,
    Histogram,
    LabelsOfRun,
    Mismatch,
    Model,
    Rate,
    RunBefore,
    RunReport,
    Speed,
    Sql,
)
from tasks.report_pictures import Thumbnail

DEMO = Path(__file__).resolve().parent.parent / "infra/demo_model"
BEGAN = datetime(2026, 11, 29, 2, tzinfo=UTC)
RUN = UUID("14df1df7-f4e1-5abf-8483-fd45d8b1480b")
#: Labels and thresholds of the two policies that are shipped, as db/migrations has them.
POLICIES = {
    "catalog": ("should_hold", "p_contradiction", 0.5, None),
    "prohibited": ("should_not_hold", "p_entailment", 0.3, 0.7),
}
CHANGES = {"contradiction": "newly_contradicting", "entailment": "newly_agreeing", "neutral": "newly_undecided"}
ERRORS = (
    ErrorCount("failed", "image_fetch_failed", 1, "demo-9003", "bucket concord-lost is allowed but does not exist"),
    ErrorCount("rejected", "image_not_found", 1, "demo-9001", "no such key in bucket concord-demo"),
    ErrorCount("rejected", "text_empty", 1, "demo-9002", "the text is empty or only spaces"),
)
MODEL = Model(
    2, "concord/demo-ofa", "v1", "awq-int4", "9d9114132ce7c346923337aaef503137f1fc471c3554a7d4d8150731cf640af1",
    ' does the image describe " {} "?', 64, "0.1.0", "2.13.0", 0,
)  # fmt: skip


@cache
def nights() -> dict[int, dict[str, dict[str, Any]]]:
    """The demo's verdicts, by how many days ago and by ref."""
    found: dict[int, dict[str, dict[str, Any]]] = {1: {}, 2: {}}
    with gzip.open(DEMO / "nights.jsonl.gz", "rt", encoding="utf-8") as lines:
        for kept in map(json.loads, lines):
            if kept["table"] == "verdict":
                found[kept["days_ago"]][kept["row"]["ref"]] = kept["row"]
    return found


def mismatch(row: Mapping[str, Any], before: Mapping[str, Any] | None = None, **changed: Any) -> Mismatch:
    """A verdict as a mismatch; `before` is the same ref's of the night before."""
    polarity, score, _, _ = POLICIES[row["policy"]]
    change = "first_seen" if before is None else "unchanged"
    if before and before["label"] != row["label"]:
        change = CHANGES[row["label"]]
    earlier = None
    if before:
        earlier = Earlier(
            label=before["label"], decision=before["decision"], p_trouble=before[score],
            submitted_at=BEGAN - timedelta(days=1), decided_at=BEGAN - timedelta(days=1),
            same_content=before["text_scored"] == row["text_scored"], same_model=False,
        )  # fmt: skip
    fields: dict[str, Any] = {
        "pair_id": UUID(row["pair_id"]), "ref": row["ref"], "image": row["image"], "text": row["text"],
        "text_is_cut": False, "premise": None, "policy": row["policy"], "polarity": polarity,
        "attributes": row["attributes"], "label": row["label"], "p_entailment": row["p_entailment"],
        "p_contradiction": row["p_contradiction"], "p_neutral": row["p_neutral"], "p_trouble": row[score],
        "decision": row["decision"], "flags": tuple(row["flags"]), "change": change,
        "is_new": before is not None and not watched(before), "earlier": earlier, "decode_mode": "exact",
        "image_width": 64, "image_height": 64, "image_sha256": None, "model_version_id": 2, "decided_at": BEGAN,
    }  # fmt: skip
    return Mismatch(**fields | changed)


def watched(row: Mapping[str, Any]) -> bool:
    return bool(row["label"] == ("contradiction" if row["policy"] == "catalog" else "entailment"))


def rate(value: str, mismatches: int, judged: int) -> Rate:
    """E. B. Wilson's interval, as report.wilson_low and wilson_high have it."""
    z, share = 1.96, mismatches / judged
    middle = (share + z * z / (2 * judged)) / (1 + z * z / judged)
    half = z * sqrt(share * (1 - share) / judged + z * z / (4 * judged * judged)) / (1 + z * z / judged)
    return Rate(value, judged, mismatches, share, max(0, middle - half), min(1, middle + half))


def histogram(policy: str, rows: Iterable[Mapping[str, Any]]) -> Histogram:
    polarity, score, review_at, reject_at = POLICIES[policy]
    counts = Counter(min(BINS - 1, int(BINS * row[score])) for row in rows)
    return Histogram(policy, 1, polarity, score, review_at, reject_at, tuple(counts[number] for number in range(BINS)))


def report(worst: Iterable[Mismatch] | None = None, **changed: Any) -> RunReport:
    """The demo's second night; `worst` are the mismatches in place of its own, `changed` fields of the report."""
    tonight, before = nights()[1], nights()[2]
    judged = [row for row in tonight.values() if row["status"] == "judged"]
    wrong = [mismatch(row, before.get(row["ref"])) for row in judged if watched(row)]
    wrong.sort(key=lambda pair: (not pair.is_new, -pair.p_trouble))
    shown = tuple(wrong[:WORST] if worst is None else worst)
    labels = Counter(row["label"] for row in judged)
    whole = rate("all", len(wrong), len(judged))
    new = sum(pair.is_new for pair in wrong)
    fields: dict[str, Any] = {
        "id": RUN, "kind": "nightly", "source": "demo", "name": "demo 2026-11-29", "lane": "bulk", "state": "done",
        "state_note": "", "submitted_at": BEGAN, "finished_at": BEGAN + timedelta(seconds=3),
        "before": RunBefore(uuid5(RUN, "before"), "demo 2026-11-28", BEGAN - timedelta(days=1)),
        "figures": tuple(figures(len(judged), len(wrong), new, whole)),
        "history": tuple(labels_of_run(day, labels) for day in range(29, -1, -1)),
        "histograms": tuple(histogram(name, (row for row in judged if row["policy"] == name)) for name in POLICIES),
        "attributes": tuple(attribute(name, judged) for name in ("category", "seller")),
        "errors": ERRORS,
        "speed": Speed(2.995, 200.3, 1, 10, 600, 60.0, 64, 0.113, 0, 2.41, 0.62, 0.04, 0.19, 0.012),
        "models": (replace(MODEL, pairs=len(judged)),),
        "mismatches": len(wrong) if worst is None else len(shown),
        "worst": shown,
        "filters": filters(shown),
        "sql": Sql(
            "select ref, text, p_trouble, decision, label_before, change\nfrom report.run_changes\n"
            f"where run_id = '{RUN}' and submitted_at = '{BEGAN.isoformat()}' and mismatch",
            "order by mismatch_before, p_trouble desc, ref\nlimit 100",
        ),
        "concord": "0.1.0",
    }  # fmt: skip
    return RunReport(**fields | changed)


def figures(judged: int, mismatches: int, new: int, whole: Rate) -> Iterator[Figure]:
    note = "The label is contradiction, and was another when the item was judged last."
    for name, unit, value, before, better in (
        ("planned", "pairs", 600, 600, None), ("judged", "pairs", judged, 600, None),
        ("mismatches", "pairs", mismatches, 208, "down"), ("rejected", "pairs", 2, 0, "down"),
        ("failed", "pairs", 1, 0, "down"), ("pairs a second", "pairs/s", 200.3, 227.1, "up"),
        ("duration", "s", 2.995, 2.642, "down"),
    ):  # fmt: skip
        yield Figure(name, name, unit, value, before, None, None, better, f"What is {name}.")  # type: ignore[arg-type]
    yield Figure("defect_rate", "defect rate", "share", whole.rate, 0.3467, whole.low, whole.high, "down", "Of judged.")
    yield Figure("newly_contradicting", "newly contradicting", "pairs", new, 4, None, None, "down", note)


def labels_of_run(days_ago: int, labels: Mapping[str, int]) -> LabelsOfRun:
    """One of the thirty last runs: much as the last, but for one that had trouble with its pictures."""
    began, trouble = BEGAN - timedelta(days=days_ago), days_ago == 17
    return LabelsOfRun(
        uuid5(RUN, str(days_ago)), f"demo {began:%Y-%m-%d}", began, "done",
        labels["entailment"] + days_ago * 7 % 23 - 9, labels["contradiction"] - days_ago * 5 % 17,
        labels["neutral"] + days_ago * 3 % 11, 2 + 9 * trouble, 1 + 30 * trouble, days_ago == 0,
    )  # fmt: skip


def filters(pairs: Iterable[Mismatch]) -> tuple[Filter, ...]:
    """What these mismatches may be narrowed to, as a report has it."""
    kept = list(pairs)
    own = [
        Filter(name, False, tuple(sorted({getattr(pair, name) for pair in kept})), name) for name in ("label", "policy")
    ]
    for name in ("category", "seller"):
        values = {pair.attributes[name] for pair in kept if name in pair.attributes}
        own.append(Filter(name, True, tuple(sorted(values)), f"attributes ->> '{name}'"))
    return tuple(own)


def attribute(name: str, judged: Iterable[Mapping[str, Any]]) -> Attribute:
    of = Counter(row["attributes"][name] for row in judged)
    wrong = Counter(row["attributes"][name] for row in judged if watched(row))
    rates = sorted((rate(value, wrong[value], pairs) for value, pairs in of.items()), key=lambda rate: -rate.low)
    return Attribute(name, tuple(rates[:20]), len(rates))


def pictures(of: RunReport) -> dict[str, Thumbnail]:
    """The demo's pictures as they are: they are small."""
    found = {}
    for image in {pair.image for pair in of.worst if pair.image}:
        body = (DEMO / "pictures" / image.rsplit("/", 1)[1]).read_bytes()
        found[image] = Thumbnail(f"data:image/png;base64,{b64encode(body).decode()}", 64, 64)
    return found
