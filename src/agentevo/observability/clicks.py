"""The points on a screen that an answer names, for drawing them on the screenshot.

Coordinates are thousandths of the screen's width and height, as the browser's actions have them:
`click 500 250`, `drag 100 100 300 100`, or JSON with `x`, `y`, `to_x` and `to_y`.
"""

from __future__ import annotations

import re

SCALE = 1000
MAX_CLICKS = 20
_NUMBER = r"(\d{1,4}(?:\.\d{1,6})?)"
_PAIR = rf"{_NUMBER}[ ,]+{_NUMBER}"
_LINE = re.compile(rf"\b(?:click|double_click|drag|type)\s+{_PAIR}(?:[ ,]+{_PAIR})?")
_JSON = re.compile(rf'"(?:to_)?x"\s*:\s*{_NUMBER}\s*,\s*"(?:to_)?y"\s*:\s*{_NUMBER}')
MAX_ANSWER = 20_000
"""Longer answers are not read."""


def find_clicks(answer: str) -> list[tuple[float, float]]:
    """The (x, y) of at most MAX_CLICKS points, in the order of the answer."""
    if len(answer) > MAX_ANSWER:
        return []

    found: list[tuple[int, float, float]] = []
    for match in _LINE.finditer(answer):
        x, y, to_x, to_y = match.groups()
        found.append((match.start(), float(x), float(y)))
        if to_x is not None:
            found.append((match.start(), float(to_x), float(to_y)))
    for match in _JSON.finditer(answer):
        found.append((match.start(), float(match[1]), float(match[2])))

    ordered = sorted(found, key=lambda point: point[0])
    points = [(x, y) for _, x, y in ordered if x <= SCALE and y <= SCALE]
    return points[:MAX_CLICKS]
