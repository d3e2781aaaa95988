"""Pictures of every kind, and a seeded stream of damage to them: what an attacker or a bad disk may put into a bucket.

`python -m tests.images.mutations --seed 1 --count 500` decodes so many, each twice, in a process that is watched: the
time each may take and the memory all may take are limited. It ends in one JSON line.
"""

import argparse
import faulthandler
import io
import itertools
import json
import random
import re
import resource
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageCms, PngImagePlugin

from worker.decode_image import decode
from worker.errors import ErrorCode, PairRejected

SIZE = (61, 43)
#: Side of the model's input: some of the pictures are reduced and squeezed, others are not.
TARGET_PX = 12
#: The limit under which mutations are decoded: 4 million pixels at 20 bytes.
MAX_PIXELS = 4_000_000
MAX_BYTES = 20 * MAX_PIXELS
#: A picture takes milliseconds. Whatever takes this long on a busy machine hangs.
HANG_S = 5.0
#: Address space beyond what the process has at its start; an allocation beyond it would be a MemoryError.
SPARE_ADDRESSES = 1 << 30

#: All that a damaged picture may come to.
CODES = {
    ErrorCode.IMAGE_EMPTY,
    ErrorCode.IMAGE_NOT_AN_IMAGE,
    ErrorCode.IMAGE_FORMAT_UNSUPPORTED,
    ErrorCode.IMAGE_TOO_MANY_PIXELS,
    ErrorCode.IMAGE_TRUNCATED,
    ErrorCode.IMAGE_CORRUPT,
}


# ---- Pictures -------------------------------------------------------------------------------------------------------


