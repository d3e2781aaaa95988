"""What bytes are, whether all of them are there, and the little of them that pixels need.

Pillow shows a picture as soon as it has pixels for it: it does not miss the end of a PNG or of an animation, nor the
later frames. So each container is walked first, from block to block, up to its end mark. The walk reads no pixels, and
gives the size before anything is allocated for it.

A picture's notes (EXIF, colour profiles, texts, comments, previews) are where hostile files hide work and memory: ten
thousand compressed profiles in a PNG cost Pillow twenty seconds, a comment of one-byte blocks in a GIF a gigabyte. No
pixel depends on them, so the file that is handed on to Pillow has none; the one note that matters, how a camera was
held, is read here.
"""

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from worker.errors import ErrorCode, PairRejected

#: A progressive JPEG of a few kilobytes can ask for thousands of passes over its pixels; encoders write about ten.
MAX_JPEG_SCANS = 100
#: Honest JPEGs have dozens of segments.
MAX_JPEG_SEGMENTS = 4_000
#: Some encoders write chunks of a kilobyte.
MAX_PNG_CHUNKS = 50_000
#: Extensions, frames and their sub-blocks, which hold 255 bytes each: a file of 32 MB has some 130,000.
MAX_GIF_BLOCKS = 500_000

_ACCEPTED = "convert it to JPEG, PNG, GIF or WebP"
#: Pictures that are recognised in order to be refused by name.
_UNSUPPORTED = (
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"8BPS", "Photoshop"),
    (b"\0\0\1\0", "ICO"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"<svg", "SVG"),
)

Kind: TypeAlias = Literal["JPEG", "PNG", "GIF", "WebP"]


@dataclass(frozen=True)
class Container:
    """A picture of which nothing is missing.

    `width` and `height` are in pixels, before it is turned upright. `data` is a file of the same kind with the first
    picture alone, without notes; `exif` is the EXIF note (a TIFF header and what follows it), empty where there is
    none. `scans` counts the passes over a JPEG's pixels; `one_pass` says that it is read row by row.
    """

    kind: Kind
    width: int
    height: int
    data: bytes
    exif: bytes = b""
    animated: bool = False
    scans: int = 1
    one_pass: bool = False

    @property
    def pixels(self) -> int:
        return self.width * self.height


def read_container(data: bytes) -> Container:
    """Walk a whole JPEG, PNG, GIF or WebP.

    Raises PairRejected: IMAGE_EMPTY, IMAGE_NOT_AN_IMAGE, IMAGE_FORMAT_UNSUPPORTED, IMAGE_TRUNCATED, IMAGE_CORRUPT.
    """
    if not data:
        raise PairRejected(ErrorCode.IMAGE_EMPTY, "no bytes")
    for signature, read in _KINDS:
        if signature.match(data):
            return read(data)
    if any(start.startswith(data) for start in (_JPEG, _PNG, b"GIF87a", b"GIF89a", b"RIFF" + data[4:12])):
        raise PairRejected(ErrorCode.IMAGE_TRUNCATED, f"only {len(data)} bytes")
    for start, name in _UNSUPPORTED:
        if data.startswith(start):
            raise PairRejected(ErrorCode.IMAGE_FORMAT_UNSUPPORTED, f"{name}: {_ACCEPTED}")
    if data[4:8] == b"ftyp":  # ISO base media: AVIF, HEIC, and films.
        raise PairRejected(ErrorCode.IMAGE_FORMAT_UNSUPPORTED, f"{data[8:12]!r}: {_ACCEPTED}")
    raise PairRejected(ErrorCode.IMAGE_NOT_AN_IMAGE, f"begins with {data[:16]!r}")


def orientation_of(exif: bytes) -> int:
    """How the camera was held, 1 to 8; 1, upright, where a note does not say so or is damaged.

    TIFF 6.0, section 2: a header, and entries of 12 bytes in the directory to which it points.
    """
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(f"{order}I", exif, 4)
        (entries,) = struct.unpack_from(f"{order}H", exif, directory)
        for entry in range(entries):
            tag, kind, count, value = struct.unpack_from(f"{order}HHI4s", exif, directory + 2 + 12 * entry)
            if tag == 0x0112 and count == 1 and kind in (1, 3, 4):
                (orientation,) = struct.unpack_from(order + {1: "B", 3: "H", 4: "I"}[kind], value)
                return orientation if 1 <= orientation <= 8 else 1
    except struct.error:
        pass
    return 1


