-- name: daily_labels
-- purpose: How many pairs came to which label and decision, day by day.
-- reader: the catalog team, analysts
-- grain: one row a day (UTC), source, policy, status, label and decision

create view report.daily_labels as
select d.day, c.source, c.policy, c.status, c.label, c.decision, c.pairs,
       (c.pairs / sum(c.pairs) over (partition by d.day, c.source, c.policy))::double precision as share
from calendar_day as d
cross join lateral (
    select v.source, v.policy, v.status, v.label, v.decision, count(*) as pairs
    from verdict as v
    where v.submitted_at >= d.starts_at and v.submitted_at < d.ends_at
    group by v.source, v.policy, v.status, v.label, v.decision
) as c;

comment on view report.daily_labels is 'How many pairs came to which label and decision, day by day. One row a day, source, policy, status, label and decision.';
comment on column report.daily_labels.day is 'The day (UTC) on which the pairs were handed over, or their run began.';
comment on column report.daily_labels.source is 'The tenant or catalog.';
comment on column report.daily_labels.policy is 'The rule that decided; null for pairs that could not be read.';
comment on column report.daily_labels.status is 'judged, rejected or failed.';
comment on column report.daily_labels.label is 'entailment, contradiction or neutral; null unless judged.';
comment on column report.daily_labels.decision is 'accept, review or reject; null unless judged.';
comment on column report.daily_labels.pairs is 'How many pairs.';
comment on column report.daily_labels.share is 'Of all pairs of that day, source and policy, from 0 to 1.';