def photo(mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Coloured blocks with some noise, which no codec stores in a handful of bytes."""
    generator = np.random.default_rng(seed)
    width, height = SIZE
    blocks = generator.integers(30, 226, (-(-height // 16), -(-width // 16), 3))
    pixels = np.kron(blocks, np.ones((16, 16, 1), dtype=int))[:height, :width]
    image = Image.fromarray((pixels + generator.integers(-20, 21, pixels.shape)).astype(np.uint8))
    if mode == "RGBA":
        image.putalpha(Image.linear_gradient("L").resize(SIZE))
        return image
    return image.convert(mode)


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def animated(format: str, mode: str = "RGB", **options: Any) -> bytes:
    later = [photo(mode, seed) for seed in (1, 2)]
    return saved(photo(mode), format, save_all=True, append_images=later, duration=50, **options)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(depth: int, colour: int, *chunks: bytes, interlaced: bool = False, size: tuple[int, int] = SIZE) -> bytes:
    """A PNG of noise in any of its pixel formats, also in seven passes (Adam7)."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    noise, rows = random.Random(depth * 10 + colour), b""
    for left, top, right, down in passes if interlaced else [(0, 0, 1, 1)]:
        wide, high = len(range(left, size[0], right)), len(range(top, size[1], down))
        row_bytes = -(-wide * channels * depth // 8)
        rows += b"".join(bytes([noise.randrange(5)]) + noise.randbytes(row_bytes) for _ in range(high if wide else 0))
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", *size, depth, colour, 0, 0, interlaced))
    data = zlib.compress(rows)
    cut = len(data) // 2
    return b"".join(
        (b"\x89PNG\r\n\x1a\n", header, *chunks, png_chunk(b"IDAT", data[:cut]), png_chunk(b"IDAT", data[cut:]),
         png_chunk(b"IEND", b""))
    )  # fmt: skip


def local_palettes() -> bytes:
    """A GIF without a global palette, whose two frames have their own."""
    frames = [saved(photo("P", seed), "GIF") for seed in (3, 4)]
    body = b""
    for frame in frames:
        entries = frame[10] & 7
        begin = frame.index(b",", 13 + (3 << (entries + 1)))
        descriptor = frame[begin : begin + 9] + bytes([0x80 | entries])
        body += descriptor + frame[13 : 13 + (3 << (entries + 1))] + frame[begin + 10 : -1]
    return b"GIF87a" + struct.pack("<HHBBB", *SIZE, 0, 0, 0) + body + b";"


@cache
def pictures() -> dict[str, bytes]:
    """One of each kind, sound and by name."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    profile[24:36] = bytes(12)  # The time at which it was made: the same seed is to make the same bytes.
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010E] = "a description " * 20
    texts = PngImagePlugin.PngInfo()
    texts.add_text("Comment", "words " * 50, zip=True)
    texts.add_itxt("Title", "Wörter " * 50, zip=True)
    texts.add_text("Author", "plain")
    trns, palette = png_chunk(b"tRNS", bytes(range(0, 256, 17))), png_chunk(b"PLTE", bytes(range(48)))
    jpeg = saved(photo(), "JPEG")
    golden = Path(__file__).parents[1] / "data" / "golden" / "images"
    return {
        **{path.name: path.read_bytes() for path in sorted(golden.iterdir())},
        "jpeg": jpeg,
        "jpeg 4:4:4": saved(photo(), "JPEG", subsampling=0, quality=95),
        "jpeg grey": saved(photo("L"), "JPEG"),
        "jpeg cmyk": saved(photo("CMYK"), "JPEG"),
        "jpeg progressive": saved(photo(), "JPEG", progressive=True),
        "jpeg progressive cmyk": saved(photo("CMYK"), "JPEG", progressive=True),
        "jpeg with restart markers": saved(photo(), "JPEG", restart_marker_blocks=3),
        "jpeg with exif": saved(photo(), "JPEG", exif=exif),
        "jpeg with a profile": saved(photo(), "JPEG", icc_profile=bytes(profile), comment=b"a comment"),
        "jpeg arithmetic": jpeg.replace(b"\xff\xc0", b"\xff\xc9"),
        "jpeg of two pictures": animated("MPO"),
        **{f"png grey {depth}": png(depth, 0) for depth in (1, 2, 4, 8, 16)},
        **{f"png palette {depth}": png(depth, 3, palette, trns) for depth in (1, 2, 4)},
        "png palette 8": saved(photo("P"), "PNG"),
        "png colour 8": saved(photo(), "PNG"),
        "png colour 16": png(16, 2),
        "png colour with a key": png(8, 2, png_chunk(b"tRNS", struct.pack(">HHH", 1, 2, 3))),
        "png grey with alpha 8": png(8, 4),
        "png grey with alpha 16": png(16, 4),
        "png alpha 8": saved(photo("RGBA"), "PNG"),
        "png alpha 16": png(16, 6),
        "png interlaced": png(8, 2, interlaced=True),
        "png interlaced 1": png(1, 0, interlaced=True),
        "png interlaced 16": png(16, 6, interlaced=True),
        "png with a profile": saved(photo(), "PNG", icc_profile=bytes(profile)),
        "png with texts": saved(photo(), "PNG", pnginfo=texts),
        "png with exif": saved(photo(), "PNG", exif=exif),
        "png animated": animated("PNG"),
        "gif 87a": saved(photo("L"), "GIF", interlace=False),
        "gif 89a": saved(photo("P"), "GIF", comment=b"a comment " * 30),
        "gif interlaced": saved(photo("P"), "GIF", interlace=True),
        "gif transparent": saved(photo("P"), "GIF", transparency=3),
        "gif animated": animated("GIF", disposal=2, loop=0),
        "gif of local palettes": local_palettes(),
        "webp": saved(photo(), "WEBP"),
        "webp lossless": saved(photo(), "WEBP", lossless=True),
        "webp with alpha": saved(photo("RGBA"), "WEBP"),
        "webp lossless with alpha": saved(photo("RGBA"), "WEBP", lossless=True),
        "webp animated": animated("WEBP", "RGBA"),
        "webp with notes": saved(photo(), "WEBP", exif=exif, icc_profile=bytes(profile), xmp=b"<x/>" * 20),
    }


@cache
def foreign() -> dict[str, bytes]:
    """Whole files of kinds that are not decoded."""
    small = photo().resize((32, 32))
    kinds = {name: saved(small, name) for name in ("TIFF", "BMP", "ICO", "AVIF", "JPEG2000", "PPM", "TGA", "PCX")}
    pdf = b"%PDF-1.7\n1 0 obj<</Type/Catalog>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF\n"
    psd = b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 4, 4, 8, 3) + bytes(12 + 2 + 48)
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'
    return {
        **kinds,
        "PSD": psd,
        "PDF": pdf,
        "SVG": svg,
        "HTML": b"<!DOCTYPE html><p>no</p>",
        "ZIP": b"PK\3\4" + bytes(60),
    }


# ---- Damage ---------------------------------------------------------------------------------------------------------

Damage = Callable[[bytearray, random.Random], bytes | bytearray]


def somewhere(data: bytearray, choose: random.Random) -> int:
    """A place in the data; half of the time near its begin, where the headers are."""
    return choose.randrange(min(len(data), 128) if choose.random() < 0.5 else len(data))


def blocks_of(data: bytes | bytearray) -> list[tuple[int, int]]:
    """Begin and end of the container's blocks: chunks, segments or, of a GIF, sub-blocks."""
    found, at = [], 0
    if data[:4] == b"\x89PNG":
        at = 8
        while at + 12 <= len(data):
            end = at + 12 + int.from_bytes(data[at : at + 4], "big")
            found.append((at, min(end, len(data))))
            at = end
    elif data[:4] == b"RIFF":
        at = 12
        while at + 8 <= len(data):
            length = int.from_bytes(data[at + 4 : at + 8], "little")
            found.append((at, min(at + 8 + length + length % 2, len(data))))
            at += 8 + length + length % 2
    elif data[:2] == b"\xff\xd8":
        for match in re.finditer(rb"\xff[\xc0-\xcf\xda-\xfe]", bytes(data)):
            length = int.from_bytes(data[match.end() : match.end() + 2], "big")
            found.append((match.start(), min(match.end() + length, len(data))))
    else:
        found = [(at, min(at + 256, len(data))) for at in range(13, len(data), 256)]
    return found or [(0, len(data))]


def flip_a_bit(data: bytearray, choose: random.Random) -> bytearray:
    data[somewhere(data, choose)] ^= 1 << choose.randrange(8)
    return data


def zero_a_byte(data: bytearray, choose: random.Random) -> bytearray:
    data[somewhere(data, choose)] = 0
    return data


def fill_a_byte(data: bytearray, choose: random.Random) -> bytearray:
    data[somewhere(data, choose)] = 255
    return data


def change_bytes(data: bytearray, choose: random.Random) -> bytearray:
    for _ in range(choose.randint(2, 20)):
        data[somewhere(data, choose)] = choose.randrange(256)
    return data


def overwrite_a_run(data: bytearray, choose: random.Random) -> bytearray:
    at, length = somewhere(data, choose), choose.randint(2, 40)
    data[at : at + length] = choose.choice([bytes(length), b"\xff" * length, choose.randbytes(length)])
    return data


def swap_two_bytes(data: bytearray, choose: random.Random) -> bytearray:
    one, other = somewhere(data, choose), somewhere(data, choose)
    data[one], data[other] = data[other], data[one]
    return data


def insert_bytes(data: bytearray, choose: random.Random) -> bytearray:
    at = somewhere(data, choose)
    data[at:at] = choose.choice([bytes(3), b"\xff" * 5, choose.randbytes(choose.randint(1, 300))])
    return data


def delete_bytes(data: bytearray, choose: random.Random) -> bytearray:
    at = somewhere(data, choose)
    del data[at : at + choose.choice([1, 2, 3, 50])]
    return data


def cut(data: bytearray, choose: random.Random) -> bytearray:
    return data[: choose.randrange(len(data))]


def cut_and_fill(data: bytearray, choose: random.Random) -> bytearray:
    at = choose.randrange(len(data))
    return data[:at] + bytes(len(data) - at)


def cut_but_for_the_end(data: bytearray, choose: random.Random) -> bytearray:
    at = choose.randrange(len(data) // 2, len(data))
    return data[:at] + data[-12:]


def repeat_a_block(data: bytearray, choose: random.Random) -> bytearray:
    begin, end = choose.choice(blocks_of(data))
    data[end:end] = data[begin:end] * choose.choice([1, 2, 50])
    return data


def drop_a_block(data: bytearray, choose: random.Random) -> bytearray:
    begin, end = choose.choice(blocks_of(data))
    del data[begin:end]
    return data


def swap_two_blocks(data: bytearray, choose: random.Random) -> bytearray:
    blocks = blocks_of(data)
    one, other = sorted(choose.choices(blocks, k=2))
    if one[1] > other[0]:
        return data
    return data[: one[0]] + data[slice(*other)] + data[one[1] : other[0]] + data[slice(*one)] + data[other[1] :]


def lie_about_a_length(data: bytearray, choose: random.Random) -> bytearray:
    """A block's length becomes nothing, the largest, the largest of a signed number, or slightly wrong."""
    begin, _ = choose.choice(blocks_of(data))
    order, at, size = {0x89: (">", begin, 4), 0x52: ("<", begin + 4, 4), 0xFF: (">", begin + 2, 2)}.get(
        data[0], ("<", begin, 1)
    )
    most = 256**size
    value = int.from_bytes(data[at : at + size], "big" if order == ">" else "little")
    lie = choose.choice([0, 1, most - 1, most // 2, most // 2 - 1, value + 1, value - 1, value * 2]) % most
    data[at : at + size] = lie.to_bytes(size, "big" if order == ">" else "little")
    return data


def lie_about_the_size(data: bytearray, choose: random.Random) -> bytearray:
    """The header states other sides, a bomb's among them, under a checksum that is right."""
    side = choose.choice([0, 1, 2, 60, 62, 2_000, 16_384, 65_535])
    if data[:4] == b"\x89PNG":
        side = choose.choice([side, 2**31 - 1, 2**31, 2**32 - 1])
        struct.pack_into(">I", data, choose.choice([16, 20]), side)
    elif data[:4] == b"RIFF":
        at = {b"VP8 ": 26, b"VP8L": 21, b"VP8X": 24}.get(bytes(data[12:16]), 24) + choose.choice([0, 2, 3])
        data[at : at + 2] = struct.pack("<H", side)
    elif data[:2] == b"\xff\xd8":
        for match in re.finditer(rb"\xff[\xc0-\xc2\xc9]\0.", bytes(data)):
            struct.pack_into(">H", data, match.start() + choose.choice([5, 7]), side)
    else:
        at = choose.choice([6, 8, *(match.start() + choose.choice([1, 3, 5, 7]) for match in re.finditer(b",", data))])
        data[at : at + 2] = struct.pack("<H", side)
    return with_checksums(data)


def damage_under_a_right_checksum(data: bytearray, choose: random.Random) -> bytearray:
    return with_checksums(change_bytes(data, choose))


def damage_what_is_compressed(data: bytearray, choose: random.Random) -> bytearray:
    """A PNG's rows are damaged before they are compressed, where a checksum would not help; another's anything."""
    at = data.find(b"IDAT")
    if data[:4] != b"\x89PNG" or at < 0:
        return change_bytes(data, choose)
    reader = zlib.decompressobj()
    rows = bytearray(reader.decompress(b"".join(bytes(data[a + 8 : b - 4]) for a, b in blocks_of(data)
                                                if data[a + 4 : a + 8] == b"IDAT")))  # fmt: skip
    rows = choose.choice([change_bytes, cut, insert_bytes])(rows, choose)
    return data[: at - 4] + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")


def with_checksums(data: bytearray) -> bytearray:
    """A PNG whose checksums are right again; anything else as it is."""
    if data[:4] == b"\x89PNG":
        for begin, end in blocks_of(data):
            if end - begin >= 12:
                data[end - 4 : end] = struct.pack(">I", zlib.crc32(data[begin + 4 : end - 4]))
    return data


def append_another(data: bytearray, choose: random.Random) -> bytearray:
    return data + choose.choice(list(everything().values()))


def put_another_before(data: bytearray, choose: random.Random) -> bytearray:
    return bytearray(choose.choice(list(everything().values()))) + data


def go_over_into_another(data: bytearray, choose: random.Random) -> bytearray:
    other = choose.choice(list(everything().values()))
    return data[: choose.randrange(len(data))] + other[choose.randrange(len(other)) :]


def graft_a_block_of_another(data: bytearray, choose: random.Random) -> bytearray:
    other = choose.choice(list(pictures().values()))
    begin, end = choose.choice(blocks_of(other))
    at, _ = choose.choice(blocks_of(data))
    data[at:at] = other[begin:end]
    return data


DAMAGES: tuple[Damage, ...] = (
    flip_a_bit, zero_a_byte, fill_a_byte, change_bytes, overwrite_a_run, swap_two_bytes, insert_bytes, delete_bytes,
    cut, cut_and_fill, cut_but_for_the_end, repeat_a_block, drop_a_block, swap_two_blocks, lie_about_a_length,
    lie_about_the_size, damage_under_a_right_checksum, damage_what_is_compressed, append_another, put_another_before,
    go_over_into_another, graft_a_block_of_another,
)  # fmt: skip


@cache
def everything() -> dict[str, bytes]:
    return pictures() | foreign()


def mutations(seed: int) -> Iterator[tuple[str, bytes]]:
    """Damaged pictures without end, each with the words that tell what it is: every damage to every picture in turn.

    A picture may be damaged more than once, by what stands first and then by something else.
    """
    for number in itertools.count():
        for damage in DAMAGES:
            for name, data in everything().items():
                choose = random.Random(f"{seed} {number} {damage.__name__} {name}")
                damaged = damage(bytearray(data), choose)
                again = choose.random() < 0.25 and len(damaged) > 1
                yield f"{name}: {damage.__name__}", bytes(flip_a_bit(bytearray(damaged), choose) if again else damaged)


# ---- Under watch ----------------------------------------------------------------------------------------------------


def outcome(data: bytes, exact: bool) -> tuple[str, bytes]:
    """The error's code, or `decoded` with the pixels. Raises AssertionError for a picture that is not one."""
    try:
        decoded = decode(data, target_px=TARGET_PX, exact=exact, max_pixels=MAX_PIXELS)
    except PairRejected as error:
        if error.code not in CODES or not 0 < len(error.detail) <= 200:
            raise AssertionError(f"{error.code}: {error.detail}") from error
        return error.code, error.detail.encode("utf-8", "backslashreplace")
    assert decoded.image.mode == "RGB"
    assert 0 < decoded.width * decoded.height <= MAX_PIXELS
    assert decoded.image.width * decoded.image.height <= max(TARGET_PX**2, decoded.width * decoded.height)
    return "decoded", decoded.image.tobytes()


def memory_of(name: str) -> int:
    """A figure of this process's memory in bytes: VmHWM is the most that it ever had, VmSize its addresses."""
    found = re.search(rf"^{name}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


class Watch:
    """What became of pictures that were decoded, twice each, in this process: watched for hangs and for memory."""

    def __init__(self) -> None:
        # From here on the kernel notes the most memory anew: making the pictures may have taken more.
        Path("/proc/self/clear_refs").write_text("5")
        self.memory_before = memory_of("VmHWM")
        resource.setrlimit(resource.RLIMIT_AS, (memory_of("VmSize") + SPARE_ADDRESSES,) * 2)
        self.outcomes: dict[str, str] = {}
        self.slowest = (0.0, "")

    def decode(self, what: str, data: bytes, exact: bool) -> None:
        # The watcher is a thread that needs no interpreter: it sees a hang inside Pillow too, writes where everybody is
        # and ends the process.
        faulthandler.dump_traceback_later(2 * HANG_S, exit=True)
        begin = time.process_time()
        result, again = outcome(data, exact), outcome(data, exact)
        spent_s = (time.process_time() - begin) / 2
        faulthandler.cancel_dump_traceback_later()
        assert result == again, f"{what}: {result[0]}, then {again[0]}"
        self.outcomes[what] = result[0]
        self.slowest = max(self.slowest, (spent_s, what))

    def report(self) -> dict[str, Any]:
        return {
            "outcomes": self.outcomes,
            "slowest_s": round(self.slowest[0], 3),
            "slowest": self.slowest[1],
            "memory_mb": round((memory_of("VmHWM") - self.memory_before) / 1e6, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    arguments = parser.parse_args()
    everything()
    watch = Watch()
    chosen = itertools.islice(mutations(arguments.seed), arguments.first, arguments.first + arguments.count)
    for number, (what, data) in enumerate(chosen, arguments.first):
        watch.decode(f"number {number}, {what}", data, exact=number % 2 == 0)
    report = watch.report()
    codes = Counter(report.pop("outcomes").values())
    json.dump({"mutations": codes.total(), "codes": dict(sorted(codes.items())), **report}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
