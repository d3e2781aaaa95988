"""A run's page: one HTML file that opens without a network, from what db/run_report.py says of the run.

Nothing leaves the page: its Content-Security-Policy allows the one style sheet and the one script that are in it, by
their hashes, and pictures that are in it as data. Whatever a producer wrote is escaped by the template, isolated from
the text around it, and its invisible characters are spelt out (`plain`): the page is where a person looks for what is
wrong with it.

Without JavaScript everything is shown, in English notation; with it cards are sorted and narrowed down, and numbers and
dates are written as the reader's locale does.
"""

import hashlib
import json
import unicodedata
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from db.run_report import Figure, Histogram, Mismatch, RunReport
from tasks import report_charts
from tasks.report_pictures import Thumbnail

#: The figure that the eye should meet first, by `Figure.name`.
FIRST = "newly_contradicting"
#: The run's own defect rate, which those of its categories are held against, by `Figure.name`.
DEFECT_RATE = "defect_rate"
#: Characters of a claim that its card shows before it has to be opened.
CLAIM_CHARS = 220
#: Characters of a chart's or a table's name.
NAME_CHARS = 80
#: Invisible characters that words are made of: in Persian, in Indic scripts, in emoji.
JOINERS = "\u200c\u200d"
#: What else is spelt out: control and format characters (bidi overrides, zero-width spaces ...), lone surrogates, and
#: the separators that end a line.
SPELT_OUT = ("Cc", "Cf", "Cs", "Zl", "Zp")

#: What a change is called on a card: `Mismatch.change`, where it was a mismatch before as well or was never judged.
CHANGES = {"unchanged": "known", "first_seen": "first verdict"}
DECISIONS = {"accept": "accepted", "review": "to review", "reject": "rejected"}


def render(report: RunReport, pictures: Mapping[str, Thumbnail]) -> str:
    """The page. `pictures` has the thumbnails by `Mismatch.image`; where it is empty, cards have no place for one."""
    style, script = _asset("report.css"), _asset("report.js")
    figures = {figure.name: figure for figure in report.figures}
    defect_rate = figures.get(DEFECT_RATE)
    return _environment.get_template("report.html.jinja").render(
        report=report,
        pictures=pictures,
        policy=_security_policy(style, script),
        style=style,
        script=script,
        first=figures.get(FIRST),
        defect_rate=defect_rate,
        # A picture that is blurred on one card is not to be seen on another.
        veiled={pair.image for pair in report.worst if pair.polarity == "should_not_hold"},
        thresholds={histogram.policy: histogram for histogram in report.histograms},
        labels=report_charts.labels(report.history) if report.history else None,
        scores=[(histogram, report_charts.scores(histogram)) for histogram in report.histograms],
        rates=[
            (
                attribute,
                report_charts.rates(
                    attribute,
                    [name(rate.value) for rate in attribute.rates],
                    defect_rate.value if defect_rate else None,
                ),
            )
            for attribute in report.attributes
            if attribute.rates
        ],
    )


def _asset(file: str) -> Markup:
    # Ours, and escaping would break it.
    return Markup(_environment.loader.get_source(_environment, file)[0])  # type: ignore[union-attr]


def _security_policy(style: str, script: str) -> str:
    """What a browser may do on behalf of the page. W3C, "Content Security Policy Level 3"."""

    def hashed(text: str) -> str:
        return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; img-src data:; style-src {hashed(style)}; script-src {hashed(script)}; "
        "base-uri 'none'; form-action 'none'"
    )


# ---- How the template writes things ----------------------------------------------------------------------------------


