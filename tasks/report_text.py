"""The figures of a run's page (db/run_report.py) as tables on a terminal."""

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from db.run_report import Attribute, Figure, Histogram, Mismatch, RunReport
from tasks.console import verbatim

#: Mismatches and values of an attribute that are named; the page has more.
NAMED = 20
RATES_NAMED = 10
#: Bars of a histogram, and how long the longest is.
BARS = 10
BAR_CHARS = 40
#: Characters of a text in a table.
CELL_CHARS = 60


def show(report: RunReport, out: Console) -> None:
    """Print all of it. Whatever a producer wrote is shown as it is written, and steers no terminal."""
    title(report, out)
    headline(report.figures, out)
    history(report, out)
    for histogram in report.histograms:
        scores(histogram, out)
    for attribute in report.attributes:
        rates(attribute, out)
    errors(report, out)
    mismatches(report, out)
    made_by(report, out)


def title(report: RunReport, out: Console) -> None:
    out.print(verbatim(f"{report.name}, {report.state}"), style="bold")
    until = f" to {moment(report.finished_at)}" if report.finished_at else ""
    out.print(verbatim(f"source {report.source}, run {report.id}, {moment(report.submitted_at)}{until}"))
    if report.state_note:
        out.print(verbatim(report.state_note))
    if report.before:
        out.print(verbatim(f"compared with {report.before.name}, {moment(report.before.submitted_at)}"))


def headline(figures: Sequence[Figure], out: Console) -> None:
    table = table_of("", ("", "right"), ("before", "right"), ("change", "right"), "95 % interval")
    for figure in figures:
        change = None if figure.value is None or figure.before is None else figure.value - figure.before
        bars = "" if figure.low is None or figure.high is None else f"{figure.low:.1%} to {figure.high:.1%}"
        by = "" if change is None else difference(abs(change), figure.unit)
        signed = f"{'+' if (change or 0) > 0 else '-'}{by}" if any(digit in "123456789" for digit in by) else ""
        table.add_row(figure.label, number(figure.value, figure.unit), number(figure.before, figure.unit), signed, bars)
    out.print(table)


def history(report: RunReport, out: Console) -> None:
    if len(report.history) < 2:
        return
    names = ("entailment", "contradiction", "neutral", "rejected", "failed")
    table = table_of("the last runs", "began", *((name, "right") for name in names))
    for run in report.history:
        table.add_row(verbatim(run.name), moment(run.submitted_at), *(f"{getattr(run, name):,}" for name in names))
    out.print(table)


def scores(histogram: Histogram, out: Console) -> None:
    """The bins, some together, as bars; a threshold stands at the bar that it falls into."""
    together = len(histogram.pairs) // BARS
    pairs = [sum(histogram.pairs[n : n + together]) for n in range(0, len(histogram.pairs), together)]
    table = table_of(f"{histogram.policy}: {histogram.score}", ("pairs", "right"), "", "")
    for n, count in enumerate(pairs):
        low, high = n / BARS, (n + 1) / BARS
        limits = (("review", histogram.review_at), ("reject", histogram.reject_at))
        said = ", ".join(f"{name} from {at:g}" for name, at in limits if at is not None and low <= at < high)
        bar = "\u2588" * -(-count * BAR_CHARS // max(*pairs, 1))
        table.add_row(f"{low:.1f} to {high:.1f}", f"{count:,}", bar, said)
    out.print(table)


def rates(attribute: Attribute, out: Console) -> None:
    names = (("judged", "right"), ("mismatches", "right"), ("rate", "right"), "95 % interval")
    table = table_of(attribute.name, *names)
    for rate in attribute.rates[:RATES_NAMED]:
        bars = f"{rate.low:.1%} to {rate.high:.1%}"
        value = cut(rate.value or "(empty)")
        table.add_row(value, f"{rate.judged:,}", f"{rate.mismatches:,}", f"{rate.rate:.1%}", bars)
    out.print(table)
    if attribute.values > RATES_NAMED:
        out.print(verbatim(f"and {attribute.values - RATES_NAMED:,} more of {attribute.name}"))


def errors(report: RunReport, out: Console) -> None:
    if not report.errors:
        return
    table = table_of("status", "error_code", ("pairs", "right"), "for example", "detail")
    for error in report.errors:
        example, detail = cut(error.example_ref or ""), cut(error.example_detail or "")
        table.add_row(error.status, error.code, f"{error.pairs:,}", example, detail)
    out.print(table)


def mismatches(report: RunReport, out: Console) -> None:
    if not report.worst:
        return
    table = table_of("mismatch", "text", "label", ("score", "right"), "decision", "before")
    for one in report.worst[:NAMED]:
        table.add_row(cut(one.ref or str(one.pair_id)), cut(one.text or "(erased)"), one.label,
                      f"{one.p_trouble:.3f}", one.decision, before(one))  # fmt: skip
    out.print(table)
    if report.mismatches > NAMED:
        out.print(f"the worst {NAMED} of {report.mismatches:,} mismatches; what is new comes first")


def before(one: Mismatch) -> str:
    if one.earlier is None:
        return "first verdict" if one.ref else ""
    return f"{one.earlier.label}, {one.earlier.decision}" + (", new" if one.is_new else "")


def made_by(report: RunReport, out: Console) -> None:
    speed = report.speed
    table = table_of("speed", "", header=False)
    table.add_row("batches", f"{speed.batches:,} of {speed.batch_mean or 0:.1f} pairs, {speed.batch_max:,} at most")
    table.add_row("workers", f"{speed.workers:,}")
    table.add_row("padding", "-" if speed.padding is None else f"{speed.padding:.1%} of the tokens")
    table.add_row("reused", f"{speed.reused:,} pairs")
    names = ("queue", "fetch", "model", "write")
    medians = [(name, getattr(speed, f"{name}_p50_s")) for name in names]
    table.add_row("medians", ", ".join(f"{name} {value:.3f} s" for name, value in medians if value is not None) or "-")
    for model in report.models:
        table.add_row("model", verbatim(f"{model.name} {model.revision} ({model.recipe}), {model.image_px} px"))
        table.add_row("weights", verbatim(model.weights_sha256))
        table.add_row("prompt", verbatim(model.prompt))
        versions = {"concord": model.concord, "torch": model.torch}
        said = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        table.add_row("worker", verbatim(said or "did not say its versions"))
    out.print(table)


# ---- How values are written ------------------------------------------------------------------------------------------


def table_of(*columns: str | tuple[str, str], header: bool = True) -> Table:
    """A table whose columns are names, a stranger's too, or names and where they are justified."""
    table = Table(show_header=header)
    for column in columns:
        name, side = column if isinstance(column, tuple) else (column, "left")
        table.add_column(cut(name), justify="right" if side == "right" else "left")
    return table


def number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    match unit:
        case "share":
            return f"{value:.2%}"
        case "pairs/s":
            return f"{value:,.1f}"
        case "s":
            return duration(value)
    return f"{value:,.0f}"


def difference(value: float, unit: str) -> str:
    """Of shares it is told in points: of per cent one would not know of what."""
    return f"{100 * value:.2f} points" if unit == "share" else number(value, unit)


def duration(seconds: float) -> str:
    """Seconds; from a minute on minutes too, and from an hour on hours."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def moment(value: datetime) -> str:
    return f"{value.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def cut(value: str) -> Text:
    return verbatim(value if len(value) <= CELL_CHARS else f"{value[: CELL_CHARS - 1]}\u2026")
