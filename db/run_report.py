"""Everything about one run that its page shows (tasks/report_page.py) and a terminal (tasks/report_text.py).

All is read from schema `report`, so that a reader's login is enough, and only from what stood when the run was over:
the same run gives the same report again, unless its pairs are redriven or erased, or its month is dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal
from uuid import UUID

#: Bins of a histogram of scores, all of the same width, from 0 to 1.
BINS = 50
#: Runs whose labels are shown, this one included.
RUNS_SHOWN = 30
#: Mismatches that are shown one by one.
WORST = 100
#: Values of an attribute that are shown: those that are surely worst.
VALUES_SHOWN = 20
#: Characters of a text, a premise or a detail that are shown.
TEXT_CHARS = 2_000
#: Characters of the value of an attribute, and attributes of a pair, that are shown.
VALUE_CHARS = 200
ATTRIBUTES_SHOWN = 20


@dataclass(frozen=True)
class Figure:
    """A headline figure and what it was in the run before (`RunReport.before`)."""

    #: Stays the same from version to version: planned, judged, ... ; also an id in the page.
    name: str
    #: The same for a person: "newly contradicting".
    label: str
    #: How it is written: `pairs` is a whole number, `share` one from 0 to 1 (write it in per cent), `pairs/s`, and `s`
    #: seconds (write them as hours, minutes and seconds).
    unit: Literal["pairs", "share", "pairs/s", "s"]
    #: None: it cannot be said, for example the defect rate where nothing was judged.
    value: float | None
    #: None: there was no run before, or it cannot be said of it.
    before: float | None
    #: The 95 % interval (Wilson) of a share; None of everything else.
    low: float | None
    high: float | None
    #: Which way is good news; None: neither.
    better: Literal["up", "down"] | None
    #: A sentence that says what is counted.
    note: str


@dataclass(frozen=True)
class LabelsOfRun:
    """How many pairs of one run have which label, or none."""

    run_id: UUID
    name: str
    submitted_at: datetime
    state: str
    entailment: int
    contradiction: int
    neutral: int
    rejected: int
    failed: int
    #: The run that the page is about: always the last.
    is_this: bool


@dataclass(frozen=True)
class Histogram:
    """How the scores of the pairs of one policy are spread.

    A score is the probability that the policy watches: of contradiction where the text should hold, of entailment where
    it should not ("p_trouble" in the views).
    """

    policy: str
    policy_version: int
    #: should_hold or should_not_hold.
    polarity: str
    #: The probability's column: p_contradiction or p_entailment.
    score: str
    #: From this score on a pair is reviewed, or rejected; None: never.
    review_at: float | None
    reject_at: float | None
    #: BINS numbers of pairs; bin n holds scores from n / BINS on, the last one 1 as well.
    pairs: tuple[int, ...]


@dataclass(frozen=True)
class Rate:
    """The defect rate of the judged pairs that share a value of an attribute, the surest worst first."""

    value: str
    judged: int
    mismatches: int
    rate: float
    #: The 95 % interval (Wilson): the pairs that the run judged are a sample of what it could have judged.
    low: float
    high: float


@dataclass(frozen=True)
class Attribute:
    """The defect rate by category, by seller, or by any attribute that has few different values."""

    name: str
    rates: tuple[Rate, ...]
    #: Different values that the run's judged pairs have; more than `rates` where only the worst are shown.
    values: int


@dataclass(frozen=True)
class ErrorCount:
    """What could not be judged, the most frequent first."""

    #: rejected: the pair's own fault; failed: attempts used up.
    status: str
    code: str
    pairs: int
    example_ref: str | None
    #: None where it was erased.
    example_detail: str | None


@dataclass(frozen=True)
class Speed:
    """How fast the run went. Batches are those of its lane from its beginning to its end, of whichever run."""

    #: From its beginning to its end or, where it is not over, until now.
    seconds: float
    #: Settled pairs a second over that time.
    pairs_per_s: float | None
    workers: int
    batches: int
    batch_pairs: int
    #: Pairs a batch, on average and of the largest; None and 0 without a batch.
    batch_mean: float | None
    batch_max: int
    #: Share of the tokens computed that were padding, 0 to 1; None where none was computed.
    padding: float | None
    #: Pairs that took an earlier verdict of the same content.
    reused: int
    #: Seconds that the model ran, of all workers together.
    model_s: float
    #: Medians, in seconds: waiting in the queue, fetching pictures, the model, writing; None without a batch.
    queue_p50_s: float | None
    fetch_p50_s: float | None
    model_p50_s: float | None
    write_p50_s: float | None


@dataclass(frozen=True)
class Model:
    """By what pairs of the run were judged; the one with the most pairs first."""

    id: int
    name: str
    revision: str
    #: Precision: awq-int4, fp32 ...
    recipe: str
    weights_sha256: str
    prompt: str
    image_px: int
    #: Versions of the worker that started with it last; None where it was one that did not say.
    concord: str | None
    torch: str | None
    #: How many pairs of the run it judged.
    pairs: int


@dataclass(frozen=True)
class Earlier:
    """The last verdict of the same source, ref and policy before the run."""

    label: str
    decision: str
    #: The score, as in `Histogram`.
    p_trouble: float | None
    submitted_at: datetime
    decided_at: datetime
    #: Picture and texts are the same as then; None where they were erased.
    same_content: bool | None
    same_model: bool | None


@dataclass(frozen=True)
class Mismatch:
    """A judged pair whose label is the one that its policy watches for. Everything in it may be a stranger's words."""

    pair_id: UUID
    ref: str | None
    #: s3://bucket/key, by which its thumbnail is found; None once erased.
    image: str | None
    #: None once erased; at most TEXT_CHARS characters.
    text: str | None
    text_is_cut: bool
    premise: str | None
    policy: str
    polarity: str
    #: Strings, numbers and booleans of the pair's attributes, as text: {"category": "shoes"}.
    attributes: Mapping[str, str]
    label: str
    p_entailment: float
    p_contradiction: float
    p_neutral: float
    #: The score, as in `Histogram`.
    p_trouble: float
    #: accept, review or reject.
    decision: str
    #: text_cut, first_frame, erased ...: docs/submitting.md.
    flags: tuple[str, ...]
    #: newly_contradicting, newly_agreeing, newly_undecided, unchanged or first_seen.
    change: str
    #: It was judged before and was no mismatch then. These come first.
    is_new: bool
    #: None where the pair has no ref, or had no verdict before.
    earlier: Earlier | None
    #: exact, or reduced: a large JPEG was scaled down while decoding.
    decode_mode: str | None
    #: Pixels of the picture as it is displayed.
    image_width: int | None
    image_height: int | None
    model_version_id: int
    decided_at: datetime
    #: Of the file that was judged.
    image_sha256: bytes | None = None


