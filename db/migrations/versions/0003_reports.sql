-- What analysts read, what the workers measure, and how months go.

select set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);


create table batch (
    settled_at        timestamptz not null default now(),
    id                uuid not null default new_uuid7(),
    worker            text not null,
    lane              text not null,
    model_version_id  integer,
    messages          integer not null,
    pairs             integer not null,
    judged            integer not null,
    reused            integer not null default 0,
    queue_s           real not null,
    fetch_s           real not null,
    model_s           real not null,
    write_s           real not null,
    tokens            integer not null,
    padded_tokens     integer not null,
    pictures          integer not null,
    primary key (settled_at, id)
) partition by range (settled_at);

create table retention (
    id             integer primary key default 1 check (id = 1),
    keep_months    integer check (keep_months >= 1),
    rejected_days  integer check (rejected_days >= 1),
    run_days       integer check (run_days >= 1)
);
insert into retention default values;

-- Where these were built beforehand (docs/deploy.md), there is nothing left to do.
create index if not exists verdict_source_ref_time on verdict (source, ref, submitted_at);
create index if not exists verdict_failed on verdict (decided_at, submitted_at, pair_id) where status = 'failed';
create index if not exists rejected_message_received_at on rejected_message (received_at);

comment on table batch is 'One row a batch that was settled: what it held and how long each step took.';
comment on column batch.settled_at is 'When its verdicts were written; with id the key, and the partition.';
comment on column batch.id is 'A UUID of version 7.';
comment on column batch.worker is 'The worker''s node name in Celery.';
comment on column batch.lane is 'live or bulk.';
comment on column batch.model_version_id is 'The model version that judged.';
comment on column batch.messages is 'Messages in it.';
comment on column batch.pairs is 'Pairs that it settled.';
comment on column batch.judged is 'Pairs of these that have a label.';
comment on column batch.reused is 'Pairs of these that took an earlier verdict of the same content.';
comment on column batch.queue_s is 'Seconds from a pair''s arrival in the queue to the batch''s start, on average.';
comment on column batch.fetch_s is 'Seconds of fetching and decoding its pictures.';
comment on column batch.model_s is 'Seconds in the model.';
comment on column batch.write_s is 'Seconds of writing its verdicts, up to just before the commit.';
comment on column batch.tokens is 'Tokens of its prompts.';
comment on column batch.padded_tokens is 'The same with the padding that the device computed.';
comment on column batch.pictures is 'Distinct pictures in it.';
comment on table retention is 'How long rows are kept; null: for ever. One row, which only the owner changes.';
comment on column retention.keep_months is 'Months of verdict and batch that are kept before the present one.';
comment on column retention.rejected_days is 'Days that a row of rejected_message is kept.';
comment on column retention.run_days is 'Days that a run is kept once it is over.';


create function make_partitions(months_ahead integer default 2)
returns integer language plpgsql security definer set search_path from current as $$
declare
    this_month timestamp := date_trunc('month', now() at time zone 'utc');
    parent text;
    first_day timestamp;
    child text;
    made integer := 0;
begin
    -- Whoever may call this may not fill the catalogue with months.
    if months_ahead is null or months_ahead not between 0 and 24 then
        raise exception 'months_ahead is 0 to 24' using errcode = '22023';
    end if;
    perform pg_advisory_xact_lock(hashtext('concord.make_verdict_partitions'));
    for parent, first_day in
        select p, m from unnest(array['verdict', 'batch']) as p,
            generate_series(this_month - interval '1 month', this_month + months_ahead * interval '1 month',
                            interval '1 month') as m
    loop
        child := parent || to_char(first_day, '_YYYY_MM');
        continue when to_regclass(child) is not null;
        -- Made aside and attached: `create table ... partition of` would lock every reader out.
        execute format('create table %I (like %I including defaults including constraints)', child, parent);
        execute format('alter table %I attach partition %I for values from (%L) to (%L)', parent, child,
                       first_day at time zone 'utc', (first_day + interval '1 month') at time zone 'utc');
        made := made + 1;
    end loop;
    return made;
end $$;
comment on function make_partitions is 'Makes last month''s, this month''s and the coming months'' partitions of verdict and batch where they are missing.';

-- Workers of the version before call it.
create or replace function make_verdict_partitions(months_ahead integer default 2)
returns integer language sql security definer set search_path from current as $$
    select make_partitions(months_ahead)
$$;

