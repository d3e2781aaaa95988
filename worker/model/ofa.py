"""OFA, the encoder-decoder that reads a picture and a text as one sequence.

Wang et al., "OFA: Unifying Architectures, Tasks, and Modalities Through a Simple Sequence-to-Sequence Learning
Framework" (arXiv:2202.03052); the block's extra norms and head gains are NormFormer's (arXiv:2110.09456); the decoupled
position bias is TUPE's (arXiv:2006.15595). Parameter names are those of ModelScope's OFA, so that its checkpoints load
by name.

Letters in shapes: B pairs, N distinct pictures, P = h * w image patches, L text tokens, S = P + L, T decoder tokens,
H heads, d the width of the model, V the vocabulary.

The network trains as well: batch normalisation stays itself until `fold`, and position biases are cached only in
evaluation without gradients. Dropout is not part of it.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker.model.config import MAX_TOKENS, RESNET_BLOCKS, OFAConfig
from worker.model.resnet import FEATURES, ResNet

#: Text lengths for which a position bias is computed are rounded up to this, so that few are.
LENGTH_STEP = 32

#: Position biases kept at a time, one a feature grid. OFA-large's takes 12 layers x 16 heads x 932 x 932 x 4 bytes
#: = 0.67 GB in float32.
MAX_CACHED_GRIDS = 2


@dataclass(frozen=True)
class Memory:
    """What the encoder hands to the decoder."""

    states: Tensor  # (B, S, d)
    positions: Tensor  # (1, S, d), the same for every pair
    key_mask: Tensor | None  # (B, 1, 1, S), 0 where there is something to attend to and -inf at padding

    def rows(self, index: Tensor) -> "Memory":
        """The memory of the pairs at `index` (K,), which may repeat."""
        return Memory(self.states[index], self.positions, None if self.key_mask is None else self.key_mask[index])


class Attention(nn.Module):
    """Multi-head attention with a learned gain `c_attn` on each head's output."""

    def __init__(self, d: int, heads: int, scale_factor: float) -> None:
        super().__init__()
        self.heads = heads
        # The dot product shares its variance with the position bias, hence the factor 2 of TUPE in the scale.
        self.scale = (d // heads * scale_factor) ** -0.5
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d, d) for _ in range(4))
        self.c_attn = nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor, source: Tensor, bias: Tensor) -> Tensor:
        """Attend from x (B, T, d) to source (B, S, d) with bias (1 or B, H, T, S)."""
        q = split_heads(self.q_proj(x), self.heads)  # (B, H, T, d/H)
        k = split_heads(self.k_proj(source), self.heads)  # (B, H, S, d/H)
        v = split_heads(self.v_proj(source), self.heads)  # (B, H, S, d/H)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale)
        y = y * self.c_attn[:, None, None]
        return cast(Tensor, self.out_proj(y.transpose(1, 2).reshape(x.shape)))  # (B, T, d)


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network, each normalised before and once more inside."""

    def __init__(self, config: OFAConfig) -> None:
        super().__init__()
        d, wide = config.d_model, config.encoder_ffn_dim
        self.self_attn = Attention(d, config.encoder_attention_heads, config.attn_scale_factor)
        self.self_attn_layer_norm, self.self_attn_mid_layer_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, wide), nn.Linear(wide, d)
        self.final_layer_norm, self.ffn_layer_norm = nn.LayerNorm(d), nn.LayerNorm(wide)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x (B, S, d), bias (1 or B, H, S, S) -> (B, S, d)"""
        h = self.self_attn_layer_norm(x)
        x = x + self.self_attn_mid_layer_norm(self.self_attn(h, h, bias))
        h = F.gelu(self.fc1(self.final_layer_norm(x)))  # (B, S, wide)
        return cast(Tensor, x + self.fc2(self.ffn_layer_norm(h)))


