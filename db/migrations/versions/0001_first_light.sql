-- Verdicts, the outbox and what they hang on.

-- Functions that run with the owner's rights take this path with them. Unnamed, pg_temp would come first, and a caller's
-- temporary table could stand in for one of these.
select set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

create table model_version (
    id              integer generated always as identity primary key,
    name            text not null,
    revision        text not null,
    recipe          text not null,
    weights_sha256  text not null,
    prompt          text not null,
    image_px        integer not null,
    answers         jsonb not null,
    first_started_at timestamptz not null default now(),
    last_started_at  timestamptz not null default now(),
    unique (name, revision, recipe, weights_sha256, prompt, image_px)
);

create table policy (
    name        text not null,
    version     integer not null,
    polarity    text not null check (polarity in ('should_hold', 'should_not_hold')),
    review_at   double precision,
    reject_at   double precision,
    note        text not null default '',
    created_at  timestamptz not null default now(),
    primary key (name, version)
);

create table run (
    id            uuid primary key,
    kind          text not null check (kind in ('submit', 'nightly')),
    source        text not null,
    name          text not null,
    lane          text not null,
    submitted_at  timestamptz not null,
    state         text not null default 'planning'
                  check (state in ('planning', 'running', 'finishing', 'done', 'cancelled', 'failed')),
    planned       bigint not null default 0,
    judged        bigint not null default 0,
    rejected      bigint not null default 0,
    failed        bigint not null default 0,
    options       jsonb not null default '{}',
    created_at    timestamptz not null default now(),
    finished_at   timestamptz
);

create table verdict (
    submitted_at     timestamptz not null,
    pair_id          uuid not null,
    source           text not null,
    ref              text,
    run_id           uuid,
    message_id       uuid not null,
    lane             text not null,
    image            text,
    text             text,
    premise          text,
    attributes       jsonb not null default '{}',
    status           text not null check (status in ('judged', 'rejected', 'failed')),
    label            text check (label in ('entailment', 'contradiction', 'neutral')),
    p_entailment     double precision,
    p_contradiction  double precision,
    p_neutral        double precision,
    answer           text,
    policy           text,
    policy_version   integer,
    decision         text check (decision in ('accept', 'review', 'reject')),
    error_code       text,
    error_detail     text,
    flags            text[] not null default '{}',
    text_scored      text,
    premise_scored   text,
    model_version_id integer references model_version (id),
    image_sha256     bytea,
    image_etag       text,
    image_width      integer,
    image_height     integer,
    decode_mode      text check (decode_mode in ('exact', 'reduced')),
    content_hash     bytea,
    attempts         integer not null default 0,
    decided_at       timestamptz not null default now(),
    primary key (submitted_at, pair_id),
    check (status <> 'judged' or (label is not null and decision is not null and model_version_id is not null)),
    check (status = 'judged' or error_code is not null)
) partition by range (submitted_at);

create index verdict_pair_id on verdict (pair_id);
create index verdict_source_ref on verdict (source, ref);
create index verdict_run_id on verdict (run_id) where run_id is not null;

create table outbox (
    message_id    uuid primary key,
    lane          text not null check (lane in ('live', 'bulk')),
    body          bytea not null,
    attempts      integer not null default 0,
    not_before    timestamptz not null default now(),
    published_at  timestamptz,
    publishes     integer not null default 0,
    expires_at    timestamptz,
    wants_result  boolean not null default false,
    task_id       text,
    last_error    text,
    created_at    timestamptz not null default now()
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 2000);

create index outbox_due on outbox (lane, not_before, message_id) where published_at is null;
create index outbox_published on outbox (published_at) where published_at is not null;

create table rejected_message (
    id            bigint generated always as identity primary key,
    received_at   timestamptz not null default now(),
    message_id    uuid,
    pair_ids      uuid[] not null default '{}',
    queue         text not null,
    source        text,
    error_code    text not null,
    error_detail  text not null,
    body          bytea not null,
    digest        bytea not null unique
);

