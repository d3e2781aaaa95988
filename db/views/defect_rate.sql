-- name: defect_rate
-- purpose: Which categories, sellers or values of any other attribute have how many mismatches, with error bars.
-- reader: the catalog team, analysts
-- grain: one row a day (UTC), source, policy, attribute and value. To cover many days add up judged and mismatches, and
--        put the sums into report.wilson_low and report.wilson_high

create view report.defect_rate as
select d.day, c.source, c.policy, c.attribute, c.value, c.judged, c.mismatches,
       c.mismatches::double precision / c.judged as rate,
       report.wilson_low(c.mismatches, c.judged) as rate_low,
       report.wilson_high(c.mismatches, c.judged) as rate_high
from calendar_day as d
cross join lateral (
    select alike.source, alike.policy, a.key as attribute, a.value #>> '{}' as value,
           sum(alike.judged)::bigint as judged, sum(alike.mismatches)::bigint as mismatches
    from (
        -- Pairs with the same attributes are counted first: there are far fewer such sets than pairs.
        select v.source, v.policy, v.attributes, count(*) as judged, count(*) filter (where v.mismatch) as mismatches
        from report.verdicts as v
        where v.submitted_at >= d.starts_at and v.submitted_at < d.ends_at and v.status = 'judged'
        group by v.source, v.policy, v.attributes
    ) as alike
    cross join lateral jsonb_each(alike.attributes) as a (key, value)
    where jsonb_typeof(a.value) in ('string', 'number', 'boolean')
    group by alike.source, alike.policy, a.key, a.value #>> '{}'
) as c;

comment on view report.defect_rate is 'Which categories, sellers or values of any other attribute have how many mismatches. One row a day, source, policy, attribute and value; for many days add up judged and mismatches.';
comment on column report.defect_rate.day is 'The day (UTC) on which the pairs were handed over, or their run began.';
comment on column report.defect_rate.source is 'The tenant or catalog.';
comment on column report.defect_rate.policy is 'The rule that decided.';
comment on column report.defect_rate.attribute is 'The attribute''s name: category, seller ... Lists and objects are left out.';
comment on column report.defect_rate.value is 'Its value.';
comment on column report.defect_rate.judged is 'Pairs that were judged.';
comment on column report.defect_rate.mismatches is 'Those at odds with their policy: see verdicts.mismatch.';
comment on column report.defect_rate.rate is 'mismatches / judged.';
comment on column report.defect_rate.rate_low is 'Lower bound of its 95% interval (Wilson).';
comment on column report.defect_rate.rate_high is 'Upper bound of its 95% interval (Wilson).';
