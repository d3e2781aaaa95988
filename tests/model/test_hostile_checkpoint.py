"""Checkpoints that lie: each is refused with a sentence, soon, in bounded memory, and nothing in it is run.

What is made here is a small checkpoint with one thing wrong. A seeded stream of damage goes through a process of its
own, whose memory and time are limited.
"""

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.images.bombs import profiles_in_png, thin_png
from tests.model.damage import QUANTIZED
from tests.model.golden import write_checkpoint, write_json
from tests.model.test_checkpoint import Payload, change, weights_of
from tests.submit_env import environment
from worker.errors import CheckpointRefused
from worker.model import checkpoint as module
from worker.model import weight_files
from worker.model.checkpoint import load

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with safetensors."""
    folder = write_checkpoint(tmp_path / "ofa_mini")
    safetensors.torch.save_file(weights_of(folder), folder / "model.safetensors")
    (folder / "pytorch_model.bin").unlink()
    return folder


def refusal(folder: Path) -> str:
    """The sentence with which it is refused: not long, and in one piece."""
    with pytest.raises(CheckpointRefused) as caught:
        load(folder)
    sentence = str(caught.value)
    assert 20 < len(sentence) < 1_500
    return sentence


# ---- Safetensors ----------------------------------------------------------------------------------------------------


def split(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The header and the values."""
    raw = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8 : 8 + length])
    return header, raw[8 + length :]


def write(folder: Path, header: bytes, values: bytes, length: int | None = None) -> None:
    stated = struct.pack("<Q", len(header) if length is None else length)
    (folder / "model.safetensors").write_bytes(stated + header + values)


BIAS = "encoder.layers.0.fc1.bias"
Lie = Callable[[dict[str, Any]], None]


def set_field(field: str, value: Any) -> Lie:
    return lambda header: header[BIAS].update({field: value})


def swap(header: dict[str, Any]) -> None:
    header[BIAS]["data_offsets"].reverse()


def overlap(header: dict[str, Any]) -> None:
    others = [one for name, one in header.items() if name != BIAS]
    begin = others[0]["data_offsets"][0]
    header[BIAS]["data_offsets"] = [begin, begin + 256]


LIES: dict[str, Lie] = {
    "offsets beyond the file": set_field("data_offsets", [0, 2**40]),
    "offsets far beyond any file": set_field("data_offsets", [2**63, 2**63 + 256]),
    "negative offsets": set_field("data_offsets", [-256, 0]),
    "reversed offsets": swap,
    "overlapping offsets": overlap,
    "offsets of words": set_field("data_offsets", ["0", "256"]),
    "one offset": set_field("data_offsets", [0]),
    "an unknown type": set_field("dtype", "F7"),
    "a type of another size": set_field("dtype", "F64"),
    "no type": set_field("dtype", None),
    "a shape that does not match": set_field("shape", [129]),
    "a shape of which the product overflows": set_field("shape", [2**32, 2**32, 4]),
    "a negative shape": set_field("shape", [-128]),
    "a shape of nothing": set_field("shape", [0]),
    "an endless shape of nothing": set_field("shape", [0, 2**62]),
    "a shape of many sides": set_field("shape", [1] * 100_000 + [128]),
    "a tensor that is a number": lambda header: header.update({BIAS: 5}),
    "a tensor too many": lambda header: header.update({"x" * 100_000: header[BIAS]}),
    "metadata that are none": lambda header: header.update({"__metadata__": [1]}),
    "metadata of numbers": lambda header: header.update({"__metadata__": {"a": 1}}),
}


@pytest.mark.parametrize("name", LIES)
def test_a_safetensors_header_that_lies_is_refused(folder: Path, name: str) -> None:
    header, values = split(folder)
    LIES[name](header)
    write(folder, json.dumps(header).encode(), values)
    sentence = refusal(folder)
    assert "model.safetensors" in sentence or BIAS in sentence or "unknown key" in sentence


