-- name: mismatches
-- purpose: Pairs whose picture and text are at odds, as the policy sees it.
-- reader: the catalog team
-- grain: one row a judged pair whose label is the one that its policy watches for

create view report.mismatches as
select submitted_at, pair_id, source, ref, run_id, image, text, premise, attributes, policy, label, p_trouble,
       decision, flags, model_version_id
from report.verdicts
where mismatch;

comment on view report.mismatches is 'Pairs whose picture and text are at odds: contradiction where the text should hold, entailment where it should not. One row a pair.';
comment on column report.mismatches.submitted_at is 'When the pair was handed over, or its run began. Give it a range: it picks the months that are read.';
comment on column report.mismatches.pair_id is 'The pair''s id.';
comment on column report.mismatches.source is 'The tenant or catalog.';
comment on column report.mismatches.ref is 'The producer''s own name for the pair.';
comment on column report.mismatches.run_id is 'The run that the pair belongs to.';
comment on column report.mismatches.image is 'S3 address of the picture.';
comment on column report.mismatches.text is 'The claim as it was submitted.';
comment on column report.mismatches.premise is 'A second text that was taken as true.';
comment on column report.mismatches.attributes is 'What the producer sent along: category, seller ...';
comment on column report.mismatches.policy is 'The rule that decided.';
comment on column report.mismatches.label is 'contradiction or entailment, whichever the policy watches for.';
comment on column report.mismatches.p_trouble is 'Its probability.';
comment on column report.mismatches.decision is 'accept, review or reject: below the policy''s thresholds a mismatch is accepted all the same.';
comment on column report.mismatches.flags is 'What a reader should know: text_cut, off_language ...';
comment on column report.mismatches.model_version_id is 'The model version that judged.';
