-- name: score_histogram
-- purpose: How scores are spread, to see what another threshold would decide.
-- reader: who sets policies
-- grain: one row a day (UTC), source, policy, model version and twentieth of the scale

create view report.score_histogram as
select d.day, c.source, c.policy, c.policy_version, c.model_version_id,
       (c.bucket - 1) / 20.0::double precision as from_score, c.bucket / 20.0::double precision as to_score,
       c.pairs, c.accept, c.review, c.reject
from calendar_day as d
cross join lateral (
    select v.source, v.policy, v.policy_version, v.model_version_id,
           least(width_bucket(v.p_trouble, 0, 1, 20), 20) as bucket, count(*) as pairs,
           count(*) filter (where v.decision = 'accept') as accept,
           count(*) filter (where v.decision = 'review') as review,
           count(*) filter (where v.decision = 'reject') as reject
    from report.verdicts as v
    where v.submitted_at >= d.starts_at and v.submitted_at < d.ends_at and v.p_trouble is not null
    group by v.source, v.policy, v.policy_version, v.model_version_id, least(width_bucket(v.p_trouble, 0, 1, 20), 20)
) as c;

comment on view report.score_histogram is 'How scores are spread, to see what another threshold would decide. One row a day, source, policy, model version and twentieth of the scale.';
comment on column report.score_histogram.day is 'The day (UTC) on which the pairs were handed over, or their run began.';
comment on column report.score_histogram.source is 'The tenant or catalog.';
comment on column report.score_histogram.policy is 'The rule that decided.';
comment on column report.score_histogram.policy_version is 'Its version.';
comment on column report.score_histogram.model_version_id is 'The model version that judged.';
comment on column report.score_histogram.from_score is 'Lower end of the bucket of p_trouble, itself inside.';
comment on column report.score_histogram.to_score is 'Upper end; outside, but for 1.';
comment on column report.score_histogram.pairs is 'How many pairs.';
comment on column report.score_histogram.accept is 'How many of them were accepted.';
comment on column report.score_histogram.review is 'How many are to be reviewed.';
comment on column report.score_histogram.reject is 'How many were rejected by the policy.';
