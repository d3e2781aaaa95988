"""The page of a run, as a file: what is in it, and that it can do no harm. tests/test_report_browser.py opens it."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from db.run_report import BINS, Figure, Histogram, Mismatch, Rate
from tasks import report_charts, report_page
from tasks.report_page import CLAIM_CHARS, duration, plain, render, trend, written
from tasks.report_pictures import Thumbnail
from tests import report_pages

#: What a stranger may write to break out of wherever it is put.
HOSTILE = (
    "</script></style></title><script>alert(1)</script><!-- \u2028 ]]> \" ' & <img src=x onerror=alert(2)> {{ 7*7 }}"
)
#: Elements that have no end tag.
VOID = {"meta", "img", "input", "br", "rect"}
LIMIT_BYTES = 3_000_000
MINUS = "\N{MINUS SIGN}"


class Parsed(HTMLParser):
    """A page's elements: tag, attributes, and the text inside."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[tuple[str, list[str]]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        text: list[str] = []
        self.elements.append((tag, dict(attrs), text))
        if tag not in VOID:
            self._open.append((tag, text))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        for _, text in self._open:
            text.append(data)

    def all(self, tag: str, **attributes: str) -> list[tuple[dict[str, str | None], str]]:
        """The elements of a tag, or of a tag with a class: their attributes and text."""
        wanted = set(attributes.get("cls", "").split())
        return [
            (found, "".join(text))
            for name, found, text in self.elements
            if name == tag and wanted <= set((found.get("class") or "").split())
        ]


def demo() -> Parsed:
    report = report_pages.report()
    return Parsed(render(report, report_pages.pictures(report)))


def some(**changed: Any) -> Mismatch:
    """One mismatch, changed."""
    return replace(report_pages.report().worst[0], **changed)


# ---- What is shown ---------------------------------------------------------------------------------------------------


def test_what_newly_contradicts_comes_first() -> None:
    classes = [(found["class"] or "").split() for found, _ in demo().all("li", cls="card")]
    new = ["new" in each for each in classes]
    assert len(new) == 100
    assert 0 < sum(new) < len(new)
    assert new == sorted(new, reverse=True)


def test_a_card_has_its_text_its_probabilities_its_decision_and_the_verdict_before() -> None:
    pair = report_pages.report().worst[0]
    assert pair.earlier and pair.text and pair.ref
    card = " ".join(demo().all("li", cls="card")[0][1].split())
    for words in (
        "newly contradicts", "to review", pair.text, pair.ref, pair.attributes["seller"],
        f"contradiction {pair.p_contradiction:.3f}", f"entailment {pair.p_entailment:.3f}",
        f"Before, 28 Nov 2026, 02:00 UTC: {pair.earlier.label}", "Picture or text has changed since.",
    ):  # fmt: skip
        assert words in card


def test_the_headline_says_what_moved_since_the_run_before_and_which_way() -> None:
    tiles = [" ".join(text.split()) for _, text in demo().all("li", cls="tile")]
    assert tiles[0].startswith("newly contradicting 10 ▲ +6, worse")
    assert "defect rate 35.2% 95%: 31.5% to 39.1% ▲ +0.5 points, worse" in tiles
    assert "planned 600 as before" in tiles