class DecoderLayer(nn.Module):
    """An encoder layer with attention to the encoder's states in the middle."""

    def __init__(self, config: OFAConfig) -> None:
        super().__init__()
        d, wide, heads = config.d_model, config.decoder_ffn_dim, config.decoder_attention_heads
        self.self_attn = Attention(d, heads, config.attn_scale_factor)
        self.self_attn_layer_norm, self.self_attn_mid_layer_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.cross_attn = Attention(d, heads, config.attn_scale_factor)
        self.cross_attn_layer_norm, self.cross_attn_mid_layer_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, wide), nn.Linear(wide, d)
        self.final_layer_norm, self.ffn_layer_norm = nn.LayerNorm(d), nn.LayerNorm(wide)

    def forward(self, x: Tensor, states: Tensor, self_bias: Tensor, cross_bias: Tensor) -> Tensor:
        """x (B, T, d), states (B, S, d), biases (1, H, T, T) and (1 or B, H, T, S) -> (B, T, d)"""
        h = self.self_attn_layer_norm(x)
        x = x + self.self_attn_mid_layer_norm(self.self_attn(h, h, self_bias))
        h = self.cross_attn_layer_norm(x)
        x = x + self.cross_attn_mid_layer_norm(self.cross_attn(h, states, cross_bias))
        h = F.gelu(self.fc1(self.final_layer_norm(x)))  # (B, T, wide)
        return cast(Tensor, x + self.fc2(self.ffn_layer_norm(h)))


