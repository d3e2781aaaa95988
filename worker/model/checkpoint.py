"""Loading a checkpoint in the hub's layout, or refusing it with a sentence that says why.

A directory holds `configuration.json`, `config.json`, `vocab.json`, `merges.txt`, the answers file that the
configuration names, and the weights as `model.safetensors` or `pytorch_model.bin`. An optional manifest,
`concord.json`, holds the files' sha256, the model's name, revision and recipe, and what each answer means; where the
weights are quantized, also how (worker/quant/stored.py):

    {"format": 1, "name": "owner/model", "revision": "v1.0.1", "recipe": "none",
     "files": {"model.safetensors": "<sha256>", ...}, "labels": {"yes": "entailment", ...}}

Nothing in a checkpoint is ever run: settings are JSON, weights are safetensors or read with `weights_only`, pickles are
not opened, and no file is followed out of the directory.
"""

import hashlib
import json
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast, get_args

import safetensors.torch
import torch
from torch import Tensor

from worker.errors import CheckpointRefused
from worker.model.config import Configuration, OFAConfig, is_text, refuse_code
from worker.model.decode import Answers
from worker.model.ofa import OFA, image_buckets, token_buckets
from worker.model.tokenizer import Tokenizer
from worker.model.weight_files import check_pickled, check_safetensors
from worker.quant.stored import (
    REFERENCE,
    REFERENCE_PICTURES,
    Quantization,
    ReferencePair,
    hollow,
    lay_out,
    make_dense,
    read_reference,
)

Label = Literal["entailment", "contradiction", "neutral"]

MANIFEST = "concord.json"
MANIFEST_FORMAT = 1
SETTINGS = ("configuration.json", "config.json", "vocab.json", "merges.txt")
SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"

#: Bytes of a settings file. The hub's longest, the vocabulary, has 1.3 million.
MAX_TEXT_BYTES = 64 * 2**20
#: Answers of a checkpoint; each is another row in every decoder pass.
MAX_ANSWERS = 100

#: Types in which weights come.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: Recipe of a checkpoint whose weights are as they were trained.
UNQUANTIZED = "none"

#: What the answers of known checkpoints mean; other wordings need `labels` in concord.json.
KNOWN_ANSWERS: Mapping[str, Label] = {
    "yes": "entailment",
    "it is true": "entailment",
    "true": "entailment",
    "entailment": "entailment",
    "no": "contradiction",
    "it is not true": "contradiction",
    "false": "contradiction",
    "contradiction": "contradiction",
    "maybe": "neutral",
    "it is not possible to tell": "neutral",
    "unknown": "neutral",
    "neutral": "neutral",
}

TOKENS = "encoder.embed_tokens.weight"
#: Names under which a checkpoint may repeat the token embeddings.
TIED = ("decoder.embed_tokens.weight", "decoder.output_projection.weight")

