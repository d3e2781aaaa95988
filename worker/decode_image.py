"""One decoder: bytes -> RGB and the sha256 of the bytes, or the reason why not.

Nothing here trusts a name or a header that came with the bytes: what a picture is, its first bytes say, and how far it
reaches, its own container says (worker/image_containers.py). Pillow decodes; its global settings are neither changed
nor relied on.
"""

import hashlib
import io
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image
from PIL import ImageFile as pillow_files
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from worker.errors import ConcordError, ErrorCode, PairRejected, TryLater
from worker.image_containers import Container, Kind, orientation_of, read_container

#: Larger pictures are refused by their header. A picture takes up to 20 bytes a pixel while it is decoded.
MAX_PIXELS = 100_000_000
#: Of a JPEG or a GIF no side can be longer. To squeeze a longer one takes more memory than its pixels do.
MAX_SIDE_PX = 65_535
#: Each scan of a progressive JPEG is another pass over its pixels; encoders write about ten. A picture with the most
#: pixels may have no more than this, smaller ones accordingly more: so many passes take a second or two.
MAX_SCANS_OF_THE_LARGEST = 25
#: An error's detail is stored with the verdict: enough to understand it, no more.
MAX_DETAIL_CHARS = 200

#: What turns a picture upright, by its EXIF orientation; 1 is upright already.
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

#: The one plug-in that may open each kind. Going by the class and not through Image.open leaves out every other
#: plug-in, and Pillow's own limit with its warnings.
_OPENERS: Mapping[Kind, Callable[[io.BytesIO], ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "GIF": GifImageFile,
    "WebP": WebPImageFile,
}


@dataclass(frozen=True, eq=False)
class DecodedImage:
    """A picture as it is judged.

    `width` and `height` are the whole picture's as it is displayed, in pixels; `image` is smaller where it was squeezed
    or where `decode_mode` is "reduced". `sha256` (32 bytes) is of the file, not of the pixels. `flags` holds
    "first_frame" for an animation, of which the rest was not looked at.
    """

    image: Image.Image
    sha256: bytes
    width: int
    height: int
    decode_mode: Literal["exact", "reduced"]
    flags: tuple[str, ...]


class Room:
    """Room for a number of pixels in memory, for which threads stand in line."""

    def __init__(self) -> None:
        self._line = threading.Lock()
        self._changed = threading.Condition()
        self._taken = 0

    @contextmanager
    def of(self, pixels: int, limit: int) -> Iterator[None]:
        """Wait until `pixels` with those of all others are at most `limit`, or there are no others."""
        # Who is at the head of the line keeps it, so that many small pictures do not keep a large one waiting for ever.
        with self._line, self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + pixels <= limit)
            self._taken += pixels
        try:
            yield
        finally:
            with self._changed:
                self._taken -= pixels
                self._changed.notify_all()


#: Memory is the process's, whoever decodes in it.
_room = Room()


