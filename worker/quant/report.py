"""What quantizing cost: errors of each Linear and block, worst first, sizes, and how far the answers moved.

All of it is measured on pairs that neither calibrated nor accepted anything. A Linear's error is its own, on the
original network's inputs; a block's is what has piled up at its output when the whole quantized network runs.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from worker.model.checkpoint import Checkpoint
from worker.model.config import OFAConfig
from worker.model.decode import score
from worker.quant.convert import Conversion, is_dense
from worker.quant.int4 import Int4Linear
from worker.quant.layers import SKIPPED, groups
from worker.quant.statistics import Pair, Progress, batches, watching

#: The picture's size, and the margins around its plot: left, top, right, bottom.
PICTURE_PX = (960, 420)
MARGINS_PX = (64, 40, 16, 36)

#: Colours of the picture by what a Linear does.
KINDS = {
    "q_proj": "#4c78a8", "k_proj": "#72b7b2", "v_proj": "#54a24b", "out_proj": "#eeca3b", "fc1": "#f58518",
    "fc2": "#e45756",
}  # fmt: skip
BLOCK_COLOUR = "#555555"


@dataclass(frozen=True)
class LinearReport:
    """One Linear; places count up from the input to the output."""

    name: str
    place: int
    rows: int
    columns: int
    kept_as: str  # "int4 in groups of 128", "int8", "float16"
    bytes: int
    fp16_bytes: int
    error: float | None  # relative; None where no pairs were there to measure on
    plain_error: float | None  # of rounding to four bits without scale and clip, where those were searched
    alpha: float | None  # of the scale of its input
    clipped: float | None  # share of its groups whose range was narrowed


@dataclass(frozen=True)
class BlockReport:
    """One encoder or decoder layer: the relative error of its output."""

    name: str
    error: float


@dataclass(frozen=True)
class Report:
    """A quantized checkpoint beside its original."""

    recipe: str
    pairs: int  # measured on
    agreement: float | None  # share of pairs with the original's label
    kl: float | None  # mean over pairs of KL(original || quantized), in nats
    worst_change: float | None  # largest change of a probability
    seconds: float  # calibration, search and writing
    linears: tuple[LinearReport, ...]
    blocks: tuple[BlockReport, ...]

    @property
    def bytes(self) -> int:
        return sum(linear.bytes for linear in self.linears)

    @property
    def share_of_fp16(self) -> float:
        """Bytes of the Linears, biases included, relative to float16."""
        return self.bytes / sum(linear.fp16_bytes for linear in self.linears)

    def worst_first(self) -> list[LinearReport]:
        return sorted(self.linears, key=lambda linear: -(linear.error or 0.0))

    def write(self, path: Path) -> list[Path]:
        """Write the report as JSON, text and, where anything was measured, a picture; returns the three paths.

        `path` names the JSON file; the others have its name with .txt and .png.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        written = [path.with_suffix(suffix) for suffix in (".json", ".txt")]
        values = {**asdict(self), "bytes": self.bytes, "share_of_fp16": round(self.share_of_fp16, 4)}
        written[0].write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        written[1].write_text(self.text(), encoding="utf-8")
        if self.blocks:
            written.append(path.with_suffix(".png"))
            self.picture().save(written[2], optimize=True)
        return written

    def text(self) -> str:
        """The report for people."""
        lines = [f"{self.recipe}: Linears take {self.bytes:,} bytes, {self.share_of_fp16:.3f} of float16"]
        if self.agreement is not None:
            lines.append(
                f"on {self.pairs} pairs: the same label for {self.agreement:.4f}, KL {self.kl:.2e} nats, "
                f"largest change of a probability {self.worst_change:.4f}"
            )
        lines += ["", f"{'Linear, worst first':40} {'error':>8} {'plain':>8} {'alpha':>5} {'clipped':>8} {'bytes':>10}"]
        for linear in self.worst_first():
            numbers = (
                shown(linear.error, "8.4f"), shown(linear.plain_error, "8.4f"), shown(linear.alpha, "5.1f"),
                shown(linear.clipped, "8.1%"), f"{linear.bytes:10,}",
            )  # fmt: skip
            lines.append(f"{linear.name:40} {' '.join(numbers)}  {linear.kept_as}")
        if self.blocks:
            lines += ["", "Block, worst first, with all that comes before it quantized"]
            lines += [f"{b.name:40} {b.error:8.4f}" for b in sorted(self.blocks, key=lambda block: -block.error)]
        lines += ["", "Not quantized"] + [f"{name:40} {reason}" for name, reason in SKIPPED.items()]
        return "\n".join(lines) + "\n"

    def picture(self) -> Image.Image:
        """Errors by depth: a dot a Linear, coloured by what it does, and a line for the blocks."""
        image = Image.new("RGB", PICTURE_PX, "white")
        pen, font = ImageDraw.Draw(image), ImageFont.load_default(13)
        left, top, right, bottom = MARGINS_PX
        width, height = PICTURE_PX[0] - left - right, PICTURE_PX[1] - top - bottom
        depth = {linear.name: linear.place for linear in self.linears}
        highest = max([*(linear.error or 0.0 for linear in self.linears), *(b.error for b in self.blocks), 1e-6])
        step = 10 ** math.floor(math.log10(highest)) / (1 if highest / 10 ** math.floor(math.log10(highest)) > 4 else 4)

        def at(place: float, error: float) -> tuple[float, float]:
            return left + width * (place + 0.5) / len(depth), top + height * (1 - error / highest)

        for tick in range(int(highest / step) + 1):
            y = at(0, tick * step)[1]
            pen.line((left, y, left + width, y), "#dddddd")
            pen.text((left - 6, y), f"{tick * step:.3g}", "black", font, anchor="rm")
        line = []
        for block in self.blocks:
            places = [place for name, place in depth.items() if name.startswith(f"{block.name}.")]
            line.append(at(max(places), block.error))
            pen.text((at(min(places), 0)[0], PICTURE_PX[1] - bottom + 6), short(block.name), "black", font)
        pen.line(line, BLOCK_COLOUR, 2)
        for linear in self.linears:
            x, y = at(linear.place, linear.error or 0.0)
            pen.ellipse((x - 4, y - 4, x + 4, y + 4), KINDS[linear.name.rpartition(".")[2]])
        x = left
        for name, colour in {**KINDS, "block output": BLOCK_COLOUR}.items():
            pen.rectangle((x, 14, x + 10, 24), colour)
            pen.text((x + 15, 19), name, "black", font, anchor="lm")
            x += 40 + int(pen.textlength(name, font))
        pen.text((PICTURE_PX[0] - right, 19), f"relative error, {self.recipe}", "black", font, anchor="rm")
        return image


