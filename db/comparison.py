"""A night compared with what was known before it: sums over `catalog_state`, whole or by an attribute."""

from typing import Any

from sqlalchemy import Connection, text

from db.nights import Night

#: Values of an attribute that are compared one by one: those with the most news.
GROUPS = 50
#: Items that are named one by one.
EXAMPLES = 20

#: Words mean what they do in `report.run_changes` and `report.verdicts`: changes are of the label, a mismatch is the
#: label that the item's policy watches for. `flagged` is drawn anew from the stored probabilities, by the thresholds in
#: force now. Every item of tonight is in exactly one of first, newly_contradicting, newly_agreeing, newly_undecided,
#: unchanged and without_verdict. Without a sample its share may be anything, from 0 to 1.
COMPARE = """
with in_force as (
    select distinct on (name) *, case polarity when 'should_hold' then 'contradiction' else 'entailment' end as watched
    from policy order by name, version desc),
item as (
    select attributes ->> :attribute as value, planned_as, label, label_before,
           coalesce(gone_in = :run_id, false) as gone,
           coalesce(judged_in = :run_id, false) and label is not null as judged,
           coalesce(label = watched, false) as mismatch,
           label is not null
               and decide(polarity, review_at, reject_at, p_entailment, p_contradiction, flags) <> 'accept' as flagged
    from catalog_state left join in_force on in_force.name = catalog_state.policy
    where source = :source and (seen_in = :run_id or gone_in = :run_id)),
summed as (
select value,
    count(*) filter (where not gone) as items,
    count(*) filter (where not gone and mismatch) as mismatches,
    count(*) filter (where not gone and flagged) as flagged,
    count(*) filter (where judged) as judged,
    count(*) filter (where judged and label_before is null) as first,
    count(*) filter (where judged and label_before is null and mismatch) as first_mismatches,
    count(*) filter (where judged and label = 'contradiction' and label_before <> label) as newly_contradicting,
    count(*) filter (where judged and label = 'entailment' and label_before <> label) as newly_agreeing,
    count(*) filter (where judged and label = 'neutral' and label_before <> label) as newly_undecided,
    count(*) filter (where not gone and label is not null and (not judged or label = label_before)) as unchanged,
    count(*) filter (where not gone and label is null) as without_verdict,
    count(*) filter (where gone) as gone,
    count(*) filter (where judged and planned_as = 'sample') as sample,
    count(*) filter (where judged and planned_as = 'sample' and mismatch) as sample_mismatches,
    count(*) filter (where judged and planned_as = 'sample' and label_before <> label) as sample_changed
from item group by value)
select *, coalesce(report.wilson_low(sample_mismatches, sample), 0) as sample_low,
       coalesce(report.wilson_high(sample_mismatches, sample), 1) as sample_high
from summed order by newly_contradicting desc, first_mismatches desc, items desc, value limit :groups
"""


def compare(connection: Connection, night: Night, attribute: str | None = None) -> list[dict[str, Any]]:
    """What the night came to: one row for the whole catalog, or one for each value of an attribute."""
    parameters = {"run_id": night.id, "source": night.source, "attribute": attribute, "groups": GROUPS}
    return [dict(row) for row in connection.execute(text(COMPARE), parameters).mappings()]


NEWLY_CONTRADICTING = """
select ref, label_before, label, p_contradiction from catalog_state
where source = :source and seen_in = :run_id and judged_in = :run_id
  and label = 'contradiction' and label_before <> label
order by p_contradiction desc, ref limit :limit
"""


def newly_contradicting(connection: Connection, night: Night) -> list[dict[str, Any]]:
    """Some items that stopped agreeing, the surest first."""
    parameters = {"run_id": night.id, "source": night.source, "limit": EXAMPLES}
    return [dict(row) for row in connection.execute(text(NEWLY_CONTRADICTING), parameters).mappings()]


RESULTS = """
select pair_id, ref, status, label, p_entailment, p_contradiction, p_neutral, decision, error_code, error_detail
from verdict where submitted_at = :submitted_at and run_id = :run_id
  and pair_id > coalesce(cast(:after as uuid), '00000000-0000-0000-0000-000000000000')
order by pair_id limit :limit
"""


def results(connection: Connection, night: Night, after: Any, limit: int) -> list[dict[str, Any]]:
    """A page of the night's verdicts, by pair_id."""
    parameters = {"submitted_at": night.submitted_at, "run_id": night.id, "after": after, "limit": limit}
    return [dict(row) for row in connection.execute(text(RESULTS), parameters).mappings()]
