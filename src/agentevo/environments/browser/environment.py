"""A page in a browser as an environment: any URL, with rewards by rules.

The player reads the task and the actions (actions.py), sees the page as a screenshot, an
accessibility tree, both, or text (observation.py), and acts until all rules of `reward` hold
(page_rules.py), it says `done`, or `max_actions` is reached. An action that is not understood, or
not possible on the page, is invalid, and the player reads why. A page that crashes, hangs, or
floods the browser fails the attempt.

Subclass BrowserEnvironment and override `grade` for rewards of your own, or `step`.
"""

from __future__ import annotations

import random
import time
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import pydantic

from agentevo.environments.browser.actions import (
    ALL_ACTIONS,
    SCALE,
    ActionName,
    BrowserActionError,
    describe_actions,
    read_browser_action,
    write_click,
)
from agentevo.environments.browser.observation import make_observation
from agentevo.environments.browser.page_rules import Rule, RuleBook
from agentevo.environments.browser.page_session import ActionRefused, PageSession, PageSettings
from agentevo.environments.browser.permissions import permissions_for
from agentevo.environments.browser.process import (
    CLOSE_S,
    BrowserProcess,
    find_chromium,
    shared_browser,
)
from agentevo.environments.browser.selenium_browser import (
    SeleniumBrowser,
    check_selenium,
    start_driver,
)
from agentevo.environments.environment import EnvironmentConfig, TextEnvironment, environments
from agentevo.errors import ConfigError, EnvironmentFailure

if TYPE_CHECKING:
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.remote.webdriver import WebDriver

T = TypeVar("T")

CLOSING_S = 3 * CLOSE_S
"""The longest end of a page, in seconds: an orderly one, and a kill of Chromium."""