#: Parameters and buffers of the decoder that serve the drawing of pictures, which is not done here.
UNUSED_PREFIXES = (
    "decoder.embed_image_positions.",
    "decoder.image_pos_ln.",
    "decoder.code_layernorm_embedding.",
    "decoder.image_rel_pos_table_list.",
    "decoder.image_position_idx",
    "encoder.version",
    "decoder.version",
)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model with all that is needed to put questions to it, and by which its verdicts are known."""

    model: OFA = field(repr=False)  # folded, in evaluation
    tokenizer: Tokenizer = field(repr=False)
    config: OFAConfig
    configuration: Configuration
    answers: Answers
    labels: tuple[Label, ...]  # what each of the answers means, in their order
    sha256: str  # of the weights file
    name: str
    revision: str
    recipe: str
    quantization: Quantization | None = field(default=None, repr=False)  # None where weights are as they were trained


@dataclass(frozen=True)
class Manifest:
    """The contents of concord.json, or their defaults."""

    name: str
    revision: str = ""
    recipe: str = UNQUANTIZED
    files: Mapping[str, str] | None = None  # name -> sha256
    labels: Mapping[str, str] = field(default_factory=dict)
    quantization: Mapping[str, Any] | None = None


def load(
    directory: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    dequantize: bool = False,
) -> Checkpoint:
    """Load the checkpoint in `directory` onto `device`, to compute in `dtype`.

    Without a `dtype` it is the recipe's, which is float32 for all but `fp16` and `bf16`. Quantized Linears stay
    quantized unless `dequantize` asks for plain ones with the same weights; their layout is made for `device` and
    `dtype`, so such a model is not moved later.

    Raises CheckpointRefused, with a sentence that names the file or key, for whatever is missing, of the wrong shape or
    hash, not computed here, or not safe to read.
    """
    root = Path(directory)
    if not root.is_dir():
        raise CheckpointRefused(f"There is no directory {root}: name the folder that holds configuration.json.")
    files = Files(root)
    network = files.json_object("config.json")
    refuse_code(network, "config.json")
    config = OFAConfig.from_hub(network)
    configuration = Configuration.from_hub(files.json_object("configuration.json"))
    config.check_image_size(configuration.patch_image_size)
    tokenizer = Tokenizer.from_hub(files.json("vocab.json"), files.text("merges.txt"))
    _check_vocabulary(tokenizer, config)
    answers = _read_answers(files, configuration, tokenizer)
    labels = _read_labels(answers.names, files.manifest.labels)
    # The longest prompt with its begin and end, or with the part of an answer that is read after it.
    _check_length(config, configuration.max_src_length + 1 + max(1, answers.depth))
    manifest = files.manifest
    quantization = Quantization.from_manifest(manifest.recipe, manifest.quantization)
    weights, digest = files.weights()
    with torch.device("meta"):
        model = OFA(config)
        if quantization is not None:
            hollow(model, quantization, weights)
    expected = model.state_dict()
    state = network_state(weights, config, configuration.max_src_length, expected)
    for name in expected:
        if name.endswith(".num_batches_tracked"):
            state[name] = torch.tensor(0)
    # Batch norms are folded in float32 whatever the final precision is, so that it is rounded only once.
    state = {name: tensor.to(expected[name].dtype) for name, tensor in state.items()}
    model.load_state_dict({**state, TIED[0]: state[TOKENS]}, assign=True)
    model = model.fold()
    if quantization is not None:
        if dequantize:
            make_dense(model)
        dtype = dtype or quantization.recipe.compute
        quantization = replace(quantization, reference=_read_reference(files, answers))
    model = model.to(device=device, dtype=dtype or torch.float32)
    lay_out(model)
    return Checkpoint(
        model, tokenizer, config, configuration, answers, labels,
        digest, manifest.name, manifest.revision, manifest.recipe, quantization,
    )  # fmt: skip


class Files:
    """The files of one checkpoint directory, each checked against the manifest, where there is one, as it is read."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.manifest = Manifest(name=self.root.name)
        if self.has(MANIFEST):
            self.manifest = _read_manifest(self.json_object(MANIFEST), self.root.name)

    def path(self, name: str) -> Path:
        """Where a file is. Raises CheckpointRefused where it is missing or outside the directory."""
        try:
            path = (self.root / name).resolve()
            is_file = path.is_file()
        except (OSError, ValueError, RuntimeError):  # A name too long, with a NUL, or of a link to itself.
            raise CheckpointRefused(f"{name!r:.80} is no file's name in {self.root}.") from None
        if not path.is_relative_to(self.root):
            raise CheckpointRefused(
                f"{name:.200} leads out of {self.root}: put the file itself there, not a link or a path."
            )
        if not is_file:
            raise CheckpointRefused(f"{name:.200} is missing in {self.root}.")
        return path

    def has(self, name: str) -> bool:
        """Whether there is something of that name, be it a link to nowhere."""
        try:
            return (self.root / name).is_symlink() or (self.root / name).exists()
        except OSError:
            return False

    def checked(self, name: str) -> tuple[Path, str]:
        """A file's path and sha256. Raises CheckpointRefused where the manifest has another one, or none."""
        path, expected = self.path(name), self.manifest.files
        digest = sha256(path)
        if expected is not None and name != MANIFEST and expected.get(name) != digest:
            if name not in expected:
                raise CheckpointRefused(f"{name} is not among the files of {MANIFEST}: the checkpoint was changed.")
            raise CheckpointRefused(
                f"{name} has sha256 {digest} and {MANIFEST} says {expected[name]}: fetch the checkpoint again."
            )
        return path, digest

    def text(self, name: str) -> str:
        """A text file's contents."""
        size = self.path(name).stat().st_size
        if size > MAX_TEXT_BYTES:
            raise CheckpointRefused(f"{name} has {size} bytes, and {MAX_TEXT_BYTES} are read: it is no checkpoint's.")
        path, _ = self.checked(name)
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise CheckpointRefused(f"{name} is not UTF-8 text.") from None

    def json(self, name: str) -> object:
        """A JSON file's contents."""
        try:
            return json.loads(self.text(name))
        except (ValueError, RecursionError):
            raise CheckpointRefused(f"{name} is not JSON.") from None

    def json_object(self, name: str) -> dict[str, Any]:
        """The contents of a JSON file that holds one object."""
        values = self.json(name)
        if not isinstance(values, dict):
            raise CheckpointRefused(f"{name} is not a JSON object.")
        return values

    def weights(self) -> tuple[dict[str, Tensor], str]:
        """The stored tensors by name, and their file's sha256; safetensors where there are both kinds."""
        name = SAFETENSORS if self.has(SAFETENSORS) or not self.has(PICKLED) else PICKLED
        (check_safetensors if name == SAFETENSORS else check_pickled)(self.path(name))
        path, digest = self.checked(name)
        try:
            if name == SAFETENSORS:
                return safetensors.torch.load_file(path), digest
            # Only files in torch's zip format can be mapped into memory instead of read.
            values = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except pickle.UnpicklingError:
            raise CheckpointRefused(
                f"{name} holds more than tensors, and reading it could run code: save the plain state_dict."
            ) from None
        except Exception as error:
            # On hostile bytes either library raises nearly anything.
            raise CheckpointRefused(f"{name} cannot be read as weights ({error!s:.200}): fetch it again.") from error
        if not isinstance(values, dict) or not all(map(is_plain, values, values.values())):
            raise CheckpointRefused(f"{name} is not a plain state_dict of tensors: save the model's state_dict().")
        return values, digest


