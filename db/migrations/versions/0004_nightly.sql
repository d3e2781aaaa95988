-- Nightly runs over catalogs.

alter table run
    add column flagged  bigint not null default 0,
    add column reused   bigint not null default 0,
    add column skipped  bigint not null default 0,
    add column position jsonb,
    add column summary  jsonb;

comment on column run.flagged is 'Judged pairs whose decision was review or reject.';
comment on column run.reused is 'Nightly: items that had not changed and whose last verdict stands.';
comment on column run.skipped is 'Nightly: lines or rows of the source that name no item, or one that stood before.';
comment on column run.position is 'Nightly: how far the planner has read its source; committed with the outbox rows.';
comment on column run.summary is 'Nightly: what the night came to, compared with what was known before; or why it failed.';

-- One night at a time over a catalog: two would take turns in catalog_state.
create unique index run_open_night on run (source)
    where kind = 'nightly' and state in ('planning', 'running', 'finishing');

alter table outbox add column run_id uuid;
comment on column outbox.run_id is 'The run that its pairs belong to; a nightly run ends when it has no row left.';
create index outbox_run_id on outbox (run_id) where run_id is not null;

-- Refs compare by their bytes, whatever the database's locale: a page of them is found by the key.
create table catalog_state (
    source               text collate "C" not null,
    ref                  text collate "C" not null,
    seen_in              uuid not null,
    planned_as           text check (planned_as in ('new', 'changed', 'sample', 'all')),
    planned_fingerprint  bytea not null,
    fingerprint          bytea,
    gone_in              uuid,
    judged_in            uuid,
    label                text,
    label_before         text,
    policy               text,
    p_entailment         double precision,
    p_contradiction      double precision,
    flags                text[] not null default '{}',
    attributes           jsonb not null default '{}',
    primary key (source, ref)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05);

comment on table catalog_state is 'One row an item of a catalog: what its last verdict was made of, and what it was.';
comment on column catalog_state.source is 'The catalog''s name.';
comment on column catalog_state.ref is 'The item''s name in it.';
comment on column catalog_state.seen_in is 'The nightly run that last found the item in its source.';
comment on column catalog_state.planned_as is 'Why that run judged it: new, changed, sample or all; null: it did not.';
comment on column catalog_state.planned_fingerprint is 'Of the item as that run found it.';
comment on column catalog_state.fingerprint is 'Of what the last verdict was made of; null: there is none that stands.';
comment on column catalog_state.gone_in is 'The nightly run that no longer found it.';
comment on column catalog_state.judged_in is 'The nightly run whose verdict this is.';
comment on column catalog_state.label is 'The last verdict''s label; null: it has none.';
comment on column catalog_state.label_before is 'The label of the verdict before that one.';
comment on column catalog_state.policy is 'The item''s policy; with the probabilities it gives the decision under today''s thresholds.';
comment on column catalog_state.p_entailment is 'Of the last verdict.';
comment on column catalog_state.p_contradiction is 'Of the last verdict.';
comment on column catalog_state.flags is 'Of the last verdict.';
comment on column catalog_state.attributes is 'Those that nights are compared by, category and seller for example.';

-- Refilled by each night and cheap to make again: a listing that a crash of the server emptied is made anew.
create unlogged table catalog_object (
    run_id  uuid not null,
    image   text collate "C" not null,
    etag    text not null,
    primary key (run_id, image)
);
comment on table catalog_object is 'A nightly run''s listing of its buckets; the row without an image says that it is complete.';
comment on column catalog_object.image is 's3://bucket/key.';
comment on column catalog_object.etag is 'S3''s ETag of the object, without quotes.';

create table catalog_item (
    source      text collate "C" not null default 'catalog',
    ref         text collate "C" not null,
    image       text not null,
    text        text not null,
    premise     text,
    policy      text not null default 'catalog',
    attributes  jsonb not null default '{}',
    primary key (source, ref)
);
comment on table catalog_item is 'A catalog in the shape that the nightly job reads without a query; the customer fills it.';
comment on column catalog_item.source is 'The catalog''s name.';
comment on column catalog_item.ref is 'The item''s name, for example a SKU.';
comment on column catalog_item.image is 's3://bucket/key.';
comment on column catalog_item.text is 'The claim that is checked.';
comment on column catalog_item.premise is 'A second text that is taken as true.';
comment on column catalog_item.policy is 'The rule that turns probabilities into a decision.';
comment on column catalog_item.attributes is 'category, seller ...: they travel into the verdict.';

grant select, insert, update, delete on catalog_state, catalog_object to concord_worker;
grant select on catalog_item to concord_worker;
