-- name: errors_by_code
-- purpose: What could not be judged, how often and why, day by day.
-- reader: who runs the workers; producers
-- grain: one row a day (UTC), source, lane, status and error code

create view report.errors_by_code as
select d.day, e.source, e.lane, e.status, e.error_code, e.pairs, e.example_ref, e.example_detail
from calendar_day as d
cross join lateral (
    select v.source, v.lane, v.status, v.error_code, count(*) as pairs, min(v.ref) as example_ref,
           min(v.error_detail) as example_detail
    from verdict as v
    where v.submitted_at >= d.starts_at and v.submitted_at < d.ends_at and v.status <> 'judged'
    group by v.source, v.lane, v.status, v.error_code
    union all
    select r.source, r.queue, 'unread', r.error_code, sum(greatest(cardinality(r.pair_ids), 1)), null,
           min(r.error_detail)
    from rejected_message as r
    where r.received_at >= d.starts_at and r.received_at < d.ends_at
    group by r.source, r.queue, r.error_code
) as e;

comment on view report.errors_by_code is 'What could not be judged, how often and why, day by day. One row a day, source, lane, status and error code.';
comment on column report.errors_by_code.day is 'The day (UTC) on which the pairs were handed over; of what could not be read at all, on which it came.';
comment on column report.errors_by_code.source is 'The tenant or catalog; null where not even that could be read.';
comment on column report.errors_by_code.lane is 'live or bulk, or whichever queue it came by.';
comment on column report.errors_by_code.status is 'rejected: the pair''s own fault; failed: attempts used up; unread: no verdict could be written, only the message was kept.';
comment on column report.errors_by_code.error_code is 'Why, in a word that never changes.';
comment on column report.errors_by_code.pairs is 'How many pairs; a message in which none could be told counts as one.';
comment on column report.errors_by_code.example_ref is 'One of them.';
comment on column report.errors_by_code.example_detail is 'The error of one of them, in a sentence.';
