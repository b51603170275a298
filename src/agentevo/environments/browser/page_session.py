"""One episode's page: its context in the shared Chromium, the actions on it, and what it looks
like. All methods are coroutines of the browser's loop.

A page is the same for the same seed and actions: the clock of its scripts stands still except for
`settle_ms` after each action (and for `wait`), random numbers follow from the seed, and fonts,
scale, locale and time zone are fixed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from agentevo.environments.browser.actions import SCALE, BrowserAction, Place
from agentevo.environments.browser.gate import HostGate
from agentevo.environments.browser.page_events import PageEvents
from agentevo.environments.browser.permissions import Permissions, absolute_url
from agentevo.environments.browser.process import BrowserProcess, driver_error, first_line
from agentevo.errors import EnvironmentFailure

if TYPE_CHECKING:
    from playwright.async_api import (
        BrowserContext,
        CDPSession,
        Dialog,
        Locator,
        Page,
        Request,
        Route,
    )

T = TypeVar("T")

START_TIME_S = 1_767_225_600
"""The time of a page's clock at its start: 2026-01-01 00:00 UTC."""
ELEMENT_MS = 20_000
"""The longest wait for an element to hold still, in milliseconds."""
IDLE_S = 5.0
"""The longest wait for a page's requests after an action, in seconds."""
POLL_S = 0.01
NAVIGATION_TRIES = 5
"""How often a page that navigates at the same time is asked again."""


class ActionRefused(Exception):
    """An action has no effect on this page."""


