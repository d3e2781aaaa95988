"""The page of a run in a real browser: headless Chromium, driven by playwright; what it looks like is axe's to judge.

Without Chromium these are skipped on a laptop; where CI is set they fail, so that they never look passed unrun.
`apt-get install chromium` brings it on Debian.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from db.run_report import RunReport
from tasks.report_page import render
from tests import report_pages
from tests.test_report_page import HOSTILE

if not os.environ.get("CI"):
    pytest.importorskip("playwright", reason="pip install -e '.[dev]' brings playwright")
    pytest.importorskip("axe_playwright_python", reason="pip install -e '.[dev]' brings axe")

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
#: Milliseconds after which something that should appear counts as missing.
TIMEOUT_MS = 10_000
PHONE, TABLET, DESKTOP = (360, 740), (768, 1024), (1280, 900)
#: Cards that are shown before the reader asks for all: FEW of tasks/templates/report.js.
FEW = 12

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("there is no Chromium: apt-get install chromium")
        pytest.skip("there is no Chromium on the PATH")
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found)
        yield chromium
        chromium.close()


def hostile_report() -> RunReport:
    """One pair whose every word wants to break out, run on, or hide."""
    pair = replace(
        report_pages.report().worst[0],
        text=HOSTILE + " \u202ereversed\u200b " + "x" * 300,
        ref="r" * 200,
        attributes={"category": "o'brien \u202e\\", "seller": "s" * 200},
    )
    return report_pages.report([pair, report_pages.report().worst[1]], name="n" * 200)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The addresses of three pages: the demo's second night, a few cards of it, and one full of hostile words."""
    folder: Path = tmp_path_factory.mktemp("pages")
    found = {}
    whole = report_pages.report()
    few = report_pages.report(whole.worst[:FEW])
    for name, report in (("demo", whole), ("few", few), ("hostile", hostile_report())):
        file = folder / f"{name}.html"
        file.write_text(render(report, report_pages.pictures(report)), encoding="utf-8")
        found[name] = file.as_uri()
    return found


@pytest.fixture
def open_page(browser: Browser, files: dict[str, str]) -> Iterator[Open]:
    """Opens a page; at the end, whatever the test did, nothing was asked for and nothing was said on the console."""
    contexts = []
    asked: list[str] = []
    said: list[str] = []

    def refuse(route: Route) -> None:
        asked.append(route.request.url)
        route.abort()

    def opened(name: str = "demo", fragment: str = "", size: tuple[int, int] = DESKTOP, **options: Any) -> Page:
        width, height = size
        context = browser.new_context(
            **{"viewport": {"width": width, "height": height}, "locale": "en-GB", "timezone_id": "UTC"} | options
        )
        contexts.append(context)
        context.set_default_timeout(TIMEOUT_MS)
        context.route(lambda url: url != files[name], refuse)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(files[name] + fragment)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert asked == []
    assert said == []


def shown(page: Page) -> list[str]:
    """The texts of the cards that are to be seen, in order."""
    return page.locator(".card:visible h3").all_inner_texts()


def choose(page: Page, name: str, value: str) -> None:
    page.get_by_label(name, exact=True).select_option(label=value)


def test_the_page_opens_with_its_charts_and_the_newly_contradicting_cards_first(open_page: Open) -> None:
    page = open_page()
    expect(page).to_have_title("10 newly contradicting · demo 2026-11-29")
    assert page.locator("svg.pygal-chart").count() == 5
    boxes = [chart.bounding_box() for chart in page.locator("svg.pygal-chart").all()]
    assert all(box and box["width"] > 200 and box["height"] > 100 for box in boxes)
    expect(page.locator(".card:visible")).to_have_count(FEW)
    expect(page.locator(".card:visible").first).to_contain_text("newly contradicts")
    assert page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")


def test_cards_are_narrowed_down_and_the_address_brings_the_same_view_back(
    open_page: Open, files: dict[str, str]
) -> None:
    page = open_page()
    pairs = [pair for pair in report_pages.report().worst if pair.attributes["category"] == "food"]
    mine = [pair for pair in pairs if pair.policy == "catalog"]
    assert 0 < len(mine) <= FEW
    choose(page, "category", "food")
    choose(page, "policy", "catalog")
    assert shown(page) == [pair.text for pair in mine]
    expect(page.get_by_role("status").first).to_have_text(f"{len(mine)} of 100 mismatches")
    fragment = page.url.partition("#")[2]
    assert fragment == "policy=catalog&a.category=food"

    again = open_page(fragment=f"#{fragment}")
    assert shown(again) == shown(page)
    expect(again.get_by_label("category", exact=True)).to_have_value("food")

    again.get_by_role("button", name="Reset").click()
    expect(again.locator(".count")).to_have_text(f"100 mismatches, the first {FEW} shown")
    assert "#" not in again.url