def test_headings_go_down_one_level_at_a_time_from_a_single_one_of_the_first() -> None:
    levels = [int(tag[1]) for tag, _, _ in demo().elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_every_chart_has_its_figures_as_a_table() -> None:
    page = demo()
    charts = page.all("figure", cls="chart")
    assert len(charts) == 5
    assert all("The figures as a table" in text for _, text in charts)
    assert len(page.all("svg", cls="pygal-chart")) == 5
    assert all(found["role"] == "img" and found["aria-label"] for found, _ in page.all("svg", cls="pygal-chart"))
    assert "cobalt" in charts[4][1]


def test_a_run_with_nothing_in_it_has_a_page() -> None:
    figures = (Figure("newly_contradicting", "newly contradicting", "pairs", None, None, None, None, "down", ""),)
    empty = report_pages.report(
        [], figures=figures, history=(), histograms=(), attributes=(), errors=(), models=(), filters=(), before=None,
        finished_at=None, state="failed", state_note="This run failed: the bucket is away.",
    )  # fmt: skip
    page = Parsed(render(empty, {}))
    nothing = [text for _, text in page.all("p", cls="none")]
    assert nothing == ["None.", "None."], "nobody knows that no pair is at odds, nor that every one was judged"
    assert " ".join(page.all("p", cls="notice")[0][1].split()) == "Failed. This run failed: the bucket is away."
    assert not page.all("form") and not page.all("svg", cls="pygal-chart")


def test_a_pair_that_was_erased_and_never_judged_before_has_a_card() -> None:
    erased = some(text=None, image=None, ref=None, attributes={}, earlier=None, is_new=False, change="first_seen")
    page = Parsed(render(report_pages.report([erased]), {"s3://shop/another.png": Thumbnail()}))
    card = page.all("li", cls="card")[0][1]
    assert "text erased" in card and "first verdict" in card and "No earlier verdict." in card and "no picture" in card


# ---- Pictures --------------------------------------------------------------------------------------------------------


def test_without_pictures_no_card_has_a_place_for_one() -> None:
    page = Parsed(render(report_pages.report(), {}))
    assert not page.all("img") and not page.all("div", cls="picture") and not page.all("button", cls="veil")


def test_a_picture_that_is_prohibited_on_one_card_is_blurred_on_every_card() -> None:
    image = "s3://shop/1.png"
    plainly = some(image=image)
    prohibited = some(image=image, policy="prohibited", polarity="should_not_hold", label="entailment")
    other = some(image="s3://shop/2.png")
    pictures = {name: Thumbnail("data:image/png;base64,AAAA", 4, 4) for name in (image, "s3://shop/2.png")}
    page = Parsed(render(report_pages.report([plainly, prohibited, other]), pictures))
    veils = page.all("button", cls="veil")
    assert [found["aria-pressed"] for found, _ in veils] == ["false", "false"]
    assert len(page.all("div", cls="picture")) == 1


def test_a_picture_that_is_not_there_says_why_and_one_that_was_replaced_says_so() -> None:
    report = report_pages.report([some(image="s3://shop/1.png"), some(image="s3://shop/2.png")])
    pictures = {
        "s3://shop/1.png": Thumbnail(reason="no such key in bucket shop"),
        "s3://shop/2.png": Thumbnail("data:image/png;base64,AAAA", 4, 4, is_other=True),
    }
    first, second = (text for _, text in Parsed(render(report, pictures)).all("li", cls="card"))
    assert "no such key in bucket shop" in first
    assert "has been replaced since" in second


def test_a_hundred_thumbnails_leave_the_page_under_three_megabytes() -> None:
    report = report_pages.report()
    # More than a WebP of the side and quality of tasks/report_pictures.py needs.
    body = base64.b64encode(bytes(range(256)) * 60).decode()
    pictures = {
        pair.image: Thumbnail(f"data:image/webp;base64,{body}", 160, 160) for pair in report.worst if pair.image
    }
    assert len(report.worst) == 100
    assert len(render(report, pictures).encode()) < LIMIT_BYTES


# ---- Strangers' words ------------------------------------------------------------------------------------------------


def hostile_page() -> str:
    pair = some(
        text=HOSTILE, premise=HOSTILE, ref=HOSTILE, image=HOSTILE, flags=(HOSTILE,),
        attributes={"category": HOSTILE, HOSTILE: HOSTILE},
    )  # fmt: skip
    report = report_pages.report([pair], name=HOSTILE, source=HOSTILE, state_note=HOSTILE, lane=HOSTILE)
    rates = (Rate(HOSTILE, 10, 5, 0.5, 0.2, 0.8), Rate("", 10, 5, 0.5, 0.2, 0.8))
    hostile = replace(
        report,
        attributes=(replace(report.attributes[0], name=HOSTILE, rates=rates),),
        histograms=(replace(report.histograms[0], policy=HOSTILE),),
        errors=(replace(report.errors[0], code=HOSTILE, example_ref=HOSTILE, example_detail=HOSTILE),),
        models=(replace(report.models[0], name=HOSTILE, prompt=HOSTILE, revision=HOSTILE),),
        sql=replace(report.sql, select=HOSTILE, order=HOSTILE),
        filters=(*report.filters, replace(report.filters[0], name=HOSTILE, values=(HOSTILE,), column=HOSTILE)),
    )
    return render(hostile, {HOSTILE: Thumbnail(reason=HOSTILE)})


def test_whatever_a_stranger_writes_is_text_wherever_it_stands() -> None:
    page = Parsed(hostile_page())
    tags = {tag for tag, _, _ in page.elements}
    assert len(page.all("script")) == 1 and len(page.all("style")) == 1
    assert "img" not in tags
    assert not [name for _, found, _ in page.elements for name in found if name.startswith("on")]
    assert page.all("h3")[0][1] == plain(HOSTILE)[:CLAIM_CHARS]
    assert "{{ 7*7 }}" in page.all("h3")[0][1]
    # Not even the one place that JSON stands in: an attribute.
    assert json.loads(page.all("li", cls="card")[0][0]["data-values"] or "")[2] == HOSTILE


@settings(max_examples=30, deadline=None)
@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), min_size=1, max_size=CLAIM_CHARS // 10)
)
def test_any_text_is_read_from_the_page_as_it_was_written(text: str) -> None:
    page = Parsed(render(report_pages.report([some(text=text)]), {}))
    assert page.all("h3")[0][1] == plain(text)
    assert len(page.all("script")) == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("abc\u202egpj", "abc⟨U+202E⟩gpj"),
        ("a\u200bb\ufeffc\u2066", "a⟨U+200B⟩b⟨U+FEFF⟩c⟨U+2066⟩"),
        ("line\u2028end\x07", "line⟨U+2028⟩end⟨U+0007⟩"),
        # What words and pictures of people are made of stays.
        ("\u0645\u06cc\u200c\u0634\u0648\u062f 👩\u200d🚀\nb", "\u0645\u06cc\u200c\u0634\u0648\u062f 👩\u200d🚀\nb"),
    ],
)
def test_invisible_characters_that_mislead_are_spelt_out(text: str, shown: str) -> None:
    assert plain(text) == shown


