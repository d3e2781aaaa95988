-- name: latency
-- purpose: How long pairs wait, and for what: queue, fetch, model, write, and from end to end.
-- reader: who runs the workers; producers of live pairs
-- grain: one row an hour and lane

create view report.latency as
select h.hour, l.lane, b.batches,
       b.queue[1] as queue_p50_s, b.queue[2] as queue_p95_s, b.queue[3] as queue_p99_s,
       b.fetch[1] as fetch_p50_s, b.fetch[2] as fetch_p95_s, b.fetch[3] as fetch_p99_s,
       b.model[1] as model_p50_s, b.model[2] as model_p95_s, b.model[3] as model_p99_s,
       b.write[1] as write_p50_s, b.write[2] as write_p95_s, b.write[3] as write_p99_s,
       v.pairs, v.whole[1] as end_to_end_p50_s, v.whole[2] as end_to_end_p95_s, v.whole[3] as end_to_end_p99_s
from calendar_hour as h
cross join (values ('live'), ('bulk')) as l (lane)
cross join lateral (
    select count(*) as batches,
           percentile_cont(array[0.5, 0.95, 0.99]) within group (order by one.queue_s) as queue,
           percentile_cont(array[0.5, 0.95, 0.99]) within group (order by one.fetch_s) as fetch,
           percentile_cont(array[0.5, 0.95, 0.99]) within group (order by one.model_s) as model,
           percentile_cont(array[0.5, 0.95, 0.99]) within group (order by one.write_s) as write
    from batch as one
    where one.settled_at >= h.hour and one.settled_at < h.next_hour and one.lane = l.lane
) as b
cross join lateral (
    select count(*) as pairs,
           percentile_cont(array[0.5, 0.95, 0.99]) within group
               (order by extract(epoch from one.decided_at - one.submitted_at)::double precision) as whole
    from verdict as one
    where one.submitted_at >= h.hour and one.submitted_at < h.next_hour and one.lane = l.lane
      and one.status = 'judged'
) as v
where b.batches > 0 or v.pairs > 0;

comment on view report.latency is 'How long pairs wait, and for what, in seconds. One row an hour and lane. The steps are of the batches that were settled in the hour, end to end of the pairs that were handed over in it.';
comment on column report.latency.hour is 'The hour.';
comment on column report.latency.lane is 'live or bulk.';
comment on column report.latency.batches is 'Batches that were settled in the hour.';
comment on column report.latency.queue_p50_s is 'From a pair''s arrival in the queue to its batch''s start: the batch''s mean, of which half of the batches had more.';
comment on column report.latency.queue_p95_s is 'One batch of 20 had more.';
comment on column report.latency.queue_p99_s is 'One batch of 100 had more.';
comment on column report.latency.fetch_p50_s is 'Fetching and decoding a batch''s pictures: half of the batches took longer.';
comment on column report.latency.fetch_p95_s is 'One batch of 20 took longer.';
comment on column report.latency.fetch_p99_s is 'One batch of 100 took longer.';
comment on column report.latency.model_p50_s is 'A batch in the model: half of the batches took longer.';
comment on column report.latency.model_p95_s is 'One batch of 20 took longer.';
comment on column report.latency.model_p99_s is 'One batch of 100 took longer.';
comment on column report.latency.write_p50_s is 'Writing a batch''s verdicts, up to the commit: half of the batches took longer.';
comment on column report.latency.write_p95_s is 'One batch of 20 took longer.';
comment on column report.latency.write_p99_s is 'One batch of 100 took longer.';
comment on column report.latency.pairs is 'Pairs that were handed over in the hour and are judged by now.';
comment on column report.latency.end_to_end_p50_s is 'From handing a pair over, or from the beginning of its run, to its verdict: half of the pairs took longer.';
comment on column report.latency.end_to_end_p95_s is 'One pair of 20 took longer.';
comment on column report.latency.end_to_end_p99_s is 'One pair of 100 took longer.';
