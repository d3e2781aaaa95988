"""A hub checkpoint's two settings files: `config.json`, the network, and `configuration.json`, the task around it.

The names are the hub's own. Keys that steer dropout, initialisation or beam search do not change what a loaded model
answers and are ignored; a key that asks for something this code does not compute is refused, so that nothing is
silently computed wrongly. Defaults are those of ModelScope's OFA, because a hub file leaves out what equals them.
"""

import re
import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from worker.errors import CheckpointRefused

#: Bottleneck blocks in each of the three stages of the image trunk; OFA drops ResNet's fourth stage.
RESNET_BLOCKS: Mapping[str, tuple[int, int, int]] = {
    "resnet18": (2, 2, 2),
    "resnet34": (3, 4, 6),
    "resnet50": (3, 4, 6),
    "resnet101": (3, 4, 23),
    "resnet152": (3, 8, 36),
}

#: Pixels of the input picture that one step of the trunk's feature grid covers, along each side.
TRUNK_STRIDE_PIXELS = 16

#: The only value of each of these keys that the network in worker/model/ofa.py computes, which is also the default.
REQUIRED: Mapping[str, object] = {
    "model_type": "ofa",
    "activation_function": "gelu",
    "add_type_embedding": True,
    "decoder_normalize_before": True,
    "encoder_normalize_before": True,
    "entangle_position_embedding": False,
    "interpolate_position": False,
    "layernorm_embedding": True,
    "normformer": True,
    "patch_layernorm_embedding": True,
    "scale_embedding": False,
    "share_attn_bias": False,
    "share_decoder_input_output_embed": True,
    "use_gamma_feature": False,
    "use_image_feature": True,
    "use_ofasys": False,
}

#: The largest value of each key, far above any OFA: what is larger would be built, layer by layer, before the weights
#: could disagree.
LARGEST: Mapping[str, int] = {
    "vocab_size": 1_000_000,
    "d_model": 16_384,
    "encoder_layers": 100,
    "encoder_attention_heads": 256,
    "encoder_ffn_dim": 65_536,
    "decoder_layers": 100,
    "decoder_attention_heads": 256,
    "decoder_ffn_dim": 65_536,
    "image_bucket_size": 256,
    "token_bucket_size": 4_096,
    "code_image_size": 4_096,
}

#: Relative text positions are bucketed as if every sequence could be this long, whatever the configuration says.
MAX_TOKENS = 1024


