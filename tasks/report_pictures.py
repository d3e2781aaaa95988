"""Thumbnails for a run's page: pictures out of S3, made small, as data URIs. Loads no torch.

A page never waits long for them: what is not there within the time limit has a reason in its place, and so has a
picture that is gone, broken or not to be read.
"""

import base64
import io
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass
from typing import TYPE_CHECKING

from db.run_report import Mismatch
from tasks.settings import Settings
from worker.errors import ConcordError, first_line

if TYPE_CHECKING:
    from worker.images import ImageStore

#: The longer side of a thumbnail, in pixels. It is shown at half of that on a sharp display.
SIDE_PX = 160
#: WebP's quality: about 4 kB a picture.
QUALITY = 72
#: Fetched and decoded at a time.
THREADS = 8
#: For all pictures of a page together.
TIME_LIMIT_S = 5.0


@dataclass(frozen=True)
class Thumbnail:
    """A small picture, or the reason why there is none.

    A page looks its pictures up by the pair's `image`; one that is not in the mapping was not asked for.
    """

    #: data:image/...;base64,... ; "" where there is none.
    data_uri: str = ""
    #: Pixels; 0 where there is none.
    width: int = 0
    height: int = 0
    #: In words for a person, such as "no such key in bucket shop"; "" where there is a picture.
    reason: str = ""
    #: Another picture lies there now than the one that was judged.
    is_other: bool = False


def thumbnails(
    mismatches: Sequence[Mismatch], settings: Settings, *, time_limit_s: float = TIME_LIMIT_S
) -> dict[str, Thumbnail]:
    """By address, the pictures of these pairs, each fetched once. What is wrong with S3 or a picture is not raised."""
    # The order is the page's: where time runs short, the worst have theirs.
    judged = {one.image: one.image_sha256 for one in reversed(mismatches) if one.image is not None}
    addresses = list(dict.fromkeys(one.image for one in mismatches if one.image is not None))
    if not addresses:
        return {}
    try:
        store = open_store(settings, time_limit_s)
    except ModuleNotFoundError as error:
        return dict.fromkeys(addresses, Thumbnail(reason=f"pictures need {error.name}: pip install '.[report]'"))
    except ConcordError as error:
        return dict.fromkeys(addresses, Thumbnail(reason=first_line(error)))
    deadline = time.monotonic() + time_limit_s
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="thumbnails")
    try:
        futures = {one: pool.submit(thumbnail, store, one, judged[one], settings) for one in addresses}
        return {one: within(future, deadline, time_limit_s) for one, future in futures.items()}
    finally:
        # Whoever still waits for S3 does so within the store's own time limit, and nobody waits for it.
        pool.shutdown(wait=False, cancel_futures=True)
        store.close()


def within(future: Future[Thumbnail], deadline: float, limit_s: float) -> Thumbnail:
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except NotInTime:
        return Thumbnail(reason=f"not there within {limit_s:g} s")


def open_store(settings: Settings, time_limit_s: float) -> "ImageStore":
    """The worker's own client of S3, with less patience. Raises ConcordError and ModuleNotFoundError."""
    from worker.images import ImageStore

    secret = settings.s3_secret_access_key
    return ImageStore(
        settings.allowed_buckets,
        endpoint_url=settings.s3_endpoint_url,
        region=settings.s3_region,
        access_key_id=settings.s3_access_key_id,
        secret_access_key=secret.get_secret_value() if secret else None,
        threads=1,
        timeout_s=time_limit_s,
        max_bytes=settings.max_image_bytes,
        allow_http=settings.s3_allow_http,
    )


def thumbnail(store: "ImageStore", address: str, judged_sha256: bytes | None, settings: Settings) -> Thumbnail:
    """One picture, as it lies in S3 now: decoded as the worker does, then made small."""
    from PIL.Image import Resampling

    from worker.decode_image import decode
    from worker.images import parse_s3

    try:
        data = store.fetch(parse_s3(address)).data
        decoded = decode(data, target_px=SIDE_PX, exact=False, max_pixels=settings.max_image_pixels, squeeze=False)
    except ConcordError as error:
        return Thumbnail(reason=first_line(error))
    except Exception as error:
        # One picture, whatever is wrong with it, is not to cost the page.
        return Thumbnail(reason=type(error).__name__)
    image = decoded.image
    image.thumbnail((SIDE_PX, SIDE_PX), Resampling.LANCZOS)
    packed = io.BytesIO()
    image.save(packed, "WEBP", quality=QUALITY)
    uri = f"data:image/webp;base64,{base64.b64encode(packed.getvalue()).decode()}"
    is_other = judged_sha256 is not None and decoded.sha256 != judged_sha256
    return Thumbnail(uri, *image.size, is_other=is_other)