def decode(
    data: bytes, *, target_px: int, exact: bool, max_pixels: int = MAX_PIXELS, squeeze: bool = True
) -> DecodedImage:
    """Decode a whole JPEG, PNG, GIF or WebP into RGB: upright, opaque on white, an animation's first frame.

    `target_px` is the side of the model's square input. Unless `exact`, a JPEG is decoded at 1/2, 1/4 or 1/8 of its
    size (libjpeg leaves out the high frequencies of its DCT) if both sides then still have twice that. What then has
    more pixels than the model reads is squeezed to its input by the very resampling that would be done later, so that
    the pictures of a batch wait in little memory; without `squeeze` it is left as it is.

    Any number of threads may call this: pictures that are decoded at the same time have at most `max_pixels` together,
    and a thread waits for its turn.

    Raises PairRejected: IMAGE_EMPTY, IMAGE_NOT_AN_IMAGE, IMAGE_FORMAT_UNSUPPORTED, IMAGE_TOO_MANY_PIXELS,
    IMAGE_TRUNCATED, IMAGE_CORRUPT; and TryLater where this machine is out of memory.
    """
    if pillow_files.LOAD_TRUNCATED_IMAGES:
        raise ConcordError("PIL.ImageFile.LOAD_TRUNCATED_IMAGES is set, which lets half pictures pass: unset it")
    container = read_container(data)
    width, height = container.width, container.height
    if width < 1 or height < 1:
        raise PairRejected(ErrorCode.IMAGE_CORRUPT, f"the header says {width} x {height} pixels")
    # The size is checked before Pillow sees the bytes, because some of its decoders allocate as they open.
    if container.pixels > max_pixels or max(width, height) > MAX_SIDE_PX:
        limit = f"at most {max_pixels} pixels and {MAX_SIDE_PX} a side"
        raise PairRejected(ErrorCode.IMAGE_TOO_MANY_PIXELS, f"{width} x {height}, {limit}")
    if container.scans * container.pixels > MAX_SCANS_OF_THE_LARGEST * max_pixels:
        raise PairRejected(ErrorCode.IMAGE_CORRUPT, f"{container.scans} scans of {width} x {height} pixels")
    reduce_to = None if exact else 2 * target_px
    turn = _UPRIGHT.get(orientation_of(container.exif))
    try:
        with _room.of(_pixels_in_memory(container, reduce_to), max_pixels):
            image = _to_rgb(container, reduce_to)
            reduced = image.size != (width, height)
            if turn is not None:
                image = image.transpose(turn)
            if squeeze and image.width * image.height > target_px**2:
                image = image.resize((target_px, target_px), Image.Resampling.BICUBIC)
            if isinstance(image, ImageFile):
                image = image.copy()  # Without the file behind it.
    except MemoryError as error:
        detail = f"no memory for a picture of {width} x {height} pixels"
        raise TryLater(ErrorCode.INTERNAL_ERROR, detail) from error
    if turn in _QUARTER_TURNS:
        width, height = height, width
    mode: Literal["exact", "reduced"] = "reduced" if reduced else "exact"
    flags = ("first_frame",) if container.animated else ()
    return DecodedImage(image, hashlib.sha256(data).digest(), width, height, mode, flags)


def _pixels_in_memory(container: Container, reduce_to: int | None) -> int:
    """How many pixels are in memory while it is decoded; Pillow's `draft` says by how much a JPEG is reduced."""
    if reduce_to is None or not container.one_pass:
        return container.pixels
    times = min(container.width // reduce_to, container.height // reduce_to)
    return container.pixels // max(scale for scale in (1, 2, 4, 8) if scale <= max(times, 1)) ** 2


def _to_rgb(container: Container, reduce_to: int | None) -> Image.Image:
    """The picture as it is stored. Raises MemoryError, and PairRejected for whatever else Pillow raises."""
    try:
        with _OPENERS[container.kind](io.BytesIO(container.data)) as image:
            if image.size != (container.width, container.height):
                raise PairRejected(ErrorCode.IMAGE_CORRUPT, f"its headers disagree about its size, {image.size}")
            if reduce_to is not None:
                image.draft(None, (reduce_to, reduce_to))  # Does nothing but for a JPEG.
            image.load()
            return _on_white(image)
    except (PairRejected, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PairRejected(ErrorCode.IMAGE_TOO_MANY_PIXELS, str(error)[:MAX_DETAIL_CHARS]) from error
    except Exception as error:
        # On hostile bytes Pillow's plug-ins raise nearly anything: OSError, SyntaxError, ValueError, struct.error,
        # IndexError ... There is nothing else here that could fail.
        code = ErrorCode.IMAGE_TRUNCATED if "truncated" in str(error).lower() else ErrorCode.IMAGE_CORRUPT
        raise PairRejected(code, f"{type(error).__name__}: {error}"[:MAX_DETAIL_CHARS]) from error


def _on_white(image: Image.Image) -> Image.Image:
    """Any mode that the four formats have, on white where it is transparent."""
    if image.mode.startswith("I;16"):
        # Pillow clips 16-bit grey at 255; the high byte is what it keeps of 16-bit colour.
        samples = np.asarray(image)
        grey = (samples >> 8).astype(np.uint8)
        grey[samples == image.info.get("transparency", -1)] = 255
        return Image.fromarray(grey).convert("RGB")
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    rgba = image if image.mode == "RGBA" else image.convert("RGBA")
    rgb = Image.new("RGB", rgba.size, "white")
    rgb.paste(rgba, mask=rgba)
    return rgb
