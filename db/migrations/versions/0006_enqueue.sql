-- What enqueue accepts, a worker can read.

-- The function runs with the owner's rights and takes this path with it: pg_temp last, as 0001 says why.
select set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

create or replace function enqueue(message jsonb, lane text default 'bulk')
returns setof uuid language plpgsql security definer set search_path from current as $$
-- One pair, a list of pairs, or {"source": ..., "pairs": [...]}. Rows appear when the caller's transaction commits.
declare
    given jsonb := case when jsonb_typeof(message) = 'object' and message ? 'pairs' then message else '{}' end;
    pairs jsonb := case when jsonb_typeof(message) = 'array' then message
                        when message ? 'pairs' then message -> 'pairs'
                        else jsonb_build_array(message) end;
    -- The fields that are a producer's to set. A field that nobody reads can still be too deep to be read past.
    envelope jsonb := (select coalesce(jsonb_object_agg(key, value), '{}') from jsonb_each(given)
                       where key in ('source', 'fresh', 'run_id'));
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
    if jsonb_typeof(envelope -> 'source') <> 'string' or length(envelope ->> 'source') not between 1 and 200
            or jsonb_typeof(envelope -> 'fresh') <> 'boolean' then
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

comment on column rejected_message.digest is
    'sha256 over queue, code, detail, message_id and body: the same message is recorded once.';
