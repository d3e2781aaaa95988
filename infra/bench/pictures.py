"""Pictures to measure with: JPEGs of a given side and of about a given size, each with bytes of its own."""

import io
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import obstore
from obstore.store import S3Store
from PIL import Image

from infra.local import Addresses
from infra.local.s3 import REGION

#: Different motifs; the others are these again, under other names and with other bytes.
MOTIFS = 32
#: Cells of a motif along a side: its large forms.
CELLS = 12
UPLOAD_THREADS = 8


def jpeg(seed: int, side_px: int, size: int) -> bytes:
    """Forms and grain, like a photo's, at the quality that comes closest to `size` bytes."""
    random = np.random.default_rng(seed)
    cells = Image.fromarray(random.integers(0, 256, (CELLS, CELLS, 3), dtype=np.uint8))
    forms = np.asarray(cells.resize((side_px, side_px), Image.Resampling.BICUBIC), dtype=np.float32)
    grain = random.normal(0, 6, (side_px, side_px, 1))
    image = Image.fromarray((forms + grain).clip(0, 255).astype(np.uint8))

    def at(quality: int) -> bytes:
        written = io.BytesIO()
        image.save(written, "JPEG", quality=quality)
        return written.getvalue()

    return min((at(quality) for quality in range(20, 96, 3)), key=lambda data: abs(len(data) - size))


def marked(data: bytes, number: int) -> bytes:
    """The same picture in other bytes: a comment behind the start of a JPEG."""
    comment = f"picture {number}".encode()
    return data[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + data[2:]


def pictures(count: int, side_px: int, size: int) -> Iterator[bytes]:
    """So many pictures, no two of the same bytes."""
    motifs = [jpeg(seed, side_px, size) for seed in range(min(count, MOTIFS))]
    return (marked(motifs[number % len(motifs)], number) for number in range(count))


def upload(addresses: Addresses, prefix: str, all_of_them: Iterable[bytes]) -> Sequence[str]:
    """Put them into the stack's bucket; returns their addresses in order."""
    store = S3Store(
        addresses.s3_bucket,
        config={
            "endpoint": addresses.s3_endpoint_url,
            "access_key_id": addresses.s3_access_key_id,
            "secret_access_key": addresses.s3_secret_access_key,
            "region": REGION,
            "virtual_hosted_style_request": False,
        },
        client_options={"allow_http": True, "timeout": timedelta(seconds=30)},
    )

    def put(numbered: tuple[int, bytes]) -> str:
        number, data = numbered
        key = f"{prefix}/{number:06}"
        obstore.put(store, key, data)
        return f"s3://{addresses.s3_bucket}/{key}"

    with ThreadPoolExecutor(UPLOAD_THREADS) as pool:
        return list(pool.map(put, enumerate(all_of_them)))