@pytest.mark.parametrize(
    "length", [0, 1, 2**62, 2**63, 2**64 - 1, 20_000_000, 10**8 + 1], ids=lambda length: f"{length} bytes"
)
def test_a_header_whose_length_is_not_the_files_is_refused(folder: Path, length: int) -> None:
    header, values = split(folder)
    write(folder, json.dumps(header).encode(), values, length)
    assert f"header would have {length} bytes" in refusal(folder)


def test_a_header_longer_than_any_networks_is_not_read(folder: Path) -> None:
    header, values = split(folder)
    write(folder, json.dumps(header).encode() + b" " * weight_files.MAX_HEADER_BYTES, values)
    assert f"{weight_files.MAX_HEADER_BYTES} are read" in refusal(folder)


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (b"not json", "header that cannot be read"),
        (b"[1, 2]", "no JSON object"),
        (b"{}", "lack"),
        (b'{"a": ' + b"[" * 5_000 + b"]" * 5_000 + b"}", "header that cannot be read"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {}}', "'a' stands there twice"),
        (b"\xff\xfe{}", "header that cannot be read"),
    ],
)
def test_a_header_that_is_no_listing_is_refused(folder: Path, header: bytes, sentence: str) -> None:
    write(folder, header, b"" if header == b"{}" else bytes(4))
    assert sentence in refusal(folder)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9])
def test_a_file_shorter_than_any_header_is_refused(folder: Path, size: int) -> None:
    (folder / "model.safetensors").write_bytes(bytes(size))
    assert "model.safetensors is cut" in refusal(folder)


