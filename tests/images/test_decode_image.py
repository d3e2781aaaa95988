"""The decoder, on pictures that are made here: what each kind becomes, and what is refused and why."""

import hashlib
import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from worker import image_containers
from worker.decode_image import DecodedImage, decode
from worker.errors import ErrorCode, PairRejected

TARGET_PX = 32
WHITE, RED, GREEN, BLUE = (255, 255, 255), (255, 0, 0), (0, 255, 0), (0, 0, 255)


def photo(width: int = 96, height: int = 64, seed: int = 0) -> Image.Image:
    """Coloured blocks with some noise, which no codec stores in a handful of bytes."""
    random = np.random.default_rng(seed)
    blocks = random.integers(30, 226, (-(-height // 16), -(-width // 16), 3))
    pixels = np.kron(blocks, np.ones((16, 16, 1), dtype=int))[:height, :width]
    return Image.fromarray((pixels + random.integers(-20, 21, pixels.shape)).astype(np.uint8))


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *chunks: bytes) -> bytes:
    """A PNG from its raw rows, each of which begins with its filter byte."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    data = png_chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + data + png_chunk(b"IEND", b"")


def decoded(data: bytes, *, exact: bool = True, target_px: int = TARGET_PX) -> DecodedImage:
    result = decode(data, target_px=target_px, exact=exact, squeeze=False)
    assert result.image.mode == "RGB"
    assert result.sha256 == hashlib.sha256(data).digest()
    return result


def pixels(data: bytes) -> NDArray[np.uint8]:
    return np.asarray(decoded(data).image)


def plain(data: bytes) -> NDArray[np.uint8]:
    """What Pillow makes of the bytes without any of our treatment."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def rejection(data: bytes, **limits: Any) -> ErrorCode:
    with pytest.raises(PairRejected) as caught:
        decode(data, target_px=TARGET_PX, exact=False, **limits)
    assert 0 < len(caught.value.detail) <= 200
    return caught.value.code


def two_frames(format: str) -> bytes:
    second = Image.new("RGB", (96, 64), "blue")
    return saved(photo(), format, save_all=True, append_images=[second], duration=100)


WHOLE = {
    "jpeg": saved(photo(), "JPEG"),
    "jpeg with restart markers": saved(photo(), "JPEG", restart_marker_blocks=4),
    "progressive jpeg": saved(photo(), "JPEG", progressive=True),
    "png": saved(photo(), "PNG"),
    "gif": saved(photo(), "GIF"),
    "webp": saved(photo(), "WEBP"),
    "lossless webp": saved(photo(), "WEBP", lossless=True),
    "webp with alpha": saved(photo().convert("RGBA"), "WEBP", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0"),
    "animated gif": two_frames("GIF"),
    "animated webp": two_frames("WEBP"),
    "animated png": two_frames("PNG"),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_whole_picture_has_the_very_pixels_of_a_plain_decode(kind: str) -> None:
    result = decoded(WHOLE[kind])
    assert np.array_equal(np.asarray(result.image), plain(WHOLE[kind]))
    assert (result.width, result.height, result.decode_mode) == (96, 64, "exact")
    assert result.flags == (("first_frame",) if "animated" in kind else ())


@pytest.mark.parametrize("kind", WHOLE)
def test_a_picture_cut_anywhere_is_rejected_as_truncated(kind: str) -> None:
    data = WHOLE[kind]
    cuts = {*range(3, 64), *np.linspace(64, len(data) - 1, 60, dtype=int).tolist(), *range(len(data) - 40, len(data))}
    for cut in sorted(cuts):
        assert rejection(data[:cut]) == ErrorCode.IMAGE_TRUNCATED, f"the first {cut} of {len(data)} bytes"


def test_a_picture_that_ends_early_inside_a_whole_container_is_truncated() -> None:
    data = WHOLE["png"]
    begin, end = data.index(b"IDAT") + 4, data.index(b"IEND") - 8
    half = png_chunk(b"IDAT", data[begin : (begin + end) // 2])
    assert rejection(data[: begin - 8] + half + png_chunk(b"IEND", b"")) == ErrorCode.IMAGE_TRUNCATED


@pytest.mark.parametrize("kind", [kind for kind in WHOLE if "webp" not in kind])
def test_bytes_after_the_end_do_no_harm(kind: str) -> None:
    assert np.array_equal(pixels(WHOLE[kind] + b"\0" * 100), pixels(WHOLE[kind]))


def test_a_jpeg_of_zeros_after_a_cut_is_truncated() -> None:
    data = WHOLE["jpeg"]
    assert rejection(data[: len(data) // 2] + bytes(len(data))) == ErrorCode.IMAGE_TRUNCATED


def test_a_damaged_png_is_corrupt() -> None:
    data = bytearray(png(200, 1, 8, 0, b"\0" + bytes(range(200))))
    data[data.index(b"IDAT") + 20] ^= 0x55
    assert rejection(bytes(data)) == ErrorCode.IMAGE_CORRUPT


@pytest.mark.parametrize("kind", WHOLE)
def test_damaged_bytes_never_raise_anything_but_a_rejection(kind: str) -> None:
    random = np.random.default_rng(7)
    codes = set()
    for _ in range(60):
        data = bytearray(WHOLE[kind])
        for position in random.integers(12, len(data), 20):
            data[position] = random.integers(256)
        try:
            decode(bytes(data), target_px=TARGET_PX, exact=False, max_pixels=10**6)
        except PairRejected as error:
            codes.add(error.code)
    assert codes
    assert codes <= {
        ErrorCode.IMAGE_CORRUPT, ErrorCode.IMAGE_TRUNCATED, ErrorCode.IMAGE_TOO_MANY_PIXELS,
        ErrorCode.IMAGE_FORMAT_UNSUPPORTED,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", ErrorCode.IMAGE_EMPTY),
        (b"<!DOCTYPE html><html><body>404</body></html>", ErrorCode.IMAGE_NOT_AN_IMAGE),
        (b"%PDF-1.7\n", ErrorCode.IMAGE_NOT_AN_IMAGE),
        (bytes(1000), ErrorCode.IMAGE_NOT_AN_IMAGE),
        (b"\xff\xd8", ErrorCode.IMAGE_TRUNCATED),
        (b"\x89PNG", ErrorCode.IMAGE_TRUNCATED),
        (b"RIFF\x10\0\0\0", ErrorCode.IMAGE_TRUNCATED),
        (saved(photo(), "BMP"), ErrorCode.IMAGE_FORMAT_UNSUPPORTED),
        (saved(photo(), "TIFF"), ErrorCode.IMAGE_FORMAT_UNSUPPORTED),
        (b"\0\0\0\x20ftypavif" + bytes(100), ErrorCode.IMAGE_FORMAT_UNSUPPORTED),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', ErrorCode.IMAGE_FORMAT_UNSUPPORTED),
        (b"RIFF\x20\0\0\0WEBPXXXX" + bytes(40), ErrorCode.IMAGE_CORRUPT),
        (b"GIF89a" + struct.pack("<HHBBB", 9, 9, 0, 0, 0) + b"\x99;", ErrorCode.IMAGE_CORRUPT),
        (png(0, 5, 8, 2, b""), ErrorCode.IMAGE_CORRUPT),
    ],
)
def test_what_is_no_picture_is_refused_by_its_first_bytes(data: bytes, code: ErrorCode) -> None:
    assert rejection(data) == code


def jpeg_bomb(width: int, height: int) -> bytes:
    frame = struct.pack(">HBHHB", 17, 8, height, width, 3) + bytes([1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0])
    scan = struct.pack(">HB", 12, 3) + bytes([1, 0, 2, 0, 3, 0, 0, 63, 0])
    return b"\xff\xd8\xff\xc0" + frame + b"\xff\xda" + scan + b"\0\0\xff\xd9"


def gif_frame(width: int, height: int) -> bytes:
    return b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\0"


def gif(width: int, height: int, frame: bytes) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0) + frame + b";"


def webp_canvas(width: int, height: int) -> bytes:
    canvas = b"\0\0\0\0" + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", 30) + b"WEBPVP8X" + struct.pack("<I", 10) + canvas + bytes(8)


@pytest.mark.parametrize(
    "bomb",
    [
        pytest.param(png(60_000, 60_000, 8, 2, b"\0" * 1000), id="png"),
        pytest.param(jpeg_bomb(60_000, 60_000), id="jpeg"),
        pytest.param(gif(60_000, 60_000, gif_frame(1, 1)), id="gif screen"),
        pytest.param(gif(1, 1, gif_frame(60_000, 60_000)), id="gif frame"),
        pytest.param(webp_canvas(60_000, 60_000), id="webp"),
    ],
)
def test_a_picture_of_60000_by_60000_pixels_is_refused_by_its_header(bomb: bytes) -> None:
    assert len(bomb) < 2000
    assert rejection(bomb) == ErrorCode.IMAGE_TOO_MANY_PIXELS


def test_the_pixel_limit_is_the_callers() -> None:
    data = saved(photo(20, 10), "PNG")
    assert rejection(data, max_pixels=199) == ErrorCode.IMAGE_TOO_MANY_PIXELS
    assert decode(data, target_px=TARGET_PX, exact=True, max_pixels=200).width == 20


def test_a_jpeg_with_endless_scans_is_refused() -> None:
    data = WHOLE["progressive jpeg"]
    scans = [at for at in range(len(data)) if data[at : at + 2] == b"\xff\xda"]
    last_scan = data[scans[-1] : -2]
    bomb = data[:-2] + last_scan * image_containers.MAX_JPEG_SCANS + b"\xff\xd9"
    assert rejection(bomb) == ErrorCode.IMAGE_CORRUPT


def test_a_picture_of_endless_blocks_is_refused() -> None:
    segments = b"\xff\xd8" + b"\xff\xfe\0\2" * image_containers.MAX_JPEG_SEGMENTS + WHOLE["jpeg"][2:]
    assert rejection(segments) == ErrorCode.IMAGE_CORRUPT
    chunks = png_chunk(b"teXt", b"") * image_containers.MAX_PNG_CHUNKS
    assert rejection(png(1, 1, 8, 0, b"\0\0", chunks)) == ErrorCode.IMAGE_CORRUPT


@pytest.mark.parametrize("size", [(1, 1), (20, 4000), (4000, 20), (3, 1)])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP"])
def test_any_shape_is_decoded_whole(format: str, size: tuple[int, int]) -> None:
    data = saved(photo(*size), format)
    result = decoded(data, exact=False)
    assert (result.width, result.height, result.decode_mode) == (*size, "exact")
    assert np.array_equal(np.asarray(result.image), plain(data))


# ---- Colours --------------------------------------------------------------------------------------------------------


def test_grey_becomes_three_equal_channels() -> None:
    for format in ("JPEG", "PNG", "GIF"):
        result = pixels(saved(photo().convert("L"), format))
        assert np.array_equal(result[..., 0], result[..., 1])
        assert np.array_equal(result[..., 0], result[..., 2])


def test_cmyk_is_read_with_and_without_adobes_marker() -> None:
    # Pillow writes the four channels inverted, as Adobe's programs do, and marks the file so. This colour is red.
    data = saved(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95)
    adobe = data.index(b"\xff\xee")
    unmarked = data[:adobe] + data[adobe + 2 + int.from_bytes(data[adobe + 2 : adobe + 4], "big") :]
    assert b"Adobe" in data
    assert b"Adobe" not in unmarked
    for picture in (data, unmarked):
        assert np.abs(pixels(picture).astype(int) - RED).max() <= 3


def test_sixteen_bit_grey_is_scaled_and_not_clipped() -> None:
    samples = np.array([0, 255, 256, 0x8000, 0xFFFF], dtype=">u2")
    assert pixels(png(5, 1, 16, 0, b"\0" + samples.tobytes()))[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_sixteen_bit_grey_is_white_where_its_key_makes_it_transparent() -> None:
    samples = np.array([0, 0x8000], dtype=">u2")
    key = png_chunk(b"tRNS", struct.pack(">H", 0))
    assert pixels(png(2, 1, 16, 0, b"\0" + samples.tobytes(), key))[0, :, 0].tolist() == [255, 128]


def test_sixteen_bit_colour_keeps_its_high_bytes() -> None:
    samples = np.array([0xFF00, 0x8000, 0x00FF], dtype=">u2")
    assert pixels(png(1, 1, 16, 2, b"\0" + samples.tobytes())).tolist() == [[[255, 128, 0]]]


def test_a_palette_with_transparency_lies_on_white() -> None:
    palette = png_chunk(b"PLTE", bytes([*RED, *GREEN, *BLUE]))
    alpha = png_chunk(b"tRNS", bytes([255, 0, 127]))
    result = pixels(png(3, 1, 8, 3, b"\0\0\1\2", palette, alpha))
    assert result[0, 0].tolist() == list(RED)
    assert result[0, 1].tolist() == list(WHITE)
    assert result[0, 2].tolist() == [128, 128, 255]


def test_transparent_pictures_lie_on_white() -> None:
    half_red = Image.new("RGBA", (8, 8), (255, 0, 0, 127))
    for data in (saved(half_red, "PNG"), saved(half_red, "WEBP", lossless=True)):
        assert pixels(data)[4, 4].tolist() == [255, 128, 128]
    grey_with_alpha = saved(Image.new("LA", (8, 8), (0, 0)), "PNG")
    assert pixels(grey_with_alpha)[4, 4].tolist() == list(WHITE)
    keyed_rgb = png(2, 1, 8, 2, b"\0" + bytes([*RED, *BLUE]), png_chunk(b"tRNS", struct.pack(">HHH", *BLUE)))
    assert pixels(keyed_rgb).tolist() == [[list(RED), list(WHITE)]]


def test_the_uncovered_part_of_a_transparent_gif_is_white() -> None:
    image = Image.new("P", (4, 4), 0)
    image.putpalette([*BLUE, *RED])
    image.putpixel((1, 1), 1)
    result = pixels(saved(image, "GIF", transparency=0))
    assert result[0, 0].tolist() == list(WHITE)
    assert result[1, 1].tolist() == list(RED)


def test_the_first_frame_of_an_animation_is_judged_and_flagged() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for format, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        result = decoded(saved(frames[0], format, save_all=True, append_images=frames[1:], **options))
        assert result.image.getpixel((4, 4)) == RED
        assert result.flags == ("first_frame",)


# ---- Orientation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_every_exif_orientation_is_applied(format: str, orientation: int) -> None:
    corners = Image.new("RGB", (64, 32), "white")
    corners.paste("red", (0, 0, 32, 16))  # upper left, as displayed
    corners.paste("blue", (32, 16, 64, 32))  # lower right
    # What a camera stores is the displayed picture, turned by the inverse of what the orientation asks for.
    inverse = {
        1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]  # fmt: skip
    stored = corners if inverse is None else corners.transpose(inverse)
    exif = Image.Exif()
    exif[0x0112] = orientation
    result = decoded(saved(stored, format, exif=exif))
    assert (result.width, result.height) == result.image.size == (64, 32)
    for position, colour in (((8, 4), RED), ((56, 28), BLUE), ((56, 4), WHITE), ((8, 28), WHITE)):
        assert np.abs(np.asarray(result.image, dtype=int)[position[::-1]] - colour).max() <= 3


def test_exif_6_of_a_reduced_jpeg_turns_it_and_its_size() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    result = decoded(saved(photo(400, 200), "JPEG", exif=exif), exact=False, target_px=50)
    assert (result.width, result.height) == (200, 400)
    assert result.image.size == (100, 200)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data", "ignore:Possibly corrupt EXIF data")
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    "notes", [b"no TIFF header", b"II*\0\xff\xff\xff\x7f", b"MM\0*\0\0\0\x08\xff\xff\1\x12\0\7\xff"]
)
def test_a_sound_picture_with_damaged_exif_is_judged_as_it_is_stored(format: str, notes: bytes) -> None:
    data = saved(photo(), format, exif=b"Exif\0\0" + notes)
    assert np.array_equal(pixels(data), plain(data))


# ---- Reduced decoding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "reduced_to"),
    [
        ((127, 127), None),  # half of it would be less than twice the target
        ((128, 128), (64, 64)),
        ((1000, 128), (500, 64)),
        ((1000, 127), None),
        ((257, 300), (65, 75)),
        ((5000, 512), (625, 64)),
        ((2000, 2000), (250, 250)),
    ],
)
def test_a_large_jpeg_is_reduced_to_no_less_than_twice_the_target(
    size: tuple[int, int], reduced_to: tuple[int, int] | None
) -> None:
    data = saved(photo(*size), "JPEG")
    result = decoded(data, exact=False)
    assert (result.width, result.height) == size
    assert result.decode_mode == ("reduced" if reduced_to else "exact")
    assert result.image.size == (reduced_to or size)
    assert np.array_equal(pixels(data), plain(data))


def test_a_reduced_jpeg_shows_the_same_picture() -> None:
    data = saved(photo(64, 64).resize((512, 512), Image.Resampling.BICUBIC), "JPEG", quality=95)
    reduced = decoded(data, exact=False).image.resize((32, 32), Image.Resampling.BOX)
    exact = decoded(data).image.resize((32, 32), Image.Resampling.BOX)
    assert np.abs(np.asarray(reduced).astype(int) - np.asarray(exact)).max() <= 4


@pytest.mark.parametrize("format", ["PNG", "GIF", "WEBP"])
def test_only_jpegs_are_reduced(format: str) -> None:
    assert decoded(saved(photo(300, 300), format), exact=False).decode_mode == "exact"


def test_a_truncated_jpeg_is_noticed_when_it_is_reduced_too() -> None:
    for progressive in (False, True):
        data = saved(photo(512, 512), "JPEG", progressive=progressive)
        assert rejection(data[: len(data) // 2]) == ErrorCode.IMAGE_TRUNCATED


# ---- Many at a time -------------------------------------------------------------------------------------------------


def test_threads_decode_side_by_side_and_leave_pillow_as_it_was() -> None:
    limit = Image.MAX_IMAGE_PIXELS
    expected = {kind: pixels(data) for kind, data in WHOLE.items()}
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda kind: (kind, pixels(WHOLE[kind])), list(WHOLE) * 5)
        assert all(np.array_equal(got, expected[kind]) for kind, got in results)
    assert limit == Image.MAX_IMAGE_PIXELS
