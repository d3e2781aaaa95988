"""Small files that ask for much work or memory, each with what it must come to; `python -m tests.images.bombs`."""

import json
import struct
import sys
import zlib
from collections.abc import Callable

from PIL import Image

from tests.images.mutations import Watch, photo, png, png_chunk, saved
from worker.errors import ErrorCode

DECODED = "decoded"
#: A limit on bytes like the worker's own.
FILE_BYTES = 20_000_000


def jpeg_segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def in_jpeg(notes: bytes, **options: object) -> bytes:
    """A JPEG with something put between its first mark and its first segment."""
    data = saved(photo(), "JPEG", **options)
    return data[:2] + notes + data[2:]


def overlapping_exif(entries: int = 4_000, size: int = 60_000) -> bytes:
    """Entries that all point at the same bytes, or past their end."""
    begin = 14 + 12 * entries
    listed = b"".join(struct.pack("<HHII", tag, 7, size, begin) for tag in range(entries))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", entries) + listed + bytes(4 + size)


def jpeg_of_exif() -> bytes:
    note = overlapping_exif()
    parts = [note[at : at + 65_000] for at in range(0, len(note), 65_000)]
    return in_jpeg(b"".join(jpeg_segment(0xE1, b"Exif\0\0" + part) for part in parts * 40))


def endless_scans(side: int, scans: int) -> bytes:
    """A progressive JPEG whose scans hold one byte each."""
    frame = struct.pack(">BHHB", 8, side, side, 3) + bytes([1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0])
    codes = jpeg_segment(0xC4, b"\0\1" + bytes(15) + b"\0")
    scan = jpeg_segment(0xDA, bytes([3, 1, 0, 2, 0, 3, 0, 0, 0, 0])) + b"\0"
    tables = jpeg_segment(0xDB, b"\0" + b"\1" * 64)
    return b"\xff\xd8" + tables + codes + jpeg_segment(0xC2, frame) + scan * scans + b"\xff\xd9"


def lossless_jpeg(side: int) -> bytes:
    """One that libjpeg decodes at full size whatever it is asked for."""
    frame = struct.pack(">BHHB", 8, side, side, 1) + bytes([1, 0x11, 0])
    codes = jpeg_segment(0xC4, b"\0\1" + bytes(15) + b"\0")
    return b"\xff\xd8" + codes + jpeg_segment(0xC3, frame) + jpeg_segment(0xDA, bytes([1, 1, 0, 1, 0, 0])) + bytes(
        side * side // 8
    ) + b"\xff\xd9"  # fmt: skip


def compressed(size: int) -> bytes:
    return zlib.compress(bytes(size))


def in_gif(blocks: bytes) -> bytes:
    frame = b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x4c\x01\0"
    return b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0, 0, 0) + blocks + frame + b";"


def thin_png(width: int, height: int) -> bytes:
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    data = png_chunk(b"IDAT", compressed(height * (width + 1)))
    return b"\x89PNG\r\n\x1a\n" + header + data + png_chunk(b"IEND", b"")


def webp_of_frames(count: int) -> bytes:
    pixel = saved(Image.new("RGB", (1, 1)), "WEBP", lossless=True)[12:]
    frame = bytes(12) + b"\1\0\0\0" + pixel
    chunks = b"VP8X" + struct.pack("<I", 10) + b"\x02" + bytes(9) + b"ANIM" + struct.pack("<I", 6) + bytes(6)
    chunks += (b"ANMF" + struct.pack("<I", len(frame)) + frame) * count
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WEBP" + chunks


def profiles_in_png() -> bytes:
    return png(8, 2, png_chunk(b"iCCP", b"profile\0\0" + compressed(2**20)) * 10_000)


def texts_in_png() -> bytes:
    text = compressed(2**20)
    return png(8, 2, *(png_chunk(b"zTXt", b"%d\0\0" % number + text) for number in range(2_000)))


#: By name: how it is made, and what it comes to. Sound pixels are judged whatever surrounds them.
BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a colour profile of a hundred megabytes": (
        lambda: png(8, 2, png_chunk(b"iCCP", b"profile\0\0" + compressed(100_000_000))),
        DECODED,
    ),
    "ten thousand colour profiles": (profiles_in_png, DECODED),
    "two thousand texts of a megabyte": (texts_in_png, DECODED),
    "EXIF that points at the same bytes again and again": (
        lambda: png(8, 2, png_chunk(b"eXIf", overlapping_exif())),
        DECODED,
    ),
    "EXIF in forty times as many segments": (jpeg_of_exif, DECODED),
    "twenty megabytes of filling before a JPEG's headers": (lambda: in_jpeg(b"\xff" * FILE_BYTES), DECODED),
    "twenty megabytes of junk before a JPEG's headers": (
        lambda: in_jpeg(jpeg_segment(0xFE, b"") + bytes(FILE_BYTES)),
        DECODED,
    ),
    "thousands of comments": (lambda: in_jpeg(jpeg_segment(0xFE, bytes(60_000)) * 500), DECODED),
    "a comment of one-byte blocks": (
        lambda: in_gif(b"!\xfe" + b"\1a" * (FILE_BYTES // 2) + b"\0"),
        ErrorCode.IMAGE_CORRUPT,
    ),
    "empty extensions": (lambda: in_gif(b"!\xfe\0" * (FILE_BYTES // 3)), ErrorCode.IMAGE_CORRUPT),
    "endless frames of a GIF": (
        lambda: in_gif((b"," + bytes(4) + b"\1\0\1\0\0\x02\x02\x4c\x01\0") * (FILE_BYTES // 15)),
        ErrorCode.IMAGE_CORRUPT,
    ),
    "a hundred thousand frames of a WebP": (lambda: webp_of_frames(100_000), DECODED),
    "a hundred scans of a JPEG within the limit": (lambda: endless_scans(1_900, 100), ErrorCode.IMAGE_CORRUPT),
    "twenty scans of a JPEG": (lambda: endless_scans(1_900, 20), DECODED),
    "a lossless JPEG": (lambda: lossless_jpeg(512), ErrorCode.IMAGE_FORMAT_UNSUPPORTED),
    "a picture of one endless column": (lambda: thin_png(1, 3_900_000), ErrorCode.IMAGE_TOO_MANY_PIXELS),
    "a picture of one long column": (lambda: thin_png(1, 65_535), DECODED),
    "a picture of a few long rows": (lambda: thin_png(65_535, 60), DECODED),
    "a WebP of 38 bytes": (lambda: one_colour(1_990), DECODED),
    "a WebP of 38 bytes and 268 million pixels": (
        lambda: one_colour(1_990)[:21] + b"\xff\xff\xff\x0f" + one_colour(1_990)[25:],
        ErrorCode.IMAGE_TOO_MANY_PIXELS,
    ),
    "a PNG of 2 to the 62nd pixels": (
        lambda: png(8, 2).replace(struct.pack(">II", 61, 43), struct.pack(">II", 2**31 - 1, 2**31 - 1), 1),
        ErrorCode.IMAGE_TOO_MANY_PIXELS,
    ),
}


def one_colour(side: int) -> bytes:
    return saved(Image.new("RGB", (side, side), "red"), "WEBP", lossless=True)


def main() -> None:
    made = {name: make() for name, (make, _) in BOMBS.items()}
    watch = Watch()
    for name, data in made.items():
        watch.decode(name, data, exact=False)
    json.dump(watch.report(), sys.stdout)
    print()


if __name__ == "__main__":
    main()