def shown(value: float | None, form: str) -> str:
    """A number in a column, or a dash in its place."""
    return "-".rjust(int(form.partition(".")[0])) if value is None else f"{value:{form}}"


def short(block: str) -> str:
    """ "encoder.layers.3" -> "e3" """
    side, _, index = block.split(".")
    return f"{side[0]}{index}"


def linear_reports(conversion: Conversion) -> list[LinearReport]:
    """Errors and sizes of all that could be quantized, in the order of the network."""
    group_of_linear = {name: group for group in groups(conversion.model.config) for name in group.linears}
    in_order = [name for name, _ in conversion.model.named_modules() if name in group_of_linear]
    reports = []
    for place, name in enumerate(in_order):
        group, made = group_of_linear[name], conversion.made[name]
        seen, linear = conversion.seen.report[group.name], conversion.linear(name)
        measured = len(seen.rows) > 0
        searched = conversion.recipe.calibrated and not is_dense(made)
        reports.append(
            LinearReport(
                name=name,
                place=place,
                rows=linear.out_features,
                columns=linear.in_features,
                kept_as=kept_as(conversion, made),
                bytes=stored_bytes(conversion, made),
                fp16_bytes=2 * (linear.weight.numel() + linear.bias.numel()),
                error=conversion.error(name, seen) if measured else None,
                plain_error=conversion.plain_error(name, seen) if measured and searched else None,
                alpha=conversion.alphas.get(group.name),
                clipped=conversion.clipped.get(name),
            )
        )
    return reports


def kept_as(conversion: Conversion, made: nn.Module) -> str:
    if isinstance(made, Int4Linear):
        return f"int4 in groups of {made.in_features // made.scales.size(1)}"
    return str(conversion.recipe.stored).removeprefix("torch.") if is_dense(made) else "int8"


def stored_bytes(conversion: Conversion, made: nn.Module) -> int:
    """Bytes that a Linear takes in the file, its bias included."""
    as_stored = {"weight", "bias"}
    return sum(
        tensor.numel() * (conversion.recipe.stored.itemsize if key in as_stored else tensor.itemsize)
        for key, tensor in made.state_dict().items()
    )


def blocks_of(config: OFAConfig) -> list[str]:
    return [f"encoder.layers.{i}" for i in range(config.encoder_layers)] + [
        f"decoder.layers.{i}" for i in range(config.decoder_layers)
    ]


@torch.inference_mode()
def compare(
    original: Checkpoint,
    made: Checkpoint,
    linears: Sequence[LinearReport],
    pairs: Sequence[Pair],
    seconds: float,
    tell: Progress,
) -> Report:
    """Run both networks over pairs, side by side, and report on blocks and answers."""
    blocks, sides = blocks_of(original.config), (original, made)
    squares = {name: torch.zeros(2, dtype=torch.float64) for name in blocks}  # of differences, of the original
    answers: list[list[Tensor]] = [[], []]
    done = 0
    for batch in zip(*(batches(side, pairs) for side in sides), strict=True):
        outputs: list[dict[str, Tensor]] = []
        for side, (_, ids, features), kept in zip(sides, batch, answers, strict=True):
            seen: dict[str, Tensor] = {}

            def see(name: str, _: Tensor, y: Tensor, seen: dict[str, Tensor] = seen) -> None:
                seen[name] = y.float()

            with watching(side.model, blocks, see):
                memory = side.model.encode(ids, features)
                kept.append(score(side.model, ids, memory, side.answers).log_probs.log_softmax(-1))
            outputs.append(seen)
        for name in blocks:
            one, other = outputs[0][name], outputs[1][name]
            squares[name] += torch.stack(((other - one).square().sum(), one.square().sum())).double()
        done += len(batch[0][0])
        tell("comparison", done, len(pairs))
    measured = tuple(BlockReport(name, float((s[0] / s[1]).sqrt())) for name, s in squares.items())
    if not pairs:
        return Report(made.recipe, 0, None, None, None, round(seconds, 1), tuple(linears), ())
    p, q = (torch.cat(kept) for kept in answers)  # (n, A), log
    return Report(
        recipe=made.recipe,
        pairs=len(pairs),
        agreement=float(p.argmax(1).eq(q.argmax(1)).float().mean()),
        kl=float((p.exp() * (p - q)).sum(1).mean()),
        worst_change=float((p.exp() - q.exp()).abs().max()),
        seconds=round(seconds, 1),
        linears=tuple(linears),
        blocks=measured,
    )
