"""A small network whose norms have a few channels that stand out, and pairs to put to it."""

import json
import math
import shutil
from functools import cache
from pathlib import Path

import safetensors.torch
import torch
from PIL import Image
from torch import Tensor, nn

from infra.demo_model.generate import held_out_pairs
from infra.demo_model.scenes import SEEDS
from infra.demo_model.vocabulary import WEIGHTS
from worker.model.checkpoint import MANIFEST, SAFETENSORS, TIED
from worker.model.config import OFAConfig
from worker.model.ofa import OFA
from worker.moderator import Question

#: Two layers a side, wide enough for two groups of weights a row.
CONFIG = OFAConfig(
    vocab_size=651,
    d_model=256,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=512,
    decoder_ffn_dim=512,
    resnet_type="resnet18",
    image_bucket_size=4,
    token_bucket_size=32,
    max_position_embeddings=128,
)

#: By how much a channel that stands out is larger, and one of how many does.
GAIN, SHARE = 15.0, 100

# The models are so small that threads would spend their time waiting for each other.
torch.set_num_threads(1)


def write_toy(folder: Path, config: OFAConfig = CONFIG, seed: int = 0, gain: float = GAIN) -> Path:
    """A checkpoint of random weights in a new folder, with the demo model's words."""
    folder.mkdir()
    for name in ("configuration.json", "vocab.json", "merges.txt", "ans2label.json"):
        shutil.copyfile(WEIGHTS / name, folder / name)
    save_random(folder, config, seed, gain)
    return folder


def save_random(folder: Path, config: OFAConfig, seed: int = 0, gain: float = GAIN) -> None:
    """Write a network's settings and random weights into a folder."""
    (folder / "config.json").write_text(json.dumps(config.to_hub()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = OFA(config)
        plant_outliers(model, gain)
    state = {name: t for name, t in model.state_dict().items() if name not in TIED and "num_batches" not in name}
    safetensors.torch.save_file(state, folder / SAFETENSORS)


@torch.no_grad()
def plant_outliers(model: nn.Module, gain: float) -> None:
    """Weights with heavy tails and rows of unequal norms; norms with unequal gains, a few of them far larger."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            tails = torch.distributions.StudentT(5.0).sample(module.weight.shape) * 0.7 / math.sqrt(module.in_features)
            module.weight.copy_(tails * torch.empty(module.out_features, 1).log_normal_(0, 0.3))
            module.bias.normal_(0, 0.02)
        elif isinstance(module, nn.LayerNorm):
            channels = module.weight.numel()
            module.weight.log_normal_(0, 0.25)
            module.bias.normal_(0, 0.1)
            module.weight[torch.randperm(channels)[: max(2, channels // SHARE)]] *= gain


@cache
def questions(count: int, seed: str = "development") -> tuple[Question, ...]:
    """The demo model's pairs as questions: `development` ones calibrate, `test` ones measure."""
    return tuple(
        Question(Image.fromarray(pair.pixels), pair.line["image"].encode(), pair.line["text"])
        for pair in held_out_pairs(count, SEEDS[seed])
    )


def tensors(folder: Path) -> dict[str, Tensor]:
    """The stored weights of a checkpoint."""
    return safetensors.torch.load_file(folder / SAFETENSORS)


def manifest(folder: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / MANIFEST).read_text())
    return content
