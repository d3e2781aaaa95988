"""Hostile pictures: whatever the bytes, a picture or a reason that stays the same, soon and in bounded memory.

Processes of their own decode them, so that a crash, a hang or a bomb fails a test instead of ending the tests.
"""

import io
import json
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import GifImagePlugin, Image, ImageFile, PngImagePlugin

from tests.images.bombs import BOMBS, FILE_BYTES
from tests.images.mutations import (
    CODES,
    DAMAGES,
    MAX_BYTES,
    everything,
    foreign,
    mutations,
    outcome,
    photo,
    pictures,
    png,
    png_chunk,
    saved,
)
from tests.line.site import eventually
from tests.submit_env import environment
from worker.decode_image import Room, decode
from worker.errors import ConcordError, ErrorCode, PairRejected, TryLater
from worker.image_containers import orientation_of, read_container
from worker.model.config import Configuration
from worker.model.preprocess import make_pixels

ROOT = Path(__file__).parents[2]
#: Memory of the interpreter's own, and of what the process makes to decode it.
SPARE_BYTES = 60_000_000


def watched(*command: str) -> Any:
    """What a process that decodes hostile pictures reports; it ends otherwise where it crashes or hangs."""
    # glibc's allocator would keep up to 64 MB for each thread that ever decoded, which is none of the decoder's doing.
    own = {**environment(), "MALLOC_TRIM_THRESHOLD_": "1000000"}
    done = subprocess.run([sys.executable, "-W", "error", *command], cwd=ROOT, env=own, capture_output=True, text=True)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-4_000:]}"
    return json.loads(done.stdout)


def damaged(count: int, seed: int) -> dict[str, Any]:
    report = watched("-m", "tests.images.mutations", "--seed", str(seed), "--count", str(count))
    assert report["mutations"] == count
    assert set(report["codes"]) <= {"decoded", *CODES}
    assert report["memory_mb"] * 1e6 < MAX_BYTES + SPARE_BYTES
    return report


def test_every_damage_to_every_picture_leaves_a_picture_or_a_reason() -> None:
    report = damaged(len(DAMAGES) * len(everything()), seed=1)
    assert set(report["codes"]) == {"decoded", *CODES}, "the damage reaches every outcome"


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_thirty_thousand_damaged_pictures_leave_a_picture_or_a_reason_each() -> None:
    print(damaged(30_000, seed=2))


def test_bombs_are_defused_in_little_memory() -> None:
    report = watched("-m", "tests.images.bombs")
    assert report["outcomes"] == {name: expected for name, (_, expected) in BOMBS.items()}
    # The file, a second of its kind without notes, and a little; the pixels of the picture.
    assert report["memory_mb"] * 1e6 < MAX_BYTES + 2 * FILE_BYTES + SPARE_BYTES


WATCHED_TOO_LONG = """
import time
from tests.images import mutations
mutations.HANG_S = 0.1
mutations.decode = lambda data, **limits: time.sleep(60)
mutations.Watch().decode("a picture that hangs", b"", exact=True)
"""


def test_a_picture_that_hangs_would_be_seen() -> None:
    with pytest.raises(AssertionError, match=r"Timeout[\s\S]*in outcome"):
        watched("-c", WATCHED_TOO_LONG)


@pytest.mark.parametrize("name", pictures())
def test_the_pictures_that_are_damaged_are_sound(name: str) -> None:
    data = pictures()[name]
    assert outcome(data, exact=True)[0] == "decoded"
    with Image.open(io.BytesIO(data)) as image:
        assert image.format in ("JPEG", "MPO", "PNG", "GIF", "WEBP")


@pytest.mark.parametrize("name", foreign())
def test_files_of_other_kinds_are_refused_by_their_first_bytes(name: str) -> None:
    assert outcome(foreign()[name], exact=True)[0] in ("image_format_unsupported", "image_not_an_image")


def test_the_same_seed_makes_the_same_damage() -> None:
    some = [next(stream) for stream in [mutations(5), mutations(5)] for _ in range(50)]
    assert some[:50] == some[50:]
    assert some[:50] != [next(stream) for stream in [mutations(6)] for _ in range(50)]


# ---- Notes ----------------------------------------------------------------------------------------------------------

DAMAGED_NOTES = {
    "a profile that is no zlib": png(8, 2, png_chunk(b"iCCP", b"x\0\0no zlib")),
    "a profile of an unknown compression": png(8, 2, png_chunk(b"iCCP", b"x\0\7")),
    "a text without an end": png(8, 2, png_chunk(b"zTXt", b"no nul")),
    "a text under a wrong checksum": png(8, 2, png_chunk(b"tEXt", b"k\0v")[:-4] + b"\0\0\0\0"),
    "animation control that is cut": png(8, 2, png_chunk(b"acTL", b"\0")),
    "a frame outside the picture": png(8, 2, png_chunk(b"acTL", bytes([0, 0, 0, 2]) * 2),
                                       png_chunk(b"fcTL", bytes(4) + b"\xff" * 16 + bytes(6))),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED_NOTES)
def test_damaged_notes_do_no_harm_to_sound_pixels(name: str) -> None:
    assert outcome(DAMAGED_NOTES[name], exact=True) == outcome(png(8, 2), exact=True)