def test_strangers_words_are_isolated_from_the_text_around_them() -> None:
    page = Parsed(render(report_pages.report([some(text="שלום world", ref="אב")]), {}))
    isolated = [text for found, text in page.all("bdi") if found["dir"] == "auto"]
    assert {"שלום world", "אב"} <= set(isolated)


def test_a_long_text_can_be_opened_on_its_card() -> None:
    text = "word " * 300
    page = Parsed(render(report_pages.report([some(text=text, text_is_cut=True)]), {}))
    assert page.all("h3")[0][1].endswith("…") and len(page.all("h3")[0][1]) == CLAIM_CHARS + 1
    assert text + " … (cut)" in page.all("details", cls="whole")[0][1]


# ---- What the page may do --------------------------------------------------------------------------------------------


def test_a_long_premise_is_cut_to_be_seen_and_can_be_opened_on_its_card() -> None:
    page = Parsed(render(report_pages.report([some(premise="given " * 100)]), {}))
    (_, shown), (_, whole) = page.all("p", cls="premise")[0], page.all("details", cls="whole")[0]
    assert shown.endswith("…") and "given " * 100 in whole


def test_the_page_says_what_its_words_mean() -> None:
    page = Parsed(render(report_pages.report(), {}))
    words = {text for _, text in page.all("dt")}
    assert words > {"entailment", "contradiction", "neutral", "mismatch", "policy", "score"}


def test_where_there_are_more_mismatches_than_cards_the_sql_says_that_it_finds_them_too() -> None:
    report = report_pages.report()
    said = "Narrowed down, it also finds those of the"
    assert said in render(replace(report, mismatches=len(report.worst) + 1), {})
    assert said not in render(replace(report, mismatches=len(report.worst)), {})


