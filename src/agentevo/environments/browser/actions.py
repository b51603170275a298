"""The actions of a player in a browser, as JSON or as a short line.

    {"action": "click", "x": 500, "y": 250}       click 500 250
    {"action": "type", "id": "e4", "text": "Ann"} type e4 "Ann"
    {"action": "drag", "x": 100, "y": 100, "to_x": 300, "to_y": 100}

A place is a point in thousandths of the viewport (0 0 is the top left corner, 1000 1000 the bottom
right one), the id of an element in the observation, or a selector of Playwright, such as CSS.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal, Self, get_args

import pydantic

from agentevo.runtime.parsing import ParseError, parse_json

ActionName = Literal[
    "click", "double_click", "type", "press", "scroll", "drag", "navigate", "back", "wait", "done"
]
ALL_ACTIONS: tuple[ActionName, ...] = get_args(ActionName)
SCALE = 1000
"""The width and the height of the viewport in the coordinates of actions."""
MAX_TEXT = 2000
MAX_WAIT_MS = 10_000
ELEMENT_ID = re.compile(r"(f\d+)?e\d+")
POINTED: tuple[ActionName, ...] = ("click", "double_click", "drag")
"""The actions that need a place."""

_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_TEXT_AT_END = re.compile(r'(?P<place>.*?)\s*(?P<text>"(?:[^"\\]|\\.)*")', re.DOTALL)

DESCRIPTIONS: dict[ActionName, str] = {
    "click": "click PLACE",
    "double_click": "double_click PLACE",
    "type": 'type "TEXT" or type PLACE "TEXT": types TEXT, after a click on PLACE',
    "press": "press KEY: a key such as Enter, Tab, Backspace or Control+A",
    "scroll": "scroll DX DY: scrolls by thousandths of the page's visible part, such as 0 500",
    "drag": "drag PLACE PLACE: drags from the first place to the second one",
    "navigate": "navigate URL",
    "back": "back: returns to the previous page",
    "wait": f"wait MS: waits for at most {MAX_WAIT_MS} milliseconds",
    "done": "done: ends the task",
}
"""What a player reads about each action."""


class BrowserActionError(ValueError):
    """A text is not an action of the browser. The message is for the player."""


class Place(pydantic.BaseModel):
    """A point, an element of the observation, or a selector: exactly one of them."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    x: float | None = pydantic.Field(default=None, ge=0, le=SCALE)
    y: float | None = pydantic.Field(default=None, ge=0, le=SCALE)
    id: str | None = pydantic.Field(default=None, pattern=rf"^{ELEMENT_ID.pattern}$")
    selector: str | None = pydantic.Field(default=None, min_length=1, max_length=1000)

    @pydantic.model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.x is None) != (self.y is None):
            raise ValueError("a point needs x and y")
        if sum(item is not None for item in (self.x, self.id, self.selector)) != 1:
            raise ValueError("give a point (x, y), an id or a selector")
        return self


class BrowserAction(pydantic.BaseModel):
    """One action. `place` and `to` are places; `text` is what is typed, `key` what is pressed, `dx`
    and `dy` thousandths of the viewport, `ms` milliseconds."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    action: ActionName
    place: Place | None = None
    to: Place | None = None
    text: str = pydantic.Field(default="", max_length=MAX_TEXT)
    clear: bool = False
    """Whether the text replaces the content of the field."""
    key: str = pydantic.Field(default="", max_length=100)
    dx: float = pydantic.Field(default=0, ge=-100 * SCALE, le=100 * SCALE)
    dy: float = pydantic.Field(default=0, ge=-100 * SCALE, le=100 * SCALE)
    url: str = pydantic.Field(default="", max_length=4000)
    ms: int = pydantic.Field(default=500, ge=0, le=MAX_WAIT_MS)

    @pydantic.model_validator(mode="after")
    def _check_needs(self) -> Self:
        if self.action in POINTED and self.place is None:
            raise ValueError("give a point (x, y), an id or a selector")
        if self.action == "drag" and self.to is None:
            raise ValueError("give the end: a point (to_x, to_y), to_id or to_selector")
        if self.action == "press" and not self.key:
            raise ValueError("give a key")
        if self.action == "navigate" and not self.url:
            raise ValueError("give a url")
        return self


def read_browser_action(text: str, allowed: tuple[ActionName, ...] = ALL_ACTIONS) -> BrowserAction:
    """The action in a text. Raises BrowserActionError, with the reason."""
    text = text.strip()
    fields = _read_json(text) if text.startswith("{") else _read_line(text)
    name = fields.get("action")
    if name not in allowed:
        raise BrowserActionError(f"{str(name)[:40]!r} is not one of {', '.join(allowed)}")

    try:
        return BrowserAction.model_validate(_nest_places(fields))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise BrowserActionError(f"{name}: {where + ': ' if where else ''}{reason}") from error


def write_click(x: float, y: float) -> str:
    """The line that clicks at (x, y), in thousandths of the viewport."""
    return f"click {x:.0f} {y:.0f}"


def write_typing(text: str) -> str:
    """The line that types `text`."""
    return f"type {json.dumps(text, ensure_ascii=False)}"


def describe_actions(allowed: tuple[ActionName, ...], with_ids: bool) -> str:
    """The rules of the actions, for the player's instructions."""
    lines = [DESCRIPTIONS[name] for name in ALL_ACTIONS if name in allowed]
    places = f"X Y, from 0 0 (top left) to {SCALE} {SCALE} (bottom right)"
    places += ", an id of an element such as e5" if with_ids else ""
    return "\n".join(
        [
            "Actions:",
            *lines,
            f"A PLACE is {places}, or a CSS selector. "
            'JSON is understood too: {"action": "click", "x": 500, "y": 250}.',
        ]
    )


