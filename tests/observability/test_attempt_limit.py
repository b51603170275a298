"""Which limit cut an attempt off."""

from __future__ import annotations

from typing import Any

import pytest

from agentevo.agents import code_agent, tool_agent
from agentevo.observability.attempt_view import limit
from agentevo.types import Trajectory, Turn

RECIPE = {"sampling": {"max_new_tokens": 4}, "agent": {"max_turns": 2}}


def attempt(*sizes: int, cut: bool = False, **metrics: float) -> Trajectory:
    turns = [
        Turn(
            index=index,
            parent=index - 1 if index else None,
            prompt_ids=[1],
            completion_ids=[2] * size,
            logprobs=[-1.0] * size,
            versions=[0] * size,
            finish_reason="length" if cut and index == len(sizes) - 1 else "stop",
        )
        for index, size in enumerate(sizes)
    ]
    return Trajectory(
        id="a", task_id="t", group_id="g", turns=turns, truncated=True, metrics=metrics
    )


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (attempt(3, 4, cut=True), "its last answer was cut at 4 tokens (sampling.max_new_tokens)"),
        (attempt(3, cut=True), "its last answer filled the context, after 3 tokens"),
        (attempt(3, 3), "all 2 turns were used (agent.max_turns)"),
        (attempt(3), ""),  # the world's own limit, which it does not tell
        (attempt(3, 4, cut=True, ended_by_repeats=1.0), "the same calls were made again and again"),
        (attempt(3, ended_by_turns=0.0, ended_by_context=1.0), "the context was full"),
        (attempt(), ""),
    ],
)
def test_it_is_named(one: Trajectory, words: str) -> None:
    assert limit(one, RECIPE).startswith(words)
    assert bool(limit(one, RECIPE)) == bool(words)


def test_every_end_of_an_agent_with_tools_has_words() -> None:
    for end in {*tool_agent.ENDS, *code_agent.ENDS} - {"answer"}:
        assert limit(attempt(3, **{f"ended_by_{end}": 1.0}), RECIPE), end


@pytest.mark.parametrize(
    "config", [{}, {"sampling": None, "agent": []}, {"agent": {"max_turns": "two"}}]
)
def test_a_damaged_recipe_costs_the_name_alone(config: dict[str, Any]) -> None:
    assert limit(attempt(3, 3), config) == ""
    assert "filled" in limit(attempt(3, cut=True), config)