create index rejected_message_pair_ids on rejected_message using gin (pair_ids);

create table relay_lease (
    id          integer primary key check (id = 1),
    holder      text not null,
    expires_at  timestamptz not null
);
insert into relay_lease values (1, 'nobody', '-infinity');

insert into policy (name, version, polarity, review_at, reject_at, note) values
    ('catalog', 1, 'should_hold', 0.5, null, 'The text should be true of the picture: a contradiction is reviewed.'),
    ('prohibited', 1, 'should_not_hold', 0.2, 0.5, 'The claim should not be true of the picture: entailment is rejected.');


comment on table verdict is 'One row a pair: what was asked, what was answered, what was decided and by what it was made.';
comment on column verdict.submitted_at is 'When the producer handed the pair over; with pair_id the key, and the partition.';
comment on column verdict.pair_id is 'The pair''s id, fixed by the producer.';
comment on column verdict.source is 'The tenant or catalog that the pair came from.';
comment on column verdict.ref is 'The producer''s own name for the pair, for example a SKU.';
comment on column verdict.run_id is 'The submitted file or nightly job that the pair belongs to.';
comment on column verdict.message_id is 'The message that carried the pair.';
comment on column verdict.lane is 'live or bulk.';
comment on column verdict.image is 'S3 address of the picture.';
comment on column verdict.text is 'The claim as it was submitted.';
comment on column verdict.premise is 'A second text that was taken as true.';
comment on column verdict.attributes is 'What the producer sent along: category, seller ...';
comment on column verdict.status is 'judged; rejected: the pair''s own fault, see error_code; failed: attempts used up, can be tried again.';
comment on column verdict.label is 'entailment: the picture shows what the text says; contradiction: it shows otherwise; neutral: it cannot tell.';
comment on column verdict.p_entailment is 'Probability of entailment; the three sum to 1.';
comment on column verdict.p_contradiction is 'Probability of contradiction.';
comment on column verdict.p_neutral is 'Probability that the picture cannot tell.';
comment on column verdict.answer is 'The checkpoint''s own wording of the label.';
comment on column verdict.policy is 'The rule that turned probabilities into the decision.';
comment on column verdict.policy_version is 'The version of that rule.';
comment on column verdict.decision is 'accept, review or reject.';
comment on column verdict.error_code is 'Why the pair was not judged, in a word that never changes.';
comment on column verdict.error_detail is 'The same in a sentence.';
comment on column verdict.flags is 'What a reader should know: text_cut, text_replaced, off_language, first_frame ...';
comment on column verdict.text_scored is 'The text as the model read it.';
comment on column verdict.premise_scored is 'The premise as the model read it.';
comment on column verdict.model_version_id is 'The model, revision, recipe, prompt and input size: see model_version.';
comment on column verdict.image_sha256 is 'Of the bytes that were decoded.';
comment on column verdict.image_etag is 'S3''s ETag of those bytes.';
comment on column verdict.image_width is 'Pixels, after EXIF orientation.';
comment on column verdict.image_height is 'Pixels, after EXIF orientation.';
comment on column verdict.decode_mode is 'exact: every pixel; reduced: a large JPEG was scaled down while decoding.';
comment on column verdict.content_hash is '16 bytes over all that a score depends on: equal hash, equal scores.';
comment on column verdict.attempts is 'Attempts before the one that settled the pair.';
comment on column verdict.decided_at is 'When the row was written.';
comment on table outbox is 'Messages that were accepted and are not settled yet; a row goes when its verdicts are in.';
comment on column outbox.body is 'The message''s JSON.';
comment on column outbox.attempts is 'Attempts so far; a delivery may only touch the row whose attempts it carries.';
comment on column outbox.not_before is 'Not published before this moment.';
comment on column outbox.published_at is 'When it was last handed to Redis; null: waiting for the relay.';
comment on column outbox.publishes is 'How often it was handed to Redis.';
comment on column outbox.expires_at is 'Celery''s expires: settled as `expired` after this moment.';
comment on column outbox.wants_result is 'Somebody waits on AsyncResult.';
comment on column outbox.task_id is 'Celery''s id of the message where it is another than message_id: it came by send_task.';
comment on column outbox.last_error is 'Why the last attempt did not settle it.';
comment on table run is 'One submitted file or one night''s job; its counters count rows that really changed.';
comment on column run.planned is 'Pairs written to the outbox; judged + rejected + failed reach it at the end.';
comment on table model_version is 'What a verdict was made by.';
comment on column model_version.answers is 'The checkpoint''s answers and the label each stands for.';
comment on table policy is 'Versioned rules from probabilities to decisions; the highest version of a name is in force.';
comment on column policy.polarity is 'should_hold: the text should be true of the picture; should_not_hold: it should not.';
comment on column policy.review_at is 'Probability of trouble from which a person looks at it.';
comment on column policy.reject_at is 'Probability of trouble from which it is rejected.';
comment on table rejected_message is 'Messages, or pairs of them, that could not be given a verdict row, with their bodies.';
comment on column rejected_message.digest is 'sha256 over queue, code, detail and body: the same message is recorded once.';
comment on table relay_lease is 'Which worker publishes the outbox at present; one row.';


