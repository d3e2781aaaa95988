-- name: verdicts
-- purpose: Every verdict with the model that made it, and whether picture and text are at odds.
-- reader: analysts, for questions that no other view answers
-- grain: one row a pair

create view report.verdicts as
select v.submitted_at, v.pair_id, v.source, v.ref, v.run_id, v.lane, v.image, v.text, v.premise, v.attributes,
       v.status, v.label, v.p_entailment, v.p_contradiction, v.p_neutral, v.answer,
       v.policy, v.policy_version, v.decision,
       case p.polarity when 'should_hold' then v.p_contradiction
                       when 'should_not_hold' then v.p_entailment end as p_trouble,
       coalesce(v.label = case p.polarity when 'should_hold' then 'contradiction'
                                          when 'should_not_hold' then 'entailment' end, false) as mismatch,
       v.error_code, v.error_detail, v.flags, v.text_scored, v.premise_scored,
       v.model_version_id, m.name as model, m.revision, m.recipe,
       v.image_sha256, v.image_etag, v.image_width, v.image_height, v.decode_mode, v.attempts, v.decided_at
from verdict as v
left join policy as p on p.name = v.policy and p.version = v.policy_version
left join model_version as m on m.id = v.model_version_id;

comment on view report.verdicts is 'Every verdict with the model that made it, and whether picture and text are at odds. One row a pair.';
comment on column report.verdicts.submitted_at is 'When the producer handed the pair over, or its run began. Give it a range: it picks the months that are read.';
comment on column report.verdicts.pair_id is 'The pair''s id; with submitted_at the key.';
comment on column report.verdicts.source is 'The tenant or catalog that the pair came from.';
comment on column report.verdicts.ref is 'The producer''s own name for the pair, for example a SKU.';
comment on column report.verdicts.run_id is 'The submitted file or nightly job that the pair belongs to; null: handed over one by one.';
comment on column report.verdicts.lane is 'live or bulk.';
comment on column report.verdicts.image is 'S3 address of the picture; null once erased.';
comment on column report.verdicts.text is 'The claim as it was submitted; null once erased.';
comment on column report.verdicts.premise is 'A second text that was taken as true.';
comment on column report.verdicts.attributes is 'What the producer sent along: category, seller ...';
comment on column report.verdicts.status is 'judged; rejected: the pair''s own fault, see error_code; failed: attempts used up, can be tried again.';
comment on column report.verdicts.label is 'entailment: the picture shows what the text says; contradiction: it shows otherwise; neutral: it cannot tell.';
comment on column report.verdicts.p_entailment is 'Probability of entailment; the three sum to 1.';
comment on column report.verdicts.p_contradiction is 'Probability of contradiction.';
comment on column report.verdicts.p_neutral is 'Probability that the picture cannot tell.';
comment on column report.verdicts.answer is 'The checkpoint''s own wording of the label.';
comment on column report.verdicts.policy is 'The rule that turned probabilities into the decision.';
comment on column report.verdicts.policy_version is 'The version of that rule.';
comment on column report.verdicts.decision is 'accept, review or reject.';
comment on column report.verdicts.p_trouble is 'The probability that the policy watches: of contradiction where the text should hold, of entailment where it should not.';
comment on column report.verdicts.mismatch is 'The label is the one that the policy watches for: contradiction where the text should hold, entailment where it should not.';
comment on column report.verdicts.error_code is 'Why the pair was not judged, in a word that never changes.';
comment on column report.verdicts.error_detail is 'The same in a sentence.';
comment on column report.verdicts.flags is 'What a reader should know: text_cut, text_replaced, off_language, first_frame, reused (the scores are those of another verdict of the same content), erased ...';
comment on column report.verdicts.text_scored is 'The text as the model read it; null once erased.';
comment on column report.verdicts.premise_scored is 'The premise as the model read it.';
comment on column report.verdicts.model_version_id is 'Stands for model, revision, recipe, weights, prompt and input size.';
comment on column report.verdicts.model is 'The model''s name.';
comment on column report.verdicts.revision is 'The model''s revision.';
comment on column report.verdicts.recipe is 'The precision that it ran in, for example awq-int4.';
comment on column report.verdicts.image_sha256 is 'Of the bytes that were decoded.';
comment on column report.verdicts.image_etag is 'S3''s ETag of those bytes.';
comment on column report.verdicts.image_width is 'Pixels, after EXIF orientation.';
comment on column report.verdicts.image_height is 'Pixels, after EXIF orientation.';
comment on column report.verdicts.decode_mode is 'exact: every pixel; reduced: a large JPEG was scaled down while decoding.';
comment on column report.verdicts.attempts is 'Attempts before the one that settled the pair.';
comment on column report.verdicts.decided_at is 'When the verdict was written.';
