-- What the page of a run is made of, for a reader's login too.

alter table model_version add column concord_version text, add column torch_version text;
comment on column model_version.concord_version is 'Concord''s version in the worker that started with it last.';
comment on column model_version.torch_version is 'The same of torch.';
comment on column run.summary is 'Nightly: what the night came to, compared with what was known before; or why it failed. Of any run that has a page: where it is.';

create view report.runs as
select id as run_id, kind, source, name, lane, state, submitted_at, finished_at, planned, judged, rejected, failed,
       flagged, reused, skipped, options, summary
from run;

comment on view report.runs is 'Every run as it is noted: its state, its counters, and what a night''s job found. Nothing is counted anew. One row a run.';
comment on column report.runs.run_id is 'The run''s id.';
comment on column report.runs.kind is 'submit: a file; nightly: the catalog job.';
comment on column report.runs.source is 'The tenant or catalog.';
comment on column report.runs.name is 'The file''s or the job''s name.';
comment on column report.runs.lane is 'live or bulk.';
comment on column report.runs.state is 'planning, running, finishing, done, cancelled or failed.';
comment on column report.runs.submitted_at is 'When it began; all its pairs have this as their submitted_at.';
comment on column report.runs.finished_at is 'When its last pair was settled; null before.';
comment on column report.runs.planned is 'Pairs that it handed over.';
comment on column report.runs.judged is 'Pairs with a label.';
comment on column report.runs.rejected is 'Pairs with a fault of their own.';
comment on column report.runs.failed is 'Pairs whose attempts were used up.';
comment on column report.runs.flagged is 'Judged pairs whose decision was review or reject.';
comment on column report.runs.reused is 'Nightly: items that had not changed and whose last verdict stands.';
comment on column report.runs.skipped is 'Nightly: lines or rows of the source that name no item, or one that stood before.';
comment on column report.runs.options is 'Nightly: what it was begun with: date, all, sample, model.';
comment on column report.runs.summary is 'Nightly: what the night came to, compared with what was known before; or why it failed. Of any run that has a page: where it is.';

create view report.models as
select id as model_version_id, name as model, revision, recipe, weights_sha256, prompt, image_px, concord_version,
       torch_version, first_started_at, last_started_at
from model_version;

comment on view report.models is 'What verdicts are made by, in full. One row a model version.';
comment on column report.models.model_version_id is 'As in verdicts.model_version_id.';
comment on column report.models.model is 'The model''s name.';
comment on column report.models.revision is 'The model''s revision.';
comment on column report.models.recipe is 'The precision that it runs in, for example awq-int4.';
comment on column report.models.weights_sha256 is 'Of the weights.';
comment on column report.models.prompt is 'What it is asked; the text stands in place of {}.';
comment on column report.models.image_px is 'Side of the square that a picture is squeezed to, in pixels.';
comment on column report.models.concord_version is 'Concord''s version in the worker that started with it last; null: an older one, which did not say.';
comment on column report.models.torch_version is 'The same of torch.';
comment on column report.models.first_started_at is 'When a worker started with it first.';
comment on column report.models.last_started_at is 'When a worker started with it last.';

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

grant select on report.runs, report.models, report.policies, report.batches to concord_reader, concord_worker;
