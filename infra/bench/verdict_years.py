"""Months of plausible verdicts, made in SQL: what infra/bench/reports.py measures on, and small, what tests read.

Each day has one nightly run over `catalog`, whose pairs all have the run's submitted_at, about 2% of all refs, and live
pairs of two shops all day long. A ref comes again and again, now and then with another text. Two weeks before the end
the model version changes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from sqlalchemy import Connection, text

#: How often a ref is judged over the whole time, on average.
VERDICTS_A_REF = 20
#: Pairs of a batch.
BATCH_PAIRS = 64
NEW_MODEL_FOR = timedelta(days=14)

MODELS = """
insert into model_version (name, revision, recipe, weights_sha256, prompt, image_px, answers) values
    ('bench/ofa', 'v1', 'awq-int4', '1', '?', 480, '{}'), ('bench/ofa', 'v2', 'awq-int4', '2', '?', 480, '{}')
on conflict do nothing
"""

#: The days of a month, each with its run.
RUNS = """
insert into run (id, kind, source, name, lane, submitted_at, state, created_at, finished_at)
select md5('run ' || day)::uuid, 'nightly', 'catalog', 'catalog', 'bulk', day + interval '2 hours', 'done',
       day + interval '2 hours', day + interval '3 hours'
from generate_series(cast(:first as timestamptz), cast(:last as timestamptz) - interval '1 day',
                     interval '1 day') as day
where day < now() - interval '4 hours'
"""

#: `g` counts the month's pairs in the order of their days: rows lie in about the order of time, as workers write them.
VERDICTS = """
insert into {child} (submitted_at, pair_id, source, ref, run_id, message_id, lane, image, text, attributes, status,
                     label, p_entailment, p_contradiction, p_neutral, answer, policy, policy_version, decision,
                     error_code, error_detail, text_scored, model_version_id, image_sha256, image_etag,
                     image_width, image_height, decode_mode, content_hash, decided_at)
select submitted_at, gen_random_uuid(), source, 'sku-' || sku, run_id, md5('message ' || g / 64)::uuid, lane,
       's3://bench/catalog/' || sku || '.jpg', claim, jsonb_build_object('category', 'category ' || sku % 12,
           'seller', 'seller ' || sku % 200, 'kind', (array['title', 'colour', 'count'])[1 + sku % 3]),
       status, case when judged then label end,
       case when judged then p_entailment end, case when judged then p_contradiction end,
       case when judged then 1 - p_entailment - p_contradiction end,
       case when judged then (array['yes', 'no', 'it is not possible to tell'])[array_position(labels, label)] end,
       policy, case when judged then 1 end,
       case when judged then decide(case policy when 'catalog' then 'should_hold' else 'should_not_hold' end,
                                    case policy when 'catalog' then 0.5 else 0.2 end,
                                    case policy when 'prohibited' then 0.5 end, p_entailment, p_contradiction) end,
       case status when 'rejected' then 'image_not_found' when 'failed' then 'image_fetch_failed' end,
       case status when 'rejected' then 'S3 has no such key' when 'failed' then 'S3 answered 503' end,
       lower(claim), case when judged then model end, decode(md5('picture ' || sku) || md5('pixels ' || sku), 'hex'),
       md5('etag ' || sku), 800, 600, 'exact', decode(md5(model || claim || sku), 'hex'),
       submitted_at + interval '1 s' * (0.1 + 2 * late + case lane when 'bulk' then 3000 * late else 0 end)
from (
    select g, sku, source, lane, late, model, labels, label, policy, submitted_at,
           case lane when 'bulk' then md5('run ' || day)::uuid end as run_id,
           'A red shoe of the summer collection, article ' || sku || case when edited < 0.05 then ', new' else '' end
               as claim,
           case when fate < 0.002 then 'failed' when fate < 0.012 then 'rejected' else 'judged' end as status,
           fate >= 0.012 as judged,
           case label when 'entailment' then sure else (1 - sure) * 0.8 end as p_entailment,
           case label when 'contradiction' then sure
                when 'entailment' then (1 - sure) * 0.9 else (1 - sure) * 0.2 end as p_contradiction
    from (
        select g, sku, day, edited, fate, late, sure, labels, model,
               case when sku % 10 = 0 then 'prohibited' else 'catalog' end as policy,
               labels[case when share < 0.85 then 1 when share < 0.93 then 2 else 3 end] as label,
               case when in_day % 5 < 2 then 'catalog' when in_day % 5 < 4 then 'shop' else 'emea' end as source,
               case when in_day % 5 < 2 then 'bulk' else 'live' end as lane,
               day + case when in_day % 5 < 2 then interval '2 hours' else interval '1 day' * in_day / a_day end
                   as submitted_at
        from (
            select g, floor(random() * :refs)::integer as sku, random() as edited, random() as fate, random() as late,
                   0.5 + 0.5 * sqrt(random()) as sure, random() as share,
                   array['entailment', 'contradiction', 'neutral'] as labels,
                   case when day < :changed_at then cast(:old_model as integer) else :new_model end as model,
                   day, g % cast(:a_day as integer) as in_day, cast(:a_day as integer) as a_day
            from generate_series(0, cast(:rows as integer) - 1) as g
            cross join lateral (
                select cast(:first as timestamptz) + interval '1 day' * (g / cast(:a_day as integer)) as day) as days
        ) as thrown
    ) as drawn
) as pair
where submitted_at < now() - interval '4 hours'
"""

BATCHES = """
insert into {child} (settled_at, worker, lane, model_version_id, messages, pairs, judged, queue_s, fetch_s, model_s,
                     write_s, tokens, padded_tokens, pictures)
