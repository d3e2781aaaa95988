-- name: batches
-- purpose: What each batch held and how long its steps took.
-- reader: who runs the workers; the page of a run
-- grain: one row a settled batch

create view report.batches as
select settled_at, id as batch_id, worker, lane, model_version_id, messages, pairs, judged, reused,
       queue_s::double precision as queue_s, fetch_s::double precision as fetch_s,
       model_s::double precision as model_s, write_s::double precision as write_s, tokens, padded_tokens, pictures
from batch;

comment on view report.batches is 'What each batch held and how long its steps took. One row a settled batch.';
comment on column report.batches.settled_at is 'When it was settled. Give it a range: it picks the months that are read.';
comment on column report.batches.batch_id is 'The batch''s id.';
comment on column report.batches.worker is 'The worker that settled it.';
comment on column report.batches.lane is 'live or bulk.';
comment on column report.batches.model_version_id is 'The model version that judged; null: none of it was.';
comment on column report.batches.messages is 'How many messages were in it.';
comment on column report.batches.pairs is 'How many pairs were settled.';
comment on column report.batches.judged is 'How many of them have a label.';
comment on column report.batches.reused is 'How many of them took an earlier verdict of the same content.';
comment on column report.batches.queue_s is 'Seconds from a pair''s arrival in the queue to the batch''s start, on average.';
comment on column report.batches.fetch_s is 'Seconds of fetching and decoding its pictures.';
comment on column report.batches.model_s is 'Seconds in the model.';
comment on column report.batches.write_s is 'Seconds of writing its verdicts, up to just before the commit.';
comment on column report.batches.tokens is 'Tokens of its prompts.';
comment on column report.batches.padded_tokens is 'The same with the padding that the device computed.';
comment on column report.batches.pictures is 'Distinct pictures in it.';