create function decide(polarity text, review_at float8, reject_at float8,
                       p_entailment float8, p_contradiction float8, flags text[] default '{}')
returns text language sql immutable parallel safe as $$
    select case
        when trouble >= reject_at then 'reject'
        when trouble >= review_at or 'off_language' = any (flags) then 'review'
        else 'accept' end
    from (select case polarity when 'should_hold' then p_contradiction else p_entailment end) as t (trouble)
$$;
comment on function decide is 'The decision that a policy draws from probabilities; the worker follows the same rule.';

create function new_uuid7() returns uuid language sql volatile parallel safe as $$
    -- RFC 9562: 48 bits of milliseconds, version 7, the rest random.
    select encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid())
        placing substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3) from 1 for 6),
        52, 1), 53, 1), 'hex')::uuid
$$;
comment on function new_uuid7 is 'A UUID that sorts by time of making.';

create function make_verdict_partitions(months_ahead integer default 2)
returns integer language plpgsql security definer set search_path from current as $$
declare
    first_day timestamp;
    child text;
    made integer := 0;
begin
    perform pg_advisory_xact_lock(hashtext('concord.make_verdict_partitions'));
    for first_day in select generate_series(date_trunc('month', now() at time zone 'utc') - interval '1 month',
                                            date_trunc('month', now() at time zone 'utc') + months_ahead * interval '1 month',
                                            interval '1 month') loop
        child := 'verdict_' || to_char(first_day, 'YYYY_MM');
        continue when to_regclass(child) is not null;
        -- Made aside and attached: `create table ... partition of` would lock every reader of verdict out.
        execute format('create table %I (like verdict including defaults including constraints)', child);
        execute format('alter table verdict attach partition %I for values from (%L) to (%L)', child,
                       first_day at time zone 'utc', (first_day + interval '1 month') at time zone 'utc');
        made := made + 1;
    end loop;
    return made;
end $$;
comment on function make_verdict_partitions is 'Makes last month''s, this month''s and the coming months'' partitions where they are missing.';

create function oldest_verdict_time() returns timestamptz language sql stable as $$
    select to_date(substring(min(c.relname) from 'verdict_(.*)'), 'YYYY_MM')::timestamp at time zone 'utc'
    from pg_inherits i join pg_class c on c.oid = i.inhrelid where i.inhparent = 'verdict'::regclass
$$;
comment on function oldest_verdict_time is 'The first moment that a verdict can be stored for.';

