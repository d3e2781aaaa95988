-- name: run_summary
-- purpose: What each run came to: a submitted file or one night's job.
-- reader: the catalog team
-- grain: one row a run

create view report.run_summary as
select r.id as run_id, r.kind, r.source, r.name, r.lane, r.state, r.submitted_at, r.finished_at,
       r.planned, r.judged, r.rejected, r.failed,
       c.entailment, c.contradiction, c.neutral, c.mismatches, c.accept, c.review, c.reject,
       extract(epoch from coalesce(r.finished_at, now()) - r.submitted_at)::double precision as seconds,
       (r.judged + r.rejected + r.failed)::double precision
           / nullif(extract(epoch from coalesce(r.finished_at, now()) - r.submitted_at), 0)::double precision
           as pairs_per_s,
       r.reused, r.skipped
from run as r
cross join lateral (
    select count(*) filter (where v.label = 'entailment') as entailment,
           count(*) filter (where v.label = 'contradiction') as contradiction,
           count(*) filter (where v.label = 'neutral') as neutral,
           count(*) filter (where v.mismatch) as mismatches,
           count(*) filter (where v.decision = 'accept') as accept,
           count(*) filter (where v.decision = 'review') as review,
           count(*) filter (where v.decision = 'reject') as reject
    from report.verdicts as v
    -- All pairs of a run have its submitted_at, so that one month is read.
    where v.submitted_at = r.submitted_at and v.run_id = r.id
) as c;

comment on view report.run_summary is 'What each run came to: a submitted file or one night''s job. One row a run.';
comment on column report.run_summary.run_id is 'The run''s id.';
comment on column report.run_summary.kind is 'submit: a file; nightly: the catalog job.';
comment on column report.run_summary.source is 'The tenant or catalog.';
comment on column report.run_summary.name is 'The file''s or the job''s name.';
comment on column report.run_summary.lane is 'live or bulk.';
comment on column report.run_summary.state is 'planning, running, finishing, done, cancelled or failed.';
comment on column report.run_summary.submitted_at is 'When it began; all its pairs have this as their submitted_at.';
comment on column report.run_summary.finished_at is 'When its last pair was settled; null before.';
comment on column report.run_summary.planned is 'Pairs that it handed over.';
comment on column report.run_summary.judged is 'Pairs with a label, as counted while they were written.';
comment on column report.run_summary.rejected is 'Pairs with a fault of their own.';
comment on column report.run_summary.failed is 'Pairs whose attempts were used up.';
comment on column report.run_summary.entailment is 'Judged pairs whose picture shows what the text says. This and the next six are counted from the verdicts, and 0 once their month is dropped.';
comment on column report.run_summary.contradiction is 'Judged pairs whose picture shows otherwise.';
comment on column report.run_summary.neutral is 'Judged pairs whose picture cannot tell.';
comment on column report.run_summary.mismatches is 'Judged pairs at odds with their policy: see verdicts.mismatch.';
comment on column report.run_summary.accept is 'Judged pairs that were accepted.';
comment on column report.run_summary.review is 'Judged pairs that a person should look at.';
comment on column report.run_summary.reject is 'Judged pairs that the policy rejects; not those of the column `rejected`.';
comment on column report.run_summary.seconds is 'From its beginning to its end, or until now.';
comment on column report.run_summary.pairs_per_s is 'Settled pairs a second over that time.';
comment on column report.run_summary.reused is 'Nightly: items that had not changed and whose last verdict stands: they have no verdict in this run. The flag reused is another matter.';
comment on column report.run_summary.skipped is 'Nightly: lines or rows of the source that name no item, or one that stood before.';
