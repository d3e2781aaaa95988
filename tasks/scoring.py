"""The model and the image store as the settings describe them, and scoring a file with no servers at all."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tasks.pairs_file import read_rows
from tasks.settings import Settings, SettingsWrong, settings
from worker.compare.trial import LabelledPair
from worker.errors import CheckpointRefused, CodedError, ConcordError, ErrorCode, PairRejected, first_line
from worker.images import ImageStore, decode, parse_s3
from worker.messages import Pair, clean, read_pair
from worker.model.checkpoint import load
from worker.moderator import Judgement, Moderator, Question
from worker.quant.recipes import recipe_named
from worker.quant.replay import load_gated

log = logging.getLogger(__name__)

#: The demo model, in the source tree beside this package: as it was trained, and as workers run it.
DEMO_MODEL = Path(__file__).parent.parent / "infra" / "demo_model"
DEMO_WEIGHTS, DEMO_QUANTIZED = DEMO_MODEL / "weights", DEMO_MODEL / "awq-int4"
NO_MODEL = "no model was named: the demo model judges, which knows 64-pixel toy scenes and nothing else"


def worker_moderator(settings: Settings) -> Moderator:
    """What a worker judges with: quantized weights that answer on this machine as they did when they were made.

    Raises CheckpointRefused, for weights that are not quantized with the command that does it, unless `recipe` says
    that they are meant to run as they are.
    """
    if settings.model_dir is None:
        log.warning(NO_MODEL)
    folder, device = settings.model_dir or DEMO_QUANTIZED, device_named(settings.device)
    checkpoint = load_gated(folder, device)
    if checkpoint.quantization is None and settings.recipe is None:
        raise CheckpointRefused(
            f"{folder} is not quantized. Quantize it with `concord quantize --model {folder} --recipe awq-int4 "
            f"--calibration PAIRS.jsonl --out {folder}-awq-int4`, or set CONCORD_RECIPE=fp32 to run it as it is"
        )
    if checkpoint.quantization is None and settings.recipe is not None:
        precision = recipe_named(settings.recipe).compute
        checkpoint = replace(load(folder, device, precision), recipe=settings.recipe)
    return Moderator(checkpoint, device)


def load_moderator(model_dir: Path | None, device: str) -> Moderator:
    """The checkpoint in `model_dir` as it is, quantized or not. Raises CheckpointRefused."""
    if model_dir is None:
        log.warning(NO_MODEL)
    chosen = device_named(device)
    return Moderator(load(model_dir or DEMO_WEIGHTS, chosen), chosen)


def device_named(name: str) -> torch.device:
    """The device of the setting `device`. Raises SettingsWrong."""
    wanted = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    # cuDNN would round convolutions to ten bits; scores are to be the same on every device.
    torch.backends.cudnn.allow_tf32 = False
    try:
        return torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError) as error:
        raise SettingsWrong(f"CONCORD_DEVICE is {name!r}, which torch cannot use: {first_line(error)}") from None


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
    store = store_for(rows, settings)
    target_px, size = moderator.checkpoint.configuration.patch_image_size, settings.max_pairs
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        questions = [question_of(row, folder, target_px, settings, store) for row in chunk]
        answers = iter(moderator.judge([question for question in questions if isinstance(question, Question)]))
        for row, question in zip(chunk, questions, strict=True):
            answer = next(answers) if isinstance(question, Question) else question
            yield line_of(row, answer)


def store_for(rows: Sequence[Mapping[str, Any] | PairRejected], settings: Settings) -> ImageStore | None:
    """The S3 client, if any row asks for it."""
    return make_store(settings) if any("s3://" in str(row) for row in rows) else None


def question_of(
    row: Mapping[str, Any] | PairRejected,
    folder: Path,
    target_px: int,
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
            target_px=target_px,
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


def read_questions(path: Path, model: Path) -> Iterator[tuple[Question, dict[str, Any]]]:
    """The pairs of a file with their pictures decoded for this checkpoint, and the rows they come from.

    Raises ConcordError at the first that cannot be asked, saying which.
    """
    chosen, rows = settings(), list(read_rows(path))
    target_px = load(model).configuration.patch_image_size
    store = store_for(rows, chosen)
    for number, row in enumerate(rows, 1):
        question = question_of(row, path.parent, target_px, chosen, store)
        if isinstance(question, CodedError):
            raise ConcordError(f"{path}, pair {number}: {question.code}: {question.detail}") from None
        assert isinstance(row, dict)
        yield question, row


def only_questions(path: Path | None, model: Path) -> list[Question] | None:
    """The pairs of a file without their labels."""
    return None if path is None else [question for question, _ in read_questions(path, model)]


def labelled(path: Path, model: Path) -> list[LabelledPair]:
    """The pairs of a file with their labels. Raises ConcordError where one has none."""
    found = []
    for question, row in read_questions(path, model):
        label = row.get("label")
        if not isinstance(label, str):
            raise ConcordError(f"{path}: {row.get('ref', row.get('id'))} has no label; each pair needs the true one")
        found.append(LabelledPair(question, label))
    return found
