-- name: policies
-- purpose: The rules from probabilities to decisions, with their thresholds.
-- reader: who sets policies; the page of a run
-- grain: one row a version of a policy

create view report.policies as
select name as policy, version as policy_version, polarity, review_at, reject_at, note, created_at,
       version = max(version) over (partition by name) as in_force
from policy;

comment on view report.policies is 'The rules from probabilities to decisions, with their thresholds. One row a version of a policy.';
comment on column report.policies.policy is 'The rule''s name, as in verdicts.policy.';
comment on column report.policies.policy_version is 'Its version.';
comment on column report.policies.polarity is 'should_hold: the text should be true of the picture; should_not_hold: the claim should not.';
comment on column report.policies.review_at is 'From this p_trouble on a pair is reviewed; null: never.';
comment on column report.policies.reject_at is 'From this p_trouble on a pair is rejected; null: never.';
comment on column report.policies.note is 'What it is for.';
comment on column report.policies.created_at is 'When it was written.';
comment on column report.policies.in_force is 'The highest version of its name, by which is decided now.';
