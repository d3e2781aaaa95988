-- name: model_comparison
-- purpose: The same picture and text under two model versions: what a change of model changes.
-- reader: who decides on a new model or recipe
-- grain: one row an older and a newer verdict of the same source, ref, picture and text by two model versions

create view report.model_comparison as
select new.source, new.ref, new.policy, old.submitted_at as old_submitted_at, new.submitted_at as new_submitted_at,
       old.pair_id as old_pair_id, new.pair_id as new_pair_id,
       old.model_version_id as old_model_version_id, new.model_version_id as new_model_version_id,
       old.model as old_model, new.model as new_model, old.recipe as old_recipe, new.recipe as new_recipe,
       old.label as old_label, new.label as new_label, old.label = new.label as same_label,
       old.decision as old_decision, new.decision as new_decision,
       greatest(abs(old.p_entailment - new.p_entailment), abs(old.p_contradiction - new.p_contradiction),
                abs(old.p_neutral - new.p_neutral)) as moved,
       new.image, new.text
from report.verdicts as new
join report.verdicts as old
  on old.source = new.source and old.ref = new.ref and old.policy = new.policy
 and old.image_sha256 = new.image_sha256 and old.text_scored = new.text_scored
 and old.premise_scored is not distinct from new.premise_scored
 and old.submitted_at < new.submitted_at and old.model_version_id <> new.model_version_id
where old.status = 'judged' and new.status = 'judged';

comment on view report.model_comparison is 'The same picture and text under two model versions. One row an older and a newer verdict of the same source, ref and policy; pairs without a ref, and erased ones, are left out.';
comment on column report.model_comparison.source is 'The tenant or catalog.';
comment on column report.model_comparison.ref is 'The producer''s own name for the pair.';
comment on column report.model_comparison.policy is 'The rule that decided.';
comment on column report.model_comparison.old_submitted_at is 'When the older verdict''s pair was handed over. Give this a range too: it picks the months that are read.';
comment on column report.model_comparison.new_submitted_at is 'When the newer verdict''s pair was handed over. Give it a range.';
comment on column report.model_comparison.old_pair_id is 'The older pair''s id.';
comment on column report.model_comparison.new_pair_id is 'The newer pair''s id.';
comment on column report.model_comparison.old_model_version_id is 'The model version of the older verdict.';
comment on column report.model_comparison.new_model_version_id is 'The model version of the newer verdict.';
comment on column report.model_comparison.old_model is 'Its model''s name.';
comment on column report.model_comparison.new_model is 'Its model''s name.';
comment on column report.model_comparison.old_recipe is 'The precision that it ran in.';
comment on column report.model_comparison.new_recipe is 'The precision that it ran in.';
comment on column report.model_comparison.old_label is 'What it said.';
comment on column report.model_comparison.new_label is 'What it said.';
comment on column report.model_comparison.same_label is 'Whether both say the same.';
comment on column report.model_comparison.old_decision is 'What was decided, by the policy''s version of that time.';
comment on column report.model_comparison.new_decision is 'What was decided.';
comment on column report.model_comparison.moved is 'The largest difference among the three probabilities.';
comment on column report.model_comparison.image is 'S3 address of the picture.';
comment on column report.model_comparison.text is 'The claim as it was submitted.';