create view expired_month as
select p.relname as parent, c.relname as name, i.inhdetachpending as pending, months.first_day,
       i.inhparent = 'verdict'::regclass and exists (
           select from run where run.state in ('planning', 'running', 'finishing')
             and run.submitted_at >= months.first_day at time zone 'utc'
             and run.submitted_at < (months.first_day + interval '1 month') at time zone 'utc') as needed
from pg_inherits as i
join pg_class as p on p.oid = i.inhparent
join pg_class as c on c.oid = i.inhrelid
cross join lateral (select to_date(right(c.relname, 7), 'YYYY_MM')::timestamp as first_day) as months
cross join retention
where i.inhparent in ('verdict'::regclass, 'batch'::regclass) and c.relname ~ '^(verdict|batch)_\d{4}_\d{2}$'
  and months.first_day < date_trunc('month', now() at time zone 'utc') - retention.keep_months * interval '1 month';
comment on view expired_month is 'Months that are older than retention.keep_months; needed: a run that is not over has pairs in it.';

create function drop_expired_month()
returns text language plpgsql security definer set search_path from current set lock_timeout = '2s' as $$
declare
    month record;
begin
    -- One at a time: a second caller would find the month gone under its hands.
    perform pg_advisory_xact_lock(hashtext('concord.make_verdict_partitions'));
    select * into month from expired_month where not needed order by first_day, name limit 1;
    if month.name is null then
        return null;
    end if;
    -- Not `concurrently`, which no function may do: the lock keeps readers and writers out for as long as it takes to
    -- change the catalogue, and is not waited for behind a long query.
    execute format('alter table %I detach partition %I', month.parent, month.name)
        || case when month.pending then ' finalize' else '' end;
    execute format('drop table %I', month.name);
    return month.name;
end $$;
comment on function drop_expired_month is 'Detaches and drops the oldest month that retention does not keep; returns its name, or null where there is none.';

create function forget_expired_rows(page integer default 10000)
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
        returning 1)
    select 'rejected_message', count(*) from messages union all select 'run', count(*) from runs
$$;
comment on function forget_expired_rows is 'Deletes one page of rejected messages and of runs that retention does not keep; returns how many of each.';

select make_partitions();


create schema report;
comment on schema report is 'What analysts read; made of views, by the role concord_reader.';

-- name: calendar_day
-- purpose: The days for which verdicts can be there, in UTC, so that views by day touch only the months that are asked for.
-- reader: the other views; not in schema report
-- grain: one row a day

create view calendar_day as
select d::date as day, d at time zone 'utc' as starts_at, (d + interval '1 day') at time zone 'utc' as ends_at
from (
    select to_date(right(min(child.relname), 7), 'YYYY_MM')::timestamp as first_day
    from pg_inherits join pg_class as child on child.oid = inhrelid
    -- Others that were attached by hand, an archive for example, tell nothing by their names.
    where inhparent = 'verdict'::regclass and child.relname ~ '^verdict_\d{4}_\d{2}$'
) as months, generate_series(months.first_day, now() at time zone 'utc' + interval '1 hour', interval '1 day') as d;

comment on view calendar_day is 'The days for which verdicts can be there, in UTC.';

-- name: calendar_hour
-- purpose: The hours for which batches and verdicts can be there, so that views by hour touch only the months that are asked for.
-- reader: the other views; not in schema report
-- grain: one row an hour

create view calendar_hour as
select h as hour, h + interval '1 hour' as next_hour
from (select min(starts_at) as first_hour from calendar_day) as days,
     generate_series(days.first_hour, now() + interval '1 hour', interval '1 hour') as h;

comment on view calendar_hour is 'The hours for which batches and verdicts can be there.';

-- name: wilson_low, wilson_high
-- purpose: The 95% bounds of a rate of which `hits` of `of` were seen.
-- reader: whoever adds up counts of defect_rate, and defect_rate itself
-- grain: functions

-- The score interval of E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927,
-- with z = 1.96. Unlike the textbook's p +- z * sqrt(p (1 - p) / n) it holds for rates near 0 and for small counts.
create function report.wilson_low(hits bigint, of bigint) returns double precision
language sql immutable parallel safe as $$
    select case when of > 0 then
        greatest(0, (p + z * z / (2 * n) - z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))) / (1 + z * z / n)) end
    from (select hits::float8 / nullif(of, 0), nullif(of, 0)::float8, 1.96::float8) as given (p, n, z)
$$;
comment on function report.wilson_low is 'The lower 95% bound of a rate of which `hits` of `of` were seen; null of none.';