create function enqueue(message jsonb, lane text default 'bulk')
returns setof uuid language plpgsql security definer set search_path from current as $$
-- One pair, a list of pairs, or {"source": ..., "pairs": [...]}. Rows appear when the caller's transaction commits.
declare
    envelope jsonb := case when jsonb_typeof(message) = 'object' and message ? 'pairs' then message - 'pairs' else '{}' end;
    pairs jsonb := case when jsonb_typeof(message) = 'array' then message
                        when message ? 'pairs' then message -> 'pairs'
                        else jsonb_build_array(message) end;
    submitted_at text := to_char(clock_timestamp() at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"');
    part jsonb;
    id uuid;
begin
    if jsonb_typeof(pairs) is distinct from 'array'
            or jsonb_path_exists(pairs, 'strict $[*] ? (@.type() != "object")') then
        raise exception 'enqueue takes one pair, a list of pairs, or {"pairs": [...]}' using errcode = '22023';
    end if;
    -- Python, which reads the message, takes no deeper nesting and no longer numbers than these.
    if jsonb_path_exists(pairs, '$.**{24}')
            or jsonb_path_exists(pairs, '$.** ? (@.type() == "number" && (@ > 1e308 || @ < -1e308))') then
        raise exception 'a pair is nested deeper than 20, or holds a number beyond 1e308' using errcode = '22023';
    end if;
    -- What is wrong with one pair is that pair's verdict; what is wrong with the envelope would take all of them along.
    if jsonb_path_exists(envelope, '$.source ? (@.type() != "string" || @ == "")')
            or length(envelope ->> 'source') > 200
            or jsonb_path_exists(envelope, '$.fresh ? (@.type() != "boolean")') then
        raise exception 'source is a name of 1 to 200 characters, fresh is true or false' using errcode = '22023';
    end if;
    perform (envelope ->> 'run_id')::uuid;
    if (select count(p ->> 'id') > count(distinct (p ->> 'id')::uuid) from jsonb_array_elements(pairs) as p) then
        raise exception 'an id stands twice among these pairs: each has one verdict, under its own id'
            using errcode = '22023';
    end if;
    if lane not in ('live', 'bulk') then
        raise exception 'lane % is neither live nor bulk', lane using errcode = '22023';
    end if;
    for part in
        select jsonb_agg(p.pair || jsonb_build_object('id', coalesce(p.pair ->> 'id', new_uuid7()::text)) order by p.n)
        from jsonb_array_elements(pairs) with ordinality as p (pair, n) group by (p.n - 1) / 64 order by (p.n - 1) / 64
    loop
        id := new_uuid7();
        insert into outbox (message_id, lane, body) values (id, enqueue.lane, convert_to(
            (envelope || jsonb_build_object('v', 1, 'message_id', id, 'submitted_at', submitted_at, 'attempts', 0,
                                            'pairs', part))::text, 'UTF8'));
        return query select (pair ->> 'id')::uuid from jsonb_array_elements(part) as pair;
    end loop;
end $$;
comment on function enqueue is 'Hands pairs over inside the caller''s own transaction; returns their ids.';

select make_verdict_partitions();


do $$
declare wanted text;
begin
    foreach wanted in array array['concord_worker', 'concord_producer'] loop
        begin
            if not exists (select from pg_roles where rolname = wanted) then
                execute format('create role %I nologin', wanted);
            end if;
        -- Roles belong to all databases of a server: another's migration may be making them at this moment.
        exception when duplicate_object or unique_violation then null;
        end;
    end loop;
end $$;
revoke all on function enqueue(jsonb, text), make_verdict_partitions(integer) from public;
grant select, insert on verdict, rejected_message to concord_worker;
grant update on verdict to concord_worker;
grant select, insert, update, delete on outbox to concord_worker;
grant select, insert, update on run, model_version to concord_worker;
grant select, update on relay_lease to concord_worker;
grant select on policy, alembic_version to concord_worker;
grant execute on function enqueue(jsonb, text), make_verdict_partitions(integer) to concord_worker;
grant execute on function enqueue(jsonb, text) to concord_producer;
-- What tasks.submit writes; message_id, to learn which rows were new.
grant insert, select (message_id) on outbox to concord_producer;
