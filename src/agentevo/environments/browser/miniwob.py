"""MiniWoB++: small tasks on pages of 160 x 210 pixels, from the HTML files of the package `miniwob`
(`agentevo[miniwob]`).

The reward is the task's raw reward, from -1 to 1; 1 is a success, and a part of it is not. There is
no time limit and no decay: the page's clock only advances with actions. The seed makes the task.
SOLVED names the tasks with a solver (miniwob_solvers.js), which plays demonstrations and sets the
optimal player's rate.

Source: Shi et al. 2017, World of Bits; Liu et al. 2018, arXiv:1802.08802.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import pydantic

from agentevo.environments.browser.actions import SCALE, write_click, write_typing
from agentevo.environments.browser.environment import Grade, PageConfig, PageEnvironment
from agentevo.environments.browser.page_session import PageSession
from agentevo.environments.environment import EnvironmentConfig, environments
from agentevo.environments.planning import random_play_success
from agentevo.errors import MissingExtraError, UnknownNameError
from agentevo.runtime.registry import nearest
from agentevo.types import Baselines

WIDTH, HEIGHT = 160, 210
NO_LIMIT_MS = 10**8
"""A task's time limit, in milliseconds of the page's clock: never reached."""
SOLVED = (
    "click-button", "click-checkboxes", "click-color", "click-dialog", "click-dialog-2",
    "click-link", "click-option", "click-shape", "click-tab", "click-test", "click-test-2",
    "enter-password", "enter-text", "focus-text", "focus-text-2", "grid-coordinate",
    "identify-shape", "login-user",
)  # fmt: skip
"""The tasks with a solver."""
HIDDEN = "#reward-display, #click-canvas, #sync-task-cover { display: none !important }"
"""What MiniWoB++ shows around the task: its score, marks of clicks, and the start button."""


class MiniWobConfig(PageConfig):
    """The task, and how the player sees it."""

    type: Literal["miniwob"] = "miniwob"
    task: str = pydantic.Field(min_length=1)
    """The name of the task, such as `click-test`: an HTML file of the package."""
    reuse_pages: bool = False
    """Whether an episode restarts the task on the page of an ended one, in a ninth of the time that
    a new page takes. The page's clock goes on, and so does what players changed outside of the
    task. Use it with players that only click (`actions: [click]`)."""


@cache
def html_folder() -> Path:
    """The folder of MiniWoB++'s HTML files. Raises MissingExtraError."""
    # The package itself is not imported: it would need Selenium.
    spec = find_spec("miniwob")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError(
            "the environment `miniwob` needs the package 'miniwob': pip install 'agentevo[miniwob]'"
        )
    return Path(spec.submodule_search_locations[0]) / "html"


def task_names() -> list[str]:
    """The names of all tasks."""
    return sorted(path.stem for path in (html_folder() / "miniwob").glob("*.html"))


@cache
def _solvers() -> str:
    return files(__package__).joinpath("miniwob_solvers.js").read_text("utf-8").strip()


@environments.register("miniwob")
class MiniWobEnvironment(PageEnvironment):
    """A task of MiniWoB++."""

    Config: ClassVar[type[EnvironmentConfig]] = MiniWobConfig
    config: MiniWobConfig
    with_address = False

    def __init__(self, config: MiniWobConfig) -> None:
        folder = html_folder()
        page = folder / "miniwob" / f"{config.task}.html"
        if config.task not in task_names():
            hint = nearest(config.task, task_names())
            raise UnknownNameError(
                f"environment.task: MiniWoB++ has no task {config.task!r}"
                + (f"; did you mean {hint!r}?" if hint else "")
            )
        super().__init__(config, page.as_uri(), (WIDTH, HEIGHT), folder=folder)
        self._words = ""
        self._has_ended = False

    @property
    def task_instruction(self) -> str:
        return self._words

    async def open_page(self, seed: int) -> None:
        self._has_ended = False
        kept = self._browser.take_page(self._settings) if self.config.reuse_pages else None
        if kept is None:
            await super().open_page(seed)
            await self.session.page.add_style_tag(content=HIDDEN)
        else:
            assert isinstance(kept, PageSession)
            self._session = kept
            await kept.restart()

    async def end_page(self, session: PageSession) -> None:
        if self.config.reuse_pages and self._has_ended and session.can_restart:
            self._browser.keep_page(self._settings, session)
        else:
            await super().end_page(session)

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Plays an action, as every page does."""
        result = super().step(action)
        self._has_ended = not self.is_running
        return result

    async def begin(self, seed: int) -> None:
        page = self.session.page
        await page.evaluate(
            "([seed, limit]) => { core.EPISODE_MAX_TIME = limit; Math.seedrandom(seed); "
            "core.startEpisodeReal(); }",
            [str(seed), NO_LIMIT_MS],
        )
        words = await page.evaluate("core.getUtterance()")
        self._words = words["utterance"] if isinstance(words, dict) else str(words)
        await self.session.settle()

    async def grade(self, is_done: bool) -> Grade:
        """The task's raw reward at its end; 0 if the player ends it with `done`."""
        is_over, reward = await self.session.page.evaluate(
            "[WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]"
        )
        if not is_over:
            return Grade(0.0, success=False, is_over=is_done)
        return Grade(float(reward), success=reward >= 1, is_over=True)

    def optimal_action(self) -> str | None:
        if self.config.task not in SOLVED or not self.is_running:
            return None
        answer: dict[str, Any] | None = self.evaluate(
            f"({_solvers()})({json.dumps(self.config.task)})", "page"
        )
        if answer is None:
            return None
        if "text" in answer:
            return write_typing(answer["text"])
        if "key" in answer:
            return f"press {answer['key']}"
        return write_click(answer["x"] / WIDTH * SCALE, answer["y"] / HEIGHT * SCALE)

    def baselines(self, max_actions: int | None = None) -> Baselines:
        """The random player's result on this seed, in one play; the mean over seeds is its rate.
        The optimal player's rate is 1 for the tasks of SOLVED."""
        limit = self.config.max_actions if max_actions is None else max_actions
        config = self.config.model_copy(update={"max_actions": limit, "observation": "text"})
        made: list[MiniWobEnvironment] = []

        def make() -> MiniWobEnvironment:
            made.append(MiniWobEnvironment(config))
            return made[0]

        try:
            rate = random_play_success(make, self._seed, 1)
        finally:
            for environment in made:
                environment.close()
        return Baselines(random=rate, optimal=1.0 if self.config.task in SOLVED else None)
