-- Verdicts whose scores are another's: words, and a rate that counts what the model did.

select set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

create or replace view report.throughput as
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

comment on column report.throughput.reused is 'How many of them took the scores of another verdict of the same content (the flag reused).';
comment on column report.throughput.judged_per_model_s is 'Pairs that the model judged, a second that it ran.';
comment on column report.verdicts.flags is 'What a reader should know: text_cut, text_replaced, off_language, first_frame, reused (the scores are those of another verdict of the same content), erased ...';
comment on column report.run_summary.reused is 'Nightly: items that had not changed and whose last verdict stands: they have no verdict in this run. The flag reused is another matter.';
comment on column verdict.flags is 'What a reader should know: text_cut, text_replaced, off_language, first_frame, reused (the scores are those of another verdict of the same content) ...';
comment on column batch.reused is 'Pairs of these that took the scores of another verdict of the same content.';
comment on column run.reused is 'Nightly: items that had not changed and whose last verdict stands: they have no verdict in this run.';
