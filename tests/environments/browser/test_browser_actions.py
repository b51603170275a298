"""Actions as players write them, in JSON and as short lines."""

from typing import Any

import pytest

from agentevo.environments.browser.actions import (
    BrowserActionError,
    describe_actions,
    read_browser_action,
)

SAME = [
    ("click 500 250", '{"action": "click", "x": 500, "y": 250}'),
    ("click 500, 250.5", '{"action": "click", "x": 500, "y": 250.5}'),
    ("double_click e5", '{"action": "double_click", "id": "e5"}'),
    ("click #ok > a", '{"action": "click", "selector": "#ok > a"}'),
    ('type "a \\"b\\""', '{"action": "type", "text": "a \\"b\\""}'),
    ('type e4 "Ann"', '{"action": "type", "id": "e4", "text": "Ann"}'),
    ('type f1e4 ""', '{"action": "type", "id": "f1e4", "text": ""}'),
    ('type 1 2 "é\n"', '{"action": "type", "x": 1, "y": 2, "text": "é\\n"}'),
    ("press Control+A", '{"action": "press", "key": "Control+A"}'),
    ("scroll 0 -300", '{"action": "scroll", "dx": 0, "dy": -300}'),
    (
        "drag 1 2 3 4",
        '{"action": "drag", "x": 1, "y": 2, "to_x": 3, "to_y": 4}',
    ),
    ("drag e1 e2", '{"action": "drag", "id": "e1", "to_id": "e2"}'),
    ("navigate /next?a=b", '{"action": "navigate", "url": "/next?a=b"}'),
    ("wait 100", '{"action": "wait", "ms": 100}'),
    ("wait", '{"action": "wait"}'),
    ("back", '{"action": "back"}'),
    (" done ", '{"action": "done"}'),
]


@pytest.mark.parametrize(("line", "text"), SAME)
def test_a_line_and_json_say_the_same(line: str, text: str) -> None:
    assert read_browser_action(line) == read_browser_action(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not one of"),
        ("dance 1 2", "is not one of"),
        ("click", "give a point"),
        ("click 1001 0", "less than or equal to 1000"),
        ("click -1 0", "greater than or equal to 0"),
        ('{"action": "click", "x": 5}', "needs x and y"),
        ('{"action": "click", "x": 5, "y": NaN}', "JSON|equal"),
        ('{"action": "click", "x": 5, "y": 5, "id": "e1"}', "an id or a selector"),
        ('{"action": "click", "id": "body"}', "pattern"),
        ('{"action": "click", "x": 5, "y": 5, "force": true}', "force"),
        ('{"action": "click", "place": {"x": 5, "y": 5}}', "unknown key"),
        ('{"action": "click"', "not JSON"),
        ('{"action": ["click"]}', "is not one of"),
        ("type hello", "double quotes"),
        ('type "' + "x" * 2001 + '"', "2000"),
        ("press", "give a key"),
        ("scroll down", "two numbers"),
        ("scroll a b", "number"),
        ("drag 1 2", "two numbers"),
        ("drag 1 2 3", "two places"),
        ("wait long", "integer"),
        ("wait 99999", "10000"),
        ("back 2", "nothing follows"),
        ("navigate", "give a url"),
    ],
)
def test_what_is_no_action_has_a_reason(text: str, reason: str) -> None:
    with pytest.raises(BrowserActionError, match=reason):
        read_browser_action(text)


def test_a_recipe_can_close_actions() -> None:
    allowed: Any = ("click", "done")

    assert read_browser_action("done", allowed).action == "done"
    with pytest.raises(BrowserActionError, match="is not one of click, done"):
        read_browser_action("navigate /", allowed)
    assert "navigate" not in describe_actions(allowed, with_ids=True)
