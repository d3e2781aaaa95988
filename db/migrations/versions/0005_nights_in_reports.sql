-- Runs in the reports: files and nights, what a night found gone, and what it did not need to judge.

select set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

-- verdict_source_ref_time finds all that it found.
drop index if exists verdict_source_ref;

create or replace function forget_expired_rows(page integer default 10000)
returns table (of_table text, gone bigint) language sql security definer set search_path from current as $$
    with messages as (
        delete from rejected_message where id in (
            select m.id from rejected_message as m, retention as k
            where m.received_at < now() - k.rejected_days * interval '1 day' order by m.received_at limit page)
        returning 1),
    runs as (
        delete from run where id in (
            select r.id from run as r, retention as k
            where r.state in ('done', 'cancelled', 'failed')
              and coalesce(r.finished_at, r.created_at) < now() - k.run_days * interval '1 day' limit page)
        returning id),
    -- What a cancelled night kept back (db/nights.py), and its listing, nobody could find again without it.
    parked as (
        delete from outbox using runs
        where outbox.run_id = runs.id and outbox.published_at is null and outbox.not_before = '9000-01-01 00:00+00'),
    listed as (delete from catalog_object using runs where catalog_object.run_id = runs.id)
    select 'rejected_message', count(*) from messages union all select 'run', count(*) from runs
$$;

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
comment on column report.run_summary.reused is 'Nightly: items that had not changed and whose last verdict stands.';
comment on column report.run_summary.skipped is 'Nightly: lines or rows of the source that name no item, or one that stood before.';

-- name: run_changes
-- purpose: What a run found otherwise than it was known before: what stopped agreeing, what agrees again.
-- reader: the catalog team, each morning
-- grain: one row a pair of the run that has a ref, and one a ref that is gone
--
-- A run is compared ref by ref with the last judged verdict of the same source, ref and policy before it, whichever run that
-- was: a nightly run checks only what is new or changed, so the night before holds few of its refs. For the same reason a
-- ref that a nightly run does not have is not gone: that is said of an item that the run no longer found in its catalog, and
-- of a pair that the last submitted file of the same name had.

create view report.run_changes as
select r.id as run_id, r.kind, r.name, r.submitted_at, v.source, v.ref, v.policy,
       case when v.status <> 'judged' then 'not_judged'
            when b.submitted_at is null then 'first_seen'
            when v.label = b.label then 'unchanged'
            when v.label = 'contradiction' then 'newly_contradicting'
            when v.label = 'entailment' then 'newly_agreeing'
            else 'newly_undecided' end as change,
       b.label as label_before, v.label, b.mismatch as mismatch_before, v.mismatch,
       b.decision as decision_before, v.decision,
       b.p_trouble as p_trouble_before, v.p_trouble, b.submitted_at as submitted_at_before,
       v.image_sha256 = b.image_sha256 and v.text_scored = b.text_scored
           and v.premise_scored is not distinct from b.premise_scored as same_content,
       v.model_version_id = b.model_version_id as same_model,
       v.pair_id, v.image, v.text, v.attributes, v.error_code
from run as r
cross join lateral (
    select * from report.verdicts as of_run
    where of_run.run_id = r.id and of_run.submitted_at = r.submitted_at and of_run.ref is not null
    -- In the order of the index that is asked below. It also keeps the run's moment a parameter, which picks the month: by
    -- the run's id alone every month would be looked into.
    order by of_run.ref
) as v
left join lateral (
    -- From the newest month backwards, and no further than the first that is found.
    select before.submitted_at, before.label, before.decision, before.p_trouble, before.mismatch,
           before.image_sha256, before.text_scored, before.premise_scored, before.model_version_id
    from report.verdicts as before
    where before.source = v.source and before.ref = v.ref and before.policy = v.policy and before.status = 'judged'
      and before.submitted_at < r.submitted_at
    order by before.submitted_at desc
    limit 1
) as b on true
union all
select r.id, r.kind, r.name, r.submitted_at, b.source, b.ref, b.policy, 'gone', b.label, null, b.mismatch, null,
       b.decision, null, b.p_trouble, null, b.submitted_at, null, null, b.pair_id, b.image, b.text, b.attributes, null
from run as r
cross join lateral (
    select last.id, last.submitted_at from run as last
    where last.kind = r.kind and last.source = r.source and last.name = r.name and last.submitted_at < r.submitted_at
    order by last.submitted_at desc
    limit 1
) as last
join report.verdicts as b on b.run_id = last.id and b.submitted_at = last.submitted_at and b.ref is not null
where r.kind = 'submit' and r.state = 'done' and not exists (
    select from verdict as v
    -- A pair that could not be read may have no policy, and is there all the same.
    where v.source = b.source and v.ref = b.ref and coalesce(v.policy = b.policy, true)
      and v.submitted_at = r.submitted_at and v.run_id = r.id)
union all
select r.id, r.kind, r.name, r.submitted_at, s.source collate "default", s.ref collate "default", s.policy, 'gone',
       s.label, null, null, null, null, null, null, null, null, null, null, null, null, null, s.attributes, null
from run as r
join catalog_state as s on s.source = r.source and s.gone_in = r.id
where r.kind = 'nightly';

comment on view report.run_changes is 'What a run found otherwise than it was known before. One row a pair of the run that has a ref, compared with the last judged verdict of the same source, ref and policy before it, whichever run that was; and one a ref that is gone.';
comment on column report.run_changes.run_id is 'The run. Ask for one at a time.';
comment on column report.run_changes.kind is 'submit: a file; nightly: the catalog job.';
comment on column report.run_changes.name is 'The file''s or the job''s name.';
comment on column report.run_changes.submitted_at is 'When the run began.';
comment on column report.run_changes.source is 'The tenant or catalog.';
comment on column report.run_changes.ref is 'The producer''s own name for the pair.';
comment on column report.run_changes.policy is 'The rule that decided.';
comment on column report.run_changes.change is 'newly_contradicting: the label is contradiction, and was another; newly_agreeing, newly_undecided: the same of entailment and neutral; unchanged: the same label; first_seen: never judged before; not_judged: rejected or failed this time; gone: a night no longer found it in its catalog, or a file no longer has it that the last one of its name had.';
comment on column report.run_changes.label_before is 'The label before.';
comment on column report.run_changes.label is 'The label now.';
comment on column report.run_changes.mismatch_before is 'Whether it was at odds with its policy before: see verdicts.mismatch.';
comment on column report.run_changes.mismatch is 'Whether it is now.';
comment on column report.run_changes.decision_before is 'The decision before.';
comment on column report.run_changes.decision is 'The decision now.';
comment on column report.run_changes.p_trouble_before is 'The probability that the policy watches, before.';
comment on column report.run_changes.p_trouble is 'The probability that the policy watches, now.';
comment on column report.run_changes.submitted_at_before is 'When the verdict before was asked for; null: there was none.';
comment on column report.run_changes.same_content is 'Whether picture and text are the same as then: if so, another model or rule changed the verdict.';
comment on column report.run_changes.same_model is 'Whether the same model version judged both.';
comment on column report.run_changes.pair_id is 'The pair''s id; of what is gone from a file, the one of last time.';
comment on column report.run_changes.image is 'S3 address of the picture.';
comment on column report.run_changes.text is 'The claim.';
comment on column report.run_changes.attributes is 'What the producer sent along: category, seller ...';
comment on column report.run_changes.error_code is 'Why it was not judged this time.';

grant select on report.run_summary, report.run_changes to concord_reader, concord_worker;
