"""Attempts as a person finds them in the browser: filters, histograms, order, paging, search, the
keyboard, and that every page of a run is whole in light and dark, wide and narrow."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import cycle
from typing import Any
from urllib.parse import quote, urljoin

import pytest
from dashboard_visitor import Visitor
from shown_attempts import NUM_GROUPS, SIZE, STEP, WORD, attempt_name
from slow import soak

from agentevo.observability.pages.navigation import TABS

Visit = Callable[..., Visitor]
pytestmark = pytest.mark.slow

LIST = "/runs/lake/attempts"
FILTERS = ("Split", "Ledger", "Status", "Outcome", "Kind of task", "Agent", "Error", "Dropped for")


def attempt(number: int, **more: object) -> str:
    """The page of an attempt of `shown_attempts.many`."""
    words = "".join(f"&{name}={value}" for name, value in more.items())
    return f"/runs/lake/attempt?id={quote(attempt_name(number), safe='')}{words}"


def compared(one: int, other: int) -> str:
    a, b = (attempt(number).partition("id=")[2] for number in (one, other))
    return f"/runs/lake/attempts/compare?a={a}&b={b}"


def number_of(page: Any) -> int:
    """How many attempts the list says it has."""
    heading = page.locator("h2", has_text="attempt").first.inner_text()
    return int(heading.split()[0].replace(",", ""))


@pytest.fixture
def listed(busy_url: str, visit: Visit) -> Visitor:
    """A visitor of the list, when the index has read all that was said."""
    visitor = visit(busy_url)
    visitor.whole_index(LIST)
    return visitor


PAGES = [
    "/",
    *(f"/runs/lake{tab.path}" for tab in TABS),
    f"/runs/lake/steps/{STEP}",
    "/runs/lake/steps/1",
    attempt(10),
    attempt(7, show="tokens"),
    compared(30, 31),
    "/compare?run=lake&by=run&x=tokens",
]


@pytest.mark.parametrize("width", [1280, *soak(360)])
def test_every_page_of_a_run_is_whole_accessible_and_fits(
    width: int, busy_url: str, visit: Visit
) -> None:
    """Wide pages are light and dark in turn, narrow ones both."""
    visitor = visit(busy_url, width=width)
    visitor.whole_index(LIST)
    for path, scheme in zip(PAGES, cycle(("light", "dark")), strict=False):
        page = visitor.go(path)
        if "show=tokens" in path:
            page.wait_for_selector("[data-t]")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        for shown in (scheme,) if width > 360 else ("light", "dark"):
            page.emulate_media(color_scheme=shown)
            visitor.check_accessible()


def test_every_filter_leads_to_as_many_attempts_as_it_says(listed: Visitor) -> None:
    page = listed.page
    everything = number_of(page)
    assert everything > NUM_GROUPS * SIZE

    seen = set()
    for place in range(page.locator(".choice").count()):
        choice = page.locator(".choice").nth(place)
        title = choice.locator("h3").inner_text()
        seen.add(title.capitalize())
        chip = choice.locator(".chip").last
        many = int(chip.inner_text().split()[-1].replace(",", ""))
        if place:  # what the others lead to is only read
            href = chip.get_attribute("href")
            answer = page.request.get(urljoin(page.url, href)).text()
            heading = re.search(r"<h2[^>]*>\s*([\d,]+) attempt", answer)
            assert heading, title
            assert int(heading[1].replace(",", "")) == many, title
            continue

        chip.click()
        chosen = page.locator(".choice .chip[aria-current=true]")
        chosen.wait_for()
        assert number_of(page) == many, title

        page.reload()
        assert number_of(page) == many, title

        chosen.click()  # takes it back
        page.locator(".choice .chip[aria-current=true]").wait_for(state="detached")
        assert number_of(page) == everything

    assert seen >= {one.capitalize() for one in FILTERS}


@pytest.mark.soak
def test_every_bar_of_a_histogram_leads_to_the_attempts_that_it_counts(listed: Visitor) -> None:
    page = listed.page
    bars = page.evaluate(
        "[...document.querySelectorAll('svg.histogram a')].map((a) => "
        "[a.getAttribute('href'), a.getAttribute('aria-label')])"
    )
    assert len(bars) > 12

    titles = {label.split(" ")[0] for _, label in bars}
    assert titles == {"Reward", "Sampled", "Age"}
    for href, label in bars:
        many = int(re.findall(r": ([\d,]+) attempt", label)[0].replace(",", ""))
        listed.go(href)
        assert number_of(page) == many, label
        assert page.locator("svg.histogram a[aria-current=true]").count() == 1, label

    page.locator("figcaption a", has_text="any").click()
    page.wait_for_url(lambda url: "_from" not in url)


def test_orders_and_pages_are_links_and_going_back_keeps_the_place(listed: Visitor) -> None:
    page = listed.page
    everything = number_of(page)
    rewards = (
        "[...document.querySelectorAll('[data-row] td:nth-child(3)')]"
        ".map((td) => Number(td.innerText.replace('−', '-')))"
    )
    page.get_by_role("link", name="lowest reward").click()
    page.wait_for_url("**order=worst")
    lowest = page.evaluate(rewards)
    assert lowest == sorted(lowest)

    names = set()
    pages = []
    while True:
        pages.append(page.url)
        found = page.locator("[data-row] td.name a").all_inner_texts()
        assert not names & set(found)

        names |= set(found)

        more = page.locator("a[rel=next]")
        if not more.count():
            break

        with page.expect_navigation():
            more.click()

    assert len(names) == everything
    assert len(pages) > 2

    page.go_back()
    assert page.url == pages[-2]
    assert page.locator("[data-row]").count() == 50

    page.locator("[data-row] td.name a").nth(3).click()
    page.wait_for_url("**/attempt?id=**")
    page.go_back()
    assert page.url == pages[-2]

    greyed = page.locator(".chip.grey", has_text="log-prob change")
    assert "tracking.token_numbers" in greyed.get_attribute("title")


@pytest.mark.soak
def test_texts_are_searched_within_the_chosen_filters(listed: Visitor) -> None:
    page = listed.page
    page.locator(".choice .chip", has_text="maze").click()
    page.wait_for_url("**kind=maze**")
    of_kind = number_of(page)
    page.keyboard.press("/")
    page.keyboard.type(WORD)
    page.keyboard.press("Enter")
    page.wait_for_url("**q=unicorn**")

    assert "kind=maze" in page.url
    assert 0 < number_of(page) < of_kind
    assert page.locator("mark", has_text=WORD).count() == page.locator("[data-row]").count()
    assert page.input_value("input[type=search]") == WORD

    for query, there in ((f'"the {WORD}"', True), ("uni*", True), (f'"{WORD} the"', False)):
        page.fill("input[type=search]", query)
        page.keyboard.press("Enter")
        page.wait_for_url(lambda url, query=query: quote(query[-4:], safe="*") in url)
        assert bool(page.locator("[data-row]").count()) == there, query

    page.locator("a.button", has_text="All").click()
    page.wait_for_url(lambda url: url.endswith("/attempts"))


def test_rows_and_tokens_are_walked_by_keyboard(listed: Visitor) -> None:
    page = listed.page
    for key in "jjk":
        page.keyboard.press(key)
    assert page.locator("[data-row].here").count() == 1

    first = page.locator("[data-row] td.name a").first.inner_text()
    page.keyboard.press("Enter")
    page.wait_for_url("**/attempt?id=**")
    assert first in page.inner_text("h2.big")

    listed.go(attempt(31))
    page.keyboard.press("o")
    page.wait_for_url("**show=tokens")
    page.wait_for_selector("[data-t]")
    page.focus("#stream")
    for _ in range(3):
        page.keyboard.press("ArrowRight")

    page.keyboard.press("ArrowLeft")
    assert page.locator("[data-t].here").count() == 1
    assert "turn 0, 1" in page.inner_text("#token-box")
    assert "log-prob" in page.inner_text("#token-box")

    for shade in ("ver", "on", "lp"):
        page.click(f"[data-shade={shade}]")
        assert page.get_attribute(f"[data-shade={shade}]", "aria-pressed") == "true"

    page.focus("#stream")
    page.keyboard.press("Enter")
    page.wait_for_selector("#token-history[open] dl.history")
    step = page.locator("#token-history a.button")
    assert f"Step {STEP}" in step.inner_text()

    page.keyboard.press("Escape")
    page.keyboard.press("m")
    page.wait_for_url(lambda url: "show=tokens" not in url)


def test_from_a_step_through_its_groups_to_two_attempts_beside_each_other(
    listed: Visitor,
) -> None:
    page = listed.go(f"/runs/lake/steps/{STEP}")
    assert page.locator(".group").count() == NUM_GROUPS

    page.locator(".dropped a").click()
    page.wait_for_url("**reason=no-spread**")
    assert page.locator(".group").count() == 3

    with page.expect_navigation():
        page.locator("a", has_text="best next to worst").first.click()

    assert page.locator(".diff .gone").count() > 0
    assert page.locator(".diff .new").count() > 0

    page.go_back()
    assert page.locator(".group").count() == 3

    page.locator("a[rel=prev]").click()
    page.wait_for_url("**/steps/2")


@pytest.mark.soak
def test_why_a_group_failed_is_found_by_clicking(listed: Visitor) -> None:
    """From the list of runs: the run, its newest groups, the worst of them, an attempt of it
    beside the best one."""
    page = listed.go("/")
    page.locator("[data-row] td.name a").click()
    page.get_by_role("link", name="its groups").click()
    page.wait_for_url("**/steps/2")
    listed.go(f"/runs/lake/steps/{STEP}")
    page.get_by_role("link", name="lowest mean first").click()
    page.wait_for_url("**order=worst**")
    means = [float(text) for text in page.locator(".group header b").all_inner_texts()]
    assert means == sorted(means)
    assert means[0] < means[-1]

    page.locator(".group").first.locator(".cell.failed").first.click()
    page.wait_for_url("**/attempt?id=**")
    assert "no answer from the tool" in page.inner_text("main")
    assert page.locator("aside .cell").count() == SIZE
    assert page.locator("aside .cell.here").count() == 1

    page.get_by_role("link", name="its best next to this one").click()
    page.wait_for_url("**/attempts/compare**")
    assert page.locator(".diff .gone").count() > 0


def test_compare_keeps_all_that_was_chosen(listed: Visitor) -> None:
    page = listed.go("/compare?run=lake")
    page.select_option("select[name=by]", "run")
    page.select_option("select[name=x]", "time")
    page.fill("input[name=q]", "critic/score/mean")
    with page.expect_navigation():
        page.get_by_role("button", name="Show").click()

    page.wait_for_selector("figure.chart canvas")
    page.reload()
    assert page.input_value("select[name=by]") == "run"
    assert page.input_value("select[name=x]") == "time"
    assert page.input_value("input[name=q]") == "critic/score/mean"
    assert page.locator("figure.chart").count() == 1
