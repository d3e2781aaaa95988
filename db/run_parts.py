"""What the page of a run shows below its headline (db/run_report.py), out of schema `report` alone.

Every statement is about one run, or a few, and is given the moment at which they began, so that one month is read. The
words are those of the views: mismatch, p_trouble, change.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, text

from db.run_report import (
    ATTRIBUTES_SHOWN,
    BINS,
    RUNS_SHOWN,
    TEXT_CHARS,
    VALUE_CHARS,
    VALUES_SHOWN,
    WORST,
    Attribute,
    Earlier,
    ErrorCount,
    Filter,
    Histogram,
    LabelsOfRun,
    Mismatch,
    Model,
    Rate,
    Speed,
    Sql,
)

LABELLED = ("entailment", "contradiction", "neutral")
#: Attributes that are always shown, and how many different values any other may have at most.
ALWAYS = ("category", "seller")
FEW_VALUES = 200
#: Pairs that a value must have on average: an article's number is no group.
PAIRS_A_VALUE = 2
#: What ends a line and is no control character.
SEPARATORS = "\u2028\u2029"

#: One pass over the run's pairs: everything that is counted by policy, label, decision, model or score.
COUNTS = f"""
select policy, policy_version, model_version_id, label, decision, mismatch,
       case when p_trouble is not null then least(width_bucket(p_trouble, 0, 1, {BINS}), {BINS}) end as bin,
       count(*) as pairs
from report.verdicts where submitted_at = :submitted_at and run_id = :run_id and status = 'judged'
group by 1, 2, 3, 4, 5, 6, 7
"""

#: Pairs with the same attributes are counted first: there are far fewer such sets than pairs.
RATES = f"""
with alike as (
    select attributes, count(*) as judged, count(*) filter (where mismatch) as mismatches
    from report.verdicts
    where submitted_at = :submitted_at and run_id = :run_id and status = 'judged' group by attributes),