def test_a_fragment_that_names_what_is_not_there_shows_everything(open_page: Open) -> None:
    page = open_page(fragment="#a.category=%3Cb%3E&sort=nonsense&policy=%")
    expect(page.locator(".count")).to_have_text(f"100 mismatches, the first {FEW} shown")


def test_an_address_sorts_by_the_attributes_name_whatever_else_a_run_has(open_page: Open) -> None:
    page = open_page(fragment="#sort=a.seller")
    sellers = page.locator(".card:visible .facts div:has(dt bdi:text-is('seller')) dd").all_inner_texts()
    assert sellers == sorted(sellers) and len(sellers) == FEW


def test_cards_are_sorted_and_all_of_them_can_be_shown(open_page: Open) -> None:
    page = open_page()
    worst = report_pages.report().worst
    choose(page, "sorted by", "score, closest calls first")
    page.get_by_role("button", name="Show all 100").click()
    expect(page.locator(".card:visible")).to_have_count(100)
    assert shown(page) == [pair.text for pair in sorted(worst, key=lambda pair: pair.p_trouble)]
    choose(page, "sorted by", "seller")
    sellers = [pair.attributes["seller"] for pair in sorted(worst, key=lambda pair: pair.attributes["seller"])]
    assert page.locator(".card:visible .facts div:has(dt bdi:text-is('seller')) dd").all_inner_texts() == sellers


def test_the_sql_follows_what_is_shown_and_is_copied(open_page: Open) -> None:
    page = open_page()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    sql = report_pages.report().sql
    page.get_by_text("SQL for what is shown").click()
    expect(page.locator(".sql pre")).to_have_text(f"{sql.select}\n{sql.order}", use_inner_text=True)
    choose(page, "seller", "ember")
    page.get_by_role("button", name="Copy").click()
    expect(page.locator(".copied")).to_have_text("Copied.")
    wanted = f"{sql.select}\n  and attributes ->> 'seller' = 'ember'\n{sql.order}"
    assert page.evaluate("navigator.clipboard.readText()") == wanted


def test_a_hostile_value_is_a_constant_of_the_sql_with_nothing_hidden_in_it(open_page: Open) -> None:
    page = open_page("hostile")
    choose(page, "category", "o'brien ⟨U+202E⟩\\")
    assert len(shown(page)) == 1
    constant = r"U&'o''brien \+00202e\\'"
    assert f"\n  and attributes ->> 'category' = {constant}\n" in (page.locator(".sql pre").text_content() or "")


def test_a_prohibited_picture_is_blurred_until_its_button_is_pressed_by_mouse_or_keyboard(open_page: Open) -> None:
    page = open_page(reduced_motion="reduce")
    choose(page, "policy", "prohibited")
    veil = page.locator(".card:visible .veil").first
    blurred = "(button) => getComputedStyle(button.querySelector('img')).filter.includes('blur')"
    assert page.locator(".card:visible .picture").count() == page.locator(".card:visible .veil").count()
    assert veil.evaluate(blurred)
    veil.focus()
    for key, is_blurred in (("Enter", False), ("Space", True), ("Space", False)):
        page.keyboard.press(key)
        assert veil.evaluate(blurred) == is_blurred
        expect(veil).to_have_attribute("aria-pressed", str(not is_blurred).lower())
    veil.click()
    assert veil.evaluate(blurred)


def test_everything_is_reached_by_keyboard_and_shows_where_it_is(open_page: Open) -> None:
    page = open_page()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the mismatches")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    label = page.get_by_label("label", exact=True)
    expect(label).to_be_focused()
    assert label.evaluate("(field) => getComputedStyle(field).outlineStyle") == "solid"
    page.keyboard.press("ArrowDown")
    expect(page.locator(".count")).to_contain_text("of 100 mismatches")
    # On to "Show all", which is behind the cards and their pictures; what comes to light has the focus then.
    page.get_by_role("button", name="Show all").press("Enter")
    assert page.evaluate("document.activeElement.matches('.card')")