def test_the_browser_is_told_to_allow_this_script_and_this_style_and_to_load_nothing() -> None:
    page = demo()
    policy = next(
        found["content"] for found, _ in page.all("meta") if found.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy and "default-src 'none'" in policy and "unsafe" not in policy
    for tag in ("style", "script"):
        ((_, text),) = page.all(tag)
        hashed = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{hashed}'" in policy
    # A style attribute or a handler would need more than that.
    assert not [
        tag for tag, found, _ in page.elements if "style" in found or any(key.startswith("on") for key in found)
    ]


def test_the_page_refers_to_nothing_outside_itself() -> None:
    addresses = [
        value or ""
        for _, found, _ in demo().elements
        for key, value in found.items()
        if key in ("src", "href", "xlink:href", "action", "formaction", "poster", "srcset", "data", "background")
    ]
    assert addresses
    assert [address[:40] for address in addresses if not re.match(r"data:image/|#", address)] == []


# ---- Numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "form", "signed", "text"),
    [
        (12345, "pairs", False, "12,345"), (-3, "pairs", True, f"{MINUS}3"), (0.3518, "share", False, "35.2%"),
        (-0.0051, "points", True, f"{MINUS}0.5"), (0.99871, "score", False, "0.999"),
        (1234.56, "pairs/s", False, "1,234.6"), (-61, "s", True, f"{MINUS}1 min 01 s"),
    ],
)  # fmt: skip
def test_numbers_are_written_by_what_they_are(value: float, form: str, signed: bool, text: str) -> None:
    assert written(value, form, signed=signed) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0124, "12 ms"), (2.995, "3.0 s"), (59.97, "1 min 00 s"), (61, "1 min 01 s"), (3725, "1 h 02 min")],
)
def test_durations_are_written_as_hours_minutes_and_seconds(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def figure(value: float | None, before: float | None, better: Any) -> Figure:
    return Figure("x", "x", "share", value, before, None, None, better, "")


def test_a_change_is_good_or_bad_news_only_where_one_way_is_better_and_it_can_be_seen() -> None:
    def told(value: float | None, before: float | None, better: Any) -> Any:
        found = trend(figure(value, before, better))
        return found and (found["sign"], found["news"])

    assert told(0.2, 0.1, "down") == ("▲", "worse")
    assert told(0.1, 0.2, "down") == ("▼", "better")
    assert told(0.2, 0.1, "up") == ("▲", "better")
    assert told(0.2, 0.1, None) == ("▲", "")
    assert told(0.10001, 0.1, "down") == ("", "")
    assert told(None, 0.1, "down") is None and told(0.1, None, "down") is None


# ---- Charts ----------------------------------------------------------------------------------------------------------


def parts(drawn: str, series: int) -> list[ElementTree.Element]:
    """The bars of one series that have a size."""
    root = ElementTree.fromstring(drawn)
    found = [
        group for group in root.iter("{http://www.w3.org/2000/svg}g")
        if f"serie-{series}" in group.get("class", "").split()
    ]  # fmt: skip
    rects = [rect for group in found for rect in group.iter("{http://www.w3.org/2000/svg}rect")]
    return [rect for rect in rects if float(rect.get("width", 0)) > 0 and float(rect.get("height", 0)) > 0]


def axis(drawn: str, name: str) -> Iterator[dict[str, str]]:
    for group in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}g"):
        if group.get("class", "").split()[:2] == ["axis", name]:
            for text in group.iter("{http://www.w3.org/2000/svg}text"):
                yield {**text.attrib, "text": text.text or ""}


def test_the_labels_of_thirty_runs_are_thirty_stacks_that_each_fill_the_scale() -> None:
    drawn = report_charts.labels(report_pages.report().history)
    series = [parts(drawn, number) for number in range(4)]
    assert [len(bars) for bars in series[:3]] == [30, 30, 30]
    for stack in zip(*series, strict=True):
        assert sum(float(bar.get("height", 0)) for bar in stack) == pytest.approx(200, abs=15)
    heights = {round(sum(float(bar.get("height", 0)) for bar in stack), 3) for stack in zip(*series, strict=True)}
    assert len(heights) == 1
    days = [label for label in axis(drawn, "x") if "data-t" in label]
    assert [day["data-t"][:10] for day in days] == ["2026-10-31", "2026-11-29"]


