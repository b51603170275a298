"""Rewards by rules about a page. Each rule holds or does not hold; the reward is the share of the
weights of those that hold, and all of them are a success.

    reward:
      - {type: element, selector: "#basket li", text: Tea}
      - {type: url, matches: "/thanks$"}
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, Self

import pydantic

from agentevo.environments.browser.actions import SCALE
from agentevo.environments.browser.page_session import Click, PageSession


class PageRule(pydantic.BaseModel):
    """The options of every rule."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    weight: float = pydantic.Field(default=1.0, gt=0, allow_inf_nan=False)
    """The rule's part of the reward, relative to the weights of the other rules."""


class ElementRule(PageRule):
    """A visible element exists, or with `absent` none exists."""

    type: Literal["element"]
    selector: str = pydantic.Field(min_length=1)
    """A selector of Playwright, such as CSS."""
    text: str = ""
    """A part of the element's text. Case and white space don't matter."""
    absent: bool = False
    """Whether there must be no such element."""

    async def holds(self, session: PageSession) -> bool:
        return await session.is_shown(self.selector, self.text) is not self.absent


class TextRule(PageRule):
    """The page shows a text."""

    type: Literal["text"]
    contains: str = pydantic.Field(min_length=1)
    """A part of the page's visible text. Case and white space don't matter."""

    async def holds(self, session: PageSession) -> bool:
        return await session.is_shown("body", self.contains)


class UrlRule(PageRule):
    """The page's address matches a pattern."""

    type: Literal["url"]
    matches: str = pydantic.Field(min_length=1)
    """A regular expression, searched for in the address."""

    @pydantic.field_validator("matches")
    @classmethod
    def _check_pattern(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"it is not a regular expression: {error}") from error
        return value

    async def holds(self, session: PageSession) -> bool:
        return re.search(self.matches, session.page.url) is not None


class JavaScriptRule(PageRule):
    """A JavaScript expression is true."""

    type: Literal["javascript"]
    expression: str = pydantic.Field(min_length=1)
    """An expression such as `document.querySelector("#age")?.value === "42"`. If it throws, the
    attempt fails."""
    world: Literal["isolated", "page"] = "isolated"
    """`isolated`: the expression sees the document, and the page's scripts can't interfere. `page`:
    it also sees their variables, and they can."""

    async def holds(self, session: PageSession) -> bool:
        return bool(await session.evaluate(self.expression, self.world))


class PointRule(PageRule):
    """The last click was within a box."""

    type: Literal["point_in_box"]
    box: tuple[float, float, float, float] | None = None
    """Left, top, right and bottom, in thousandths of the viewport."""
    selector: str = ""
    """In place of `box`: the element whose box counts, at the time of the click."""

    @pydantic.model_validator(mode="after")
    def _check_box(self) -> Self:
        if (self.box is None) == (not self.selector):
            raise ValueError("give either box or selector")
        if self.box is not None and not (self.box[0] <= self.box[2] and self.box[1] <= self.box[3]):
            raise ValueError("box is left, top, right, bottom")
        return self


Rule = Annotated[
    ElementRule | TextRule | UrlRule | JavaScriptRule | PointRule,
    pydantic.Field(discriminator="type"),
]


class RuleBook:
    """The rules of a page."""

    def __init__(self, rules: Sequence[Rule], width: int, height: int) -> None:
        self._rules = rules
        self._size = (width, height)

    @property
    def watched_selectors(self) -> tuple[str, ...]:
        """The elements of `point_in_box`, for `PageSession.watched_selectors`."""
        selectors = (rule.selector for rule in self._rules if isinstance(rule, PointRule))
        return tuple(selector for selector in selectors if selector)

    async def grade(self, session: PageSession) -> tuple[float, bool]:
        """The reward, from 0 to 1, and whether all rules hold. Without rules 0 and false."""
        reached = total = 0.0
        for rule in self._rules:
            total += rule.weight
            is_met = (
                self._is_hit(rule, session.last_click)
                if isinstance(rule, PointRule)
                else await rule.holds(session)
            )
            reached += rule.weight if is_met else 0.0

        return (reached / total if total else 0.0), bool(self._rules) and reached == total

    def _is_hit(self, rule: PointRule, click: Click | None) -> bool:
        if click is None:
            return False
        if rule.box is None:
            box = click.boxes[rule.selector]
        else:
            left, top, right, bottom = rule.box
            width, height = self._size
            box = (
                left * width / SCALE,
                top * height / SCALE,
                right * width / SCALE,
                bottom * height / SCALE,
            )
        if box is None:
            return False
        x, y = click.point
        return box[0] <= x <= box[2] and box[1] <= y <= box[3]
