"""The tables as SQLAlchemy sees them. What each column means is in the database's own comments (psql: \\d+ verdict).

A test proves that this is what the migrations make.
"""

from sqlalchemy import (
    REAL,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.schema import SchemaItem

from db.originals import IS_ORIGINAL

METADATA = MetaData()
MOMENT = DateTime(timezone=True)

VERDICT = Table(
    "verdict",
    METADATA,
    Column("submitted_at", MOMENT, nullable=False),
    Column("pair_id", Uuid, nullable=False),
    Column("source", Text, nullable=False),
    Column("ref", Text),
    Column("run_id", Uuid),
    Column("message_id", Uuid, nullable=False),
    Column("lane", Text, nullable=False),
    Column("image", Text),
    Column("text", Text),
    Column("premise", Text),
    Column("attributes", JSONB, nullable=False),
    Column("status", Text, CheckConstraint("status in ('judged', 'rejected', 'failed')"), nullable=False),
    Column("label", Text),
    Column("p_entailment", Double),
    Column("p_contradiction", Double),
    Column("p_neutral", Double),
    Column("answer", Text),
    Column("policy", Text),
    Column("policy_version", Integer),
    Column("decision", Text),
    Column("error_code", Text),
    Column("error_detail", Text),
    Column("flags", ARRAY(Text), nullable=False),
    Column("text_scored", Text),
    Column("premise_scored", Text),
    Column("model_version_id", Integer, ForeignKey("model_version.id")),
    Column("image_sha256", LargeBinary),
    Column("image_etag", Text),
    Column("image_width", Integer),
    Column("image_height", Integer),
    Column("decode_mode", Text),
    Column("content_hash", LargeBinary),
    Column("attempts", Integer, nullable=False),
    Column("decided_at", MOMENT, nullable=False),
    PrimaryKeyConstraint("submitted_at", "pair_id"),
    Index("verdict_pair_id", "pair_id"),
    Index("verdict_source_ref_time", "source", "ref", "submitted_at"),
    Index("verdict_failed", "decided_at", "submitted_at", "pair_id", postgresql_where=text("status = 'failed'")),
    Index("verdict_run_id", "run_id", postgresql_where=text("run_id is not null")),
    Index("verdict_content_hash", "content_hash", "submitted_at", postgresql_where=text(IS_ORIGINAL)),
    postgresql_partition_by="RANGE (submitted_at)",
    comment="One row a pair: what was asked, what was answered, what was decided and by what it was made.",
)

BATCH = Table(
    "batch",
    METADATA,
    Column("settled_at", MOMENT, nullable=False),
    Column("id", Uuid, nullable=False),
    *(Column(name, Text, nullable=False) for name in ("worker", "lane")),
    Column("model_version_id", Integer),
    *(Column(name, Integer, nullable=False) for name in ("messages", "pairs", "judged", "reused")),
    *(Column(name, REAL, nullable=False) for name in ("queue_s", "fetch_s", "model_s", "write_s")),
    *(Column(name, Integer, nullable=False) for name in ("tokens", "padded_tokens", "pictures")),
    PrimaryKeyConstraint("settled_at", "id"),
    postgresql_partition_by="RANGE (settled_at)",
    comment="One row a batch that was settled: what it held and how long each step took.",
)

OUTBOX = Table(
    "outbox",
    METADATA,
    Column("message_id", Uuid, primary_key=True),
    Column("lane", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("not_before", MOMENT, nullable=False),
    Column("published_at", MOMENT),
    Column("publishes", Integer, nullable=False),
    Column("expires_at", MOMENT),
    Column("wants_result", Boolean, nullable=False),
    Column("task_id", Text),
    Column("last_error", Text),
    Column("created_at", MOMENT, nullable=False),
    Column("run_id", Uuid),
    Index("outbox_run_id", "run_id", postgresql_where=text("run_id is not null")),
    Index("outbox_due", "lane", "not_before", "message_id", postgresql_where=text("published_at is null")),
    Index("outbox_published", "published_at", postgresql_where=text("published_at is not null")),
    comment="Messages that were accepted and are not settled yet; a row goes when its verdicts are in.",
)

RUN = Table(
    "run",
    METADATA,
    Column("id", Uuid, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("lane", Text, nullable=False),
    Column("submitted_at", MOMENT, nullable=False),
    Column("state", Text, nullable=False),
    *(Column(counter, BigInteger, nullable=False) for counter in ("planned", "judged", "rejected", "failed")),
    Column("options", JSONB, nullable=False),
    Column("created_at", MOMENT, nullable=False),
    Column("finished_at", MOMENT),
    *(Column(counter, BigInteger, nullable=False) for counter in ("flagged", "reused", "skipped")),
    Column("position", JSONB),
    Column("summary", JSONB),
    Index(
        "run_open_night",
        "source",
        unique=True,
        postgresql_where=text("kind = 'nightly' and state in ('planning', 'running', 'finishing')"),
    ),
    comment="One submitted file or one night's job; its counters count rows that really changed.",
)

MODEL_VERSION = Table(
    "model_version",
    METADATA,
    Column("id", Integer, Identity(always=True), primary_key=True),
    *(Column(name, Text, nullable=False) for name in ("name", "revision", "recipe", "weights_sha256", "prompt")),
    Column("image_px", Integer, nullable=False),
    Column("answers", JSONB, nullable=False),
    Column("first_started_at", MOMENT, nullable=False),
    Column("last_started_at", MOMENT, nullable=False),
    *(Column(name, Text) for name in ("concord_version", "torch_version")),
    UniqueConstraint("name", "revision", "recipe", "weights_sha256", "prompt", "image_px"),
    comment="What a verdict was made by.",
)

POLICY = Table(
    "policy",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("polarity", Text, nullable=False),
    Column("review_at", Double),
    Column("reject_at", Double),
    Column("note", Text, nullable=False),
    Column("created_at", MOMENT, nullable=False),
    comment="Versioned rules from probabilities to decisions; the highest version of a name is in force.",
)

REJECTED_MESSAGE = Table(
    "rejected_message",
    METADATA,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("received_at", MOMENT, nullable=False),
    Column("message_id", Uuid),
    Column("pair_ids", ARRAY(Uuid), nullable=False),
    Column("queue", Text, nullable=False),
    Column("source", Text),
    Column("error_code", Text, nullable=False),
    Column("error_detail", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("digest", LargeBinary, nullable=False, unique=True),
    Index("rejected_message_pair_ids", "pair_ids", postgresql_using="gin"),
    Index("rejected_message_received_at", "received_at"),
    comment="Messages, or pairs of them, that could not be given a verdict row, with their bodies.",
)

SUSPECT = Table(
    "suspect",
    METADATA,
    Column("submitted_at", MOMENT, nullable=False),
    Column("pair_id", Uuid, nullable=False),
    Column("message_id", Uuid, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("tried_at", MOMENT, nullable=False),
    PrimaryKeyConstraint("submitted_at", "pair_id"),
    comment="Pairs of messages whose worker died: each is judged alone, and counted here before.",
)

CATALOG_STATE = Table(
    "catalog_state",
    METADATA,
    Column("source", Text(collation="C"), nullable=False),
    Column("ref", Text(collation="C"), nullable=False),
    Column("seen_in", Uuid, nullable=False),
    Column("planned_as", Text),
    Column("planned_fingerprint", LargeBinary, nullable=False),
    Column("fingerprint", LargeBinary),
    Column("gone_in", Uuid),
    Column("judged_in", Uuid),
    *(Column(name, Text) for name in ("label", "label_before", "policy")),
    Column("p_entailment", Double),
    Column("p_contradiction", Double),
    Column("flags", ARRAY(Text), nullable=False),
    Column("attributes", JSONB, nullable=False),
    PrimaryKeyConstraint("source", "ref"),
    comment="One row an item of a catalog: what its last verdict was made of, and what it was.",
)

CATALOG_OBJECT = Table(
    "catalog_object",
    METADATA,
    Column("run_id", Uuid, nullable=False),
    Column("image", Text(collation="C"), nullable=False),
    Column("etag", Text, nullable=False),
    PrimaryKeyConstraint("run_id", "image"),
    prefixes=["unlogged"],
    comment="A nightly run's listing of its buckets; the row without an image says that it is complete.",
)

CATALOG_ITEM = Table(
    "catalog_item",
    METADATA,
    Column("source", Text(collation="C"), nullable=False),
    Column("ref", Text(collation="C"), nullable=False),
    *(Column(name, Text, nullable=False) for name in ("image", "text")),
    Column("premise", Text),
    Column("policy", Text, nullable=False),
    Column("attributes", JSONB, nullable=False),
    PrimaryKeyConstraint("source", "ref"),
    comment="A catalog in the shape that the nightly job reads without a query; the customer fills it.",
)

RETENTION = Table(
    "retention",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    *(Column(name, Integer) for name in ("keep_months", "rejected_days", "run_days")),
    comment="How long rows are kept; null: for ever. One row, which only the owner changes.",
)

RELAY_LEASE = Table(
    "relay_lease",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("holder", Text, nullable=False),
    Column("expires_at", MOMENT, nullable=False),
    comment="Which worker publishes the outbox at present; one row.",
)


def is_declared(item: SchemaItem, name: str | None, kind: str, reflected: bool, compared: SchemaItem | None) -> bool:
    """Months come and go and are declared by their parents; a customer's own tables are not ours."""
    if kind == "table" and reflected:
        return name in METADATA.tables
    return True
