"""The paper of infra/bench/precision.py: what it measured, as Markdown."""

from collections.abc import Mapping
from typing import Any

#: What a comparison's columns are called.
HEADINGS = (
    "recipe", "accuracy", "agreement", "difference (95%)", "drift", "p50 / p95 / p99 ms", "pairs/s (batch)", "speed",
    "MB", "load s", "peak MB",
)  # fmt: skip

#: Pairs of sides by their place in the result, and what they are called.
SIDES = (
    ("int4", "float32, then `awq-int4`, demo model"),
    ("demo", "plain loop, then float32, demo model"),
    ("distilled", "plain loop, then float32, distilled shape at 256 px"),
)

PAGE = """# Precision, measured

The demo model on {pairs:,} test pairs (`python -m infra.demo_model.generate --pairs 6000 --out DIR` writes them),
calibrated on {calibrated_on} development pairs. [precision.md](../precision.md) says what the columns mean.

    {command}

{date}, commit {commit}. {cpu}, {cores} cores, {vector_instructions}; torch {torch}, {threads} thread(s); Python
{python}. The load average was {load} at the start and {load_at_end} at the end. Where other work ran beside, trust the
ratios, which were taken in turns, and not the absolute times.

## Recipes

{recipes}

## Input sizes

{image_sizes}

The weights are the same at every size; the model was trained at 64 pixels. A smaller picture is a smaller grid of
patches.

## In batches of 16

Milliseconds a pair of the first and of the second side, and how many times as fast the second is. The plain loop
(`infra/bench/plain.py`) takes one pair at a time, folds nothing, spells attention out, builds position biases anew for
each pair, and reads each of the three answers in a decoder pass of its own with logits over the whole vocabulary. The
distilled shape has the sizes of OFA-Tiny, 33 million parameters, and random weights.

| sides | first, ms | second, ms | ratio |
|---|--:|--:|--:|
{ratios}

## Targets

| what | target | measured | met |
|---|---|--:|---|
{targets}
{profiles}"""


def page(result: Mapping[str, Any], bounds: Mapping[str, tuple[str, float, bool]]) -> str:
    """The whole paper; `bounds` has each target's kind, bound, and whether it was met."""
    targets = [
        f"| {name} | {kind} {bound:g} | {result['targets'][name]:.4g} | {'yes' if met else '**no**'} |"
        for name, (kind, bound, met) in bounds.items()
    ]
    return PAGE.format(
        **{**result, **result["machine"]}
        | {
            "recipes": table(result["recipes"]),
            "image_sizes": table(result["image_sizes"]),
            "ratios": "\n".join(ratios(result)),
            "targets": "\n".join(targets),
            "profiles": profiles(result),
        }
    )


def table(recipes: Mapping[str, Mapping[str, Any]]) -> str:
    """A comparison's lines; the first is the baseline."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" + "|--:" * (len(HEADINGS) - 1) + "|"]
    for name, row in recipes.items():
        difference = "{:+.4f} ({:+.4f} to {:+.4f})".format(row["accuracy_diff"], *row["diff_ci95"])
        cells = (
            f"`{name}`", f"{row['accuracy']:.4f}", f"{row['agreement']:.4f}", difference if len(lines) > 2 else "",
            f"{row['batch_drift']:.0e}", f"{row['p50_ms']:.1f} / {row['p95_ms']:.1f} / {row['p99_ms']:.1f}",
            f"{row['pairs_per_s']:,.0f} ({row['best_batch']})", f"{row['speed_ratio']:.2f}",
            f"{row['bytes'] / 1e6:.1f}", f"{row['load_s']:.2f}", f"{row['peak_rss_mb']:.0f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ratios(result: Mapping[str, Any]) -> list[str]:
    """A line for each pair of sides."""
    lines = []
    for key, name in SIDES:
        entries = [(name, result[key])]
        if "answers_together" in result[key]:
            entries.append(("the same, the three passes as one of three rows", result[key]["answers_together"]))
        for title, entry in entries:
            lines.append("| {} | {:.2f} | {:.2f} | {:.2f} |".format(title, *entry["ms"], entry["ratio"]))
    return lines


def profiles(result: Mapping[str, Any]) -> str:
    """What the time went into, where a target was missed."""
    found = []
    for key, name in SIDES:
        for side, shares in zip(("first", "second"), result[key].get("profile", ()), strict=False):
            found.append(f"- {name}, {side}: " + ", ".join(f"`{op}` {share:.0%}" for op, share in shares.items()))
    return (
        "\n".join(["\nWhere the time went, by operation, for what missed its target:\n", *found, ""]) if found else ""
    )