create function report.wilson_high(hits bigint, of bigint) returns double precision
language sql immutable parallel safe as $$
    select case when of > 0 then
        least(1, (p + z * z / (2 * n) + z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))) / (1 + z * z / n)) end
    from (select hits::float8 / nullif(of, 0), nullif(of, 0)::float8, 1.96::float8) as given (p, n, z)
$$;
comment on function report.wilson_high is 'The upper 95% bound of a rate of which `hits` of `of` were seen; null of none.';

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
comment on column report.verdicts.flags is 'What a reader should know: text_cut, text_replaced, off_language, first_frame, erased ...';
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

-- name: daily_labels
-- purpose: How many pairs came to which label and decision, day by day.
-- reader: the catalog team, analysts
-- grain: one row a day (UTC), source, policy, status, label and decision

create view report.daily_labels as
select d.day, c.source, c.policy, c.status, c.label, c.decision, c.pairs,
       (c.pairs / sum(c.pairs) over (partition by d.day, c.source, c.policy))::double precision as share
from calendar_day as d
cross join lateral (
    select v.source, v.policy, v.status, v.label, v.decision, count(*) as pairs
    from verdict as v
    where v.submitted_at >= d.starts_at and v.submitted_at < d.ends_at
    group by v.source, v.policy, v.status, v.label, v.decision
) as c;

comment on view report.daily_labels is 'How many pairs came to which label and decision, day by day. One row a day, source, policy, status, label and decision.';
comment on column report.daily_labels.day is 'The day (UTC) on which the pairs were handed over, or their run began.';
comment on column report.daily_labels.source is 'The tenant or catalog.';
comment on column report.daily_labels.policy is 'The rule that decided; null for pairs that could not be read.';
comment on column report.daily_labels.status is 'judged, rejected or failed.';
comment on column report.daily_labels.label is 'entailment, contradiction or neutral; null unless judged.';
comment on column report.daily_labels.decision is 'accept, review or reject; null unless judged.';
comment on column report.daily_labels.pairs is 'How many pairs.';
comment on column report.daily_labels.share is 'Of all pairs of that day, source and policy, from 0 to 1.';

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

-- name: dead_letters
-- purpose: Pairs that could not be judged in all attempts, and can be tried again.
-- reader: who runs the workers
-- grain: one row a failed pair

create view report.dead_letters as
select submitted_at, decided_at, pair_id, source, ref, run_id, message_id, lane, error_code, error_detail, attempts,
       flags, image, text, attributes
from verdict
where status = 'failed';

comment on view report.dead_letters is 'Pairs that could not be judged in all attempts, and can be tried again. One row a failed pair.';
comment on column report.dead_letters.submitted_at is 'When the pair was handed over, or its run began. Give it a range: it picks the months that are read.';
comment on column report.dead_letters.decided_at is 'When it was given up.';
comment on column report.dead_letters.pair_id is 'The pair''s id.';
comment on column report.dead_letters.source is 'The tenant or catalog.';
comment on column report.dead_letters.ref is 'The producer''s own name for the pair.';
comment on column report.dead_letters.run_id is 'The run that counted it.';
comment on column report.dead_letters.message_id is 'The message that carried it.';
comment on column report.dead_letters.lane is 'live or bulk.';
comment on column report.dead_letters.error_code is 'Why the last attempt failed, in a word that never changes.';
comment on column report.dead_letters.error_detail is 'The same in a sentence.';
comment on column report.dead_letters.attempts is 'Attempts before the last one.';
comment on column report.dead_letters.flags is 'redriven: it is being tried again.';
comment on column report.dead_letters.image is 'S3 address of the picture.';
comment on column report.dead_letters.text is 'The claim as it was submitted.';
comment on column report.dead_letters.attributes is 'What the producer sent along.';

-- name: errors_by_code
-- purpose: What could not be judged, how often and why, day by day.
-- reader: who runs the workers; producers
-- grain: one row a day (UTC), source, lane, status and error code

create view report.errors_by_code as
select d.day, e.source, e.lane, e.status, e.error_code, e.pairs, e.example_ref, e.example_detail
from calendar_day as d
cross join lateral (
    select v.source, v.lane, v.status, v.error_code, count(*) as pairs, min(v.ref) as example_ref,
           min(v.error_detail) as example_detail
    from verdict as v
    where v.submitted_at >= d.starts_at and v.submitted_at < d.ends_at and v.status <> 'judged'
    group by v.source, v.lane, v.status, v.error_code
    union all
    select r.source, r.queue, 'unread', r.error_code, sum(greatest(cardinality(r.pair_ids), 1)), null,
           min(r.error_detail)
    from rejected_message as r
    where r.received_at >= d.starts_at and r.received_at < d.ends_at
    group by r.source, r.queue, r.error_code
) as e;

