from __future__ import annotations

import pytest

from agentevo.observability.clicks import MAX_CLICKS, find_clicks


@pytest.mark.parametrize(
    ("answer", "points"),
    [
        ("<answer>click 500 250</answer>", [(500, 250)]),
        ("double_click 12.5 1000", [(12.5, 1000)]),
        ("drag 1 2 3 4 || click 5 6", [(1, 2), (3, 4), (5, 6)]),
        ('{"action": "click", "x": 500, "y": 0}', [(500, 0)]),
        ('{"x": 1, "y": 2, "to_x": 3, "to_y": 4}', [(1, 2), (3, 4)]),
        ("drag 100,100, 300,100", [(100, 100), (300, 100)]),
        ("click e4", []),
        ("click 2000 10", []),
        ("I clicked 10 20 times", []),
        ("scroll 0 500", []),
        ("click 1 1 " * 100, [(1, 1)] * MAX_CLICKS),
        ("click 1 1 " * 10_000, []),
    ],
)
def test_points_of_an_answer(answer: str, points: list[tuple[float, float]]) -> None:
    assert find_clicks(answer) == points
