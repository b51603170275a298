"""Options of a page that a recipe gets wrong, and what it reads about them."""

from __future__ import annotations

from typing import Any

import pytest

from agentevo.config import build_config
from agentevo.errors import ConfigError

TYPES = "element, javascript, point_in_box, text, url"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": {"type": "element"}}, r"environment\.reward\[0\]\.selector: missing"),
        (
            {"reward": [{"type": "text", "contains": "a"}, {"type": "url", "match": "a"}]},
            r"reward\[1\]\.match: unknown key; did you mean matches\?",
        ),
        ({"reward": {"type": "box"}}, rf"reward\[0\]\.type: got 'box'; choose one of {TYPES}"),
        ({"reward": {"selector": "#a"}}, rf"reward\[0\]\.type: missing; choose one of {TYPES}"),
        ({"reward": {"type": "point_in_box"}}, r"reward\[0\]: give either box or selector"),
        ({"reward": {"type": "element", "selector": ""}}, r"reward\[0\]\.selector: got ''; needs"),
        ({"marks": True}, "observation=accessibility has none: set observation to screenshot"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    environment = {"type": "browser", "url": "http://127.0.0.1/", **options}
    with pytest.raises(ConfigError, match=message):
        build_config({"environment": environment, "agent": {"step_timeout_s": 120}}, ())
