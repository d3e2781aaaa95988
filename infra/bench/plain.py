"""OFA scored the plain way, one pair at a time: what the project's short cuts are measured against.

The same network and weights as worker/model/ofa.py, computed as the reference does it: batch normalisation in
evaluation and not folded, the usual memory layout, attention spelt out with a materialised bias, position biases built
anew for every pair, each answer read to its end by the decoder, and logits over the whole vocabulary at every place.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.model.checkpoint import Checkpoint, Files, network_state
from worker.model.config import OFAConfig
from worker.model.decode import Answers
from worker.model.ofa import OFA, Attention, DecoderLayer, EncoderLayer, split_heads, token_buckets
from worker.model.preprocess import make_pixels, make_prompt
from worker.moderator import Question


def load_plain(folder: Path, longest_text: int) -> OFA:
    """The network of an unquantized checkpoint in float32, nothing folded."""
    files = Files(folder)
    config = OFAConfig.from_hub(files.json_object("config.json"))
    state = network_state(files.weights()[0], config, longest_text)
    model = OFA(config)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=False)
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def judge_plain(model: OFA, checkpoint: Checkpoint, questions: Sequence[Question], together: bool = False) -> Tensor:
    """Probabilities (n, A) of each question's answers. `together`: the answers' rows go through the decoder as one."""
    allowed = masks(checkpoint.answers, model.config.vocab_size)
    rows = []
    for question in questions:
        prompt = make_prompt(question.text, question.premise, checkpoint.tokenizer, checkpoint.configuration)
        pixels = make_pixels(question.image, checkpoint.configuration)
        rows.append(score_plain(model, prompt.ids, pixels, checkpoint.answers, allowed, together))
    return torch.stack(rows)


def masks(answers: Answers, vocabulary: int) -> list[Tensor]:
    """For each answer, what may stand at each of its places, its end included: (len + 1, V) bool."""
    sequences = [(*tokens, answers.eos) for tokens in answers.tokens]
    found = []
    for sequence in sequences:
        mask = torch.zeros(len(sequence), vocabulary, dtype=torch.bool)
        for place in range(len(sequence)):
            for other in sequences:
                if len(other) > place and other[:place] == sequence[:place]:
                    mask[place, other[place]] = True
        found.append(mask)
    return found


def score_plain(
    model: OFA, ids: Sequence[int], pixels: Tensor, answers: Answers, allowed: Sequence[Tensor], together: bool
) -> Tensor:
    """Probabilities (A,) for one pair: token ids with begin and end, pixels (3, S, S)."""
    states, positions = encode(model, torch.tensor([ids]), pixels[None])
    prompt = list(ids[:-1])
    rows = [[*prompt, *tokens] for tokens in answers.tokens]
    longest = max(map(len, rows))
    padded = torch.tensor([[*row, *[model.config.pad_token_id] * (longest - len(row))] for row in rows])  # (A, T)
    if together:
        logits = list(decode(model, padded, states, positions))  # (T, V) each
    else:
        logits = [decode(model, torch.tensor([row]), states, positions)[0] for row in rows]
    scores = []
    for tokens, mask, scored in zip(answers.tokens, allowed, logits, strict=True):
        whole = mask.new_zeros(scored.shape)
        whole[len(prompt) - 1 : len(prompt) + len(tokens)] = mask
        chosen = scored.masked_fill(~whole, -math.inf).log_softmax(-1)  # (T, V)
        places = torch.arange(len(prompt) - 1, len(prompt) + len(tokens))
        scores.append(chosen[places, torch.tensor((*tokens, answers.eos))].sum())
    return torch.stack(scores).softmax(0)


def encode(model: OFA, ids: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """States (1, S, d) and positions (1, S, d) of one pair: ids (1, L), pixels (1, 3, S, S)."""
    encoder = model.encoder
    features = encoder.embed_images(pixels)  # (1, 1024, h, w)
    positions, biases = encoder._position_bias(features.size(2), features.size(3), ids.size(1))
    patches = encoder.image_proj(features.flatten(2).transpose(1, 2)) + encoder.type_embedding.weight[1]
    text = encoder.layernorm_embedding(encoder.embed_tokens(ids) + encoder.type_embedding.weight[0])
    x = torch.cat([encoder.patch_layernorm_embedding(patches), text], 1)  # (1, S, d)
    for layer, bias in zip(cast(Iterable[EncoderLayer], encoder.layers), biases, strict=True):
        h = layer.self_attn_layer_norm(x)
        x = x + layer.self_attn_mid_layer_norm(attend(layer.self_attn, h, h, bias))
        h = F.gelu(layer.fc1(layer.final_layer_norm(x)))
        x = x + layer.fc2(layer.ffn_layer_norm(h))
    return encoder.layer_norm(x), positions


def decode(model: OFA, rows: Tensor, states: Tensor, positions: Tensor) -> Tensor:
    """Logits (A, T, V) of rows (A, T) over one pair's states (1, S, d), which are repeated for each row."""
    decoder, length = model.decoder, rows.size(1)
    states, positions = (tensor.repeat(len(rows), 1, 1) for tensor in (states, positions))
    own = decoder.pos_ln(decoder.embed_positions(torch.arange(length).repeat(len(rows), 1)))  # (A, T, d)
    q = split_heads(decoder.self_pos_q_linear(own), decoder.heads) * decoder.pos_scaling
    k = split_heads(decoder.self_pos_k_linear(own), decoder.heads)
    causal = q @ k.transpose(2, 3) + torch.full((length, length), -math.inf).triu(1)  # (A, H, T, T)
    q = split_heads(decoder.cross_pos_q_linear(own), decoder.heads) * decoder.pos_scaling
    k = split_heads(decoder.cross_pos_k_linear(positions), decoder.heads)
    cross = q @ k.transpose(2, 3)  # (A, H, T, S)
    x = decoder.layernorm_embedding(decoder.embed_tokens(rows))
    layers = cast(Iterable[DecoderLayer], decoder.layers)
    for layer, table in zip(layers, decoder.token_rel_pos_table_list, strict=True):
        buckets = token_buckets(length, decoder.token_bucket_size, rows.device)
        h = layer.self_attn_layer_norm(x)
        attended = attend(layer.self_attn, h, h, causal + table(buckets).permute(2, 0, 1))
        x = x + layer.self_attn_mid_layer_norm(attended)
        h = layer.cross_attn_layer_norm(x)
        x = x + layer.cross_attn_mid_layer_norm(attend(layer.cross_attn, h, states, cross))
        h = F.gelu(layer.fc1(layer.final_layer_norm(x)))
        x = x + layer.fc2(layer.ffn_layer_norm(h))
    return model.logits(decoder.layer_norm(x))


def attend(attention: Attention, x: Tensor, source: Tensor, bias: Tensor) -> Tensor:
    """Attention step by step: x (B, T, d), source (B, S, d), bias (B, H, T, S) -> (B, T, d)."""
    q = split_heads(attention.q_proj(x), attention.heads) * attention.scale
    k = split_heads(attention.k_proj(source), attention.heads)
    v = split_heads(attention.v_proj(source), attention.heads)
    weights = (q @ k.transpose(2, 3) + bias).softmax(-1)  # (B, H, T, S)
    y = (weights @ v) * attention.c_attn[:, None, None]
    return cast(Tensor, attention.out_proj(y.transpose(1, 2).reshape(x.shape)))