comment on view report.errors_by_code is 'What could not be judged, how often and why, day by day. One row a day, source, lane, status and error code.';
comment on column report.errors_by_code.day is 'The day (UTC) on which the pairs were handed over; of what could not be read at all, on which it came.';
comment on column report.errors_by_code.source is 'The tenant or catalog; null where not even that could be read.';
comment on column report.errors_by_code.lane is 'live or bulk, or whichever queue it came by.';
comment on column report.errors_by_code.status is 'rejected: the pair''s own fault; failed: attempts used up; unread: no verdict could be written, only the message was kept.';
comment on column report.errors_by_code.error_code is 'Why, in a word that never changes.';
comment on column report.errors_by_code.pairs is 'How many pairs; a message in which none could be told counts as one.';
comment on column report.errors_by_code.example_ref is 'One of them.';
comment on column report.errors_by_code.example_detail is 'The error of one of them, in a sentence.';

-- name: defect_rate
-- purpose: Which categories, sellers or values of any other attribute have how many mismatches, with error bars.
-- reader: the catalog team, analysts
-- grain: one row a day (UTC), source, policy, attribute and value. To cover many days add up judged and mismatches, and
--        put the sums into report.wilson_low and report.wilson_high

create view report.defect_rate as
select d.day, c.source, c.policy, c.attribute, c.value, c.judged, c.mismatches,
       c.mismatches::double precision / c.judged as rate,
       report.wilson_low(c.mismatches, c.judged) as rate_low,
       report.wilson_high(c.mismatches, c.judged) as rate_high
from calendar_day as d
cross join lateral (
    select alike.source, alike.policy, a.key as attribute, a.value #>> '{}' as value,
           sum(alike.judged)::bigint as judged, sum(alike.mismatches)::bigint as mismatches
    from (
        -- Pairs with the same attributes are counted first: there are far fewer such sets than pairs.
        select v.source, v.policy, v.attributes, count(*) as judged, count(*) filter (where v.mismatch) as mismatches
        from report.verdicts as v
        where v.submitted_at >= d.starts_at and v.submitted_at < d.ends_at and v.status = 'judged'
        group by v.source, v.policy, v.attributes
    ) as alike
    cross join lateral jsonb_each(alike.attributes) as a (key, value)
    where jsonb_typeof(a.value) in ('string', 'number', 'boolean')
    group by alike.source, alike.policy, a.key, a.value #>> '{}'
) as c;

comment on view report.defect_rate is 'Which categories, sellers or values of any other attribute have how many mismatches. One row a day, source, policy, attribute and value; for many days add up judged and mismatches.';
comment on column report.defect_rate.day is 'The day (UTC) on which the pairs were handed over, or their run began.';
comment on column report.defect_rate.source is 'The tenant or catalog.';
comment on column report.defect_rate.policy is 'The rule that decided.';
comment on column report.defect_rate.attribute is 'The attribute''s name: category, seller ... Lists and objects are left out.';
comment on column report.defect_rate.value is 'Its value.';
comment on column report.defect_rate.judged is 'Pairs that were judged.';
comment on column report.defect_rate.mismatches is 'Those at odds with their policy: see verdicts.mismatch.';
comment on column report.defect_rate.rate is 'mismatches / judged.';
comment on column report.defect_rate.rate_low is 'Lower bound of its 95% interval (Wilson).';
comment on column report.defect_rate.rate_high is 'Upper bound of its 95% interval (Wilson).';

-- name: score_histogram
-- purpose: How scores are spread, to see what another threshold would decide.
-- reader: who sets policies
-- grain: one row a day (UTC), source, policy, model version and twentieth of the scale

create view report.score_histogram as
select d.day, c.source, c.policy, c.policy_version, c.model_version_id,
       (c.bucket - 1) / 20.0::double precision as from_score, c.bucket / 20.0::double precision as to_score,
       c.pairs, c.accept, c.review, c.reject
