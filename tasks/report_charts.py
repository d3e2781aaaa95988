"""The charts of a run's page: pygal lays them out, the page's own style sheet paints them (tasks/templates/report.css).

Each is one SVG without colours, scripts or styles of its own, so that it follows the reader's dark mode and the page's
Content-Security-Policy needs no exception. Series have the classes serie-0, serie-1 ... and differ by pattern as well
as by colour. An axis' numbers and dates carry their value in `data-n` or `data-t` and what they are in `data-as`: the
page's script writes them as the reader's locale does.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import pygal
from markupsafe import Markup
from pygal.etree import etree
from pygal.style import Style

from db.run_report import BINS, Attribute, Histogram, LabelsOfRun

# It leaves a finder of modules behind, for maps, that lacks what Python asks finders for: each later import would warn.
sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, pygal.PluginImportFixer)]

#: A chart's width and height in CSS pixels: a phone's width, so that its text is as large there as anywhere.
WIDTH = 340
HEIGHT = 220
#: Height of one line of a chart whose lines are named, and of what lies around the lines.
LINE_PX = 24
FRAME_PX = 36
#: Text of the axes, in CSS pixels; pygal leaves room by it.
FONT_PX = 11.5
#: Runs for which there is room at least, so that two of them are not two walls.
RUNS_ROOM = 10
#: Runs from which on there is room for the dates of the first and of the last.
BOTH_DATES = 5
#: Characters of a name beside a chart; the table beneath has it whole.
NAME_CHARS = 16
#: Ticks of the scale of scores that stand this near to a threshold make room for it.
NEAR = 0.12
#: Height of a single pair on the logarithmic scale, in tenfolds: it must be seen.
ONE_PAIR = 0.3
#: Steps of a scale in per cent.
STEPS = (0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)

#: Elements of pygal's that are not wanted: its own looks, and the words of tooltips whose script is not there.
UNWANTED_TAGS = ("style", "script", "title", "desc", "defs")
UNWANTED_CLASS = "tooltip-overlay"

#: What the labels of an axis stand for: the label -> its number or moment, and how to write it.
Meanings = Mapping[str, tuple[float | datetime, str]]


def labels(history: Sequence[LabelsOfRun]) -> Markup:
    """The shares of the labels, run by run: contradiction, neutral, entailment, not judged from the bottom up."""
    chart = pygal.StackedBar(**_frame(HEIGHT), range=(0, 1))
    gap = [None] * max(0, RUNS_ROOM - len(history))
    settled = [max(1, sum(_parts(run))) for run in history]
    for number, name in enumerate(("contradiction", "neutral", "entailment", "not judged")):
        chart.add(name, gap + [_parts(run)[number] / of for run, of in zip(history, settled, strict=True)])
    # Numbers, since runs may share a day, and pygal knows its labels by what they say.
    chart.x_labels = [str(n) for n in range(len(gap) + len(history))]
    # Between the first and the last there is no room for dates on a phone, nor for both where they are neighbours.
    ends = {chart.x_labels[len(gap)]: history[0]} if len(history) >= BOTH_DATES else {}
    ends[chart.x_labels[-1]] = history[-1]
    chart.x_labels_major = list(ends)
    chart.show_minor_x_labels = False
    chart.y_labels, percents = _percents(1, 4)
    days = {name: (run.submitted_at, "day") for name, run in ends.items()}
    return _drawn(chart, "Shares of the labels, run by run", x=days, y=percents)


def _parts(run: LabelsOfRun) -> tuple[int, int, int, int]:
    return run.contradiction, run.neutral, run.entailment, run.rejected + run.failed


def scores(histogram: Histogram) -> Markup:
    """How many pairs have which score, on a logarithmic scale, and the thresholds as lines.

    The series are what the thresholds accept, review and reject.
    """
    most = max(10, *histogram.pairs)
    chart = pygal.Histogram(**_frame(HEIGHT), range=(0, _tenfolds(most)))
    zones: list[list[tuple[float, float, float]]] = [[], [], []]
    for number, pairs in enumerate(histogram.pairs):
        if pairs:
            start, end = number / BINS, (number + 1) / BINS
            zones[_zone(histogram, start)].append((_tenfolds(pairs), start, end))
    for name, bars in zip(("accept", "review", "reject"), zones, strict=True):
        # A bar of no height makes the scale reach from 0 to 1, whatever bins are empty.
        chart.add(name, [(0, 0, 1), *bars])
    thresholds = [at for at in (histogram.review_at, histogram.reject_at) if at is not None and 0 < at < 1]
    ticks = [at for at in (0, 0.25, 0.5, 0.75, 1) if all(abs(at - other) > NEAR for other in thresholds)]
    chart.x_labels = [{"value": at, "label": f"{at:.2f}"} for at in sorted({*ticks, *thresholds})]
    chart.x_labels_major = [f"{at:.2f}" for at in thresholds]
    chart.show_x_guides = True
    tens = [10**n for n in range(1 + int(math.log10(most)))]
    chart.y_labels = [{"value": _tenfolds(n), "label": f"{n:,}"} for n in tens]
    return _drawn(
        chart,
        f"How the scores of policy {histogram.policy} are spread",
        x={f"{at:.2f}": (at, "axis score") for at in (*ticks, *thresholds)},
        y={f"{n:,}": (n, "pairs") for n in tens},
    )


def _zone(histogram: Histogram, score: float) -> int:
    if histogram.reject_at is not None and score >= histogram.reject_at:
        return 2
    return int(histogram.review_at is not None and score >= histogram.review_at)


def _tenfolds(pairs: float) -> float:
    return ONE_PAIR + math.log10(pairs)


def rates(attribute: Attribute, names: Sequence[str], of_run: float | None) -> Markup:
    """The defect rate of each value, worst first, with its 95 % interval; the run's own rate as a line across.

    `names` are the values as they may be shown.
    """
    top = min(1.0, 1.04 * max(rate.high for rate in attribute.rates))
    chart = pygal.HorizontalBar(**_frame(FRAME_PX + LINE_PX * len(names)), range=(0, top))
    bars = [{"value": rate.rate, "ci": {"low": rate.low, "high": rate.high}} for rate in attribute.rates]
    chart.add("defect rate", bars[::-1])
    chart.x_labels = [_short(name) for name in reversed(names)]
    chart.y_labels, percents = _percents(top, 5)
    if of_run is not None and 0 < of_run < top:
        chart.y_labels.append({"value": of_run, "label": ""})
        chart.y_labels_major = [of_run]
    else:
        chart.y_labels_major = []
    # The chart lies on its side: to the reader these are the numbers from left to right.
    return _drawn(chart, f"Defect rate by {attribute.name}", x=percents, y={})


def _short(name: str) -> str:
    return name if len(name) <= NAME_CHARS else f"{name[: NAME_CHARS - 1]}…"


def _percents(top: float, most: int) -> tuple[list[dict[str, Any]], Meanings]:
    """Round ticks from 0 to `top`, `most` steps at most, and what they stand for."""
    step = next(step for step in STEPS if top / step <= most)
    ticks = [n * step for n in range(int(top / step + 1e-9) + 1)]
    written = {f"{100 * tick:.4g}%": tick for tick in ticks}
    return (
        [{"value": tick, "label": label} for label, tick in written.items()],
        {label: (tick, "tick") for label, tick in written.items()},
    )


def _frame(height: int) -> dict[str, Any]:
    plain = Style(font_family="sans-serif", label_font_size=FONT_PX, major_label_font_size=FONT_PX)
    return {
        "style": plain, "width": WIDTH, "height": height, "margin": 4, "margin_left": 14, "spacing": 6, "js": (),
        "show_legend": False, "truncate_label": -1,
    }  # fmt: skip


def _drawn(chart: Any, name: str, *, x: Meanings, y: Meanings) -> Markup:
    """The chart as SVG: what is not wanted left out, and the labels of its axes marked with what they stand for."""
    root = chart.render_tree()
    for parent in list(root.iter()):
        for child in list(parent):
            # A comment's tag is a function.
            unwanted = child.tag in UNWANTED_TAGS or not isinstance(child.tag, str)
            if unwanted or UNWANTED_CLASS in child.get("class", ""):
                parent.remove(child)
    # Its own id is another one each time.
    del root.attrib["id"]
    root.attrib.update({"role": "img", "aria-label": f"{name}. The table beneath has the figures."})
    for axis, meanings in (("x", x), ("y", y)):
        groups = [group for group in root.iter("g") if group.get("class", "").split()[:2] == ["axis", axis]]
        for label in (label for group in groups for label in group.iter("text")):
            if label.text in meanings:
                value, form = meanings[label.text]
                if isinstance(value, datetime):
                    label.text = f"{value:%d %b}"
                    label.attrib.update({"data-t": value.isoformat(), "data-as": form})
                else:
                    label.attrib.update({"data-n": repr(value), "data-as": form})
    return Markup(etree.tostring(root, encoding="unicode"))
