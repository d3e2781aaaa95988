-- name: review_queue
-- purpose: What a person should look at now.
-- reader: the people who review, who sort it by p_trouble
-- grain: one row a pair that was decided as `review` and that no later verdict of the same source, ref and policy replaces

create view report.review_queue as
select v.submitted_at, v.pair_id, v.source, v.ref, v.run_id, v.image, v.text, v.premise, v.attributes, v.policy,
       v.label, v.p_trouble, v.flags, v.decided_at
from report.verdicts as v
where v.decision = 'review' and (v.ref is null or not exists (
    -- `offset 0` keeps this a look-up by index for each row: as a join it would read all months.
    select from verdict as later
    where later.source = v.source and later.ref = v.ref and later.policy = v.policy and later.status = 'judged'
      and later.submitted_at > v.submitted_at
    offset 0));

comment on view report.review_queue is 'What a person should look at now: pairs decided as review that no later verdict of the same source, ref and policy replaces. One row a pair.';
comment on column report.review_queue.submitted_at is 'When the pair was handed over, or its run began. Give it a range: it picks the months that are read.';
comment on column report.review_queue.pair_id is 'The pair''s id.';
comment on column report.review_queue.source is 'The tenant or catalog.';
comment on column report.review_queue.ref is 'The producer''s own name for the pair.';
comment on column report.review_queue.run_id is 'The run that the pair belongs to.';
comment on column report.review_queue.image is 'S3 address of the picture.';
comment on column report.review_queue.text is 'The claim as it was submitted.';
comment on column report.review_queue.premise is 'A second text that was taken as true.';
comment on column report.review_queue.attributes is 'What the producer sent along: category, seller ...';
comment on column report.review_queue.policy is 'The rule that decided.';
comment on column report.review_queue.label is 'entailment, contradiction or neutral.';
comment on column report.review_queue.p_trouble is 'The probability that the policy watches; the highest first is a good order.';
comment on column report.review_queue.flags is 'What a reader should know; off_language alone sends a pair here.';
comment on column report.review_queue.decided_at is 'When the verdict was written.';