from calendar_day as d
cross join lateral (
    select v.source, v.policy, v.policy_version, v.model_version_id,
           least(width_bucket(v.p_trouble, 0, 1, 20), 20) as bucket, count(*) as pairs,
           count(*) filter (where v.decision = 'accept') as accept,
           count(*) filter (where v.decision = 'review') as review,
           count(*) filter (where v.decision = 'reject') as reject
    from report.verdicts as v
    where v.submitted_at >= d.starts_at and v.submitted_at < d.ends_at and v.p_trouble is not null
    group by v.source, v.policy, v.policy_version, v.model_version_id, least(width_bucket(v.p_trouble, 0, 1, 20), 20)
) as c;

comment on view report.score_histogram is 'How scores are spread, to see what another threshold would decide. One row a day, source, policy, model version and twentieth of the scale.';
comment on column report.score_histogram.day is 'The day (UTC) on which the pairs were handed over, or their run began.';
comment on column report.score_histogram.source is 'The tenant or catalog.';
comment on column report.score_histogram.policy is 'The rule that decided.';
comment on column report.score_histogram.policy_version is 'Its version.';
comment on column report.score_histogram.model_version_id is 'The model version that judged.';
comment on column report.score_histogram.from_score is 'Lower end of the bucket of p_trouble, itself inside.';
comment on column report.score_histogram.to_score is 'Upper end; outside, but for 1.';
comment on column report.score_histogram.pairs is 'How many pairs.';
comment on column report.score_histogram.accept is 'How many of them were accepted.';
comment on column report.score_histogram.review is 'How many are to be reviewed.';
comment on column report.score_histogram.reject is 'How many were rejected by the policy.';

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

-- name: throughput
-- purpose: How much the workers got done, in what batches, and how much of the device's work was padding.
-- reader: who runs the workers
-- grain: one row an hour and lane in which a batch was settled

create view report.throughput as
select h.hour, b.lane, b.workers, b.batches, b.messages, b.pairs, b.judged, b.reused,
       b.pairs / extract(epoch from least(h.next_hour, now()) - h.hour)::double precision as pairs_per_s,
       b.judged / nullif(b.model_s, 0) as judged_per_model_s,
       b.pairs::double precision / b.batches as batch_mean, b.batch_p50, b.batch_max,
       1 - b.tokens::double precision / nullif(b.padded_tokens, 0) as padding,
       b.pictures, b.model_s
from calendar_hour as h
cross join lateral (
    select one.lane, count(distinct one.worker) as workers, count(*) as batches, sum(one.messages) as messages,
           sum(one.pairs) as pairs, sum(one.judged) as judged, sum(one.reused) as reused,
           percentile_cont(0.5) within group (order by one.pairs) as batch_p50, max(one.pairs) as batch_max,
           sum(one.tokens) as tokens, sum(one.padded_tokens) as padded_tokens, sum(one.pictures) as pictures,
           sum(one.model_s)::double precision as model_s
    from batch as one
    where one.settled_at >= h.hour and one.settled_at < h.next_hour
    group by one.lane
) as b;

comment on view report.throughput is 'How much the workers got done, in what batches, and how much of the device''s work was padding. One row an hour and lane.';
comment on column report.throughput.hour is 'The hour in which the batches were settled.';
comment on column report.throughput.lane is 'live or bulk.';
comment on column report.throughput.workers is 'How many workers settled one.';
comment on column report.throughput.batches is 'How many batches.';
comment on column report.throughput.messages is 'How many messages were in them.';
comment on column report.throughput.pairs is 'How many pairs were settled.';
comment on column report.throughput.judged is 'How many of them have a label.';
comment on column report.throughput.reused is 'How many of them took an earlier verdict of the same content.';
comment on column report.throughput.pairs_per_s is 'Pairs settled a second, over the whole hour or, of the present one, so far.';
comment on column report.throughput.judged_per_model_s is 'Pairs judged a second that the model ran.';
comment on column report.throughput.batch_mean is 'Pairs a batch.';
comment on column report.throughput.batch_p50 is 'Half of the batches are larger.';
comment on column report.throughput.batch_max is 'The largest.';
comment on column report.throughput.padding is 'Share of the tokens that the device computed which were padding, from 0 to 1.';
comment on column report.throughput.pictures is 'Distinct pictures of each batch, added up.';
comment on column report.throughput.model_s is 'Seconds that the model ran, of all workers together.';

-- name: latency
-- purpose: How long pairs wait, and for what: queue, fetch, model, write, and from end to end.
-- reader: who runs the workers; producers of live pairs
-- grain: one row an hour and lane

