"""Train the demo model on drawn scenes: `python -m infra.demo_model.train --minutes 60 --run DIR`.

Two stages share one run. First the image trunk alone learns which product's centre lies in which cell of its feature
grid, by a 1x1 convolution that is dropped afterwards. Then the whole network learns, together and on the same
features, to judge statements, to caption ("what does the image describe?") and to go on finding centres: judging
alone stalls, because nothing ties words to pictures.

Progress is the share of the time budget, so a run ends when it should on any machine. It stops and resumes at its last
checkpoint. Gradients are computed in bfloat16 where autocast chooses so; the weights stay float32 until `export`.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn

from infra.demo_model.catalog import PRODUCTS
from infra.demo_model.scenes import (
    LABELS,
    PROHIBITED_PRODUCTS,
    SEEDS,
    SIDE_PX,
    Scene,
    Statement,
    caption,
    scene_at,
    state,
)
from infra.demo_model.vocabulary import ANSWERS, BOS, CAPTION_PROMPT, ENTAILMENT_PROMPT, EOS, PAD, WEIGHTS
from worker.model.config import TRUNK_STRIDE_PIXELS, OFAConfig
from worker.model.ofa import OFA
from worker.model.resnet import FEATURES, Bottleneck

#: Scenes a step while the trunk learns alone, and afterwards; statements a scene.
TRUNK_BATCH, BATCH, STATEMENTS = 64, 48, 4

#: Share of the time budget that the trunk learns alone.
TRUNK_SHARE = 0.06

#: Highest learning rate, its lowest share at the end, and the steps to warm up at the start of each stage.
LEARNING_RATE, LAST_SHARE, WARMUP_STEPS = 1e-3, 0.01, 200

WEIGHT_DECAY, CLIP_NORM = 0.02, 1.0

#: Shares of entailment, contradiction, neutral in training: what is neutral is told by the text and learned first.
LABEL_SHARES = (0.42, 0.42, 0.16)

#: Of ten scenes, how many surely show a prohibited product; of ten decided statements, how many are the policy's.
PROHIBITED_TENTHS, POLICY_TENTHS = 2, 2

#: Weight of the centres' loss beside the others, and of an empty cell in it.
CENTRES_WEIGHT, EMPTY_WEIGHT = 0.5, 0.3

#: Steps between lines of the log, and between checkpoints.
LOG_STEPS, SAVE_STEPS = 50, 250

#: Development scenes looked at with each checkpoint.
DEVELOPMENT_SCENES = 400

GRID = SIDE_PX // TRUNK_STRIDE_PIXELS


@dataclass
class Batch:
    """Scenes with their statements and captions, as tensors."""

    pixels: Tensor  # (N, 3, S, S)
    centres: Tensor  # (N, GRID, GRID) index into PRODUCTS, or len(PRODUCTS) for an empty cell
    statements: Tensor  # (N * K, L) token ids
    labels: Tensor  # (N * K,)
    captions: Tensor  # (N, T) token ids
    kinds: list[str] = field(default_factory=list)  # N * K


class Tokens:
    """Token ids of statements and captions, remembered because the same texts come again and again."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
        self.known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids between begin and end."""
        if text not in self.known:
            self.known[text] = [BOS, *self.tokenizer.encode(text).ids, EOS]
        return self.known[text]

    def answers(self) -> Tensor:
        """The first token of each answer, in the order of their label ids."""
        return torch.tensor([self.encode(f" {answer}")[1] for answer in ANSWERS])


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """(rows, longest), padding on the right."""
    ids = torch.full((len(rows), max(map(len, rows))), PAD)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    return ids


def as_pixels(scenes: Sequence[Scene]) -> Tensor:
    """(N, 3, S, S) in -1 to 1, as preprocessing makes them."""
    pictures = torch.from_numpy(np.stack([scene.pixels for scene in scenes])).permute(0, 3, 1, 2)
    return (pictures.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)


def centre_cells(scene: Scene) -> np.ndarray:
    """(GRID, GRID): which product's centre lies in the cell."""
    cells = np.full((GRID, GRID), len(PRODUCTS))
    for product, (x, y) in zip(scene.products, scene.centres, strict=True):
        cells[int(y) // TRUNK_STRIDE_PIXELS, int(x) // TRUNK_STRIDE_PIXELS] = product
    return cells


def draw_statement(rng: Generator, scene: Scene) -> Statement:
    """A training statement: label by LABEL_SHARES, a share of the decided ones under `prohibited`."""
    label = LABELS[int(np.searchsorted(np.cumsum(LABEL_SHARES), rng.random()))]
    policy = "prohibited" if rng.integers(10) < POLICY_TENTHS else "catalog"
    if policy == "prohibited" and label == "entailment" and not set(scene.products) & set(PROHIBITED_PRODUCTS):
        label = "contradiction"
    return state(rng, scene, label, policy)


def draw_batch(seed: int, first: int, scenes: int, statements: int, tokens: Tokens) -> Batch:
    """The scenes `first`, `first` + 1, ... of a seed."""
    drawn = [scene_at(seed, i, prohibited=i % 10 < PROHIBITED_TENTHS) for i in range(first, first + scenes)]
    claims = [draw_statement(rng, scene) for scene, rng in drawn for _ in range(statements)]
    shown = [scene for scene, _ in drawn]
    return Batch(
        pixels=as_pixels(shown),
        centres=torch.from_numpy(np.stack([centre_cells(scene) for scene in shown])),
        statements=padded([tokens.encode(ENTAILMENT_PROMPT.format(claim.text)) for claim in claims])
        if claims
        else torch.empty(0, 1),
        labels=torch.tensor([LABELS.index(claim.label) for claim in claims]),
        captions=padded([tokens.encode(f" {caption(scene)}") for scene in shown]),
        kinds=[claim.kind if claim.policy == "catalog" else "prohibited" for claim in claims],
    )


def demo_config(vocab_size: int) -> OFAConfig:
    """The demo model's shape, 5 million parameters."""
    return OFAConfig(
        vocab_size=vocab_size,
        d_model=128,
        encoder_layers=3,
        encoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=512,
        resnet_type="resnet18",
        token_bucket_size=64,
        max_position_embeddings=128,
    )


def build(vocab_size: int) -> OFA:
    """A fresh model: small embeddings, and residual blocks that begin as the identity."""
    model = OFA(demo_config(vocab_size))
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Bottleneck):
            assert isinstance(module.bn3, nn.BatchNorm2d)
            nn.init.zeros_(module.bn3.weight)
    model.encoder.embed_images.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def judge(model: OFA, ids: Tensor, features: Tensor, answers: Tensor) -> Tensor:
    """Logits (B, A) of the answers' first tokens, read at each prompt's last token, the end token left out."""
    memory = model.encode(ids, features)
    hidden = model.decode(ids.masked_fill(ids.eq(EOS), PAD)[:, :-1], memory)
    last = ids.ne(PAD).sum(1) - 2
    return model.logits(hidden[torch.arange(len(ids)), last], answers).float()


