-- name: calendar_day
-- purpose: The days for which verdicts can be there, in UTC, so that views by day touch only the months that are asked for.
-- reader: the other views; not in schema report
-- grain: one row a day

create view calendar_day as
select d::date as day, d at time zone 'utc' as starts_at, (d + interval '1 day') at time zone 'utc' as ends_at
from (
    select to_date(right(min(child.relname), 7), 'YYYY_MM')::timestamp as first_day
    from pg_inherits join pg_class as child on child.oid = inhrelid
    -- Others that were attached by hand, an archive for example, tell nothing by their names.
    where inhparent = 'verdict'::regclass and child.relname ~ '^verdict_\d{4}_\d{2}$'
) as months, generate_series(months.first_day, now() at time zone 'utc' + interval '1 hour', interval '1 day') as d;

comment on view calendar_day is 'The days for which verdicts can be there, in UTC.';
