"""Which Linears of OFA are quantized, and which of them read the same input.

A group's input can be scaled channel by channel without any cost at run time: what makes the input, a norm or a
`v_proj`, is divided by the scales, and the columns of the Linears that read it are multiplied by them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from worker.model.config import OFAConfig

#: Linears that stay as they are, and why.
SKIPPED: Mapping[str, str] = {
    "encoder.image_proj": "reads the trunk's features, which no norm precedes",
    "encoder.pos_q_linear": "runs once for each picture size and is kept",
    "encoder.pos_k_linear": "runs once for each picture size and is kept",
    "decoder.self_pos_q_linear": "makes attention biases, which every layer adds up",
    "decoder.self_pos_k_linear": "makes attention biases, which every layer adds up",
    "decoder.cross_pos_q_linear": "makes attention biases, which every layer adds up",
    "decoder.cross_pos_k_linear": "makes attention biases, which every layer adds up",
}


@dataclass(frozen=True)
class Group:
    """Linears that read one input, and the module that can take the inverse of the input's scale."""

    name: str
    source: str  # a LayerNorm, or a v_proj: attention mixes tokens and weighs heads, but never mixes channels
    linears: tuple[str, ...]


def groups(config: OFAConfig) -> list[Group]:
    """Every Linear that is quantized, each in one group."""
    found, cross = [], []
    for side, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        for index in range(layers):
            at = f"{side}.layers.{index}"
            attention = f"{at}.self_attn"
            qkv = tuple(f"{attention}.{name}_proj" for name in "qkv")
            found.append(Group(f"{attention}.qkv", f"{at}.self_attn_layer_norm", qkv))
            found.append(Group(f"{attention}.out", f"{attention}.v_proj", (f"{attention}.out_proj",)))
            if side == "decoder":
                attention = f"{at}.cross_attn"
                found.append(Group(f"{attention}.q", f"{at}.cross_attn_layer_norm", (f"{attention}.q_proj",)))
                found.append(Group(f"{attention}.out", f"{attention}.v_proj", (f"{attention}.out_proj",)))
                cross += [f"{attention}.k_proj", f"{attention}.v_proj"]
            found.append(Group(f"{at}.fc1", f"{at}.final_layer_norm", (f"{at}.fc1",)))
            found.append(Group(f"{at}.fc2", f"{at}.ffn_layer_norm", (f"{at}.fc2",)))
    # All decoder layers read the encoder's states, so that one scale has to suit them all.
    return [*found, Group("decoder.cross_attn.kv", "encoder.layer_norm", tuple(cross))]


def reads_prompt(name: str) -> bool:
    """Whether a module reads the decoder's prompt, a few tokens a pair; the others read pictures with texts."""
    return name.startswith("decoder.") and not name.endswith((".cross_attn.k_proj", ".cross_attn.v_proj"))


def may_clip(name: str) -> bool:
    """Whether the range of a Linear's weights may be narrowed: errors of queries and keys multiply in attention."""
    return not name.endswith((".q_proj", ".k_proj"))
