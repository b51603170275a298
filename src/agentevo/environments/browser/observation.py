"""What a player sees of a page: a text, and a screenshot in VAGEN's form, with `<image>` at its
place in the text.

    {"obs_str": "http://127.0.0.1/\\n<image>", "multi_modal_data": {"<image>": [PNG]}}
"""

from __future__ import annotations

import io
import re
from typing import Any

from agentevo.environments.browser.page_session import View

IMAGE = "<image>"
_IMAGE_IN_TEXT = re.compile(r"<\s*image\s*>", re.IGNORECASE)
_BOX = re.compile(r" \[box=(-?\d+),(-?\d+),(\d+),(\d+)\]")
_REFERENCE = re.compile(r"\[ref=((?:f\d+)?e\d+)\]")
_ELEMENT = re.compile(
    r"""\s*-\ '?(?P<role>[\w-]+)(\ "([^"\\]|\\.)*")?(?P<attributes>(\ \[[^\]"]*\])*)""", re.VERBOSE
)
"""A line of the tree up to the element's text. The page chooses its name and its text, which may
look like attributes."""
MARKED_ROLES = (
    "button", "checkbox", "combobox", "link", "listbox", "menuitem", "menuitemcheckbox",
    "menuitemradio", "option", "radio", "searchbox", "slider", "spinbutton", "switch", "tab",
    "textbox", "treeitem",
)  # fmt: skip
"""The roles of elements whose ids are drawn on a screenshot."""
MAX_MARKS = 1000
"""The most marks on a screenshot."""
MARK_SIZE = 11
"""The height of a mark's letters, in pixels."""


def make_observation(
    view: View, lines: list[str], max_text: int, marks: bool, shows_tree: bool
) -> str | dict[str, Any]:
    """The observation of a view, after the `lines`."""
    parts = list(lines)
    if view.text:
        parts.append(cut_text(view.text.strip(), max_text))
    if shows_tree:
        parts.append(cut_text(_BOX.sub("", view.tree), max_text))

    text = "\n".join(_without_placeholders(part) for part in parts if part)
    if not view.screenshot:
        return text

    picture = draw_marks(view.screenshot, view.tree) if marks else view.screenshot
    return {
        "obs_str": f"{text}\n{IMAGE}" if text else IMAGE,
        "multi_modal_data": {IMAGE: [picture]},
    }


def cut_text(text: str, max_characters: int) -> str:
    """The first `max_characters` of a text, with a note if there are more."""
    if len(text) <= max_characters:
        return text
    return f"{text[:max_characters]}\n... (the rest of the page is not shown)"


def _without_placeholders(text: str) -> str:
    """A page's text can't claim to have a picture."""
    return _IMAGE_IN_TEXT.sub("(image)", text)


def draw_marks(picture: bytes, tree: str) -> bytes:
    """The screenshot with the box and the id of each element that can be used and is in sight."""
    from PIL import Image, ImageDraw, ImageFont  # 50 ms

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(MARK_SIZE)
    num_marks = 0
    for line in tree.splitlines():
        element = _ELEMENT.match(line)
        attributes = "" if element is None else element["attributes"]
        reference, box = _REFERENCE.search(attributes), _BOX.search(attributes)
        if element is None or reference is None or box is None or num_marks == MAX_MARKS:
            continue
        if element["role"] not in MARKED_ROLES and "[cursor=pointer]" not in attributes:
            continue

        left, top, width, height = map(int, box.groups())
        right, bottom = min(left + width - 1, image.width), min(top + height - 1, image.height)
        left, top = max(left, -1), max(top, -1)  # a side out of sight is not drawn
        if left > right or top > bottom:
            continue

        num_marks += 1
        pen.rectangle((left, top, right, bottom), outline=(200, 0, 0))
        label = pen.textbbox((left, top), reference[1], font=font)
        pen.rectangle(label, fill=(200, 0, 0))
        pen.text((left, top), reference[1], fill=(255, 255, 255), font=font)

    output = io.BytesIO()
    image.save(output, "PNG")
    return output.getvalue()