def caption_loss(model: OFA, prompt: Tensor, features: Tensor, captions: Tensor) -> Tensor:
    """Cross-entropy of the captions' tokens, which follow the begin token in the decoder."""
    memory = model.encode(prompt.expand(len(features), -1), features)
    logits = model.logits(model.decode(captions[:, :-1], memory)).float()
    return F.cross_entropy(logits.flatten(0, 1), captions[:, 1:].flatten(), ignore_index=PAD)


def centres_loss(head: nn.Conv2d, features: Tensor, centres: Tensor) -> Tensor:
    """Cross-entropy of the cells' products."""
    weight = torch.ones(len(PRODUCTS) + 1)
    weight[-1] = EMPTY_WEIGHT
    return F.cross_entropy(head(features).float(), centres, weight)


class Run:
    """One training run in a folder: model, optimizer, and how far it is."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.budget = folder, seconds
        self.tokens = Tokens(WEIGHTS)
        self.answers = self.tokens.answers()
        self.caption_prompt = torch.tensor([self.tokens.encode(CAPTION_PROMPT)])
        torch.manual_seed(0)
        self.model = build(self.tokens.tokenizer.get_vocab_size())
        self.head = nn.Conv2d(FEATURES, len(PRODUCTS) + 1, 1)
        self.parameters = [*self.model.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        self.step, self.scenes, self.elapsed, self.stage_step, self.stage = 0, 0, 0.0, 0, "trunk"
        if (folder / "last.pt").exists():
            self.load()

    def load(self) -> None:
        """Go on where the last checkpoint was written."""
        kept = torch.load(self.folder / "last.pt", weights_only=True)
        self.model.load_state_dict(kept["model"])
        self.head.load_state_dict(kept["head"])
        self.optimizer.load_state_dict(kept["optimizer"])
        for name in ("step", "scenes", "elapsed", "stage_step", "stage"):
            setattr(self, name, kept[name])

    def save(self) -> None:
        """Write a checkpoint, whole or not at all."""
        kept = {name: getattr(self, name) for name in ("step", "scenes", "elapsed", "stage_step", "stage")}
        states = {name: getattr(self, name).state_dict() for name in ("model", "head", "optimizer")}
        torch.save({**states, **kept}, self.folder / "next.pt")
        (self.folder / "next.pt").replace(self.folder / "last.pt")

    def rate(self) -> float:
        """A half cosine over the time budget, with a warm-up at the start of each stage."""
        progress = min(self.elapsed / self.budget, 1.0)
        cosine = LAST_SHARE + (1 - LAST_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))
        return LEARNING_RATE * cosine * min(1.0, (self.stage_step + 1) / WARMUP_STEPS)

    def losses(self) -> dict[str, Tensor]:
        """Draw the next scenes and compute what the stage learns from them."""
        if self.stage == "trunk":
            batch = draw_batch(SEEDS["train"], self.scenes, TRUNK_BATCH, 0, self.tokens)
        else:
            batch = draw_batch(SEEDS["train"], self.scenes, BATCH, STATEMENTS, self.tokens)
        self.scenes += len(batch.pixels)
        with torch.autocast("cpu", torch.bfloat16):
            features = self.model.trunk(batch.pixels)
            losses = {"centres": centres_loss(self.head, features, batch.centres)}
            if self.stage == "trunk":
                return losses
            logits = judge(self.model, batch.statements, features.repeat_interleave(STATEMENTS, 0), self.answers)
            losses["caption"] = caption_loss(self.model, self.caption_prompt, features, batch.captions)
        losses["judge"] = F.cross_entropy(logits, batch.labels)
        losses["accuracy"] = logits.argmax(1).eq(batch.labels).float().mean().detach()
        return losses

    def advance(self) -> dict[str, float]:
        """One step; returns the losses."""
        started = time.monotonic()
        if self.stage == "trunk" and self.elapsed > TRUNK_SHARE * self.budget:
            self.stage, self.stage_step = "whole", 0
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        losses = self.losses()
        total = losses["centres"] * (1.0 if self.stage == "trunk" else CENTRES_WEIGHT)
        if self.stage == "whole":
            total = total + losses["judge"] + losses["caption"]
        self.optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        self.optimizer.step()
        self.step, self.stage_step = self.step + 1, self.stage_step + 1
        self.elapsed += time.monotonic() - started
        return {name: loss.item() for name, loss in losses.items()}

    @torch.inference_mode()
    def develop(self) -> dict[str, float]:
        """Accuracy on the development scenes, by label and by kind of statement."""
        self.model.eval()
        right: dict[str, list[float]] = {}
        for first in range(0, DEVELOPMENT_SCENES, 100):
            batch = draw_batch(SEEDS["development"], first, 100, STATEMENTS, self.tokens)
            features = self.model.trunk(batch.pixels).repeat_interleave(STATEMENTS, 0)
            judged = judge(self.model, batch.statements, features, self.answers).argmax(1)
            for label, kind, answer in zip(batch.labels.tolist(), batch.kinds, judged.tolist(), strict=True):
                for name in (LABELS[label], kind):
                    right.setdefault(name, []).append(float(answer == label))
        self.model.train()
        return {name: round(sum(hits) / len(hits), 3) for name, hits in sorted(right.items())}


def main() -> None:
    """Train, logging a line of JSON every few steps; `export` afterwards writes the weights."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of checkpoints and the log; a run resumes")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.run.mkdir(parents=True, exist_ok=True)
    run = Run(arguments.run, arguments.minutes * 60)
    recent: list[dict[str, float]] = []
    while run.elapsed < run.budget:
        recent.append(run.advance())
        if run.step % LOG_STEPS == 0:
            shown = [losses for losses in recent if losses.keys() == recent[-1].keys()]
            means = {name: round(sum(losses[name] for losses in shown) / len(shown), 4) for name in recent[-1]}
            line = {"step": run.step, "scenes": run.scenes, "seconds": round(run.elapsed), "rate": round(run.rate(), 6)}
            print(json.dumps({**line, **means}), flush=True)
            recent = []
        if run.step % SAVE_STEPS == 0:
            run.save()
            if run.stage == "whole":
                print(json.dumps({"step": run.step, "development": run.develop()}), flush=True)
    run.save()
    print(json.dumps({"step": run.step, "development": run.develop()}), flush=True)


if __name__ == "__main__":
    main()