select at, 'gpu' || g % 2 || '@bench', case when g % 5 < 2 then 'bulk' else 'live' end, :old_model,
       1 + g % 8, :pairs, cast(:pairs as integer) - 1, 0.05 + random(), 0.1 + random() / 5, 0.3 + random() / 10,
       0.01 + random() / 50, 20 * cast(:pairs as integer), 26 * cast(:pairs as integer), 50
from (select g, cast(:first as timestamptz) + (cast(:last as timestamptz) - cast(:first as timestamptz))
             * g / cast(:batches as integer) as at
      from generate_series(0, cast(:batches as integer) - 1) as g) as one
where at < now() - interval '4 hours'
"""

COUNTERS = """
update run set planned = c.pairs, judged = c.judged, rejected = c.rejected, failed = c.failed
from (select run_id, count(*) as pairs, count(*) filter (where status = 'judged') as judged,
             count(*) filter (where status = 'rejected') as rejected,
             count(*) filter (where status = 'failed') as failed
      from {child} where run_id is not null group by run_id) as c
where run.id = c.run_id
"""


def months_back(count: int) -> list[tuple[datetime, datetime]]:
    """The last `count` months, this one among them: first moments of each and of the one after it."""
    this = datetime.now(UTC)
    numbers = range(this.year * 12 + this.month - count, this.year * 12 + this.month + 1)
    return list(pairwise(datetime(number // 12, number % 12 + 1, 1, tzinfo=UTC) for number in numbers))


@contextmanager
def month(connection: Connection, parent: str, first: datetime, last: datetime) -> Iterator[str]:
    """A new month's table, filled inside the `with` and attached after it, so that its indexes are built once."""
    child = f"{parent}_{first:%Y_%m}"
    connection.execute(text(f"drop table if exists {child}"))
    connection.execute(text(f"create table {child} (like {parent} including defaults including constraints)"))
    yield child
    attach = f"alter table {parent} attach partition {child} for values from ('{first}') to ('{last}')"
    connection.execute(text(attach))


def fill(connection: Connection, rows: int, months: int, tell: Callable[[str], object] = lambda line: None) -> int:
    """Make about `rows` verdicts over the last `months` months, as the owner, on a connection that commits by itself.

    Months that are there already are made anew. Returns how many verdicts there are.
    """
    connection.execute(text(MODELS))
    named = text("select id from model_version where name = 'bench/ofa' order by id")
    models = list(connection.execute(named).scalars())
    total = 0
    for first, last in months_back(months):
        a_day = max(1, rows // (months * 30))
        values = {
            "first": first, "last": last, "a_day": a_day, "rows": a_day * (last - first).days,
            "refs": max(1, rows // VERDICTS_A_REF), "pairs": BATCH_PAIRS,
            "old_model": models[0], "new_model": models[1], "changed_at": datetime.now(UTC) - NEW_MODEL_FOR,
        }  # fmt: skip
        values["batches"] = max(1, values["rows"] // BATCH_PAIRS)
        connection.execute(text(RUNS), values)
        for parent, statement in (("verdict", VERDICTS), ("batch", BATCHES)):
            with month(connection, parent, first, last) as child:
                made = connection.execute(text(statement.format(child=child)), values).rowcount
            if parent == "verdict":
                connection.execute(text(COUNTERS.format(child=child)))
                total += made
                tell(f"{child}: {made:,} verdicts")
    connection.execute(text("vacuum analyze verdict, batch, run"))
    return total