@dataclass(frozen=True)
class Filter:
    """What the mismatches shown may be narrowed to: label, policy, and attributes."""

    #: label, policy, or the attribute's name.
    name: str
    is_attribute: bool
    #: The values that the mismatches shown have, in order.
    values: tuple[str, ...]
    #: The same in SQL, an expression of type text that a value is compared with: "v.label".
    column: str


@dataclass(frozen=True)
class Sql:
    """The question whose answer is shown, for psql and a reader's login.

    Without a filter it is `select`, a new line, `order`; with filters there comes ` and {column} = '{value}'` for each
    between the two, a quote in a value doubled. `select` ends within a `where`.
    """

    select: str
    order: str


@dataclass(frozen=True)
class RunBefore:
    """The last run that was done before this one began, of the same kind and source."""

    id: UUID
    name: str
    submitted_at: datetime


@dataclass(frozen=True)
class RunReport:
    """One run: a submitted file, or one night of a catalog."""

    id: UUID
    #: submit: a file; nightly: the catalog job.
    kind: str
    source: str
    #: The file's name, or the catalog's and the date.
    name: str
    lane: str
    #: planning, running, finishing, done, cancelled or failed.
    state: str
    #: A sentence for the top of the page where there is something to say first: the run is still going on, was
    #: cancelled, why it failed, that it judged nothing, that its verdicts are no longer kept; else "".
    state_note: str
    submitted_at: datetime
    #: None while it is not over.
    finished_at: datetime | None
    before: RunBefore | None
    figures: tuple[Figure, ...]
    #: At most RUNS_SHOWN, the oldest first, this run last.
    history: tuple[LabelsOfRun, ...]
    histograms: tuple[Histogram, ...]
    attributes: tuple[Attribute, ...]
    errors: tuple[ErrorCount, ...]
    speed: Speed
    models: tuple[Model, ...]
    #: All that the run has, and the worst WORST of them: what is new first, then by score.
    mismatches: int
    worst: tuple[Mismatch, ...]
    filters: tuple[Filter, ...]
    sql: Sql
    #: Of the Concord that wrote the report.
    concord: str