class PageConfig(EnvironmentConfig):
    """How a player sees and uses a page."""

    observation: Literal["screenshot", "accessibility", "both", "text"] = "accessibility"
    """What the player sees: a `screenshot` (needs a vision-language model), the `accessibility`
    tree with ids of elements, `both`, or the visible `text`."""
    marks: bool = False
    """Whether the screenshot shows the box and the id of each element that can be used (set of
    marks)."""
    actions: tuple[ActionName, ...] = pydantic.Field(default=ALL_ACTIONS, min_length=1)
    """The actions that are open to the player."""
    dialogs: Literal["dismiss", "accept"] = "dismiss"
    """The answer to a dialog of the page. The player reads its text."""
    popups: Literal["close", "follow"] = "close"
    """What happens to a window that the page opens. `follow`: the player continues there, until it
    closes."""
    downloads: bool = False
    """Whether the page may download files. They are deleted with the episode."""
    clock: Literal["virtual", "real"] = "virtual"
    """`virtual`: the clock and the timers of the page's scripts advance by `settle_ms` after each
    action, so that pages are equal for equal seeds. `real`: they follow the time of day."""
    settle_ms: int = pydantic.Field(default=200, ge=0, le=10_000)
    """How long the page reacts to an action, on its clock, in milliseconds."""
    deadline_s: float = pydantic.Field(default=60.0, gt=0, le=3600)
    """The longest time for a reset, or for an action with its observation, in seconds. A page that
    takes longer fails the attempt. The start of Chromium does not count. `agent.step_timeout_s`
    must be longer."""
    max_text: int = pydantic.Field(default=8000, ge=100)
    """The longest text or tree of an observation, in characters."""
    executable: str = ""
    """The program of the browser, any Chromium. Empty: `chromium` or `google-chrome` in PATH, or
    Playwright's own."""
    driver: Literal["playwright", "selenium"] = "playwright"
    """What starts Chromium: Playwright, or Selenium (`agentevo[selenium]`), by chromedriver, on a
    grid, or as `make_driver` of your own class does. Pages are the same."""
    grid: str = ""
    """With `driver: selenium`: the address of the Selenium Grid that starts Chromium, such as
    `http://127.0.0.1:4444`. Empty: this machine does."""
    gate_host: str = "127.0.0.1"
    """The address of this machine through which pages reach hosts. If a grid's nodes are other
    machines, one at which they reach this machine."""

    @pydantic.model_validator(mode="after")
    def _check_marks(self) -> Self:
        if self.marks and not self.shows_images:
            raise ValueError(
                f"marks are drawn on a screenshot, and observation={self.observation} has none: "
                "set observation to screenshot or both"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _check_grid(self) -> Self:
        if self.grid and self.driver != "selenium":
            raise ValueError("grid needs driver: selenium")
        if self.grid and self.downloads:
            raise ValueError("downloads stay on a grid's node: leave downloads or grid out")
        return self

    @property
    def shows_images(self) -> bool:
        return self.observation in ("screenshot", "both")


class BrowserConfig(PageConfig):
    """The page, the task and its rewards."""

    type: Literal["browser"] = "browser"
    url: str = pydantic.Field(min_length=1)
    """The address at which each episode starts: http, https, or a file (`file:///FOLDER/PAGE.html`).
    A file may use the other files of its folder."""
    task_instruction: str = ""
    """What the player is asked to do."""
    reward: tuple[Rule, ...] = ()
    """The rules about the page that make the reward. One rule needs no list."""
    reward_at: Literal["step", "done"] = "step"
    """When the rules are checked: after each `step`, and the episode ends as soon as all hold, or
    only once the player says `done`."""
    allowed_hosts: tuple[str, ...] = ()
    """Further hosts that the page may ask for: `cdn.example.com`, `example.com:8080`,
    `*.example.com`. Without a port, all ports of the host are allowed. The host of `url` is allowed
    with its port."""
    viewport: tuple[int, int] = (800, 600)
    """The width and the height of the page's visible part, in pixels."""

    @pydantic.field_validator("reward", mode="before")
    @classmethod
    def _wrap_rule(cls, value: object) -> object:
        return [value] if isinstance(value, dict) else value

    @pydantic.field_validator("viewport")
    @classmethod
    def _check_viewport(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not all(32 <= size <= 4096 for size in value):
            raise ValueError("width and height must be from 32 to 4096 pixels")
        return value

    @pydantic.model_validator(mode="after")
    def _check_done(self) -> BrowserConfig:
        if self.reward_at == "done" and "done" not in self.actions:
            raise ValueError("reward_at: done needs the action `done` in `actions`")
        return self


@dataclass(frozen=True)
class Grade:
    """The judgement of a page."""

    reward: float
    """What the last action earned."""
    success: bool
    """Whether the task is solved."""
    is_over: bool
    """Whether the episode ends."""


class PageEnvironment(TextEnvironment):
    """The base class of environments in a browser. Subclasses implement `grade`, and pass the first
    page and its size."""

    config: PageConfig
    with_address: ClassVar[bool] = True
    """Whether observations show the page's address."""

    def __init__(
        self,
        config: PageConfig,
        url: str,
        size: tuple[int, int],
        *,
        allowed_hosts: tuple[str, ...] = (),
        folder: Path | None = None,
    ) -> None:
        """`size` is the viewport in pixels; `folder` has the files that a page may read. Raises
        ConfigError, and MissingExtraError without Playwright."""
        super().__init__(config)
        self._permissions = permissions_for(url, allowed_hosts, folder)
        if config.grid and url.startswith("file:"):
            raise ConfigError(
                f"environment.grid: {url} is a file, which nodes of a grid can't read: serve it by "
                "http, or leave grid out"
            )
        self._size = size
        self._settings = PageSettings(
            url=url,
            width=size[0],
            height=size[1],
            clock=config.clock,
            settle_ms=config.settle_ms,
            dialogs=config.dialogs,
            popups=config.popups,
            downloads=config.downloads,
            max_text=config.max_text,
            gate_host=config.gate_host,
        )
        self._browser = self._find_browser()
        self._session: PageSession | None = None
        self._running = False
        self._num_actions = 0
        self._seed = 0
        self._last_look: object = None

    def _find_browser(self) -> BrowserProcess:
        config = self.config
        if config.driver == "playwright":
            program = find_chromium(config.executable)
            return shared_browser(program, lambda: BrowserProcess(program))

        where = (config.executable, config.grid, config.gate_host)
        check_selenium(config.executable, config.grid)
        make_driver = partial(self.make_driver, config)
        return shared_browser((type(self), *where), lambda: SeleniumBrowser(*where, make_driver))

    @classmethod
    def make_driver(
        cls, config: PageConfig, options: Options, service: Service | None
    ) -> WebDriver:
        """Starts Chromium for `driver: selenium`, once for all episodes. Override it for a driver
        of your own, which must start with the options: they close other hosts. The service is that
        of chromedriver on this machine; None for a grid. AgentEvo ends the driver."""
        return start_driver(config.grid, options, service)

    @property
    def task_instruction(self) -> str:
        """What the player is asked to do, on the current page."""
        return ""

    @property
    def instructions(self) -> str:
        shows_ids = self.config.marks or self.config.observation in ("accessibility", "both")
        return "\n".join(
            [
                "You use a page in a browser.",
                describe_actions(self.config.actions, shows_ids),
                f"You have {self.config.max_actions} actions.",
            ]
        )

    @property
    def is_running(self) -> bool:
        """Whether an episode runs."""
        return self._running

    @property
    def session(self) -> PageSession:
        """The page of the episode. Its methods are coroutines: pass them to `call`. Raises
        EnvironmentFailure outside an episode."""
        if self._session is None:
            raise EnvironmentFailure(
                f"{self.config.type}: there is no page; call reset(seed=...) first"
            )
        return self._session

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of a coroutine that uses the page, within `deadline_s`. After a failure the
        page is closed."""
        try:
            return self._browser.call(work, self.config.deadline_s)
        except EnvironmentFailure:
            with suppress(EnvironmentFailure):  # the first failure is the reason
                self.close()
            raise

    def evaluate(self, expression: str, world: Literal["isolated", "page"] = "isolated") -> Any:
        """The value of a JavaScript expression in the page, see `PageSession.evaluate`."""
        return self.call(lambda: self.session.evaluate(expression, world))

    async def open_page(self, seed: int) -> None:
        """Opens the page of an episode, on the browser's loop."""
        await self.session.open(seed)

    async def end_page(self, session: PageSession) -> None:
        """Ends the page of an episode, on the browser's loop."""
        await session.close()

    async def begin(self, seed: int) -> None:
        """Prepares the page that was just opened, on the browser's loop."""

    @abstractmethod
    async def grade(self, is_done: bool) -> Grade:
        """The judgement after an action, on the browser's loop. `is_done`: the player said
        `done`."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Opens the page in a new context."""
        self.close()
        self._seed = random.SystemRandom().randrange(2**31) if seed is None else seed
        self._num_actions = 0
        self._browser.start()
        self._session = PageSession(self._browser, self._settings, self._permissions)
        started = time.monotonic()
        observation = self.call(self._open)
        self._running = True
        return observation, self._info(started, valid=True, effective=False, success=False)

    async def _open(self) -> Any:
        await self.open_page(self._seed)
        await self.begin(self._seed)
        task = self.task_instruction
        observation, _ = await self._look([f"Task: {task}"] if task else [])
        return observation

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Plays an action. `info` also has `problem`, `url`, `latency_s`, `num_actions`, and the
        counts of `PageEvents`."""
        if not self._running:
            raise EnvironmentFailure(
                f"{self.config.type}: step() outside an episode; call reset(seed=...) first"
            )
        started = time.monotonic()
        self._num_actions += 1
        observation, grade, problem, effective = self.call(lambda: self._play(action))
        truncated = not grade.is_over and self._num_actions >= self.config.max_actions
        info = self._info(
            started, valid=not problem, effective=effective, success=grade.success, problem=problem
        )
        self._running = not (grade.is_over or truncated)
        return observation, grade.reward, grade.is_over, truncated, info

    async def _play(self, text: str) -> tuple[Any, Grade, str, bool]:
        problem, is_done = "", False
        try:
            action = read_browser_action(text, self.config.actions)
            await self.session.perform(action)
            is_done = action.action == "done"
        except (BrowserActionError, ActionRefused) as error:
            problem = str(error)

        grade = await self.session.steadily(lambda: self.grade(is_done))
        before = self._last_look
        observation, look = await self._look([f"Invalid action: {problem}."] if problem else [])
        return observation, grade, problem, look != before

    async def _look(self, lines: list[str]) -> tuple[Any, object]:
        """The observation, and the part of it that is the page."""
        config = self.config
        has_tree = config.observation in ("accessibility", "both")
        view = await self.session.look(
            screenshot=config.observation in ("screenshot", "both"),
            tree=has_tree or config.marks,
            text=config.observation == "text",
        )
        self._last_look = look = (view.url, view.tree, view.text, view.screenshot)
        lines = [*lines, *self.session.events.take_news()]
        if self.with_address:
            lines.append(f"URL: {view.url}")
        return make_observation(view, lines, config.max_text, config.marks, has_tree), look

    def _info(self, started: float, **values: Any) -> dict[str, Any]:
        events = self.session.events
        counts = ("page_errors", "dialogs", "popups", "downloads", "blocked_requests")
        return {
            "problem": "",
            "url": self.session.page.url,
            "latency_s": time.monotonic() - started,
            "num_actions": self._num_actions,
            "errors": list(events.errors),
            "blocked": list(events.blocked),
            **{f"num_{name}": events.counts[name] for name in counts},
            **values,
        }

    def random_action(self, rng: random.Random) -> str:
        """A click at a uniformly random point."""
        return write_click(rng.uniform(0, SCALE), rng.uniform(0, SCALE))

    def close(self) -> None:
        """Closes the page."""
        self._running = False
        session, self._session = self._session, None
        if session is not None:
            self._browser.call(lambda: self.end_page(session), CLOSING_S)


@environments.register("browser")
class BrowserEnvironment(PageEnvironment):
    """A page of the recipe's choice."""

    Config: ClassVar[type[EnvironmentConfig]] = BrowserConfig
    config: BrowserConfig

    def __init__(self, config: BrowserConfig) -> None:
        super().__init__(config, config.url, config.viewport, allowed_hosts=config.allowed_hosts)
        self._rules = RuleBook(config.reward, *config.viewport)

    @property
    def task_instruction(self) -> str:
        return self.config.task_instruction

    async def begin(self, seed: int) -> None:
        self.session.watched_selectors = self._rules.watched_selectors

    async def grade(self, is_done: bool) -> Grade:
        """The reward of the rules, once: at `done`, when all hold, or at the last action."""
        is_last = self._num_actions >= self.config.max_actions
        if self.config.reward_at == "done" and not is_done:
            return Grade(0.0, success=False, is_over=False)

        reward, success = await self._rules.grade(self.session)
        is_over = is_done or success
        return Grade(reward if is_over or is_last else 0.0, success=success, is_over=is_over)