def is_plain(name: object, value: object) -> bool:
    """Whether it is a named tensor whose values are all there, in memory."""
    if not isinstance(name, str) or not isinstance(value, Tensor):
        return False
    return value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized


def sha256(path: Path) -> str:
    """A file's sha256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def network_state(
    weights: Mapping[str, Tensor],
    config: OFAConfig,
    longest_text: int,
    expected: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Pick from a checkpoint's tensors those that the network holds, each once.

    `expected` has the names, shapes and types that the network holds, where it is not as it was trained.

    What a checkpoint repeats (tied embeddings) or could be computed (position buckets up to `longest_text` tokens) must
    agree; what the network has no use for is dropped. Raises CheckpointRefused naming a key that is missing, unknown,
    of the wrong shape, not finite, or in disagreement.
    """
    if expected is None:
        with torch.device("meta"):
            expected = OFA(config).state_dict()
    counters = {name for name in expected if name.endswith(".num_batches_tracked")}
    state = {name: tensor for name, tensor in weights.items() if name in expected and name not in (*counters, *TIED)}
    for name, tensor in weights.items():
        if name in TIED:
            # A checkpoint may hold the shared table under any of its names.
            if not same_values(state.setdefault(TOKENS, tensor), tensor):
                raise CheckpointRefused(f"{name} differs from {TOKENS}; separate tables are not supported.")
        elif name.endswith((".token_rp_bucket", ".image_rp_bucket")):
            _check_buckets(name, tensor, config, longest_text)
        elif name not in expected and not name.startswith(UNUSED_PREFIXES):
            raise CheckpointRefused(
                f"The weights hold an unknown key, {name:.200}: this is not the architecture of config.json."
            )
    missing = sorted(set(expected) - set(state) - counters - set(TIED))
    if missing:
        raise CheckpointRefused(
            f"The weights lack {len(missing)} keys that config.json calls for, such as {missing[0]}."
        )
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            found, wanted = str(tuple(tensor.shape)), tuple(expected[name].shape)
            raise CheckpointRefused(f"{name} has the shape {found:.80} where config.json calls for {wanted}.")
        floating = expected[name].is_floating_point() and tensor.dtype in FLOATS
        # Of 64 bits, what is finite may be so no longer in those that are computed in.
        values = tensor.float() if tensor.dtype == torch.float64 else tensor
        if not (floating or tensor.dtype == expected[name].dtype) or not values.isfinite().all():
            raise CheckpointRefused(f"{name} holds values that are not finite numbers.")
    return state


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, without reading them when they share their memory."""
    shared = one.shape == other.shape and one.dtype == other.dtype and one.data_ptr() == other.data_ptr()
    return (shared and one.stride() == other.stride()) or torch.equal(one, other)


def _check_buckets(name: str, stored: Tensor, config: OFAConfig, longest_text: int) -> None:
    """Compare a stored table of position buckets with the computed one, as far as texts and pictures reach."""
    cpu, side = torch.device("cpu"), config.image_bucket_size
    if stored.dim() != 2:
        raise CheckpointRefused(f"{name} has {stored.dim()} dimensions, and a table of buckets has two sides.")
    if name.endswith(".token_rp_bucket"):
        # Rounding may move the last buckets of very long distances, which no text reaches.
        computed, corner = (
            token_buckets(longest_text, config.token_bucket_size, cpu),
            stored[:longest_text, :longest_text],
        )
    else:
        computed, corner = image_buckets(side, side, side, cpu), stored[1:, 1:]
    if not torch.equal(corner, computed):
        raise CheckpointRefused(f"{name} differs from what config.json's bucket sizes give.")


def _check_vocabulary(tokenizer: Tokenizer, config: OFAConfig) -> None:
    ids = (tokenizer.bos, tokenizer.pad, tokenizer.eos)
    if ids != (config.bos_token_id, config.pad_token_id, config.eos_token_id):
        raise CheckpointRefused(f"vocab.json has <s>, <pad>, </s> at {ids}, config.json has them elsewhere.")
    if tokenizer.size > config.vocab_size:
        raise CheckpointRefused(
            f"vocab.json has {tokenizer.size} tokens, config.json only vocab_size = {config.vocab_size}."
        )


def _check_length(config: OFAConfig, tokens: int) -> None:
    if tokens > config.max_position_embeddings:
        raise CheckpointRefused(
            f"configuration.json allows prompts of {tokens} tokens, config.json has max_position_embeddings = "
            f"{config.max_position_embeddings}: lower max_src_length."
        )


def _read_answers(files: Files, configuration: Configuration, tokenizer: Tokenizer) -> Answers:
    name, example = configuration.answer2label, '{"yes": 0, "no": 1, "it is not possible to tell": 2}'
    if not PurePosixPath(name).name:
        raise CheckpointRefused(
            "configuration.json names no answers: set model.answer2label to the name of a JSON file such as " + example
        )
    if PurePosixPath(name).suffix != ".json":
        # A pickle can run code when it is read, so its JSON twin is the only one that is opened.
        named, name = name, str(PurePosixPath(name).with_suffix(".json"))
        if not files.has(name):
            raise CheckpointRefused(
                f"configuration.json names {named:.200} for the answers, which is not JSON and is never opened: "
                f"write its contents to {name:.200}, such as {example}"
            )
    values = files.json_object(name)
    if len(values) < 2 or not all(key.strip() and type(index) is int for key, index in values.items()):
        raise CheckpointRefused(
            f"{name} is not an object of at least two answers with their numbers, such as {example}"
        )
    if len(values) > MAX_ANSWERS or not all(map(is_text, values)):
        raise CheckpointRefused(f"{name} has {len(values)} answers; there may be {MAX_ANSWERS} texts, none with a NUL.")
    try:
        return Answers(tuple(values), tuple(tuple(tokenizer.encode(f" {answer}")) for answer in values), tokenizer.eos)
    except ValueError as error:
        raise CheckpointRefused(f"{name} cannot be used: {error}.") from None


def _read_labels(answers: tuple[str, ...], given: Mapping[str, str]) -> tuple[Label, ...]:
    """What each answer means, each label at most once; only `neutral` may be without an answer."""
    labels: list[Label] = []
    for answer in answers:
        label = given.get(answer) or KNOWN_ANSWERS.get(answer.strip().lower())
        if label not in get_args(Label):
            raise CheckpointRefused(
                f"It is not known what the answer {answer!r:.80} means: give it a label in {MANIFEST}, such as "
                f'"labels": {{{json.dumps(answer)}: "neutral"}}, one of {", ".join(get_args(Label))}.'
            )
        if label in labels:
            raise CheckpointRefused(f"Two answers mean {label}: give each answer its own label in {MANIFEST}.")
        labels.append(cast(Label, label))
    lacking = [label for label in ("entailment", "contradiction") if label not in labels]
    if lacking:
        raise CheckpointRefused(f"No answer means {lacking[0]}: give one that label in {MANIFEST}.")
    return tuple(labels)


def _read_reference(files: Files, answers: Answers) -> tuple[ReferencePair, ...]:
    """The reference pairs of quantized weights; a checkpoint that is just being made has none yet."""
    if not files.has(REFERENCE):
        return ()
    values = files.json_object(REFERENCE)
    path, _ = files.checked(REFERENCE_PICTURES)
    return read_reference(values, path, len(answers.names))


def _read_manifest(values: Mapping[str, Any], default_name: str) -> Manifest:
    if values.get("format") != MANIFEST_FORMAT:
        raise CheckpointRefused(
            f"{MANIFEST} has format {values.get('format')!r:.80}; this version reads {MANIFEST_FORMAT}."
        )
    for key in ("name", "revision", "recipe"):
        if not is_text(values.get(key, ""), longest=500):
            raise CheckpointRefused(f"{MANIFEST} has {key} = {values[key]!r:.200}, which is not a text that is stored.")
    for key in ("files", "labels"):
        entries = values.get(key, {})
        if not isinstance(entries, dict) or not all(isinstance(entry, str) for entry in entries.values()):
            raise CheckpointRefused(f"{MANIFEST} has {key} that are not an object of texts.")
    if not isinstance(values.get("quantization", {}), dict):
        raise CheckpointRefused(f"{MANIFEST} has a quantization that is not an object.")
    return Manifest(
        name=values.get("name") or default_name,
        revision=values.get("revision", ""),
        recipe=values.get("recipe") or UNQUANTIZED,
        files=values.get("files"),
        labels=values.get("labels", {}),
        quantization=values.get("quantization"),
    )
