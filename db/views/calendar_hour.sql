-- name: calendar_hour
-- purpose: The hours for which batches and verdicts can be there, so that views by hour touch only the months that are asked for.
-- reader: the other views; not in schema report
-- grain: one row an hour

create view calendar_hour as
select h as hour, h + interval '1 hour' as next_hour
from (select min(starts_at) as first_hour from calendar_day) as days,
     generate_series(days.first_hour, now() + interval '1 hour', interval '1 hour') as h;

comment on view calendar_hour is 'The hours for which batches and verdicts can be there.';
