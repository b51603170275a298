"""Penalties of agents beside a list of rewards."""

import pytest

from agentevo.config import build_config
from agentevo.errors import ConfigError

RECIPE = {
    "tasks": "tasks.jsonl",
    "model": {"name": "tiny", "tiny": {"tokenizer": "byte"}},
    "rewards": ["numeric"],
}


@pytest.mark.parametrize(
    ("agent", "key"),
    [
        ({"type": "code_agent", "code_penalty": 0.1}, "code_penalty"),
        ({"type": "tool_agent", "tools": ["calculator"], "call_penalty": 0.1}, "call_penalty"),
    ],
)
def test_a_penalty_that_counts_for_nothing_is_refused(agent, key):
    with pytest.raises(ConfigError, match=rf"agent\.{key} .*rewards=\[numeric, returned\]"):
        build_config({**RECIPE, "agent": agent})

    both = {**RECIPE, "agent": agent, "rewards": ["numeric", "returned"]}
    assert getattr(build_config(both).agent, key) == 0.1
    assert build_config({**RECIPE, "agent": {**agent, key: 0}})
