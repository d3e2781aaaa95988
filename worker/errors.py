"""Every way a pair, a message or a checkpoint can go wrong, and which step of the flow says so.

    messages   PairRejected, MessageRejected     the producer's fault, found while reading the message
    images     PairRejected                      the picture's fault: missing, forbidden, broken, too large
               TryLater                          S3's fault: this pair is judged on a later attempt
    model      PairRejected                      the text's fault
               DeviceLost                        the GPU is gone: the worker ends, nobody's attempts are spent
               CheckpointRefused                 at load: a checkpoint that cannot be trusted or does not fit
    database   Hold                              the database is away: the batch waits, nobody's attempts are spent

`ErrorCode` values are stored in `verdict.error_code` and `rejected_message.error_code`; producers and
analysts match on them, so a value is never renamed or given a second meaning.
"""

from enum import StrEnum


class ErrorCode(StrEnum):
    """What went wrong, in a word that stays the same for ever."""

    # A pair as it was sent (worker.messages).
    INVALID_PAIR = "invalid_pair"  # a field is missing or of the wrong type; the detail names it
    INVALID_ID = "invalid_id"  # the pair's id is not a UUID
    DUPLICATE_ID = "duplicate_id"  # the same id stood earlier in this message
    TEXT_EMPTY = "text_empty"  # no text, or only spaces
    UNKNOWN_POLICY = "unknown_policy"
    IMAGE_NOT_S3 = "image_not_s3"  # http://, file:// ...: only s3://bucket/key is fetched
    BUCKET_NOT_ALLOWED = "bucket_not_allowed"
    EXPIRED = "expired"  # Celery's `expires` passed before the pair was judged
    REVOKED = "revoked"
    UNSUPPORTED_OPTION = "unsupported_option"  # link, chain, chord: see docs/submitting.md

    # An envelope (worker.messages, worker.batching): recorded in rejected_message.
    INVALID_MESSAGE = "invalid_message"  # JSON, but not a message of ours; the detail says why
    NOT_JSON = "not_json"
    UNKNOWN_VERSION = "unknown_version"
    UNKNOWN_TASK = "unknown_task"
    TOO_MANY_PAIRS = "too_many_pairs"
    SUBMITTED_AT_OUT_OF_RANGE = "submitted_at_out_of_range"

    # A picture (worker.images).
    IMAGE_NOT_FOUND = "image_not_found"
    IMAGE_ACCESS_DENIED = "image_access_denied"
    IMAGE_EMPTY = "image_empty"  # zero bytes
    IMAGE_TOO_LARGE = "image_too_large"  # more bytes than are read
    IMAGE_TOO_MANY_PIXELS = "image_too_many_pixels"
    IMAGE_NOT_AN_IMAGE = "image_not_an_image"  # the first bytes are no picture's: HTML, PDF, text
    IMAGE_FORMAT_UNSUPPORTED = "image_format_unsupported"  # a picture, of a kind that is not decoded
    IMAGE_TRUNCATED = "image_truncated"
    IMAGE_CORRUPT = "image_corrupt"

    # Passing troubles: stored only when the attempts are used up and the pair is `failed`.
    IMAGE_FETCH_FAILED = "image_fetch_failed"  # S3 answered 5xx, reset or timed out
    MODEL_FAILED = "model_failed"  # the model raised on this pair alone
    INTERNAL_ERROR = "internal_error"  # a fault of Concord's own, on this message alone
    UNSTORABLE = "unstorable"  # Postgres refused this pair's row alone
    KILLED_WORKER = "killed_worker"  # the worker died each time it judged this pair alone

    # What an operator decided (concord dead drop).
    DROPPED = "dropped"  # a failed pair that is given up; the detail keeps why it failed


class ConcordError(Exception):
    """Anything Concord raises on purpose. The docstring is the default message."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail or (self.__doc__ or "").splitlines()[0])


class CodedError(ConcordError):
    """An error with a stable code."""

    def __init__(self, code: ErrorCode, detail: str = "") -> None:
        super().__init__(detail or code.value)
        self.code = code
        self.detail = detail


class PairRejected(CodedError):
    """The pair's own fault: it is stored as `rejected` and never tried again."""


class MessageRejected(CodedError):
    """An envelope that cannot be read: recorded with its body in `rejected_message`."""


class TryLater(CodedError):
    """Not the pair's fault: tried again later, `failed` with this code once the attempts are used up."""


class GivenUp(TryLater):
    """Not tried again, whatever attempts are left: `failed` at once."""


class Hold(ConcordError):
    """The database or the bucket is away: keep the batch and wait, nobody's attempts are spent."""


class DeviceLost(ConcordError):
    """The device no longer answers this process; another process may use it."""


class CheckpointRefused(ConcordError):
    """The checkpoint cannot be loaded."""


def first_line(error: BaseException | None) -> str:
    """What an error says, in one line of a log or of a row."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]
