"""What is known of a catalog's items: `catalog_state`, and the listing of a night's buckets.

A fingerprint stands for all that an item's scores depend on. The planner writes it as `planned_fingerprint`; it becomes
`fingerprint` once a verdict of that very night is there, so that what failed is planned again the night after.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from db.nights import Night

#: Verdicts that are carried over in one transaction.
VERDICTS_PER_PAGE = 5_000
#: Rejections whose cause may be mended without a change of the item: it is judged again the next night.
MENDABLE = (
    "image_not_found", "image_access_denied", "bucket_not_allowed", "image_too_large", "image_too_many_pixels",
    "unknown_policy", "expired", "revoked", "dropped",
)  # fmt: skip
#: The share of a sample is a multiple of one in this many: 20 bits of the hash are looked at.
SAMPLE_STEPS = 1 << 20

LISTED = "select 1 from catalog_object where run_id = :run_id and image = ''"


def is_listed(connection: Connection, run_id: UUID) -> bool:
    """Whether the night's listing is complete."""
    return connection.execute(text(LISTED), {"run_id": run_id}).first() is not None


def add_objects(connection: Connection, run_id: UUID, objects: Iterable[tuple[str, str]]) -> None:
    """Write (s3://bucket/key, ETag) of the night's listing; an empty address says that it is complete."""
    images, etags = zip(*objects, strict=True)
    statement = """insert into catalog_object (run_id, image, etag)
        select :run_id, * from unnest(cast(:images as text[]), cast(:etags as text[])) on conflict do nothing"""
    connection.execute(text(statement), {"run_id": run_id, "images": list(images), "etags": list(etags)})


def etags(connection: Connection, run_id: UUID, images: Sequence[str]) -> dict[str, str]:
    """By image, the ETag that the night's listing has for it; what is not in the bucket is not there."""
    statement = "select image, etag from catalog_object where run_id = :run_id and image = any(:images)"
    rows = connection.execute(text(statement), {"run_id": run_id, "images": list(images)})
    return {row.image: row.etag for row in rows}


def forget_objects(connection: Connection, run_id: UUID) -> None:
    connection.execute(text("delete from catalog_object where run_id = :run_id"), {"run_id": run_id})


#: The sample follows from the night and the ref alone, so that a page that is planned again has the same one.
SEE = f"""
insert into catalog_state as old (source, ref, seen_in, planned_as, planned_fingerprint, attributes)
select :source, item.ref, :run_id, case when :everything then 'all' else 'new' end, item.fingerprint, item.attributes
from jsonb_to_recordset(cast(:items as jsonb)) as item (ref text, fingerprint bytea, attributes jsonb)
order by item.ref collate "C"
on conflict (source, ref) do update set
    seen_in = excluded.seen_in, planned_fingerprint = excluded.planned_fingerprint, attributes = excluded.attributes,
    gone_in = null,
    planned_as = case
        when :everything then 'all'
        when old.fingerprint is null then 'new'
        when old.fingerprint <> excluded.planned_fingerprint then 'changed'
        when (hashtextextended(old.ref, :seed) & {SAMPLE_STEPS - 1}) < :sample * {SAMPLE_STEPS} then 'sample' end
where old.seen_in <> excluded.seen_in
returning ref, planned_as
"""


def see(connection: Connection, night: Night, items: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    """Note that the night's source has these items, each (ref, fingerprint, attributes) at most once among them.

    Returns by ref why it is to be judged, or None where its last verdict stands. A ref that is not returned stood
    earlier in the source.
    """
    plain = [{**item, "fingerprint": f"\\x{item['fingerprint'].hex()}"} for item in items]
    parameters = {
        "source": night.source,
        "run_id": night.id,
        "everything": bool(night.options["all"]),
        "sample": float(night.options["sample"]),
        "seed": night.id.int % 2**63,
        "items": json.dumps(plain),
    }
    return {row.ref: row.planned_as for row in connection.execute(text(SEE), parameters)}


CARRY_OVER = """
with page as (
    select pair_id, ref, status, label, p_entailment, p_contradiction, policy, flags, model_version_id, error_code
    from verdict where submitted_at = :submitted_at and run_id = :run_id and pair_id > :after
    order by pair_id limit :limit),
carried as (
    update catalog_state as item set
        judged_in = :run_id, label_before = coalesce(item.label, item.label_before), label = page.label,
        policy = page.policy, flags = page.flags,
        p_entailment = page.p_entailment, p_contradiction = page.p_contradiction,
        fingerprint = case when (page.status = 'judged' and page.model_version_id = coalesce(:model, model_version_id))
                             or (page.status = 'rejected' and page.error_code <> all (:mendable))
                           then item.planned_fingerprint end
    from page
    where item.source = :source and item.ref = page.ref and page.status <> 'failed'
      and item.seen_in = :run_id and item.judged_in is distinct from :run_id)
select (array_agg(pair_id order by pair_id desc))[1] as last from page
"""


def carry_over(connection: Connection, night: Night, after: UUID, model: int | None) -> UUID | None:
    """Make the next page of the night's verdicts what is known of their items; once, however often it is called.

    `model` is the version that the night was planned for, or None where any will do. Returns where to go on.
    """
    parameters = {
        "submitted_at": night.submitted_at,
        "run_id": night.id,
        "source": night.source,
        "after": after,
        "model": model,
        "mendable": list(MENDABLE),
        "limit": VERDICTS_PER_PAGE,
    }
    last: UUID | None = connection.execute(text(CARRY_OVER), parameters).scalar_one()
    return last


#: What was gone the night before is forgotten, so that a catalog that turns over does not grow for ever.
FORGET_GONE = "delete from catalog_state where source = :source and gone_in <> :run_id"
MARK_GONE = """
update catalog_state set gone_in = :run_id where source = :source and seen_in <> :run_id and gone_in is null
"""


def mark_gone(connection: Connection, night: Night) -> None:
    """Note which items the night's source no longer had."""
    parameters = {"source": night.source, "run_id": night.id}
    connection.execute(text(FORGET_GONE), parameters)
    connection.execute(text(MARK_GONE), parameters)