each as (
    select a.key as name, left(a.value #>> '{{}}', {VALUE_CHARS}) as value,
           sum(alike.judged)::bigint as judged, sum(alike.mismatches)::bigint as mismatches
    from alike cross join lateral jsonb_each(alike.attributes) as a (key, value)
    where jsonb_typeof(a.value) in ('string', 'number', 'boolean')
    group by 1, 2),
ranked as (
    select *, count(*) over whole as values, sum(judged) over whole as of_all,
           row_number() over (partition by name order by report.wilson_low(mismatches, judged) desc, mismatches desc,
                              judged desc, value) as place
    from each window whole as (partition by name))
select name, value, judged, mismatches, mismatches::double precision / judged as rate,
       report.wilson_low(mismatches, judged) as low, report.wilson_high(mismatches, judged) as high, values
from ranked
where place <= {VALUES_SHOWN}
  and (name = any(:always) or (values <= {FEW_VALUES} and of_all >= values * {PAIRS_A_VALUE}))
order by array_position(cast(:always as text[]), name), values, name, place
"""

ERRORS = f"""
select status, error_code as code, count(*) as pairs, left(min(ref), {VALUE_CHARS}) as example_ref,
       left(min(error_detail), {TEXT_CHARS}) as example_detail
from report.verdicts where submitted_at = :submitted_at and run_id = :run_id and status <> 'judged'
group by 1, 2 order by pairs desc, 1, 2
"""

#: The run's own time, and the batches that its lane settled in it.
SPEED = """
select extract(epoch from time.until - time.since)::double precision as seconds, b.*
from (select cast(:submitted_at as timestamptz) as since,
             coalesce(cast(:finished_at as timestamptz), now()) as until) as time
cross join (
    select count(distinct worker) as workers, count(*) as batches, coalesce(sum(pairs), 0) as batch_pairs,
           avg(pairs)::double precision as batch_mean, coalesce(max(pairs), 0) as batch_max,
           1 - sum(tokens)::double precision / nullif(sum(padded_tokens), 0) as padding,
           coalesce(sum(reused), 0) as reused, coalesce(sum(model_s), 0.0) as model_s,
           percentile_cont(0.5) within group (order by queue_s) as queue_p50_s,
           percentile_cont(0.5) within group (order by fetch_s) as fetch_p50_s,
           percentile_cont(0.5) within group (order by model_s) as model_p50_s,
           percentile_cont(0.5) within group (order by write_s) as write_p50_s
    from report.batches
    where lane = :lane and settled_at >= :submitted_at and settled_at <= coalesce(:finished_at, now())
) as b
"""

MODELS = "select * from report.models where model_version_id = any(:ids)"
POLICIES = "select policy, policy_version, polarity, review_at, reject_at from report.policies"

HISTORY = f"""
select * from report.runs
where kind = :kind and source = :source and submitted_at <= :submitted_at
  and (planned > 0 or run_id = :run_id) and (state = 'done' or run_id = :run_id)
order by submitted_at desc, run_id = :run_id desc limit {RUNS_SHOWN}
"""
LABELS = """
select run_id, label, count(*) as pairs from report.verdicts
where submitted_at = any(:moments) and run_id = any(:ids) and status = 'judged' group by 1, 2
"""

#: The verdict before, as `report.run_changes` finds it; pairs without a ref have none, and are mismatches all the same.
EARLIER = """(
    select * from report.verdicts as before
    where before.source = v.source and before.ref = v.ref and before.policy = v.policy
      and before.status = 'judged' and before.submitted_at < v.submitted_at
    order by before.submitted_at desc
    limit 1)"""
IN_ORDER = "coalesce(not b.mismatch, false) desc, v.p_trouble desc, v.pair_id"

#: Which pairs are the worst is told by a few short columns; texts are fetched of those alone.
WORST_MISMATCHES = f"""
with worst as (
    select v.pair_id, b.pair_id as pair_id_before, b.submitted_at as submitted_at_before,
           row_number() over (order by {IN_ORDER}) as place
    from report.mismatches as v left join lateral {EARLIER} as b on true
    where v.submitted_at = :submitted_at and v.run_id = :run_id
    order by place limit {WORST})
select v.pair_id, v.ref, v.image, left(v.text, {TEXT_CHARS}) as text,
       coalesce(length(v.text) > {TEXT_CHARS}, false) as text_is_cut, left(v.premise, {TEXT_CHARS}) as premise,
       v.policy, p.polarity, v.label, v.p_entailment, v.p_contradiction, v.p_neutral, v.p_trouble, v.decision, v.flags,
       v.decode_mode, v.image_width, v.image_height, v.image_sha256, v.model_version_id, v.decided_at,
       (select jsonb_object_agg(left(a.key, {VALUE_CHARS}), left(a.value #>> '{{}}', {VALUE_CHARS}))
        from (select * from jsonb_each(v.attributes) as e (key, value)
              where jsonb_typeof(e.value) in ('string', 'number', 'boolean')
              order by e.key limit {ATTRIBUTES_SHOWN}) as a) as attributes,
       b.label as label_before, b.decision as decision_before, b.p_trouble as p_trouble_before,
       b.mismatch as mismatch_before, b.submitted_at as submitted_at_before, b.decided_at as decided_at_before,
       b.image_sha256 = v.image_sha256 and b.text_scored = v.text_scored
           and b.premise_scored is not distinct from v.premise_scored as same_content,
       b.model_version_id = v.model_version_id as same_model
from worst
join report.verdicts as v on v.submitted_at = :submitted_at and v.pair_id = worst.pair_id
join report.policies as p on p.policy = v.policy and p.policy_version = v.policy_version
left join report.verdicts as b on b.submitted_at = worst.submitted_at_before and b.pair_id = worst.pair_id_before
order by worst.place
"""

#: The same for psql.
SHOWN = """select v.ref, v.image, v.text, v.attributes, v.policy, v.label, v.p_trouble, v.decision,
       b.label as label_before, b.decision as decision_before, b.decided_at as decided_at_before
from report.mismatches as v
left join lateral {earlier} as b on true
where v.submitted_at = '{submitted_at}' and v.run_id = '{run_id}'"""


def counts_of(connection: Connection, one: Mapping[str, Any]) -> list[Any]:
    """How many judged pairs there are of each kind: see COUNTS. `one` has the run's run_id and submitted_at."""
    return list(connection.execute(text(COUNTS), one))


def histograms(connection: Connection, counts: Sequence[Any]) -> tuple[Histogram, ...]:
    policies = {(row.policy, row.policy_version): row for row in connection.execute(text(POLICIES))}
    bins: dict[tuple[str, int], list[int]] = {}
    for row in counts:
        if row.bin is not None:
            bins.setdefault((row.policy, row.policy_version), [0] * BINS)[row.bin - 1] += row.pairs
    found = []
    for key, pairs in sorted(bins.items()):
        rule = policies[key]
        score = "p_contradiction" if rule.polarity == "should_hold" else "p_entailment"
        found.append(Histogram(*key, rule.polarity, score, rule.review_at, rule.reject_at, tuple(pairs)))
    return tuple(found)


def models(connection: Connection, counts: Sequence[Any]) -> tuple[Model, ...]:
    pairs: Counter[int] = Counter()
    for row in counts:
        pairs[row.model_version_id] += row.pairs
    rows = {row.model_version_id: row for row in connection.execute(text(MODELS), {"ids": list(pairs)})}
    return tuple(
        Model(
            number, row.model, row.revision, row.recipe, row.weights_sha256, row.prompt, row.image_px,
            row.concord_version, row.torch_version, judged,
        )
        for number, judged in pairs.most_common()
        if (row := rows.get(number))
    )  # fmt: skip


def rates(connection: Connection, one: Mapping[str, Any]) -> tuple[Attribute, ...]:
    found: dict[str, list[Rate]] = {}
    values = {}
    for row in connection.execute(text(RATES), {**one, "always": list(ALWAYS)}):
        rate = Rate(row.value, row.judged, row.mismatches, row.rate, row.low, row.high)
        found.setdefault(row.name, []).append(rate)
        values[row.name] = row.values
    return tuple(Attribute(name, tuple(some), values[name]) for name, some in found.items())


def errors(connection: Connection, one: Mapping[str, Any]) -> tuple[ErrorCount, ...]:
    return tuple(ErrorCount(**row._mapping) for row in connection.execute(text(ERRORS), one))


def speed(connection: Connection, run: Mapping[str, Any]) -> Speed:
    row = connection.execute(text(SPEED), run).mappings().one()
    seconds, settled = row["seconds"], run["judged"] + run["rejected"] + run["failed"]
    return Speed(**{**row, "pairs_per_s": settled / seconds if seconds > 0 else None})


def history(connection: Connection, run: Mapping[str, Any]) -> tuple[LabelsOfRun, ...]:
    """The labels of the last runs: as their ends noted them or, where that is not so or no longer true, counted."""
    found = connection.execute(text(HISTORY), run).mappings().all()[::-1]
    rows = [run if row["run_id"] == run["run_id"] else dict(row) for row in found]
    labels = {row["run_id"]: noted_labels(row) for row in rows}
    to_count = [row for row in rows if labels[row["run_id"]] is None]
    counted: dict[Any, dict[str, int]] = {row["run_id"]: {} for row in to_count}
    wanted = {"ids": list(counted), "moments": [row["submitted_at"] for row in to_count]}
    for run_id, label, pairs in connection.execute(text(LABELS), wanted) if to_count else ():
        counted[run_id][label] = pairs
    made = []
    for row in rows:
        names = ("run_id", "name", "submitted_at", "state", "rejected", "failed")
        of_run = labels[row["run_id"]] or counted[row["run_id"]]
        about: dict[str, Any] = {name: row[name] for name in names}
        about |= {label: of_run.get(label, 0) for label in LABELLED}
        made.append(LabelsOfRun(**about, is_this=row["run_id"] == run["run_id"]))
    return tuple(made)


def noted_labels(row: Mapping[str, Any]) -> dict[str, int] | None:
    """The labels in a run's summary, unless pairs were judged since."""
    labels: dict[str, int] | None = (row["summary"] or {}).get("labels")
    return labels if labels is not None and sum(labels.values()) == row["judged"] else None


def worst(connection: Connection, one: Mapping[str, Any]) -> tuple[Mismatch, ...]:
    return tuple(mismatch_of(dict(row)) for row in connection.execute(text(WORST_MISMATCHES), one).mappings())


def mismatch_of(row: dict[str, Any]) -> Mismatch:
    earlier = None
    if row["label_before"] is not None:
        names = ("label", "decision", "p_trouble", "submitted_at", "decided_at")
        same = {name: row[name] for name in ("same_content", "same_model")}
        earlier = Earlier(**{name: row[f"{name}_before"] for name in names}, **same)
    plain = {name: row[name] for name in row if not name.endswith("_before") and not name.startswith("same_")}
    return Mismatch(
        **{**plain, "attributes": row["attributes"] or {}, "flags": tuple(row["flags"])},
        change=change_of(row["label"], earlier),
        is_new=row["mismatch_before"] is False,
        earlier=earlier,
    )


def change_of(label: str, earlier: Earlier | None) -> str:
    """As `report.run_changes` names it."""
    if earlier is None:
        return "first_seen"
    if earlier.label == label:
        return "unchanged"
    return "newly_contradicting" if label == "contradiction" else "newly_agreeing"


def filters(mismatches: Sequence[Mismatch]) -> Iterator[Filter]:
    """What the mismatches shown differ in; an attribute only where values repeat."""
    for name in ("label", "policy"):
        yield Filter(name, False, tuple(sorted({str(getattr(one, name)) for one in mismatches})), f"v.{name}")
    names = {name for one in mismatches for name in one.attributes}
    for name in sorted(names, key=lambda name: (ALWAYS.index(name) if name in ALWAYS else len(ALWAYS), name)):
        found = [one.attributes[name] for one in mismatches if name in one.attributes]
        values = tuple(sorted(set(found)))
        # A name that may have been cut is no longer that of an attribute.
        if name in ALWAYS or (len(values) * PAIRS_A_VALUE <= len(found) and len(name) < VALUE_CHARS):
            column = f"v.attributes ->> {constant(name)}"
            if any(len(value) == VALUE_CHARS for value in values):
                # Cut as those values are, or it would find none of them.
                column = f"left({column}, {VALUE_CHARS})"
            yield Filter(name, True, values, column)


def constant(words: str) -> str:
    """A string constant of Postgres; what a reader cannot see is spelt out, so that the question read is that asked."""
    quoted = words.replace("'", "''")
    hidden = {character for character in words if unicodedata.category(character)[0] == "C" or character in SEPARATORS}
    if not hidden:
        return f"'{quoted}'"
    spelt = quoted.replace("\\", "\\\\")
    return "U&'" + "".join(f"\\+{ord(one):06x}" if one in hidden else one for one in spelt) + "'"


def shown_sql(one: Mapping[str, Any]) -> Sql:
    moment = one["submitted_at"].isoformat(sep=" ")
    return Sql(
        SHOWN.format(earlier=EARLIER, run_id=one["run_id"], submitted_at=moment),
        f"order by {IN_ORDER}\nlimit {WORST};",
    )