# ---- JPEG -----------------------------------------------------------------------------------------------------------

_JPEG = b"\xff\xd8\xff"
#: A marker that opens a segment or ends the file. FF00 is an escaped byte, FFD0 to FFD7 lie inside scans.
_JPEG_MARKER = re.compile(rb"\xff([^\x00\x01\xff\xd0-\xd8])")
_JPEG_SCAN, _JPEG_END, _JPEG_EXIF = 0xDA, 0xD9, 0xE1
#: Huffman or arithmetic coded, sequential or progressive; the others are hierarchical, or lossless.
_JPEG_FRAMES, _JPEG_PROGRESSIVE = {0xC0, 0xC1, 0xC2, 0xC9, 0xCA}, {0xC2, 0xCA}
_JPEG_RARE_FRAMES = set(range(0xC3, 0xD0)) - _JPEG_FRAMES - {0xC4, 0xC8, 0xCC}
#: Comments, and application segments but for JFIF's and Adobe's, which say what the channels are.
_JPEG_NOTES = {*range(0xE1, 0xF0), 0xFE} - {0xEE}


def _read_jpeg(data: bytes) -> Container:
    """ISO/IEC 10918-1, annex B: segments that begin with a marker and their length, then scans, then an end marker."""
    kept, exif, frame, scan = [b"\xff\xd8"], b"", b"", b""
    scans, first_scan, at = 0, 0, 2
    for _ in range(MAX_JPEG_SEGMENTS):
        found = _JPEG_MARKER.search(data, at)
        if found is None:
            raise _truncated("JPEG")
        marker, begin, at = found[1][0], found.start(), found.end()
        if marker == _JPEG_END:
            if frame and scan:
                break
            continue
        segment = data[begin : at + int.from_bytes(data[at : at + 2], "big")]
        at = max(at, begin + len(segment))
        if marker == _JPEG_SCAN:
            scan, first_scan = scan or segment, first_scan or begin
            scans += 1
            if scans > MAX_JPEG_SCANS:
                raise PairRejected(ErrorCode.IMAGE_CORRUPT, f"more than {MAX_JPEG_SCANS} scans")
        elif not scan:
            if marker in _JPEG_RARE_FRAMES:
                raise PairRejected(ErrorCode.IMAGE_FORMAT_UNSUPPORTED, f"a JPEG of kind 0x{marker:02x}: {_ACCEPTED}")
            if marker in _JPEG_FRAMES and len(segment) >= 10:
                frame = segment
            if marker == _JPEG_EXIF and segment[4:10] == b"Exif\0\0":
                exif = exif or segment[10:]
            if marker not in _JPEG_NOTES:
                kept.append(segment)
    else:
        raise PairRejected(ErrorCode.IMAGE_CORRUPT, f"more than {MAX_JPEG_SEGMENTS} segments")
    height, width, channels = struct.unpack_from(">HHB", frame, 5)
    # Only where the first scan has all channels, and it is the only one, can the picture be read row by row.
    one_pass = scans == 1 and frame[1] not in _JPEG_PROGRESSIVE and scan[4:5] == bytes([channels])
    whole = b"".join(kept) + data[first_scan:at]
    return Container("JPEG", width, height, whole, exif, scans=scans, one_pass=one_pass)


# ---- PNG ------------------------------------------------------------------------------------------------------------

_PNG = b"\x89PNG\r\n\x1a\n"
#: Chunks that pixels depend on; of an animation these are its first frame, or what stands for it.
_PNG_NEEDED = (b"PLTE", b"tRNS", b"IDAT", b"IEND")


def _read_png(data: bytes) -> Container:
    """W3C PNG, section 5: chunks of length, type, data and a checksum, from IHDR to IEND."""
    if len(data) < 33:
        raise _truncated("PNG")
    if data[8:16] != b"\0\0\0\rIHDR":
        raise PairRejected(ErrorCode.IMAGE_CORRUPT, f"a PNG that begins with a chunk {data[12:16]!r}")
    width, height = struct.unpack_from(">II", data, 16)
    kept, exif, animated, at = [data[:33]], b"", False, 33
    for _ in range(MAX_PNG_CHUNKS):
        if at + 12 > len(data):
            raise _truncated("PNG")
        length, kind = struct.unpack_from(">I4s", data, at)
        begin, at = at, at + 12 + length
        if kind in _PNG_NEEDED:
            kept.append(data[begin:at])
        animated |= kind == b"acTL"
        if kind == b"eXIf":
            exif = data[begin + 8 : at - 4].removeprefix(b"Exif\0\0")
        if kind == b"IEND" and at <= len(data):
            return Container("PNG", width, height, b"".join(kept), exif, animated)
    raise PairRejected(ErrorCode.IMAGE_CORRUPT, f"more than {MAX_PNG_CHUNKS} chunks")