@dataclass(frozen=True)
class OFAConfig:
    """Sizes of one OFA network; every field is a key of the hub's `config.json`."""

    vocab_size: int = 59457
    d_model: int = 512
    encoder_layers: int = 4
    encoder_attention_heads: int = 8
    encoder_ffn_dim: int = 2048
    decoder_layers: int = 4
    decoder_attention_heads: int = 8
    decoder_ffn_dim: int = 2048
    resnet_type: str = "resnet101"
    image_bucket_size: int = 42
    token_bucket_size: int = 256
    code_image_size: int = 128
    max_position_embeddings: int = 1024
    attn_scale_factor: float = 2.0
    bos_token_id: int = 0
    pad_token_id: int = 1
    eos_token_id: int = 2

    @classmethod
    def from_hub(cls, values: Mapping[str, Any]) -> "OFAConfig":
        """Read the contents of `config.json`.

        Raises CheckpointRefused, naming the key, where the file asks for a network that is not built here.
        """
        for key, supported in REQUIRED.items():
            if values.get(key, supported) != supported:
                raise CheckpointRefused(
                    f"config.json has {key} = {values[key]!r:.200}, and only {supported!r} is supported: "
                    "use a checkpoint of the plain OFA architecture."
                )
        config = cls(**_read(values, cls, "config.json"))
        config._check()
        return config

    def to_hub(self) -> dict[str, Any]:
        """Give the contents of a `config.json` that reads back as this configuration."""
        return dict(sorted({**REQUIRED, **asdict(self)}.items()))

    def _check(self) -> None:
        if self.resnet_type not in RESNET_BLOCKS:
            raise CheckpointRefused(
                f"config.json has resnet_type = {self.resnet_type!r:.200}; supported are {', '.join(RESNET_BLOCKS)}."
            )
        for key, largest in LARGEST.items():
            if not 1 <= getattr(self, key) <= largest:
                raise CheckpointRefused(
                    f"config.json has {key} = {getattr(self, key)!r:.40}; it must be 1 to {largest}."
                )
        if not 0 < self.attn_scale_factor < 1_000:
            raise CheckpointRefused(
                f"config.json has attn_scale_factor = {self.attn_scale_factor}; it must be above 0."
            )
        for key in ("encoder_attention_heads", "decoder_attention_heads"):
            heads = getattr(self, key)
            if self.d_model % heads:
                raise CheckpointRefused(
                    f"config.json has {key} = {heads}, which does not divide d_model = {self.d_model}."
                )
        if not 1 <= self.max_position_embeddings <= MAX_TOKENS:
            raise CheckpointRefused(
                f"config.json has max_position_embeddings = {self.max_position_embeddings}; "
                f"it must be 1 to {MAX_TOKENS}."
            )
        for key in ("bos_token_id", "pad_token_id", "eos_token_id"):
            if not 0 <= getattr(self, key) < self.vocab_size:
                raise CheckpointRefused(f"config.json has {key} = {getattr(self, key)}, outside the vocabulary.")

    def check_image_size(self, pixels: int) -> None:
        """Refuse (CheckpointRefused) a square of `pixels` a side whose grid is larger than the position tables."""
        grid = -(-pixels // TRUNK_STRIDE_PIXELS)
        if pixels < 1 or grid > self.image_bucket_size:
            raise CheckpointRefused(
                f"configuration.json has patch_image_size = {pixels}, a grid of {grid} x {grid}, and image_bucket_size "
                f"= {self.image_bucket_size} in config.json has positions for {self.image_bucket_size} x "
                f"{self.image_bucket_size} only."
            )


#: Prompts of the reference where configuration.json gives none: one text, or a second text taken as true first.
PLAIN_PROMPT = ' does the image describe " {} "?'
PREMISE_PROMPT = ' can image and text1 " {} " imply text2 " {} "?'

#: Mean and standard deviation of each colour channel, in the 0 to 1 range, that pixels are normalised by.
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

#: Keys by which a configuration asks ModelScope or transformers to run code from somewhere.
CODE_KEYS = ("plugins", "allow_remote", "auto_map", "custom_pipelines", "external_modules")


@dataclass(frozen=True)
class Configuration:
    """How questions are put to the network; every field but the prompts is a key of `model` in `configuration.json`.

    `max_src_length` bounds the words of a text and also the tokens of a whole prompt; `patch_image_size` is in pixels.
    Beam search settings and `gen_type` are not kept: the answers are a closed set, of which each is scored.
    """

    language: str = "en"
    max_src_length: int = 256
    patch_image_size: int = 480
    imagenet_default_mean_and_std: bool = False
    prompt_type: str = "none"
    answer2label: str = ""
    plain_prompt: str = PLAIN_PROMPT
    premise_prompt: str = PREMISE_PROMPT

    @classmethod
    def from_hub(cls, values: Mapping[str, Any]) -> "Configuration":
        """Read the contents of `configuration.json`.

        Raises CheckpointRefused, naming the key, for another task, for a request to run code, and for a setting that
        would change scores in a way that is not computed here.
        """
        refuse_code(values, "configuration.json")
        model = values.get("model")
        if not isinstance(model, Mapping):
            raise CheckpointRefused('configuration.json has no object "model".')
        wanted = (
            ("task", values.get("task"), "visual-entailment"),
            ("model.type", model.get("type"), "ofa"),
            ("model.multimodal_type", model.get("multimodal_type", "default"), "default"),
            ("model.language", model.get("language", "en"), "en"),
            # The reference's default, "none", fails in its own visual entailment, so there is nothing to agree with.
            ("model.prompt_type", model.get("prompt_type", "none"), "prev_output"),
        )
        for key, value, supported in wanted:
            if value != supported:
                raise CheckpointRefused(
                    f"configuration.json has {key} = {value!r:.200}; only {supported!r} is supported."
                )
        known = _read({k: v for k, v in model.items() if not k.endswith("_prompt")}, cls, "configuration.json")
        if "prompt" in model:
            fields_in_prompt = prompt_fields(model["prompt"])
            known["plain_prompt" if fields_in_prompt == 1 else "premise_prompt"] = model["prompt"]
        configuration = cls(**known)
        if configuration.max_src_length < 1:
            raise CheckpointRefused(f"configuration.json has max_src_length = {configuration.max_src_length}.")
        return configuration

    @property
    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation by channel, for pixels in the 0 to 1 range."""
        return IMAGENET if self.imagenet_default_mean_and_std else HALF


def refuse_code(values: object, file: str) -> None:
    """Refuse (CheckpointRefused) settings that, as read from `file`, ask anywhere for code to be run."""
    inside = [values]
    while inside:
        value = inside.pop()
        if isinstance(value, list):
            inside += value
        elif isinstance(value, Mapping):
            for key in CODE_KEYS:
                if value.get(key):
                    raise CheckpointRefused(
                        f"{file} asks to run code ({key} = {value[key]!r:.200}); no code of a checkpoint is ever run: "
                        "use a checkpoint that needs none."
                    )
            inside += value.values()


def is_text(value: object, longest: int = 2_000) -> bool:
    """Whether a value is text that can be stored with a verdict: Postgres takes neither NUL nor lone surrogates."""
    return isinstance(value, str) and len(value) <= longest and not re.search("[\0\ud800-\udfff]", value)


def prompt_fields(prompt: object) -> int:
    """Count the `{}` of a prompt: 1 takes a text, 2 take a premise and a text. Raises CheckpointRefused otherwise."""
    try:
        parsed = list(string.Formatter().parse(prompt)) if isinstance(prompt, str) and is_text(prompt) else []
    except ValueError:
        parsed = []
    places = [(name, spec, conversion) for _, name, spec, conversion in parsed if name is not None]
    # Anything but a bare {} would let a prompt look into Python objects.
    if len(places) not in (1, 2) or any(place != ("", "", None) for place in places):
        raise CheckpointRefused(
            f"configuration.json has prompt = {prompt!r:.200}; it must hold {{}} once, for the text, "
            "or twice, for the premise and the text."
        )
    return len(places)


def _read(values: Mapping[str, Any], into: type[OFAConfig] | type[Configuration], file: str) -> dict[str, Any]:
    """Pick the keys that are fields of `into`, each of its default's type."""
    known: dict[str, Any] = {}
    for field in fields(into):
        if field.name in values:
            value, wanted = values[field.name], type(field.default)
            if type(value) is int and wanted is float:
                value = float(value)
            if type(value) is not wanted:
                raise CheckpointRefused(
                    f"{file} has {field.name} = {value!r:.200}, which is not of type {wanted.__name__}."
                )
            known[field.name] = value
    return known
