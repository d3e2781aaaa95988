-- name: throughput
-- purpose: How much the workers got done, in what batches, and how much of the device's work was padding.
-- reader: who runs the workers
-- grain: one row an hour and lane in which a batch was settled

create view report.throughput as
select h.hour, b.lane, b.workers, b.batches, b.messages, b.pairs, b.judged, b.reused,
       b.pairs / extract(epoch from least(h.next_hour, now()) - h.hour)::double precision as pairs_per_s,
       (b.judged - b.reused) / nullif(b.model_s, 0) as judged_per_model_s,
       b.pairs::double precision / b.batches as batch_mean, b.batch_p50, b.batch_max,
       1 - b.tokens::double precision / nullif(b.padded_tokens, 0) as padding,
       b.pictures, b.model_s
from calendar_hour as h
cross join lateral (
    select one.lane, count(distinct one.worker) as workers, count(*) as batches, sum(one.messages) as messages,
           sum(one.pairs) as pairs, sum(one.judged) as judged, sum(one.reused) as reused,
           percentile_cont(0.5) within group (order by one.pairs) as batch_p50, max(one.pairs) as batch_max,
           sum(one.tokens) as tokens, sum(one.padded_tokens) as padded_tokens, sum(one.pictures) as pictures,
           sum(one.model_s)::double precision as model_s
    from batch as one
    where one.settled_at >= h.hour and one.settled_at < h.next_hour
    group by one.lane
) as b;

comment on view report.throughput is 'How much the workers got done, in what batches, and how much of the device''s work was padding. One row an hour and lane.';
comment on column report.throughput.hour is 'The hour in which the batches were settled.';
comment on column report.throughput.lane is 'live or bulk.';
comment on column report.throughput.workers is 'How many workers settled one.';
comment on column report.throughput.batches is 'How many batches.';
comment on column report.throughput.messages is 'How many messages were in them.';
comment on column report.throughput.pairs is 'How many pairs were settled.';
comment on column report.throughput.judged is 'How many of them have a label.';
comment on column report.throughput.reused is 'How many of them took the scores of another verdict of the same content (the flag reused).';
comment on column report.throughput.pairs_per_s is 'Pairs settled a second, over the whole hour or, of the present one, so far.';
comment on column report.throughput.judged_per_model_s is 'Pairs that the model judged, a second that it ran.';
comment on column report.throughput.batch_mean is 'Pairs a batch.';
comment on column report.throughput.batch_p50 is 'Half of the batches are larger.';
comment on column report.throughput.batch_max is 'The largest.';
comment on column report.throughput.padding is 'Share of the tokens that the device computed which were padding, from 0 to 1.';
comment on column report.throughput.pictures is 'Distinct pictures of each batch, added up.';
comment on column report.throughput.model_s is 'Seconds that the model ran, of all workers together.';