def test_a_single_run_is_one_bar_and_not_a_wall() -> None:
    (bar,) = parts(report_charts.labels(report_pages.report().history[-1:]), 0)
    assert float(bar.get("width", 0)) < report_charts.WIDTH / report_charts.RUNS_ROOM


def test_the_dates_of_neighbouring_runs_do_not_lie_on_each_other() -> None:
    history = report_pages.report().history
    for runs, dates in ((1, 1), (2, 1), (4, 1), (5, 2)):
        drawn = report_charts.labels(history[-runs:])
        assert len([label for label in axis(drawn, "x") if "data-t" in label]) == dates


def test_scores_are_painted_by_what_the_thresholds_decide_and_the_thresholds_are_marked() -> None:
    pairs = [0] * BINS
    pairs[0], pairs[20], pairs[24], pairs[25], pairs[48], pairs[49] = 5000, 1, 2, 3, 4, 10
    drawn = report_charts.scores(Histogram("catalog", 1, "should_hold", "p_contradiction", 0.5, 0.98, tuple(pairs)))
    assert [len(parts(drawn, number)) for number in range(3)] == [3, 2, 1]
    marked = [label for label in axis(drawn, "x") if "major" in label["class"].split()]
    assert [(label["text"], label["data-n"]) for label in marked] == [("0.50", "0.5"), ("0.98", "0.98")]
    # No tick that would run into a threshold.
    assert "1.00" not in [label["text"] for label in axis(drawn, "x")]


@pytest.mark.parametrize("thresholds", [(None, None), (0.0, 1.0), (0.5, 0.5)])
def test_a_policy_without_thresholds_or_with_extreme_ones_has_its_chart(thresholds: tuple[Any, Any]) -> None:
    drawn = report_charts.scores(
        Histogram("x", 1, "should_hold", "p_contradiction", *thresholds, (0,) * (BINS - 1) + (1,))
    )
    assert sum(len(parts(drawn, number)) for number in range(3)) == 1


def test_a_defect_rate_has_its_interval_and_the_runs_own_rate_across() -> None:
    rates = (Rate("bag", 10, 6, 0.6, 0.3, 0.8), Rate("a very long category indeed", 100, 10, 0.1, 0.05, 0.17))
    attribute = replace(report_pages.report().attributes[0], rates=rates)
    drawn = report_charts.rates(attribute, [rate.value for rate in rates], 0.2)
    wide = [float(bar.get("width", 0)) for bar in parts(drawn, 0)]
    assert max(wide) / min(wide) == pytest.approx(6, rel=0.01)
    root = ElementTree.fromstring(drawn)
    intervals = [group for group in root.iter("{http://www.w3.org/2000/svg}g") if group.get("class") == "ci"]
    assert len(intervals) == 2
    assert [label["text"] for label in axis(drawn, "y")] == ["a very long cat…", "bag"]
    assert [label for label in axis(drawn, "x") if "major" in label["class"].split()]


@pytest.mark.parametrize(
    "rate", [Rate("x", 1, 0, 0.0, 0.0, 0.79), Rate("x", 9, 9, 1.0, 0.7, 1.0), Rate("x", 10**6, 1, 1e-6, 0, 5e-6)]
)
def test_rates_of_none_of_all_and_of_hardly_any_have_their_chart(rate: Rate) -> None:
    attribute = replace(report_pages.report().attributes[0], rates=(rate,))
    assert "ci" in report_charts.rates(attribute, ["x"], rate.rate)


def test_charts_bring_no_looks_scripts_or_ids_of_their_own() -> None:
    report = report_pages.report()
    for drawn in (report_charts.labels(report.history), report_charts.scores(report.histograms[0])):
        root = ElementTree.fromstring(drawn)
        tags = {element.tag.rpartition("}")[2] for element in root.iter()}
        assert tags <= {"svg", "g", "path", "rect", "text", "circle"}
        assert not [element for element in root.iter() if "style" in element.attrib or "id" in element.attrib]
    assert report_page.render(report, {}) == report_page.render(report, {})