def plain(text: str) -> str:
    """Text in which every invisible character that could mislead a reader is spelt out, as in ⟨U+202E⟩."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        f"⟨U+{ord(character):04X}⟩"
        if unicodedata.category(character) in SPELT_OUT and character not in JOINERS and character not in "\n\t"
        else character
        for character in text
    )


def name(text: str) -> str:
    """The same in one line, not too long, and never nothing: for headings, charts and lists to choose from."""
    line = plain(" ".join(text.split()))
    return (line if len(line) <= NAME_CHARS else f"{line[: NAME_CHARS - 1]}…") or "(empty)"


def exact(text: str) -> Markup:
    """Text as the value of an attribute that a script compares: a carriage return would be read as a line feed."""
    return Markup(escape(text).replace("\r", "&#13;"))


def written(value: float, form: str, *, signed: bool = False) -> str:
    """A number as English writes it, which is what stands in the page before its script has run.

    `form`: pairs, share, points (of a share's difference), score, pairs/s, s.
    """
    sign = "+" if signed else ""
    match form:
        case "share":
            text = f"{value:{sign}.1%}"
        case "points":
            text = f"{100 * value:{sign}.1f}"
        case "score":
            text = f"{value:{sign}.3f}"
        case "pairs/s":
            text = f"{value:{sign},.1f}"
        case "s":
            text = f"{'-' if value < 0 else sign}{duration(abs(value))}"
        case _:
            text = f"{value:{sign},.0f}"
    return text.replace("-", "\N{MINUS SIGN}")


def duration(seconds: float) -> str:
    """Hours, minutes and seconds; of less than a minute a tenth of a second, of less than a second milliseconds."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def moment(value: datetime) -> str:
    return f"{value.astimezone(UTC):%d %b %Y, %H:%M} UTC"


def trend(figure: Figure) -> dict[str, Any] | None:
    """How a figure moved since the run before: by how much, in which form, and whether that is good news."""
    if figure.value is None or figure.before is None:
        return None
    by = figure.value - figure.before
    form = "points" if figure.unit == "share" else figure.unit
    moved = any(digit in "123456789" for digit in written(by, form))
    return {
        "by": by,
        "form": form,
        "sign": ("▲" if by > 0 else "▼") if moved else "",
        "news": ("better" if (by > 0) == (figure.better == "up") else "worse") if moved and figure.better else "",
    }


def zone(histogram: Histogram | None) -> list[tuple[float, str]]:
    """The thresholds of a policy, from the lower to the higher, and what a score from there on means."""
    if histogram is None:
        return []
    found = [(histogram.review_at, "review"), (histogram.reject_at, "reject")]
    return [(at, meaning) for at, meaning in found if at is not None]


def bins(histogram: Histogram) -> list[tuple[float, float, int]]:
    """The bins of a histogram that hold a pair: from, to, pairs."""
    width = 1 / len(histogram.pairs)
    return [(n * width, (n + 1) * width, pairs) for n, pairs in enumerate(histogram.pairs) if pairs]


def news(pair: Mismatch) -> str:
    """In a word or two, what is new about a mismatch."""
    if not pair.is_new:
        return CHANGES.get(pair.change, "known")
    return "newly contradicts" if pair.polarity == "should_hold" else "newly matches"


def cause(pair: Mismatch) -> str:
    """Why a verdict may have changed since the earlier one; "" where there is none or nobody can know."""
    if pair.earlier is None or pair.earlier.same_content is None:
        return ""
    if not pair.earlier.same_content:
        return "Picture or text has changed since."
    if pair.earlier.same_model is False:
        return "Same picture and text; another model version judged it then."
    return "Same picture, text and model version."


def probabilities(pair: Mismatch) -> list[tuple[str, float, bool]]:
    """Each label, its probability, and whether it is the one that the policy watches for."""
    watched = "contradiction" if pair.polarity == "should_hold" else "entailment"
    found = {"entailment": pair.p_entailment, "contradiction": pair.p_contradiction, "neutral": pair.p_neutral}
    return [(label, probability, label == watched) for label, probability in found.items()]


def values(pair: Mismatch, report: RunReport) -> str:
    """What each filter finds in a pair, as a JSON list in their order; null where the pair has no such attribute."""
    own = {"label": pair.label, "policy": pair.policy}
    return json.dumps([(pair.attributes if chosen.is_attribute else own).get(chosen.name) for chosen in report.filters])


def attributes(pair: Mismatch, report: RunReport) -> list[tuple[str, str]]:
    """A pair's attributes, those first that cards are narrowed down by."""
    chosen = [each.name for each in report.filters if each.is_attribute and each.name in pair.attributes]
    names = dict.fromkeys([*chosen, *pair.attributes])
    return [(name, pair.attributes[name]) for name in names]


def first_come(figures: Sequence[Figure]) -> list[Figure]:
    """The headline figures, the one first that the eye should meet first."""
    return sorted(figures, key=lambda figure: figure.name != FIRST)


_environment = Environment(
    loader=PackageLoader("tasks"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_environment.filters |= {
    "plain": plain, "name": name, "exact": exact, "written": written, "moment": moment, "trend": trend, "zone": zone,
    "bins": bins, "news": news, "cause": cause, "probabilities": probabilities, "values": values,
    "attributes": attributes, "first_come": first_come,
}  # fmt: skip
_environment.globals |= {"DECISIONS": DECISIONS, "CLAIM_CHARS": CLAIM_CHARS}