def test_what_strangers_wrote_is_shown_as_text_and_runs_nothing(open_page: Open) -> None:
    page = open_page("hostile")
    title = page.locator(".card h3").first.inner_text()
    assert title.startswith("</script></style></title><script>alert(1)</script><!-- ⟨U+2028⟩")
    assert page.locator("script").count() == 1 and page.locator("img:not([src^='data:'])").count() == 0


def test_the_browser_itself_refuses_what_would_leave_the_page(browser: Browser, files: dict[str, str]) -> None:
    """Not by `open_page`, whose console is to stay empty: there Chromium says what it has refused."""
    with browser.new_context() as context:
        asked: list[str] = []
        page = context.new_page()
        page.goto(files["few"])
        context.route("**/*", lambda route: asked.append(route.request.url))
        refused = page.evaluate(
            """() => new Promise((resolve) => {
                document.addEventListener("securitypolicyviolation", (event) => resolve(event.effectiveDirective));
                document.body.append(Object.assign(new Image(), { src: "https://elsewhere.invalid/x.png" }));
            })"""
        )
        assert (refused, asked) == ("img-src", [])


def test_letters_twice_as_large_still_fit_a_phone_and_a_card(open_page: Open) -> None:
    page = open_page(size=PHONE)
    page.evaluate("document.documentElement.style.fontSize = '200%'")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    for words in page.locator(".card:visible .words").all():
        inside, card = words.bounding_box(), words.locator("xpath=ancestor::li").bounding_box()
        assert inside and card and inside["width"] > card["width"] / 2
        assert inside["x"] + inside["width"] <= card["x"] + card["width"]


def test_the_last_number_of_a_scale_is_not_cut_off(open_page: Open) -> None:
    page = open_page()
    assert {chart.evaluate("(e) => getComputedStyle(e).overflow") for chart in page.locator(".pygal-chart").all()} == {
        "visible"
    }


@pytest.mark.parametrize("name", ["demo", "hostile"])
def test_nothing_has_to_be_scrolled_sideways_on_a_phone_a_tablet_or_a_desktop(open_page: Open, name: str) -> None:
    page = open_page(name)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    for width, height in (PHONE, TABLET, DESKTOP):
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("scheme", "size"), [("light", DESKTOP), ("dark", PHONE)], ids=["light", "dark"])
def test_axe_finds_nothing_to_complain_of(open_page: Open, scheme: str, size: tuple[int, int]) -> None:
    page = open_page("few", color_scheme=scheme, size=size, reduced_motion="reduce")
    page.get_by_text("SQL for what is shown").click()
    page.get_by_text("The figures as a table").last.click()
    results = Axe().run(page)
    assert results.violations_count == 0, results.generate_report()


def test_dark_mode_is_dark_and_its_charts_follow(open_page: Open) -> None:
    looks = "(part) => [getComputedStyle(document.body).backgroundColor, getComputedStyle(part).fill]"
    light, dark = (
        open_page("few", color_scheme=scheme).locator(".stacked .serie-0 rect").first.evaluate(looks)
        for scheme in ("light", "dark")
    )
    assert sum(map(int, light[0][4:-1].split(","))) > 600 and sum(map(int, dark[0][4:-1].split(","))) < 150
    assert light[1] != dark[1]


def test_numbers_and_dates_are_written_as_the_readers_locale_does(open_page: Open) -> None:
    page = open_page("few", locale="de-DE", timezone_id="Europe/Berlin")
    expect(page.locator(".when time").first).to_have_text("29.11.2026, 03:00")
    expect(page.locator(".tile", has_text="defect rate")).to_contain_text("35,2\xa0%")
    expect(page.locator(".tile", has_text="defect rate")).to_contain_text("+0,5 points")
    assert "0,25" in page.locator(".spread .axis.x").first.text_content()  # type: ignore[operator]


def test_without_javascript_every_card_is_shown_and_nothing_that_needs_it(open_page: Open) -> None:
    page = open_page(java_script_enabled=False)
    expect(page.locator(".card:visible")).to_have_count(100)
    expect(page.locator(".controls")).to_be_hidden()
    expect(page.get_by_role("button", name="Copy")).to_be_hidden()
    expect(page.locator(".tile.first .value")).to_have_text("10")
    page.get_by_text("SQL for what is shown").click()
    expect(page.locator(".sql pre")).to_contain_text("from report.run_changes")


def test_on_paper_all_cards_are_there_and_no_controls(open_page: Open) -> None:
    page = open_page()
    page.emulate_media(media="print")
    expect(page.locator(".card:visible")).to_have_count(100)
    expect(page.locator(".controls")).to_be_hidden()
