"""The model and the image store as the settings describe them, and scoring a file with no servers at all."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tasks.settings import Settings, SettingsWrong
from worker.errors import CodedError, ErrorCode, PairRejected
from worker.images import ImageStore, decode, parse_s3
from worker.messages import Pair, clean, read_pair
from worker.model.checkpoint import load
from worker.moderator import Judgement, Moderator, Question

log = logging.getLogger(__name__)

#: The demo model, in the source tree beside this package.
DEMO_MODEL = Path(__file__).parent.parent / "infra" / "demo_model" / "weights"


def load_moderator(model_dir: Path | None, device: str) -> Moderator:
    """The checkpoint in `model_dir` on `device`. Raises CheckpointRefused."""
    if model_dir is None:
        log.warning("no model was named: the demo model judges, which knows 64-pixel toy scenes and nothing else")
    wanted = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        chosen = torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError) as error:
        raise SettingsWrong(
            f"CONCORD_DEVICE is {device!r}, which torch cannot use: {str(error).splitlines()[0]}"
        ) from None
    # cuDNN would round convolutions to ten bits; scores are to be the same on every device.
    torch.backends.cudnn.allow_tf32 = False
    return Moderator(load(model_dir or DEMO_MODEL, chosen), chosen)


def make_store(settings: Settings) -> ImageStore:
    """The client of the worker's hot path: many small GETs."""
    secret = settings.s3_secret_access_key
    return ImageStore(
        settings.allowed_buckets,
        endpoint_url=settings.s3_endpoint_url,
        region=settings.s3_region,
        access_key_id=settings.s3_access_key_id,
        secret_access_key=secret.get_secret_value() if secret else None,
        threads=settings.image_threads,
        timeout_s=settings.image_timeout_s,
        max_bytes=settings.max_image_bytes,
        allow_http=settings.s3_allow_http,
    )


def score_file(
    rows: Sequence[Mapping[str, Any] | PairRejected], folder: Path, moderator: Moderator, settings: Settings
) -> Iterator[dict[str, Any]]:
    """One answer a row, in order: `id`, `label` and `probs`, or `error_code`.

    An image is an S3 address or a path, which counts from `folder`.
    """
    store = make_store(settings) if any("s3://" in str(row) for row in rows) else None
    size = settings.max_pairs
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        questions = [question_of(row, folder, moderator, settings, store) for row in chunk]
        answers = iter(moderator.judge([question for question in questions if isinstance(question, Question)]))
        for row, question in zip(chunk, questions, strict=True):
            answer = next(answers) if isinstance(question, Question) else question
            yield line_of(row, answer)


def question_of(
    row: Mapping[str, Any] | PairRejected,
    folder: Path,
    moderator: Moderator,
    settings: Settings,
    store: ImageStore | None,
) -> Question | CodedError:
    """A row with its picture decoded, or what is wrong with it."""
    if isinstance(row, PairRejected):
        return row
    try:
        cleaned = clean(row)
        pair = read_pair({**cleaned, "id": None} if isinstance(cleaned, dict) else cleaned)
        decoded = decode(
            read_image(pair, folder, settings, store),
            target_px=moderator.checkpoint.configuration.patch_image_size,
            exact=settings.exact_images,
            max_pixels=settings.max_image_pixels,
        )
        return Question(decoded.image, decoded.sha256, pair.text, pair.premise)
    except CodedError as error:
        return error


def read_image(pair: Pair, folder: Path, settings: Settings, store: ImageStore | None) -> bytes:
    """The picture's bytes, from S3 or from a file."""
    if "://" in pair.image and store is not None:
        return store.fetch(parse_s3(pair.image)).data
    if "://" in pair.image:
        raise PairRejected(ErrorCode.IMAGE_NOT_S3, f"{pair.image:.200} is neither an s3:// address nor a file")
    path = folder / pair.image
    try:
        if path.stat().st_size > settings.max_image_bytes:
            raise PairRejected(ErrorCode.IMAGE_TOO_LARGE, f"{path} has more than {settings.max_image_bytes} bytes")
        return path.read_bytes()
    except PermissionError:
        raise PairRejected(ErrorCode.IMAGE_ACCESS_DENIED, f"{path} may not be read") from None
    except (OSError, ValueError) as error:
        raise PairRejected(ErrorCode.IMAGE_NOT_FOUND, f"{path}: {error}"[:300]) from None


def line_of(row: Mapping[str, Any] | PairRejected, answer: Judgement | CodedError) -> dict[str, Any]:
    """What `concord score` prints for one row."""
    name = None if isinstance(row, PairRejected) else row.get("id", row.get("ref"))
    if isinstance(answer, CodedError):
        return {"id": name, "error_code": str(answer.code), "error_detail": answer.detail}
    flags = {"flags": list(answer.flags)} if answer.flags else {}
    return {"id": name, "label": answer.label, "probs": answer.probs, **flags}
