-- name: runs
-- purpose: Every run as it is noted: its state, its counters, and what a night's job found. Nothing is counted anew.
-- reader: the page of a run; analysts, who want many runs at once
-- grain: one row a run

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
