"""One decoder: bytes -> RGB and the sha256 of the bytes, or the reason why not.

Nothing here trusts a name or a header that came with the bytes: what a picture is, its first bytes say, and
how far it reaches, its own container says. Pillow decodes; its global settings are neither changed nor relied on.
"""

import contextlib
import hashlib
import io
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from PIL import Image
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from worker.errors import ErrorCode, PairRejected

#: Larger pictures are refused by their header: 3 bytes a pixel make 256 MiB of RGB, Pillow's own limit.
MAX_PIXELS = 256 * 2**20 // 3
#: A progressive JPEG of a few kilobytes can ask for thousands of passes over its pixels; encoders write about ten.
MAX_JPEG_SCANS = 100
#: Honest JPEGs have dozens of segments. Pillow joins their notes in time that grows with the square of their number.
MAX_JPEG_SEGMENTS = 4_000
#: Pillow reads a PNG chunk by chunk in Python; some encoders write chunks of a kilobyte.
MAX_PNG_CHUNKS = 50_000
#: An error's detail is stored with the verdict: enough to understand it, no more.
MAX_DETAIL_CHARS = 200

_EXIF_ORIENTATION = 0x0112
#: What turns a picture upright, by its EXIF orientation; 1, or anything else, is upright already.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_QUARTER_TURNS = {_UPRIGHT[5], _UPRIGHT[6], _UPRIGHT[7], _UPRIGHT[8]}

#: A marker that opens a segment or ends the file. FF00 is an escaped byte, FFD0 to FFD7 lie inside scans.
_JPEG_MARKER = re.compile(rb"\xff([^\x00\x01\xff\xd0-\xd8])")
_JPEG_SCAN, _JPEG_END = 0xDA, 0xD9
_JPEG_FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}

_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
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


@dataclass(frozen=True, eq=False)
class DecodedImage:
    """A picture as it is judged.

    `width` and `height` are the whole picture's as it is displayed, in pixels; `image` is smaller than that
    where `decode_mode` is "reduced". `sha256` (32 bytes) is of the file, not of the pixels. `flags` holds
    "first_frame" for an animation, of which the rest was not looked at.
    """

    image: Image.Image
    sha256: bytes
    width: int
    height: int
    decode_mode: Literal["exact", "reduced"]
    flags: tuple[str, ...]


@dataclass(frozen=True)
class _Header:
    width: int
    height: int
    animated: bool = False


_Measurer: TypeAlias = Callable[[bytes], _Header]
_Opener: TypeAlias = Callable[[io.BytesIO], ImageFile]


def decode(data: bytes, *, target_px: int, exact: bool, max_pixels: int = MAX_PIXELS) -> DecodedImage:
    """Decode a whole JPEG, PNG, GIF or WebP into RGB: upright, opaque on white, an animation's first frame.

    `target_px` is the side of the model's square input. Unless `exact`, a JPEG is decoded at 1/2, 1/4 or 1/8
    of its size (libjpeg leaves out the high frequencies of its DCT) if both sides then still have twice that.

    Raises PairRejected: IMAGE_EMPTY, IMAGE_NOT_AN_IMAGE, IMAGE_FORMAT_UNSUPPORTED, IMAGE_TOO_MANY_PIXELS,
    IMAGE_TRUNCATED, IMAGE_CORRUPT.
    """
    measure, open_image = _sniff(data)
    try:
        header = measure(data)
        # The size is checked before Pillow sees the bytes, because some of its decoders allocate as they open.
        _check_pixels(header.width, header.height, max_pixels)
        return _decode(data, header, open_image, target_px, exact, max_pixels)
    except PairRejected:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PairRejected(ErrorCode.IMAGE_TOO_MANY_PIXELS, str(error)[:MAX_DETAIL_CHARS]) from error
    except Exception as error:
        # On hostile bytes Pillow's plug-ins raise nearly anything: OSError, SyntaxError, ValueError, struct.error,
        # IndexError, MemoryError ... There is nothing else here that could fail.
        code = ErrorCode.IMAGE_TRUNCATED if "truncated" in str(error).lower() else ErrorCode.IMAGE_CORRUPT
        raise PairRejected(code, f"{type(error).__name__}: {error}"[:MAX_DETAIL_CHARS]) from error


