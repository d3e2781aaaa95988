"""The paper of infra/bench/soak.py: what it measured, as Markdown and as a chart."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import leather

from infra.bench.flatness import Growth, Sample

#: Rows of the table over time, at most.
ROWS = 12
#: Points of a line of the chart, at most.
POINTS = 180
WIDTH_PX, HEIGHT_PX = 900, 420
#: One a process, told apart by those too who do not see all colours (Okabe and Ito).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#000000")

PAGE = """# Soak

{minutes:g} minutes at full load: {workers} worker(s) with the demo model on {threads} thread(s) each, a producer that
never lets the bulk lane of the outbox run dry, and a live pair four times a second.

    {command}

{date}, commit {commit}. {cpu}, {cores} cores; torch {torch}; Python {python}. The load average was {load} at the start.

{accepted:,} pairs were accepted and {judged:,} judged: {missing}. {verdict}
{pairs_per_s:,.0f} pairs a second were judged.

![Memory of every process](soak.svg)

## Over time

Memory in MB, of a process with all that it has started: what is in memory and neither shared nor a file's. So programs
are left out, weights that are mapped, and Postgres' shared buffers, which fill up to their fixed size as tables grow.

{over_time}

## Whether anything grows

Medians: of the second quarter of the run, when caches and allocators have reached their working size, and of the second
half, which may lie above it by what is allowed (`infra/bench/flatness.py`). The slope is that of the second half.

| what | second quarter | second half | allowed more | slope an hour | flat |
|---|--:|--:|--:|--:|---|
{growths}
"""


def page(result: Mapping[str, Any], samples: Sequence[Sample], growths: Sequence[Growth]) -> str:
    """The whole paper."""
    missing = result["accepted"] - result["settled"].get("judged", 0)
    grown = [growth.what for growth in growths if not growth.flat]
    return PAGE.format(
        **{name: result[name] for name in result if name != "growths"},
        judged=result["settled"].get("judged", 0),
        missing="none is missing" if not missing else f"**{missing:,} are missing**",
        verdict="Nothing grew." if not grown else f"**What grew: {', '.join(grown)}.**",
        over_time=over_time(samples),
        growths="\n".join(map(line, growths)),
    )


def over_time(samples: Sequence[Sample]) -> str:
    """A table with a row for each stretch of the run: its rate, and how things stood at its end."""
    names = list(samples[0].processes)
    headings = ["minute", "pairs/s", "waiting", *names, "database"]
    lines = [f"| {' | '.join(headings)} |", "|--:" * len(headings) + "|"]
    step = max(1, (len(samples) - 1) // ROWS)
    for start in range(0, len(samples) - step, step):
        first, last = samples[start], samples[start + step]
        rate = (last.verdicts - first.verdicts) / (last.at_s - first.at_s)
        memory = [f"{last.processes[name].own_mb:,.0f}" for name in names]
        cells = [
            f"{last.at_s / 60:.1f}",
            f"{rate:,.0f}",
            f"{last.waiting['bulk']:,}",
            *memory,
            f"{last.database_mb:,.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def line(growth: Growth) -> str:
    flat = "yes" if growth.flat else "**no**"
    unit = f" {growth.unit}".rstrip()
    numbers = (f"{growth.before:,g}", f"{growth.after:,g}", f"{growth.allowed:g}", f"{growth.per_hour:+,.1f}")
    return f"| {growth.what} | {' | '.join(number + unit for number in numbers)} | {flat} |"


def chart(samples: Sequence[Sample]) -> str:
    """Memory of every process over the run, as SVG."""
    drawn = leather.Chart("Memory in MB, by minutes")
    top = max(used.own_mb for sample in samples for used in sample.processes.values())
    drawn.add_x_scale(0, samples[-1].at_s / 60)
    drawn.add_y_scale(0, 1.1 * top)
    seen = samples[:: len(samples) // POINTS + 1]
    for name, colour in zip(samples[0].processes, cycle(COLOURS), strict=False):
        points = [(round(sample.at_s / 60, 2), sample.processes[name].own_mb) for sample in seen]
        drawn.add_line(points, name=name, stroke_color=colour, width=1.5)
    return str(drawn.to_svg(width=WIDTH_PX, height=HEIGHT_PX))
