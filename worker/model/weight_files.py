"""What a file of weights says of itself, looked at before a library is let near it.

safetensors and torch's `weights_only` run no code, but they do what the file asks: make objects of a million names,
inflate records, fill arrays of any size. A file that asks for more than tensors need is refused here.
"""

import json
import pickletools
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from worker.errors import CheckpointRefused

#: A header takes some 120 bytes a tensor, of which OFA-large has 1,300.
MAX_HEADER_BYTES = 8 * 2**20
#: The pickle in a weights file names tensors and where they lie; it takes about as much.
MAX_PICKLE_BYTES = 8 * 2**20
#: All that a pickle of plain tensors names. Others that torch allows make arrays of any size.
TENSORS_ALONE = re.compile(
    r"collections OrderedDict|torch\._utils (_rebuild_tensor|_rebuild_tensor_v2|_rebuild_parameter)"
    r"|torch [A-Za-z0-9]+Storage|torch\.storage UntypedStorage"
)
#: Pickles at the begin of a file in torch's old format: a number, its version, the machine, the tensors, their keys.
PICKLES_OF_OLD_FORMAT = 5


def check_safetensors(path: Path) -> None:
    """Refuse (CheckpointRefused) a file whose header is longer than the file, or than any network's, or names a tensor
    twice. The library checks the rest of it.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 10 or not 2 <= length <= size - 8:
            raise CheckpointRefused(
                f"{path.name} is cut, or no safetensors file: its header would have {length} bytes, and the file has "
                f"{size}: fetch it again."
            )
        if length > MAX_HEADER_BYTES:
            raise CheckpointRefused(f"{path.name} has a header of {length} bytes, and {MAX_HEADER_BYTES} are read.")
        header = file.read(length)
    try:
        values = json.loads(header, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise CheckpointRefused(f"{path.name} has a header that cannot be read ({error}): fetch it again.") from None
    if not isinstance(values, dict):
        raise CheckpointRefused(f"{path.name} has a header that is no JSON object: fetch it again.")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{twice!r:.80} stands there twice")
    return values


def check_pickled(path: Path) -> None:
    """Refuse (CheckpointRefused) a file whose records are compressed, or whose pickle asks for more than tensors."""
    try:
        if zipfile.is_zipfile(path):
            _check_archive(path)
        else:
            with path.open("rb") as file:
                for _ in range(PICKLES_OF_OLD_FORMAT):
                    _check_pickle(file, path.name)
    except CheckpointRefused:
        raise
    except Exception as error:
        # What pickletools and zipfile raise on hostile bytes has no common base.
        raise CheckpointRefused(f"{path.name} cannot be read as weights ({error!r:.200}): fetch it again.") from error


def _check_archive(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise CheckpointRefused(f"{path.name} holds compressed records, which torch does not write: save it again.")
        if sum(record.file_size for record in records) > path.stat().st_size:
            raise CheckpointRefused(f"{path.name} holds records that overlap: save it again.")
        for record in records:
            if record.filename.endswith("data.pkl"):
                with archive.open(record) as file:
                    _check_pickle(file, path.name)


def _check_pickle(file: IO[bytes], name: str) -> None:
    for what in _named(file, name):
        if not TENSORS_ALONE.fullmatch(what):
            raise CheckpointRefused(
                f"{name} holds more than tensors ({what:.80}), and reading it could run code: "
                "save the plain state_dict."
            )


def _named(file: IO[bytes], name: str) -> Iterator[str]:
    """What a pickle names, `module name`. Nothing is made of it."""
    for operation, argument, position in pickletools.genops(file):
        if (position or 0) > MAX_PICKLE_BYTES:
            raise CheckpointRefused(
                f"{name} holds a pickle of more than {MAX_PICKLE_BYTES} bytes: save the state_dict."
            )
        if operation.name == "GLOBAL":
            yield str(argument)
        elif operation.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
            yield operation.name  # torch does not write these, nor does it read them.