def _decode(
    data: bytes, header: _Header, open_image: _Opener, target_px: int, exact: bool, max_pixels: int
) -> DecodedImage:
    with open_image(io.BytesIO(data)) as image:
        width, height = image.size
        _check_pixels(width, height, max_pixels)  # A GIF's frame may be larger than its screen.
        if not exact:
            image.draft(None, (2 * target_px, 2 * target_px))  # Does nothing but for a JPEG.
        reduced = image.size != (width, height)
        image.load()
        turn = None
        # A camera's damaged notes about a sound picture are no reason to reject it: it is judged as it is stored.
        with contextlib.suppress(Exception):
            turn = _UPRIGHT.get(image.getexif().get(_EXIF_ORIENTATION, 1))
        rgb = _to_rgb(image)
    if turn is not None:
        rgb = rgb.transpose(turn)
    if turn in _QUARTER_TURNS:
        width, height = height, width
    flags = ("first_frame",) if header.animated else ()
    mode: Literal["exact", "reduced"] = "reduced" if reduced else "exact"
    return DecodedImage(rgb, hashlib.sha256(data).digest(), width, height, mode, flags)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Any mode that the four formats have, on white where it is transparent."""
    if image.mode.startswith("I;16"):
        # Pillow clips 16-bit grey at 255; the high byte is what it keeps of 16-bit colour.
        samples = np.asarray(image)
        grey = (samples >> 8).astype(np.uint8)
        grey[samples == image.info.get("transparency", -1)] = 255
        return Image.fromarray(grey).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    rgb = Image.new("RGB", rgba.size, "white")
    rgb.paste(rgba, mask=rgba.getchannel("A"))
    return rgb


def _check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise PairRejected(ErrorCode.IMAGE_CORRUPT, f"the header says {width} x {height} pixels")
    if width * height > max_pixels:
        raise PairRejected(ErrorCode.IMAGE_TOO_MANY_PIXELS, f"{width} x {height}, at most {max_pixels} pixels")


# ---- What the bytes are, and whether all of them are there ----------------------------------------------------------
#
# Pillow shows a picture as soon as it has pixels for it: it does not miss the end of a PNG or of an animation, nor
# the later frames. So each container is walked first, from block to block, up to its end mark. The walk reads no
# pixels, and gives the size before anything is allocated for it.


def _measure_jpeg(data: bytes) -> _Header:
    """ISO/IEC 10918-1, annex B: segments that begin with a marker and their length, then scans, then an end marker."""
    header, scans, at = None, 0, 2
    for _ in range(MAX_JPEG_SEGMENTS):
        found = _JPEG_MARKER.search(data, at)
        if found is None:
            raise _truncated("JPEG")
        marker, at = found[1][0], found.end()
        if marker == _JPEG_END:
            if header and scans:
                return header
            continue
        if marker in _JPEG_FRAMES and at + 7 <= len(data):
            height, width = struct.unpack_from(">HH", data, at + 3)
            header = _Header(width, height)
        scans += marker == _JPEG_SCAN
        if scans > MAX_JPEG_SCANS:
            raise PairRejected(ErrorCode.IMAGE_CORRUPT, f"more than {MAX_JPEG_SCANS} scans")
        at += int.from_bytes(data[at : at + 2], "big")
    raise PairRejected(ErrorCode.IMAGE_CORRUPT, f"more than {MAX_JPEG_SEGMENTS} segments")


def _measure_png(data: bytes) -> _Header:
    """W3C PNG, section 5: chunks of length, type, data and a checksum, from IHDR to IEND."""
    width, height = struct.unpack_from(">II", data, 16) if len(data) >= 24 else (0, 0)
    animated, at = False, len(_PNG)
    for _ in range(MAX_PNG_CHUNKS):
        if at + 12 > len(data):
            raise _truncated("PNG")
        length, chunk = struct.unpack_from(">I4s", data, at)
        animated |= chunk == b"acTL"
        at += 12 + length
        if chunk == b"IEND" and at <= len(data):
            return _Header(width, height, animated)
    raise PairRejected(ErrorCode.IMAGE_CORRUPT, f"more than {MAX_PNG_CHUNKS} chunks")


def _measure_gif(data: bytes) -> _Header:
    """GIF89a: a screen, then extensions and frames made of sub-blocks, up to the trailer."""
    frames = 0
    try:
        width, height, packed = struct.unpack_from("<HHB", data, 6)
        at = 13 + _gif_palette_bytes(packed)
        while data[at] != 0x3B:
            match data[at]:
                case 0x21:
                    at = _after_gif_blocks(data, at + 2)
                case 0x2C:
                    frames += 1
                    at = _after_gif_blocks(data, at + 11 + _gif_palette_bytes(data[at + 9]))
                case _ if frames:
                    break  # Every decoder takes junk after a whole frame for the end.
                case block:
                    raise PairRejected(ErrorCode.IMAGE_CORRUPT, f"a GIF with a block 0x{block:02x}")
    except (IndexError, struct.error):
        raise _truncated("GIF") from None
    return _Header(width, height, animated=frames > 1)


def _gif_palette_bytes(packed: int) -> int:
    return 3 << ((packed & 7) + 1) if packed & 0x80 else 0


def _after_gif_blocks(data: bytes, at: int) -> int:
    while data[at]:
        at += data[at] + 1
    return at + 1


def _measure_webp(data: bytes) -> _Header:
    """RFC 9649: a RIFF file that states its length, and its size in the first chunk, in one of three ways."""
    if len(data) < 30 or len(data) < 8 + int.from_bytes(data[4:8], "little"):
        raise _truncated("WebP")
    match data[12:16]:
        case b"VP8 ":
            width, height = struct.unpack_from("<HH", data, 26)
            return _Header(width & 0x3FFF, height & 0x3FFF)
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            return _Header((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
        case b"VP8X":
            width, height = int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
            return _Header(width, height, animated=bool(data[20] & 0x02))
        case chunk:
            raise PairRejected(ErrorCode.IMAGE_CORRUPT, f"a WebP that begins with a chunk {chunk!r}")


def _sniff(data: bytes) -> tuple[_Measurer, _Opener]:
    """How to measure and how to open what these bytes begin."""
    if not data:
        raise PairRejected(ErrorCode.IMAGE_EMPTY, "no bytes")
    for signature, measure, open_image in _KINDS:
        if signature.match(data):
            return measure, open_image
    if any(start.startswith(data) for start in (_JPEG, _PNG, b"GIF87a", b"GIF89a", b"RIFF" + data[4:12])):
        raise PairRejected(ErrorCode.IMAGE_TRUNCATED, f"only {len(data)} bytes")
    for start, name in _UNSUPPORTED:
        if data.startswith(start):
            raise PairRejected(ErrorCode.IMAGE_FORMAT_UNSUPPORTED, f"{name}: {_ACCEPTED}")
    if data[4:8] == b"ftyp":  # ISO base media: AVIF, HEIC, and films.
        raise PairRejected(ErrorCode.IMAGE_FORMAT_UNSUPPORTED, f"{data[8:12]!r}: {_ACCEPTED}")
    raise PairRejected(ErrorCode.IMAGE_NOT_AN_IMAGE, f"begins with {data[:16]!r}")


def _truncated(kind: str) -> PairRejected:
    return PairRejected(ErrorCode.IMAGE_TRUNCATED, f"the {kind} ends before its end mark")


#: The four kinds: their first bytes, the walk through their container, and the one plug-in that may open them. Going
#: by the class and not through Image.open leaves out every other plug-in, and Pillow's own limit with its warnings.
_KINDS: tuple[tuple[re.Pattern[bytes], _Measurer, _Opener], ...] = (
    (re.compile(_JPEG), _measure_jpeg, JpegImageFile),
    (re.compile(_PNG), _measure_png, PngImageFile),
    (re.compile(b"GIF8[79]a"), _measure_gif, GifImageFile),
    (re.compile(b"RIFF....WEBP", re.DOTALL), _measure_webp, WebPImageFile),
)