create view report.latency as
select h.hour, l.lane, b.batches,
       b.queue[1] as queue_p50_s, b.queue[2] as queue_p95_s, b.queue[3] as queue_p99_s,
       b.fetch[1] as fetch_p50_s, b.fetch[2] as fetch_p95_s, b.fetch[3] as fetch_p99_s,
       b.model[1] as model_p50_s, b.model[2] as model_p95_s, b.model[3] as model_p99_s,
       b.write[1] as write_p50_s, b.write[2] as write_p95_s, b.write[3] as write_p99_s,
       v.pairs, v.whole[1] as end_to_end_p50_s, v.whole[2] as end_to_end_p95_s, v.whole[3] as end_to_end_p99_s
from calendar_hour as h
cross join (values ('live'), ('bulk')) as l (lane)
cross join lateral (
    select count(*) as batches,
           percentile_cont(array[0.5, 0.95, 0.99]) within group (order by one.queue_s) as queue,
           percentile_cont(array[0.5, 0.95, 0.99]) within group (order by one.fetch_s) as fetch,
           percentile_cont(array[0.5, 0.95, 0.99]) within group (order by one.model_s) as model,
           percentile_cont(array[0.5, 0.95, 0.99]) within group (order by one.write_s) as write
    from batch as one
    where one.settled_at >= h.hour and one.settled_at < h.next_hour and one.lane = l.lane
) as b
cross join lateral (
    select count(*) as pairs,
           percentile_cont(array[0.5, 0.95, 0.99]) within group
               (order by extract(epoch from one.decided_at - one.submitted_at)::double precision) as whole
    from verdict as one
    where one.submitted_at >= h.hour and one.submitted_at < h.next_hour and one.lane = l.lane
      and one.status = 'judged'
) as v
where b.batches > 0 or v.pairs > 0;

comment on view report.latency is 'How long pairs wait, and for what, in seconds. One row an hour and lane. The steps are of the batches that were settled in the hour, end to end of the pairs that were handed over in it.';
comment on column report.latency.hour is 'The hour.';
comment on column report.latency.lane is 'live or bulk.';
comment on column report.latency.batches is 'Batches that were settled in the hour.';
comment on column report.latency.queue_p50_s is 'From a pair''s arrival in the queue to its batch''s start: the batch''s mean, of which half of the batches had more.';
comment on column report.latency.queue_p95_s is 'One batch of 20 had more.';
comment on column report.latency.queue_p99_s is 'One batch of 100 had more.';
comment on column report.latency.fetch_p50_s is 'Fetching and decoding a batch''s pictures: half of the batches took longer.';
comment on column report.latency.fetch_p95_s is 'One batch of 20 took longer.';
comment on column report.latency.fetch_p99_s is 'One batch of 100 took longer.';
comment on column report.latency.model_p50_s is 'A batch in the model: half of the batches took longer.';
comment on column report.latency.model_p95_s is 'One batch of 20 took longer.';
comment on column report.latency.model_p99_s is 'One batch of 100 took longer.';
comment on column report.latency.write_p50_s is 'Writing a batch''s verdicts, up to the commit: half of the batches took longer.';
comment on column report.latency.write_p95_s is 'One batch of 20 took longer.';
comment on column report.latency.write_p99_s is 'One batch of 100 took longer.';
comment on column report.latency.pairs is 'Pairs that were handed over in the hour and are judged by now.';
comment on column report.latency.end_to_end_p50_s is 'From handing a pair over, or from the beginning of its run, to its verdict: half of the pairs took longer.';
comment on column report.latency.end_to_end_p95_s is 'One pair of 20 took longer.';
comment on column report.latency.end_to_end_p99_s is 'One pair of 100 took longer.';



do $$
begin
    if not exists (select from pg_roles where rolname = 'concord_reader') then
        create role concord_reader nologin;
    end if;
-- Roles belong to all databases of a server: another's migration may be making it at this moment.
exception when duplicate_object or unique_violation then null;
end $$;
grant usage on schema report to concord_reader, concord_worker;
grant select on all tables in schema report to concord_reader, concord_worker;
revoke all on all functions in schema report from public;
grant execute on all functions in schema report to concord_reader, concord_worker;

revoke all on function make_partitions(integer), drop_expired_month(), forget_expired_rows(integer) from public;
grant execute on function make_partitions(integer), drop_expired_month(), forget_expired_rows(integer) to concord_worker;
grant select, insert on batch to concord_worker;
grant select on retention, expired_month to concord_worker;