@dataclass(frozen=True)
class PageSettings:
    """How a page is opened. Sizes are in pixels."""

    url: str
    width: int
    height: int
    clock: Literal["virtual", "real"]
    settle_ms: int
    dialogs: Literal["dismiss", "accept"]
    popups: Literal["close", "follow"]
    downloads: bool
    max_text: int
    gate_host: str
    """The address of this machine at which Chromium reaches the gate."""


Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels."""


@dataclass(frozen=True)
class Click:
    """A click, and where the watched elements were when it came."""

    point: tuple[float, float]
    """In pixels."""
    boxes: dict[str, Box | None]
    """Maps a selector to the box of its first element. None if it is not visible."""


@dataclass(frozen=True)
class View:
    """What a page looks like. Parts that were not asked for are empty."""

    url: str
    screenshot: bytes = b""
    """PNG."""
    tree: str = ""
    """The accessibility tree, with ids and boxes of elements."""
    text: str = ""


@cache
def _page_script() -> str:
    return files(__package__).joinpath("page_script.js").read_text("utf-8")


def _is_in_page(request: Request) -> bool:
    """Whether a request is for a part of a page. A part that is not allowed shows an error; a page
    that is not allowed leaves the current one as it is."""
    try:
        return not request.is_navigation_request() or request.frame.parent_frame is not None
    except driver_error():  # a new window has no frame yet
        return False


async def _box_of(locator: Locator) -> Box | None:
    """The box of an element as it is now. None if it is not visible. Playwright's
    `Locator.bounding_box` waits for an element, with a limit that a busy machine exceeds."""
    handles = await locator.element_handles()
    box = await handles[0].bounding_box() if handles else None
    if box is None:
        return None
    return box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"]


class PageSession:
    """See the module. Lifecycle: open, then perform and look, then close."""

    def __init__(
        self, browser: BrowserProcess, settings: PageSettings, permissions: Permissions
    ) -> None:
        self.events = PageEvents()
        self.watched_selectors: tuple[str, ...] = ()
        """The selectors of `Click.boxes`."""
        self.last_click: Click | None = None
        self._browser = browser
        self._settings = settings
        self._permissions = permissions
        self._context: BrowserContext | None = None
        self._page: Page | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._gate = HostGate(permissions, lambda place: self.events.record_blocked(place))

    @property
    def page(self) -> Page:
        """Playwright's page."""
        if self._page is None:
            raise EnvironmentFailure("the page is closed: call reset(seed=...) first")
        return self._page

    async def open(self, seed: int) -> None:
        """Opens the start URL in a new context. Raises EnvironmentFailure if it does not load."""
        settings = self._settings
        try:
            port = await self._gate.open(settings.gate_host)
        except OSError as error:
            raise EnvironmentFailure(
                f"environment.gate_host: {settings.gate_host} is no address of this machine: "
                f"{error}"
            ) from error
        context = await self._browser.open_context(
            # Addresses of this machine, too, are reached through the gate.
            proxy={
                "server": f"socks5://{settings.gate_host}:{port}",
                "bypass": "<-loopback>",
            },
            viewport={"width": settings.width, "height": settings.height},
            device_scale_factor=1,
            locale="en-US",
            timezone_id="UTC",
            color_scheme="light",
            reduced_motion="reduce",
            accept_downloads=settings.downloads,
            service_workers="block",
            permissions=[],
        )
        self._context = context
        if settings.clock == "virtual":
            await context.clock.pause_at(START_TIME_S)
        await context.add_init_script(
            f"{{ const SEED = {json.dumps(str(seed))};\n{_page_script()} }}"
        )
        await context.route("**/*", self._answer_request)
        await context.route_web_socket("**/*", self._answer_socket)
        context.on("request", lambda request: self._count(request, 1))
        context.on("requestfinished", lambda request: self._count(request, -1))
        context.on("requestfailed", lambda request: self._count(request, -1))

        self._page = await context.new_page()
        self._watch(self._page)
        context.on("page", self._meet_popup)
        try:
            await self._unless_broken(self.page.goto(settings.url, timeout=0))
        except driver_error() as error:
            raise EnvironmentFailure(
                f"the page {settings.url} can't be opened: {first_line(error)}"
            ) from error
        await self._unless_broken(self.settle())

    @property
    def can_restart(self) -> bool:
        """Whether this is still the only window, with the document of the start URL."""
        return (
            self._context is not None
            and self._page is not None
            and self._context.pages == [self._page]
            and self._page.url == self._settings.url
            and not self.events.broken.is_set()
        )

    async def restart(self) -> None:
        """Makes the open document ready for another episode: no events, no focus, at the top, and
        the mouse in the corner."""
        self.events = PageEvents()
        self.last_click = None
        await self._unless_broken(self.page.mouse.move(0, 0))
        await self._unless_broken(
            self._evaluate_isolated("document.activeElement?.blur(), scrollTo(0, 0)")
        )

    async def close(self) -> None:
        """Closes the context and its gate."""
        context = self._context
        self._context = None
        self._page = None
        for task in self._tasks:
            task.cancel()
        try:
            if context is not None:
                await self._browser.end_context(context)
        finally:
            await self._gate.close()

    # What the page does on its own

    def _watch(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.events.record_error(str(error)))
        page.on("dialog", self._answer_dialog)
        page.on("download", lambda _: self.events.record_download(self._settings.downloads))
        page.on("crash", lambda _: self.events.break_off("the page crashed"))
        page.on("close", lambda _: self._leave_closed_window())

    def _count(self, request: Request, change: int) -> None:
        self.events.in_flight = max(0, self.events.in_flight + change)

    async def _answer_request(self, route: Route) -> None:
        url = route.request.url
        with suppress(driver_error()):  # the page has gone, and its request with it
            if self._permissions.allow(url):
                await route.continue_()
            else:
                self.events.record_blocked(url)
                await route.abort("blockedbyclient" if _is_in_page(route.request) else "aborted")

    async def _answer_socket(self, socket: Any) -> None:
        with suppress(driver_error()):
            if self._permissions.allow(socket.url):
                socket.connect_to_server()
            else:
                self.events.record_blocked(socket.url)
                await socket.close()

    async def _answer_dialog(self, dialog: Dialog) -> None:
        if not self.events.record_dialog(dialog.type, dialog.message):
            return
        with suppress(driver_error()):
            if self._settings.dialogs == "accept" or dialog.type == "beforeunload":
                await dialog.accept()
            else:
                await dialog.dismiss()

    def _meet_popup(self, page: Page) -> None:
        is_followed = self._settings.popups == "follow"
        self.events.record_popup(is_followed)
        if is_followed:
            self._watch(page)
            self._page = page
        else:
            task = asyncio.ensure_future(self._close_page(page))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _leave_closed_window(self) -> None:
        """Returns to the window that is left, after one that the player followed has closed."""
        if self._context is None or self._page is None or not self._page.is_closed():
            return
        left = [page for page in self._context.pages if not page.is_closed()]
        if left:
            self._page = left[-1]
        else:
            self.events.break_off("the page closed its window, or its browser ended")

    async def _close_page(self, page: Page) -> None:
        with suppress(driver_error(), TimeoutError):  # it is closed with the context
            async with asyncio.timeout(ELEMENT_MS / 1000):
                await page.close()

    async def _unless_broken(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises EnvironmentFailure as soon as the page is broken."""
        task = asyncio.ensure_future(work)
        broken = asyncio.ensure_future(self.events.broken.wait())
        try:
            await asyncio.wait([task, broken], return_when=asyncio.FIRST_COMPLETED)
            if self.events.broken.is_set():
                raise EnvironmentFailure(self.events.reason)
            return task.result()
        finally:
            for item in (task, broken):
                item.cancel()
            # A cancelled call of Playwright must not be reported as a lost exception.
            await asyncio.gather(task, broken, return_exceptions=True)

    # Actions

    async def perform(self, action: BrowserAction) -> None:
        """Plays an action, and waits until the page has settled. Raises ActionRefused if the
        action is not possible on this page."""
        await self._unless_broken(self._perform(action))

    async def _perform(self, action: BrowserAction) -> None:
        page = self.page
        try:
            await getattr(self, f"_do_{action.action}")(action)
        except driver_error() as error:
            if self.page.is_closed():
                raise
            if not page.is_closed():  # else the action has closed its own window
                raise ActionRefused(first_line(error)) from error
        if action.action != "done":
            await self.settle()
            await self._leave_forbidden_page()

    async def _do_click(self, action: BrowserAction) -> None:
        await self._click(action.place, 1)

    async def _do_double_click(self, action: BrowserAction) -> None:
        await self._click(action.place, 2)

    async def _do_type(self, action: BrowserAction) -> None:
        if action.place is not None:
            await self._click(action.place, 1)
        if action.clear:
            await self.page.keyboard.press("Control+A")
            await self.page.keyboard.press("Delete")
        await self.page.keyboard.type(action.text)

    async def _do_press(self, action: BrowserAction) -> None:
        await self.page.keyboard.press(action.key)

    async def _do_scroll(self, action: BrowserAction) -> None:
        place = action.place or Place(x=SCALE / 2, y=SCALE / 2)
        await self.page.mouse.move(*await self._point(place))
        await self.page.mouse.wheel(
            action.dx * self._settings.width / SCALE, action.dy * self._settings.height / SCALE
        )
        # The compositor scrolls within its next frames, which the page's own clock doesn't see.
        await self._evaluate_isolated(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
            ".then(() => null)"
        )

    async def _do_drag(self, action: BrowserAction) -> None:
        assert action.place is not None and action.to is not None
        start, end = await self._point(action.place), await self._point(action.to)
        mouse = self.page.mouse
        await mouse.move(*start)
        await mouse.down()
        try:
            await mouse.move(*end, steps=10)
        finally:
            await mouse.up()

    async def _do_navigate(self, action: BrowserAction) -> None:
        url = absolute_url(action.url, self.page.url)
        if not self._permissions.allow_navigation(url):
            raise ActionRefused(f"the address {url[:200]} is not allowed")
        await self.page.goto(url, timeout=0)

    async def _do_back(self, action: BrowserAction) -> None:
        client = await self._client()
        history = await client.send("Page.getNavigationHistory")
        await client.detach()
        index = history["currentIndex"]
        if index == 0 or history["entries"][index - 1]["url"] == "about:blank":
            raise ActionRefused("there is no earlier page")
        await self.page.go_back(timeout=0)

    async def _do_wait(self, action: BrowserAction) -> None:
        await self._run_clock(action.ms)

    async def _do_done(self, action: BrowserAction) -> None:
        """The environment ends the episode."""

    async def _click(self, place: Place | None, count: int) -> None:
        assert place is not None
        point = await self._point(place)
        self.last_click = Click(point, await self._watched_boxes())
        await self.page.mouse.click(*point, click_count=count)

    async def _point(self, place: Place) -> tuple[float, float]:
        """The pixel of a place; of an element its middle, after scrolling there."""
        if place.x is not None and place.y is not None:
            return (
                min(place.x / SCALE * self._settings.width, self._settings.width - 1),
                min(place.y / SCALE * self._settings.height, self._settings.height - 1),
            )

        name = place.id or place.selector
        locator = self._locate(place)
        if not await locator.count():
            raise ActionRefused(f"there is no element {name}")
        if not await locator.is_visible():
            raise ActionRefused(f"the element {name} is not visible")

        await locator.scroll_into_view_if_needed(timeout=ELEMENT_MS)
        box = await _box_of(locator)
        if box is None:
            raise ActionRefused(f"the element {name} is not visible")
        left, top, right, bottom = box
        return (left + right) / 2, (top + bottom) / 2

    def _locate(self, place: Place) -> Locator:
        if place.id is not None:
            return self.page.locator(f"aria-ref={place.id}").first
        assert place.selector is not None
        return self.page.locator(place.selector).first

    async def _watched_boxes(self) -> dict[str, Box | None]:
        try:
            return {
                selector: await self.steadily(partial(_box_of, self.page.locator(selector).first))
                for selector in self.watched_selectors
            }
        except driver_error() as error:
            if self.page.is_closed():
                raise
            raise EnvironmentFailure(
                f"the box of an element can't be found: {first_line(error)}"
            ) from error

    async def _leave_forbidden_page(self) -> None:
        """Returns to the last allowed page, after a redirect to another host."""
        for try_number in range(NAVIGATION_TRIES):
            url = self.page.url
            if self._permissions.allow(url):
                return
            self.events.record_blocked(url)
            if try_number == 0:
                await self.page.go_back(timeout=0)
            else:
                await self.page.goto(self._settings.url, timeout=0)
        raise EnvironmentFailure(f"the page leads to {self.page.url[:200]}, which is not allowed")

    # Time

    async def settle(self) -> None:
        """Lets the page react: half of `settle_ms`, its requests, and the other half."""
        for _ in range(2):
            await self._run_clock(self._settings.settle_ms / 2)
            await self._wait_for_requests()

    async def _run_clock(self, ms: float) -> None:
        if self._settings.clock == "real":
            await asyncio.sleep(ms / 1000)
            return

        assert self._context is not None
        try:
            await self._context.clock.run_for(round(ms))
        except driver_error():
            if self.page.is_closed():
                raise
            # The page navigates; the new document begins at the advanced time.

    async def _wait_for_requests(self) -> None:
        """Waits for the answers to all requests and for the document, at most IDLE_S."""
        deadline = time.monotonic() + IDLE_S
        with suppress(driver_error()):  # a page that keeps on loading is shown as it is
            while self.events.in_flight and time.monotonic() < deadline:
                await asyncio.sleep(POLL_S)
            await self.page.wait_for_load_state("load", timeout=IDLE_S * 1000)

    # Looking

    async def look(self, *, screenshot: bool, tree: bool, text: bool) -> View:
        """The parts of the page that are asked for."""
        return await self.steadily(lambda: self._look(screenshot, tree, text))

    async def steadily(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `ask` returns. A question that the page's own navigation interrupts is asked
        again."""
        for try_number in range(1, NAVIGATION_TRIES + 1):
            try:
                return await self._unless_broken(ask())
            except driver_error():
                if self.page.is_closed() or try_number == NAVIGATION_TRIES:
                    raise
                await self._unless_broken(self._wait_for_requests())

        raise AssertionError("the loop returns or raises")

    async def _look(self, screenshot: bool, tree: bool, text: bool) -> View:
        page = self.page
        if tree:
            await self._remove_dead_frames()
        return View(
            url=page.url,
            tree=await page.aria_snapshot(mode="ai", boxes=True, timeout=0) if tree else "",
            text=await self._text() if text else "",
            screenshot=await page.screenshot(
                animations="disabled", caret="hide", scale="css", timeout=0
            )
            if screenshot
            else b"",
        )

    async def _remove_dead_frames(self) -> None:
        """Removes frames whose address Chromium refuses: they never load, and the accessibility
        tree would wait for them."""
        for frame in self.page.frames[1:]:
            if frame.url:
                continue
            element = await frame.frame_element()
            url = absolute_url(await element.get_attribute("src") or "", self.page.url)
            if not self._permissions.allow(url):
                self.events.record_blocked(url)
                await element.evaluate("(element) => element.remove()")

    async def _text(self) -> str:
        """The visible text, cut in the page so that a huge one never leaves it."""
        limit = self._settings.max_text + 1
        value = await self._evaluate_isolated(f"(document.body?.innerText ?? '').slice(0, {limit})")
        return str(value)

    async def evaluate(self, expression: str, world: Literal["isolated", "page"]) -> Any:
        """The value of a JavaScript expression, as JSON can express it. In the `isolated` world it
        sees the document, and not the variables of the page's scripts, nor can they change what its
        functions do. Raises EnvironmentFailure if it throws."""
        if world == "isolated":
            return await self._unless_broken(self._evaluate_isolated(expression))
        try:
            return await self._unless_broken(self.page.evaluate(expression))
        except driver_error() as error:
            raise EnvironmentFailure(
                f"the JavaScript {expression[:200]!r} failed: {first_line(error)}"
            ) from error

    async def _client(self) -> CDPSession:
        """A client of Chromium's own protocol, for the page."""
        assert self._context is not None
        return await self._context.new_cdp_session(self.page)

    async def _evaluate_isolated(self, expression: str) -> Any:
        client = await self._client()
        tree = await client.send("Page.getFrameTree")
        world = await client.send(
            "Page.createIsolatedWorld",
            {"frameId": tree["frameTree"]["frame"]["id"], "worldName": "agentevo"},
        )
        answer = await client.send(
            "Runtime.evaluate",
            {
                "expression": expression,
                "contextId": world["executionContextId"],
                "returnByValue": True,
                "awaitPromise": True,
            },
        )
        await client.detach()
        if problem := answer.get("exceptionDetails"):
            message = problem.get("exception", {}).get("description") or problem["text"]
            raise EnvironmentFailure(
                f"the JavaScript {expression[:200]!r} failed: {message.splitlines()[0][:300]}"
            )
        return answer["result"].get("value")

    async def is_shown(self, selector: str, text: str) -> bool:
        """Whether a visible element of `selector` contains `text`."""
        locator = self.page.locator(selector).filter(visible=True)
        if text:
            locator = locator.filter(has_text=text)
        return await locator.count() > 0
