"""A row of each view of schema `report`. What the columns mean is in docs/sql.md and in the database's own comments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any
from uuid import UUID


@dataclass(frozen=True)
class Verdicts:
    submitted_at: datetime
    pair_id: UUID
    source: str
    ref: str | None
    run_id: UUID | None
    lane: str
    image: str | None
    text: str | None
    premise: str | None
    attributes: Mapping[str, Any]
    status: str
    label: str | None
    p_entailment: float | None
    p_contradiction: float | None
    p_neutral: float | None
    answer: str | None
    policy: str | None
    policy_version: int | None
    decision: str | None
    p_trouble: float | None
    mismatch: bool
    error_code: str | None
    error_detail: str | None
    flags: Sequence[str]
    text_scored: str | None
    premise_scored: str | None
    model_version_id: int | None
    model: str | None
    revision: str | None
    recipe: str | None
    image_sha256: bytes | None
    image_etag: str | None
    image_width: int | None
    image_height: int | None
    decode_mode: str | None
    attempts: int
    decided_at: datetime


@dataclass(frozen=True)
class DailyLabels:
    day: date
    source: str
    policy: str | None
    status: str
    label: str | None
    decision: str | None
    pairs: int
    share: float


@dataclass(frozen=True)
class RunSummary:
    run_id: UUID
    kind: str
    source: str
    name: str
    lane: str
    state: str
    submitted_at: datetime
    finished_at: datetime | None
    planned: int
    judged: int
    rejected: int
    failed: int
    entailment: int
    contradiction: int
    neutral: int
    mismatches: int
    accept: int
    review: int
    reject: int
    seconds: float
    pairs_per_s: float | None
    reused: int
    skipped: int


@dataclass(frozen=True)
class RunChanges:
    run_id: UUID
    kind: str
    name: str
    submitted_at: datetime
    source: str
    ref: str
    policy: str | None
    change: str
    label_before: str | None
    label: str | None
    mismatch_before: bool | None
    mismatch: bool | None
    decision_before: str | None
    decision: str | None
    p_trouble_before: float | None
    p_trouble: float | None
    submitted_at_before: datetime | None
    same_content: bool | None
    same_model: bool | None
    pair_id: UUID | None
    image: str | None
    text: str | None
    attributes: Mapping[str, Any]
    error_code: str | None


@dataclass(frozen=True)
class Mismatches:
    submitted_at: datetime
    pair_id: UUID
    source: str
    ref: str | None
    run_id: UUID | None
    image: str | None
    text: str | None
    premise: str | None
    attributes: Mapping[str, Any]
    policy: str
    label: str
    p_trouble: float
    decision: str
    flags: Sequence[str]
    model_version_id: int


@dataclass(frozen=True)
class ReviewQueue:
    submitted_at: datetime
    pair_id: UUID
    source: str
    ref: str | None
    run_id: UUID | None
    image: str | None
    text: str | None
    premise: str | None
    attributes: Mapping[str, Any]
    policy: str | None
    label: str
    p_trouble: float | None
    flags: Sequence[str]
    decided_at: datetime


@dataclass(frozen=True)
class DeadLetters:
    submitted_at: datetime
    decided_at: datetime
    pair_id: UUID
    source: str
    ref: str | None
    run_id: UUID | None
    message_id: UUID
    lane: str
    error_code: str
    error_detail: str | None
    attempts: int
    flags: Sequence[str]
    image: str | None
    text: str | None
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class ErrorsByCode:
    day: date
    source: str | None
    lane: str
    status: str
    error_code: str
    pairs: int
    example_ref: str | None
    example_detail: str | None


@dataclass(frozen=True)
class DefectRate:
    day: date
    source: str
    policy: str | None
    attribute: str
    value: str
    judged: int
    mismatches: int
    rate: float
    rate_low: float
    rate_high: float


@dataclass(frozen=True)
class ScoreHistogram:
    day: date
    source: str
    policy: str
    policy_version: int
    model_version_id: int
    from_score: float
    to_score: float
    pairs: int
    accept: int
    review: int
    reject: int


@dataclass(frozen=True)
class ModelComparison:
    source: str
    ref: str
    policy: str
    old_submitted_at: datetime
    new_submitted_at: datetime
    old_pair_id: UUID
    new_pair_id: UUID
    old_model_version_id: int
    new_model_version_id: int
    old_model: str
    new_model: str
    old_recipe: str
    new_recipe: str
    old_label: str
    new_label: str
    same_label: bool
    old_decision: str
    new_decision: str
    moved: float
    image: str | None
    text: str | None


@dataclass(frozen=True)
class Throughput:
    hour: datetime
    lane: str
    workers: int
    batches: int
    messages: int
    pairs: int
    judged: int
    reused: int
    pairs_per_s: float
    judged_per_model_s: float | None
    batch_mean: float
    batch_p50: float
    batch_max: int
    padding: float | None
    pictures: int
    model_s: float


@dataclass(frozen=True)
class Latency:
    hour: datetime
    lane: str
    batches: int
    queue_p50_s: float | None
    queue_p95_s: float | None
    queue_p99_s: float | None
    fetch_p50_s: float | None
    fetch_p95_s: float | None
    fetch_p99_s: float | None
    model_p50_s: float | None
    model_p95_s: float | None
    model_p99_s: float | None
    write_p50_s: float | None
    write_p95_s: float | None
    write_p99_s: float | None
    pairs: int
    end_to_end_p50_s: float | None
    end_to_end_p95_s: float | None
    end_to_end_p99_s: float | None


@dataclass(frozen=True)
class Runs:
    run_id: UUID
    kind: str
    source: str
    name: str
    lane: str
    state: str
    submitted_at: datetime
    finished_at: datetime | None
    planned: int
    judged: int
    rejected: int
    failed: int
    flagged: int
    reused: int
    skipped: int
    options: Mapping[str, Any]
    summary: Mapping[str, Any] | None


@dataclass(frozen=True)
class Models:
    model_version_id: int
    model: str
    revision: str
    recipe: str
    weights_sha256: str
    prompt: str
    image_px: int
    concord_version: str | None
    torch_version: str | None
    first_started_at: datetime
    last_started_at: datetime


@dataclass(frozen=True)
class Policies:
    policy: str
    policy_version: int
    polarity: str
    review_at: float | None
    reject_at: float | None
    note: str
    created_at: datetime
    in_force: bool


@dataclass(frozen=True)
class Batches:
    settled_at: datetime
    batch_id: UUID
    worker: str
    lane: str
    model_version_id: int | None
    messages: int
    pairs: int
    judged: int
    reused: int
    queue_s: float
    fetch_s: float
    model_s: float
    write_s: float
    tokens: int
    padded_tokens: int
    pictures: int