def test_values_that_are_not_covered_by_the_header_are_refused(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(bytes(100))
    assert "model.safetensors cannot be read as weights" in refusal(folder)


# ---- Pickles --------------------------------------------------------------------------------------------------------


def pickled(folder: Path) -> Path:
    """The same weights as torch saves them."""
    path = folder / "pytorch_model.bin"
    torch.save(safetensors.torch.load_file(folder / "model.safetensors"), path)
    (folder / "model.safetensors").unlink()
    return path


def rewritten(path: Path, change_record: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, change_record(name, data))


class Call:
    """A pickle that calls something harmless to torch with whatever arguments."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.made = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.made


@pytest.mark.parametrize("old_format", [False, True])
@pytest.mark.parametrize(
    "inside",
    [
        Call(bytearray, 20_000_000_000),
        Call(torch.FloatTensor, 10**10),
        Call(set, ["a"]),
        Call(os.system, "true"),
        Call(eval, "1"),
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
    ],
    ids=["bytes without end", "a tensor without end", "a set", "a command", "code", "meta", "sparse"],
)
def test_a_pickle_that_names_more_than_tensors_is_refused_before_it_is_read(
    folder: Path, inside: object, old_format: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({BIAS: inside}, pickled(folder), _use_new_zipfile_serialization=not old_format)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was read"))
    assert "holds more than tensors" in refusal(folder)


@pytest.mark.parametrize("protocol", range(5))
def test_a_plain_pickle_that_would_run_code_is_refused_and_does_not_run(
    folder: Path, tmp_path: Path, protocol: int
) -> None:
    touched = tmp_path / "touched"
    pickled(folder).write_bytes(pickle.dumps({"weights": Payload(touched)}, protocol) * 5)
    assert "more than tensors" in refusal(folder)
    assert not touched.exists()


def test_compressed_records_are_refused_unread(folder: Path) -> None:
    bomb = bytes(50_000_000)
    rewritten(pickled(folder), lambda name, data: bomb if name.endswith("data/0") else data, zipfile.ZIP_DEFLATED)
    assert "compressed records" in refusal(folder)


def test_records_that_overlap_are_refused_unread(folder: Path) -> None:
    path = pickled(folder)
    raw = path.read_bytes()
    # The archive's listing says of each record how long it is; every one now reaches over those behind it.
    listing = raw.rindex(b"PK\5\6")
    begin = int.from_bytes(raw[listing + 16 : listing + 20], "little")
    head, entries = raw[:begin], bytearray(raw[begin:])
    at = 0
    while entries[at : at + 4] == b"PK\1\2":
        entries[at + 20 : at + 28] = struct.pack("<II", len(head), len(head))
        at += 46 + sum(struct.unpack_from("<HHH", entries, at + 28))
    path.write_bytes(head + entries)
    assert "pytorch_model.bin holds records that overlap" in refusal(folder)


def test_a_pickle_without_end_is_refused_where_it_is_too_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "MAX_PICKLE_BYTES", 1_000)
    assert "a pickle of more than 1000 bytes" in _refused_after(folder, pickled)


def _refused_after(folder: Path, step: Callable[[Path], object]) -> str:
    step(folder)
    return refusal(folder)


@pytest.mark.parametrize("old_format", [False, True])
def test_sound_pickles_of_both_formats_pass(folder: Path, old_format: bool) -> None:
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    torch.save(
        {name: torch.nn.Parameter(one) if one.is_floating_point() else one for name, one in weights.items()},
        pickled(folder), _use_new_zipfile_serialization=not old_format,
    )  # fmt: skip
    assert load(folder).name == "ofa_mini"


@pytest.mark.parametrize("name", ["empty", "text", "zip", "half a zip", "zip of nothing", "tar"])
def test_a_file_of_another_kind_is_refused(folder: Path, name: str) -> None:
    path = pickled(folder)
    whole = path.read_bytes()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello", b"hello")
    made = {"empty": b"", "text": b"hello " * 100, "zip": path.read_bytes(), "half a zip": whole[: len(whole) // 2],
            "zip of nothing": b"PK\5\6" + bytes(18), "tar": b"storages" + bytes(504)}  # fmt: skip
    path.write_bytes(made[name])
    assert "pytorch_model.bin" in refusal(folder)


def test_a_key_that_is_no_name_is_refused(folder: Path) -> None:
    torch.save({5: torch.zeros(3)}, pickled(folder))
    assert "not a plain state_dict" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int8])
def test_weights_of_another_type_are_refused(folder: Path, dtype: torch.dtype) -> None:
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights[BIAS] = torch.zeros(128).to(dtype)
    torch.save(weights, pickled(folder))
    # The newest types need more of torch than plain tensors do.
    assert BIAS in (sentence := refusal(folder)) or "more than tensors (torch._utils _rebuild_tensor_v3)" in sentence


def test_weights_that_are_finite_in_64_bits_alone_are_refused(folder: Path) -> None:
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights[BIAS] = torch.full((128,), 1e300, dtype=torch.float64)
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    assert f"{BIAS} holds values that are not finite" in refusal(folder)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2, 2)])
@pytest.mark.parametrize("name", ["encoder.token_rp_bucket", "decoder.image_rp_bucket"])
def test_a_table_of_buckets_of_another_shape_is_refused(folder: Path, name: str, shape: tuple[int, ...]) -> None:
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights[name] = torch.zeros(shape, dtype=torch.long)
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    assert name in refusal(folder)


# ---- Settings and names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 2**31, 10**18, 2**63, 10**30])
@pytest.mark.parametrize(
    "key",
    ["vocab_size", "d_model", "encoder_layers", "encoder_ffn_dim", "decoder_layers", "decoder_ffn_dim",
     "encoder_attention_heads", "image_bucket_size", "token_bucket_size", "max_position_embeddings"],
)  # fmt: skip
def test_a_network_of_an_impossible_size_is_refused_before_it_is_built(folder: Path, key: str, value: int) -> None:
    change(folder, "config.json", **{key: value})
    assert key in refusal(folder)


@pytest.mark.parametrize("value", [0, -2, float("nan"), float("inf")])
def test_an_impossible_scale_is_refused(folder: Path, value: float) -> None:
    change(folder, "config.json", attn_scale_factor=float(value))
    assert "attn_scale_factor" in refusal(folder)


@pytest.mark.parametrize("depth", [5, 900, 100_000])
@pytest.mark.parametrize("key", ["plugins", "allow_remote", "auto_map"])
def test_a_request_to_run_code_is_found_however_deep(folder: Path, key: str, depth: int) -> None:
    path = folder / "configuration.json"
    deep = '{"a": ' * depth + json.dumps({key: ["x"]}) + "}" * depth
    path.write_text(path.read_text().rstrip("}\n ") + ', "deep": ' + deep + "}}")
    assert "asks to run code" in (sentence := refusal(folder)) or "is not JSON" in sentence


@pytest.mark.parametrize("index", [2**32, 2**63, 10**30, -1, True, None])
def test_a_vocabulary_with_an_impossible_id_is_refused(folder: Path, index: Any) -> None:
    vocabulary = json.loads((folder / "vocab.json").read_text())
    write_json(folder / "vocab.json", {**vocabulary, "new": index})
    assert "vocab.json" in refusal(folder)


@pytest.mark.parametrize(
    "name",
    ["a\0.json", "x" * 5_000 + ".json", ".", "/", "..", "./", "/etc/passwd", "a/../../b.json",
     "\u202e.json", "~/.json", "//", "\n.json"],
)  # fmt: skip
def test_an_answers_file_of_an_impossible_name_is_refused(folder: Path, name: str) -> None:
    change(folder, "configuration.json", answer2label=name)
    refusal(folder)


@pytest.mark.parametrize(
    "answers", [{f"answer {n}": n for n in range(101)}, {"yes\0": 0, "no": 1}, {"\ud800": 0, "no": 1}]
)
def test_answers_without_number_or_that_cannot_be_stored_are_refused(folder: Path, answers: dict[str, int]) -> None:
    write_json(folder / "ans2label.json", answers)
    assert "ans2label.json has" in refusal(folder)


@pytest.mark.parametrize("key", ["name", "revision", "recipe"])
@pytest.mark.parametrize("value", ["a\0b", "\ud800", "x" * 10_000, 5, ["x"]])
def test_a_manifest_whose_words_cannot_be_stored_is_refused(folder: Path, key: str, value: Any) -> None:
    write_json(folder / "concord.json", {"format": 1, key: value})
    assert f"concord.json has {key}" in refusal(folder)


def test_a_settings_file_of_endless_length_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (folder / "vocab.json").open("ab") as file:
        file.truncate(module.MAX_TEXT_BYTES + 1)
    monkeypatch.setattr(module, "sha256", lambda path: pytest.fail("it was read") if path.name == "vocab.json" else "")
    assert f"vocab.json has {module.MAX_TEXT_BYTES + 1} bytes" in refusal(folder)


# ---- Links ----------------------------------------------------------------------------------------------------------


def outside(tmp_path: Path, folder: Path, name: str) -> Path:
    """The file, moved out of the folder."""
    target = tmp_path / "outside" / name
    target.parent.mkdir(exist_ok=True)
    (folder / name).rename(target)
    return target


def absolute(folder: Path, name: str, target: Path) -> None:
    (folder / name).symlink_to(target)


def relative(folder: Path, name: str, target: Path) -> None:
    (folder / name).symlink_to(os.path.relpath(target, folder))


def chain(folder: Path, name: str, target: Path) -> None:
    """A link within the folder to a link within it that leads out."""
    (folder / "second").symlink_to(target)
    (folder / "first").symlink_to("second")
    (folder / name).symlink_to("first")


def by_directory(folder: Path, name: str, target: Path) -> None:
    """A link that is a path within the folder, whose directory leads out."""
    (folder / "inner").symlink_to(target.parent, target_is_directory=True)
    (folder / name).symlink_to(f"inner/{name}")


def and_back(folder: Path, name: str, target: Path) -> None:
    """A link that leads out and, by a link out there, back in: what is out there decides what is read."""
    copy = folder / f"{name}.copy"
    copy.write_bytes(target.read_bytes())
    target.unlink()
    target.symlink_to("/proc/self/cwd/nothing")
    (folder / name).symlink_to(target)


def itself(folder: Path, name: str, target: Path) -> None:
    (folder / name).symlink_to(name)


@pytest.mark.parametrize("link", [absolute, relative, chain, by_directory, and_back, itself])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "vocab.json", "ans2label.json"])
def test_no_link_leads_out_of_the_directory(
    folder: Path, tmp_path: Path, name: str, link: Callable[[Path, str, Path], None]
) -> None:
    link(folder, name, outside(tmp_path, folder, name))
    assert name in refusal(folder)


def test_an_answers_file_in_a_directory_that_leads_out_is_refused(folder: Path, tmp_path: Path) -> None:
    outside(tmp_path, folder, "ans2label.json")
    (folder / "inner").symlink_to(tmp_path / "outside", target_is_directory=True)
    change(folder, "configuration.json", answer2label="inner/ans2label.json")
    assert "inner/ans2label.json leads out of" in refusal(folder)


def test_what_is_no_file_is_not_opened(folder: Path) -> None:
    (folder / "merges.txt").unlink()
    os.mkfifo(folder / "merges.txt")
    assert "merges.txt is missing" in refusal(folder), "to open it would wait for ever"


def test_the_folder_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder, target_is_directory=True)
    assert load(tmp_path / "link").name == "ofa_mini"


# ---- Quantized folders ----------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The demo model's quantized folder, without the files' hashes: whoever changes a file can change its hash."""
    folder = Path(shutil.copytree(QUANTIZED, tmp_path / "stored"))
    manifest = json.loads((folder / "concord.json").read_text())
    del manifest["files"]
    write_json(folder / "concord.json", manifest)
    return folder


BOMBS = {
    "of pixels": thin_png(1, 20_000_000),
    "of pixels beyond Pillow's limit": thin_png(60_000, 1).replace(struct.pack(">II", 60_000, 1), b"\0\0\xff\xff" * 2),
    "of bytes": b"\x89PNG\r\n\x1a\n" + bytes(2 * 2**20),
    "of colour profiles": profiles_in_png(),
    "of another kind": b"\xff\xd8\xff\xe0" + bytes(100),
    "of nothing": b"",
}


@pytest.mark.parametrize("name", BOMBS)
def test_reference_pictures_that_are_a_bomb_are_refused(stored: Path, name: str) -> None:
    (stored / "reference.png").write_bytes(BOMBS[name])
    assert "reference.json with reference.png cannot be read" in refusal(stored)


@pytest.mark.parametrize(
    "pairs",
    [None, 5, [], [5], "pairs", [{}], [{"text": 5, "premise": None, "probs": [1.0]}],
     [{"text": "a", "premise": ["b"], "probs": [1.0]}], [{"text": "a", "premise": None, "probs": "1"}],
     [{"text": "a", "premise": None, "probs": [10**400]}]],
)  # fmt: skip
def test_reference_pairs_that_are_none_are_refused(stored: Path, pairs: Any) -> None:
    write_json(stored / "reference.json", {"pairs": pairs})
    assert "reference.json" in refusal(stored)


# ---- A stream of damage ----------------------------------------------------------------------------------------------


def damaged(count: int, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-W", "error", "-m", "tests.model.damage", "--seed", str(seed), "--count", str(count)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-4_000:]}"
    report: dict[str, Any] = json.loads(done.stdout)
    assert (report["checkpoints"], report["loaded"] + report["refused"]) == (count, count)
    return report


def test_every_damaged_checkpoint_is_refused_or_loads_in_bounded_memory() -> None:
    report = damaged(96, seed=1)
    assert report["refused"] > 48, "the damage is seen"
    assert report["more_memory_mb"] < 100


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_thousands_of_damaged_checkpoints_are_refused_or_load() -> None:
    print(damaged(3_000, seed=2))