def _read_json(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ParseError as error:
        raise BrowserActionError(f"it is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise BrowserActionError("it is not an object")
    return value


def _nest_places(fields: dict[str, Any]) -> dict[str, Any]:
    """Moves x, y, id and selector into `place`, and to_x, to_y, to_id, to_selector into `to`."""
    nested: dict[str, Any] = {}
    for key, value in fields.items():
        bare = key.removeprefix("to_")
        if bare in Place.model_fields:
            nested.setdefault("place" if bare == key else "to", {})[bare] = value
        elif key in ("place", "to"):
            raise BrowserActionError(f"unknown key {key!r}")
        else:
            nested[key] = value

    return nested


def _read_line(text: str) -> dict[str, Any]:
    """The fields of an action written as a short line."""
    name, _, rest = text.partition(" ")
    rest = rest.strip()
    fields: dict[str, Any] = {"action": name}
    if name in ("click", "double_click"):
        return fields | _read_place(rest)
    if name == "drag":
        return fields | _read_drag(rest)
    if name == "type":
        match = _TEXT_AT_END.fullmatch(rest)
        if match is None:
            raise BrowserActionError('type: write the text in double quotes: type "TEXT"')
        fields["text"] = _read_quoted(match["text"])
        return fields | (_read_place(match["place"]) if match["place"] else {})
    if name == "scroll":
        return fields | _read_scroll(rest)
    if name == "press":
        return fields | {"key": rest}
    if name == "navigate":
        return fields | {"url": rest}
    if name == "wait" and rest:
        return fields | {"ms": rest}
    if name in ("back", "done", "wait") and rest:
        raise BrowserActionError(f"{name}: nothing follows this action")
    return fields


def _read_place(text: str) -> dict[str, Any]:
    words = text.replace(",", " ").split()
    if len(words) == 2 and all(_NUMBER.fullmatch(word) for word in words):
        return {"x": words[0], "y": words[1]}
    if ELEMENT_ID.fullmatch(text):
        return {"id": text}
    if not text:
        return {}
    if _NUMBER.fullmatch(text):
        raise BrowserActionError("a point has two numbers: X Y")
    return {"selector": text}


def _read_drag(text: str) -> dict[str, Any]:
    words = text.replace(",", " ").split()
    if len(words) == 4:
        halves = [" ".join(words[:2]), " ".join(words[2:])]
    elif len(words) == 2:
        halves = words
    else:
        raise BrowserActionError("drag: write two places: drag X Y X Y, or drag ID ID")
    start, end = map(_read_place, halves)
    return start | {f"to_{key}": value for key, value in end.items()}


def _read_scroll(text: str) -> dict[str, Any]:
    words = text.replace(",", " ").split()
    if len(words) != 2:
        raise BrowserActionError("scroll: write two numbers: scroll DX DY")
    return {"dx": words[0], "dy": words[1]}


def _read_quoted(text: str) -> str:
    try:
        return str(json.loads(text, strict=False))
    except ValueError as error:
        raise BrowserActionError(f"type: the text in quotes can't be read ({error})") from error
