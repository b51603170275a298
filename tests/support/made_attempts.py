"""Attempts that are made up, with what findings look for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from agentevo.types import Message, ToolCall, Trajectory, Turn

_numbers = itertools.count()


def make_attempt(  # noqa: PLR0913 (each finding looks for another)
    reward: float = 0.0,
    *,
    group: str = "g0",
    success: bool | None = None,
    answer: str = "so be it",
    prompt: str = "What is it?",
    ids: Sequence[int] = (),
    is_cut: bool = False,
    calls: int = 0,
    malformed: int = 0,
    offered: Sequence[str] = (),
    parts: dict[str, float] | None = None,
    metrics: dict[str, float] | None = None,
) -> Trajectory:
    """One attempt of one turn. `ids`: what it sampled; other ids than any other attempt's if none
    are given. `success`: by default a reward above 0.5. `calls`: calls of the first offered tool
    that are answered."""
    number = next(_numbers)
    sampled = list(ids) or [2 + number % 1000, 3 + number // 1000, 4]
    schemas = [{"type": "function", "function": {"name": name}} for name in offered]
    tool_calls = tuple(ToolCall(name=offered[0], arguments="{}") for _ in range(calls))
    counts = {"num_tool_calls": float(calls), "num_malformed_calls": float(malformed)}
    turn = Turn(
        index=0,
        prompt_ids=[1],
        completion_ids=sampled,
        logprobs=[-0.5] * len(sampled),
        versions=[0] * len(sampled),
        finish_reason="length" if is_cut else "stop",
        messages=[
            Message(role="user", content=prompt),
            Message(role="assistant", content=answer, tool_calls=tool_calls),
        ],
        tools=json.dumps(schemas) if schemas else "",
    )
    return Trajectory(
        id=f"t{number}",
        task_id=group,
        group_id=group,
        turns=[turn],
        reward=reward,
        success=reward > 0.5 if success is None else success,
        reward_parts=parts or {},
        metrics={**(counts if offered or malformed else {}), **(metrics or {})},
    )


def make_group(
    *, rewards: Sequence[float], group: str = "g0", is_same: bool = False, **options: Any
) -> list[Trajectory]:
    """Attempts at one task with these rewards. `is_same`: all sample the same tokens."""
    ids = {"ids": [7, 8, 9]} if is_same else {}
    return [make_attempt(reward, group=group, **ids, **options) for reward in rewards]


def make_step(groups: int = 4, **options: Any) -> list[Trajectory]:
    """Several groups as `make_group` makes them."""
    return [
        attempt for number in range(groups) for attempt in make_group(group=f"g{number}", **options)
    ]
