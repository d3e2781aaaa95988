-- name: dead_letters
-- purpose: Pairs that could not be judged in all attempts, and can be tried again.
-- reader: who runs the workers
-- grain: one row a failed pair

create view report.dead_letters as
select submitted_at, decided_at, pair_id, source, ref, run_id, message_id, lane, error_code, error_detail, attempts,
       flags, image, text, attributes
from verdict
where status = 'failed';

comment on view report.dead_letters is 'Pairs that could not be judged in all attempts, and can be tried again. One row a failed pair.';
comment on column report.dead_letters.submitted_at is 'When the pair was handed over, or its run began. Give it a range: it picks the months that are read.';
comment on column report.dead_letters.decided_at is 'When it was given up.';
comment on column report.dead_letters.pair_id is 'The pair''s id.';
comment on column report.dead_letters.source is 'The tenant or catalog.';
comment on column report.dead_letters.ref is 'The producer''s own name for the pair.';
comment on column report.dead_letters.run_id is 'The run that counted it.';
comment on column report.dead_letters.message_id is 'The message that carried it.';
comment on column report.dead_letters.lane is 'live or bulk.';
comment on column report.dead_letters.error_code is 'Why the last attempt failed, in a word that never changes.';
comment on column report.dead_letters.error_detail is 'The same in a sentence.';
comment on column report.dead_letters.attempts is 'Attempts before the last one.';
comment on column report.dead_letters.flags is 'redriven: it is being tried again.';
comment on column report.dead_letters.image is 'S3 address of the picture.';
comment on column report.dead_letters.text is 'The claim as it was submitted.';
comment on column report.dead_letters.attributes is 'What the producer sent along.';