# ---- GIF ------------------------------------------------------------------------------------------------------------

_GIF_CONTROL, _GIF_EXTENSION, _GIF_FRAME, _GIF_END = 0xF9, 0x21, 0x2C, 0x3B


def _read_gif(data: bytes) -> Container:
    """GIF89a: a screen, then extensions and frames made of sub-blocks, up to the trailer."""
    control, first, frames, blocks = b"", b"", 0, 0
    try:
        width, height, packed = struct.unpack_from("<HHB", data, 6)
        at = screen = 13 + _gif_palette_bytes(packed)
        while data[at] != _GIF_END:
            begin, kind = at, data[at]
            if kind == _GIF_EXTENSION:
                at += 2
            elif kind == _GIF_FRAME:
                at += 11 + _gif_palette_bytes(data[at + 9])
                frames += 1
            elif frames:
                break  # Every decoder takes junk after a whole frame for the end.
            else:
                raise PairRejected(ErrorCode.IMAGE_CORRUPT, f"a GIF with a block 0x{kind:02x}")
            while True:
                blocks += 1
                if blocks > MAX_GIF_BLOCKS:
                    raise PairRejected(ErrorCode.IMAGE_CORRUPT, f"more than {MAX_GIF_BLOCKS} blocks")
                length = data[at]
                at += length + 1
                if not length:
                    break
            if kind == _GIF_FRAME and frames == 1:
                first = data[begin:at]
                left, top, wide, high = struct.unpack_from("<HHHH", first, 1)
                # A frame that is larger than its screen makes the picture larger.
                width, height = max(width, left + wide), max(height, top + high)
            elif kind == _GIF_EXTENSION and data[begin + 1] == _GIF_CONTROL and not frames:
                control = data[begin:at]
    except (IndexError, struct.error):
        raise _truncated("GIF") from None
    if not frames:
        raise PairRejected(ErrorCode.IMAGE_CORRUPT, "a GIF without a frame")
    whole = data[:screen] + control + first + bytes([_GIF_END])
    return Container("GIF", width, height, whole, animated=frames > 1)


def _gif_palette_bytes(packed: int) -> int:
    return 3 << ((packed & 7) + 1) if packed & 0x80 else 0


# ---- WebP -----------------------------------------------------------------------------------------------------------


def _read_webp(data: bytes) -> Container:
    """RFC 9649: a RIFF file that states its length, and its size in the first chunk, in one of three ways."""
    end = 8 + int.from_bytes(data[4:8], "little")
    if len(data) < 30 or len(data) < end:
        raise _truncated("WebP")
    animated = False
    match data[12:16]:
        case b"VP8 ":
            width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8X":
            width, height = int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
            animated = bool(data[20] & 0x02)
        case chunk:
            raise PairRejected(ErrorCode.IMAGE_CORRUPT, f"a WebP that begins with a chunk {chunk!r}")
    return Container("WebP", width, height, data[:end], _webp_exif(data, end), animated)


def _webp_exif(data: bytes, end: int) -> bytes:
    """The EXIF chunk, if it is among the first; libwebp, which walks the other chunks, does it in no time."""
    at = 12
    for _ in range(MAX_PNG_CHUNKS):
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        if at + 8 + length > end:
            break
        if data[at : at + 4] == b"EXIF":
            return data[at + 8 : at + 8 + length].removeprefix(b"Exif\0\0")
        at += 8 + length + length % 2
    return b""


def _truncated(kind: Kind) -> PairRejected:
    return PairRejected(ErrorCode.IMAGE_TRUNCATED, f"the {kind} ends before its end mark")


#: The four kinds by their first bytes.
_KINDS: tuple[tuple[re.Pattern[bytes], Callable[[bytes], Container]], ...] = (
    (re.compile(_JPEG), _read_jpeg),
    (re.compile(_PNG), _read_png),
    (re.compile(b"GIF8[79]a"), _read_gif),
    (re.compile(b"RIFF....WEBP", re.DOTALL), _read_webp),
)
