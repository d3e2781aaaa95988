-- name: models
-- purpose: What verdicts are made by, in full.
-- reader: analysts; the page of a run
-- grain: one row a model version

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