class Encoder(nn.Module):
    """Image patches and text tokens to states; patches stand first."""

    def __init__(self, config: OFAConfig, embed_tokens: nn.Embedding) -> None:
        super().__init__()
        d, heads, layers = config.d_model, config.encoder_attention_heads, config.encoder_layers
        self.heads, self.pad, self.grid_side = heads, config.pad_token_id, config.image_bucket_size
        self.token_bucket_size = config.token_bucket_size
        self.max_tokens = config.max_position_embeddings
        self.pos_scaling = (d / heads * config.attn_scale_factor) ** -0.5
        self.embed_tokens = embed_tokens
        self.layernorm_embedding = nn.LayerNorm(d)
        self.type_embedding = nn.Embedding(2, d)  # row 0 marks text, row 1 the picture
        self.embed_images = ResNet(RESNET_BLOCKS[config.resnet_type])
        self.image_proj = nn.Linear(FEATURES, d)
        self.patch_layernorm_embedding = nn.LayerNorm(d)
        self.embed_positions = nn.Embedding(config.max_position_embeddings + 2, d)
        self.embed_image_positions = nn.Embedding(self.grid_side**2 + 1, d)
        self.pos_ln, self.image_pos_ln = nn.LayerNorm(d), nn.LayerNorm(d)
        self.pos_q_linear, self.pos_k_linear = nn.Linear(d, d), nn.Linear(d, d)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(layers))
        self.layer_norm = nn.LayerNorm(d)
        tokens, patches = 2 * config.token_bucket_size - 1, (2 * self.grid_side - 1) ** 2 + 3
        self.token_rel_pos_table_list = nn.ModuleList(nn.Embedding(tokens, heads) for _ in range(layers))
        self.image_rel_pos_table_list = nn.ModuleList(nn.Embedding(patches, heads) for _ in range(layers))
        self._biases: dict[tuple[object, ...], tuple[int, Tensor, list[Tensor]]] = {}
        self.register_load_state_dict_post_hook(lambda encoder, _: encoder._biases.clear())  # type: ignore[no-untyped-call]

    def forward(self, ids: Tensor, features: Tensor) -> Memory:
        """ids (B, L) padded on the right, features (B, 1024, h, w) -> Memory"""
        h, w = features.shape[-2:]
        if ids.size(1) > self.max_tokens:
            raise ValueError(f"a text of {ids.size(1)} tokens does not fit the model's {self.max_tokens} positions")
        positions, biases = self.position_bias(h, w, ids.size(1))
        patches = self.image_proj(features.flatten(2).transpose(1, 2)) + self.type_embedding.weight[1]  # (B, P, d)
        text = self.layernorm_embedding(self.embed_tokens(ids) + self.type_embedding.weight[0])  # (B, L, d)
        padding = ids.eq(self.pad)  # (B, L)
        text = text.masked_fill(padding[..., None], 0)
        x = torch.cat([self.patch_layernorm_embedding(patches), text], 1)  # (B, S, d)
        key_mask = None
        if padding.any():
            key_mask = F.pad(torch.zeros_like(padding, dtype=x.dtype).masked_fill(padding, -math.inf), (h * w, 0))
            key_mask = key_mask[:, None, None]  # (B, 1, 1, S)
        for layer, bias in zip(self.layers, biases, strict=True):
            x = layer(x, bias if key_mask is None else bias + key_mask)
        return Memory(self.layer_norm(x), positions, key_mask)

    def position_bias(self, h: int, w: int, length: int) -> tuple[Tensor, list[Tensor]]:
        """Positions (1, S, d) and each layer's attention bias (1, H, S, S) for an h x w grid and `length` tokens.

        Both depend on nothing else, and those of a shorter text are a corner of those of a longer one: in evaluation
        the longest yet seen is kept for each grid, and cut.
        """
        if self.training or torch.is_grad_enabled():
            return self._position_bias(h, w, length)
        weight, size = self.embed_positions.weight, h * w + length
        key = (h, w, weight.device, weight.dtype)
        kept = self._biases.get(key)
        if kept is None or kept[0] < length:
            longest = min(-(-length // LENGTH_STEP) * LENGTH_STEP, self.max_tokens)
            kept = (longest, *self._position_bias(h, w, longest))
            # A new dictionary each time, because several threads may be reading the old one.
            others = [(k, v) for k, v in self._biases.items() if k != key]
            self._biases = dict([*others[-(MAX_CACHED_GRIDS - 1) :], (key, kept)])
        _, positions, biases = kept
        return positions[:, :size], [bias[:, :, :size, :size] for bias in biases]

    def _position_bias(self, h: int, w: int, length: int) -> tuple[Tensor, list[Tensor]]:
        device, side, patches = self.embed_positions.weight.device, self.grid_side, h * w
        if max(h, w) > side:
            raise ValueError(f"a feature grid of {h} x {w} does not fit the model's {side} x {side} positions")
        y, x = grid(h, w, device)
        # Positions are numbered over the whole side x side table, from 1, whatever part of it the picture fills.
        image = self.image_pos_ln(self.embed_image_positions(y * side + x + 1))
        text = self.pos_ln(self.embed_positions(torch.arange(length, device=device)))
        positions = torch.cat([image, text])[None]  # (1, S, d)
        q = split_heads(self.pos_q_linear(positions), self.heads) * self.pos_scaling
        k = split_heads(self.pos_k_linear(positions), self.heads)
        absolute = q @ k.transpose(2, 3)  # (1, H, S, S)
        steps = image_buckets(h, w, side, device)  # (P, P)
        buckets = token_buckets(length, self.token_bucket_size, device)  # (L, L)
        biases = []
        for token_table, image_table in zip(self.token_rel_pos_table_list, self.image_rel_pos_table_list, strict=True):
            bias = absolute.clone()
            bias[:, :, :patches, :patches] += image_table(steps).permute(2, 0, 1)
            bias[:, :, patches:, patches:] += token_table(buckets).permute(2, 0, 1)
            biases.append(bias)
        return positions, biases

    def train(self, mode: bool = True) -> "Encoder":
        """Switch between training and evaluation; either way the weights may have changed, so biases are forgotten."""
        self._biases = {}
        return super().train(mode)


class Decoder(nn.Module):
    """A prompt, read left to right over the encoder's states."""

    def __init__(self, config: OFAConfig, embed_tokens: nn.Embedding) -> None:
        super().__init__()
        d, heads, layers = config.d_model, config.decoder_attention_heads, config.decoder_layers
        self.heads, self.token_bucket_size = heads, config.token_bucket_size
        self.max_tokens = config.max_position_embeddings
        self.pos_scaling = (d / heads * config.attn_scale_factor) ** -0.5
        self.embed_tokens = embed_tokens
        self.layernorm_embedding = nn.LayerNorm(d)
        self.embed_positions = nn.Embedding(config.max_position_embeddings + 2, d)
        self.pos_ln = nn.LayerNorm(d)
        self.self_pos_q_linear, self.self_pos_k_linear = nn.Linear(d, d), nn.Linear(d, d)
        self.cross_pos_q_linear, self.cross_pos_k_linear = nn.Linear(d, d), nn.Linear(d, d)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(layers))
        self.layer_norm = nn.LayerNorm(d)
        tokens = 2 * config.token_bucket_size - 1
        self.token_rel_pos_table_list = nn.ModuleList(nn.Embedding(tokens, heads) for _ in range(layers))

    def forward(self, prompt: Tensor, memory: Memory) -> Tensor:
        """prompt (B, T), padding only on the right -> (B, T, d)"""
        length, device = prompt.size(1), prompt.device
        if length > self.max_tokens:
            raise ValueError(f"a prompt of {length} tokens does not fit the model's {self.max_tokens} positions")
        positions = self.pos_ln(self.embed_positions(torch.arange(length, device=device)))[None]  # (1, T, d)
        q = split_heads(self.self_pos_q_linear(positions), self.heads) * self.pos_scaling
        k = split_heads(self.self_pos_k_linear(positions), self.heads)
        # No token sees a later one, so padding on the right needs no mask of its own.
        later = torch.full((length, length), -math.inf, dtype=q.dtype, device=device).triu(1)
        causal = q @ k.transpose(2, 3) + later  # (1, H, T, T)
        q = split_heads(self.cross_pos_q_linear(positions), self.heads) * self.pos_scaling
        k = split_heads(self.cross_pos_k_linear(memory.positions), self.heads)
        cross = q @ k.transpose(2, 3)  # (1, H, T, S)
        if memory.key_mask is not None:
            cross = cross + memory.key_mask  # (B, H, T, S)
        buckets = token_buckets(length, self.token_bucket_size, device)  # (T, T)
        x = self.layernorm_embedding(self.embed_tokens(prompt))  # (B, T, d)
        for layer, table in zip(self.layers, self.token_rel_pos_table_list, strict=True):
            x = layer(x, memory.states, causal + table(buckets).permute(2, 0, 1), cross)
        return cast(Tensor, self.layer_norm(x))


class OFA(nn.Module):
    """The whole network: trunk, then encode, then decode, then logits."""

    def __init__(self, config: OFAConfig) -> None:
        super().__init__()
        self.config = config
        # Both sides and the output projection share one table of token embeddings.
        embed_tokens = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        self.encoder = Encoder(config, embed_tokens)
        self.decoder = Decoder(config, embed_tokens)

    def trunk(self, pixels: Tensor) -> Tensor:
        """Look at each distinct picture once: pixels (N, 3, S, S) -> features (N, 1024, h, w)."""
        return cast(Tensor, self.encoder.embed_images(pixels.contiguous(memory_format=torch.channels_last)))

    def encode(self, ids: Tensor, features: Tensor) -> Memory:
        """Read texts with their pictures.

        ids (B, L) hold the begin and end tokens and are padded on the right; features (B, 1024, h, w) are rows of
        `trunk`'s, repeated where pairs share a picture. Raises ValueError where either is larger than the tables.
        """
        return cast(Memory, self.encoder(ids, features))

    def decode(self, prompt: Tensor, memory: Memory) -> Tensor:
        """Read prompts (B, T), padded on the right, over the encoder's memory -> hidden (B, T, d)."""
        return cast(Tensor, self.decoder(prompt, memory))

    def logits(self, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Score next tokens: hidden (..., d) -> (..., V), or (..., K) for token_ids (K,)."""
        table = self.encoder.embed_tokens.weight  # (V, d)
        return F.linear(hidden, table if token_ids is None else table[token_ids])

    def fold(self) -> "OFA":
        """Prepare for inference only: batch norms folded into convolutions, no gradients, channels last."""
        self.encoder.embed_images.fold()
        self.encoder.embed_images.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return self.eval().requires_grad_(False)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, d) -> (B, H, T, d/H)"""
    return x.view(x.size(0), x.size(1), heads, -1).transpose(1, 2)


def token_buckets(length: int, size: int, device: torch.device) -> Tensor:
    """Number the relative positions of `length` tokens: (length, length), values 0 to 2 * size - 2.

    Near distances have a bucket each, far ones share buckets on a logarithmic scale up to MAX_TOKENS, as in T5
    (arXiv:1910.10683, section 2.1).
    """
    place = torch.arange(length, device=device)
    step = place[:, None] - place  # (length, length)
    near = size // 2
    distance = torch.where(step.abs() < near, near - 1, step.abs())
    log_distance = torch.log(distance / near) / math.log((MAX_TOKENS - 1) / near) * (near - 1)
    far = torch.ceil(log_distance).int() + near
    return torch.where(distance <= near, step, far * step.sign()).long() + size - 1


def grid(h: int, w: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each of the h * w patches, row by row: two of (P,)."""
    return torch.arange(h, device=device).repeat_interleave(w), torch.arange(w, device=device).repeat(h)


def image_buckets(h: int, w: int, side: int, device: torch.device) -> Tensor:
    """Number the relative positions of h x w patches in a table for side x side of them: (P, P)."""
    y, x = grid(h, w, device)
    return (y[:, None] - y + side - 1) * (2 * side - 1) + (x[:, None] - x + side - 1)