@pytest.mark.parametrize("name", pictures())
def test_what_is_handed_on_has_no_notes_and_the_same_pixels(name: str) -> None:
    container = read_container(pictures()[name])
    with Image.open(io.BytesIO(pictures()[name])) as whole, Image.open(io.BytesIO(container.data)) as bare:
        assert np.array_equal(np.asarray(whole.convert("RGBA")), np.asarray(bare.convert("RGBA")))
        if container.kind != "WebP":
            assert not set(bare.info) & {"exif", "icc_profile", "xmp", "comment", "Comment", "Title", "Author"}


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("kind", "letter"), [(1, "B"), (3, "H"), (4, "I")])
def test_the_orientation_is_read_from_exif_of_either_byte_order(order: str, kind: int, letter: str) -> None:
    header = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8)
    value = struct.pack(order + letter, 6).ljust(4, b"\0")
    entries = struct.pack(f"{order}HHHI", 2, 0x010F, 2, 4) + b"abc\0" + struct.pack(f"{order}HHI", 0x0112, kind, 1)
    note = header + entries + value
    assert orientation_of(note) == 6
    assert {orientation_of(note[:cut]) for cut in range(len(note))} == {1}


# ---- Memory ---------------------------------------------------------------------------------------------------------

SIXTEEN_AT_ONCE = """
import struct
from concurrent.futures import ThreadPoolExecutor
from tests.images.bombs import one_colour
from tests.images.mutations import MAX_PIXELS, Watch
from worker.decode_image import decode
picture = one_colour(8)
side = int(MAX_PIXELS ** 0.5) - 1
picture = picture[:21] + struct.pack("<I", side | side << 14 | 1 << 28) + picture[25:]
watch = Watch()
with ThreadPoolExecutor(16) as pool:
    kept = list(pool.map(lambda data: decode(data, target_px=64, exact=True, max_pixels=MAX_PIXELS), [picture] * 32))
print(watch.report()["memory_mb"])
"""


def test_sixteen_threads_take_no_more_memory_than_the_largest_picture() -> None:
    """Whatever waits to be judged waits squeezed, or the 32 pictures would take half a gigabyte."""
    assert watched("-c", SIXTEEN_AT_ONCE) * 1e6 < MAX_BYTES + SPARE_BYTES


def test_a_large_picture_waits_for_room_and_nobody_overtakes_it() -> None:
    room, entered = Room(), []
    inside, may_go = threading.Event(), threading.Event()

    def take(name: str, pixels: int) -> None:
        with room.of(pixels, 100):
            entered.append(name)
            if name == "first":
                inside.set()
                assert may_go.wait(60)

    with ThreadPoolExecutor(3) as pool:
        taken = [pool.submit(take, "first", 60)]
        assert inside.wait(60)
        taken.append(pool.submit(take, "large", 90))
        eventually(room._line.locked, "the large one at the head of the line")
        # 60 and 30 would have room together.
        taken.append(pool.submit(take, "small", 30))
        assert entered == ["first"]
        may_go.set()
        for one in taken:
            one.result(60)
    assert entered == ["first", "large", "small"]


def test_a_picture_larger_than_all_the_room_goes_alone() -> None:
    with Room().of(500, 100):
        pass


def test_a_picture_that_fails_leaves_its_room() -> None:
    room = Room()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), room.of(100, 100):
            raise ZeroDivisionError
    with room.of(100, 100):
        pass


def test_a_machine_out_of_memory_is_no_fault_of_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: object) -> None:
        raise MemoryError

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    with pytest.raises(TryLater, match="no memory for a picture of 61 x 43 pixels"):
        decode(png(8, 2), target_px=32, exact=True)


@pytest.mark.parametrize(
    "name", ["jpeg", "jpeg cmyk", "png alpha 8", "png grey 16", "gif transparent", "jpeg with exif"]
)
@pytest.mark.parametrize("target_px", [20, 48, 64])
def test_a_squeezed_picture_is_to_the_model_what_the_whole_one_is(name: str, target_px: int) -> None:
    configuration = Configuration(patch_image_size=target_px)
    squeezed, whole = (
        decode(pictures()[name], target_px=target_px, exact=True, squeeze=squeeze).image for squeeze in (True, False)
    )
    assert squeezed.width * squeezed.height <= max(target_px**2, 1)
    assert np.array_equal(make_pixels(squeezed, configuration).numpy(), make_pixels(whole, configuration).numpy())


# ---- Pillow's own settings ------------------------------------------------------------------------------------------


def test_pillows_global_settings_weaken_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [data for (_, data), _ in zip(mutations(3), range(400), strict=False)]
    before = [outcome(data, exact=True) for data in chosen]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    monkeypatch.setattr(ImageFile, "MAXBLOCK", 2**24)
    monkeypatch.setattr(PngImagePlugin, "MAX_TEXT_CHUNK", 2**40)
    monkeypatch.setattr(PngImagePlugin, "MAX_TEXT_MEMORY", 2**40)
    monkeypatch.setattr(GifImagePlugin, "LOADING_STRATEGY", GifImagePlugin.LoadingStrategy.RGB_ALWAYS)
    assert [outcome(data, exact=True) for data in chosen] == before


def test_pictures_are_not_judged_while_pillow_lets_half_ones_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(ConcordError, match="LOAD_TRUNCATED_IMAGES"):
        decode(png(8, 2), target_px=32, exact=True)


def test_passes_are_counted_by_the_size_of_the_picture() -> None:
    data = saved(photo(), "JPEG", progressive=True)
    pixels, scans = 61 * 43, data.count(b"\xff\xda")
    assert scans > 2
    with pytest.raises(PairRejected, match="26 scans of 61 x 43 pixels") as caught:
        decode(data.replace(b"\xff\xd9", data[data.rindex(b"\xff\xda") : -2] * (26 - scans) + b"\xff\xd9"),
               target_px=32, exact=True, max_pixels=pixels)  # fmt: skip
    assert caught.value.code == ErrorCode.IMAGE_CORRUPT
    assert decode(data, target_px=32, exact=True, max_pixels=pixels).width == 61
