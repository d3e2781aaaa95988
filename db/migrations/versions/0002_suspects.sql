-- Pairs that are tried alone because the worker that had them died.

create table suspect (
    submitted_at  timestamptz not null,
    pair_id       uuid not null,
    message_id    uuid not null,
    tries         integer not null,
    tried_at      timestamptz not null default now(),
    primary key (submitted_at, pair_id)
);

comment on table suspect is 'Pairs of messages whose worker died: each is judged alone, and counted here before.';
comment on column suspect.submitted_at is 'With pair_id the key of the verdict.';
comment on column suspect.message_id is 'The message that carries the pair.';
comment on column suspect.tries is 'Lone tries that were begun and not ended: at three, the pair fails as killed_worker.';
comment on column suspect.tried_at is 'When the last one began.';

grant select, insert, update, delete on suspect to concord_worker;
