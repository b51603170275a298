"""What a step's record says of its trajectories."""

from __future__ import annotations

import json
import struct
from typing import Any

import msgspec
import pytest

from agentevo.config import AlgorithmSection
from agentevo.errors import TrainingError
from agentevo.training.batching.shaping import shape_by_length
from agentevo.training.batching.step_plan import StepPlan, plan_digest
from agentevo.types import Constraint, Message, RemoteTurn, SamplingOverrides, Trajectory, Turn
from agentevo.types.image_span import ImageSpan
from agentevo.types.penalties import Penalties
from agentevo.types.routed_experts import RoutedExperts


def turn(index: int, **changes: Any) -> Turn:
    fields: dict[str, Any] = {
        "index": index,
        "parent": index - 1 if index else None,
        "prompt_ids": [1, 2, 3 + index],
        "completion_ids": [7, 8],
        "logprobs": [-0.1, -1.7],
        "versions": [4, 5],
        "finish_reason": "stop",
        "reward": 0.25,
        "processor": "f",
    }
    return Turn(**(fields | changes))


def trajectory(name: str, *turns: Turn, **changes: Any) -> Trajectory:
    return Trajectory(
        **{
            "id": name,
            "task_id": "t",
            "group_id": "g",
            "turns": list(turns or (turn(0), turn(1))),
            "reward": 1.5,
        }
        | changes
    )


def plan_of(
    trained: list[Trajectory], earned: dict[str, float] | None = None, **changes: Any
) -> StepPlan:
    earned = {t.id: t.reward for t in trained} if earned is None else earned
    return StepPlan.make(
        trained, earned=earned, **{"baselines": {}, "staleness": 0, "policy": "wait"} | changes
    )


OTHER: dict[str, Any] = {
    "id": "b",
    "task_id": "u",
    "group_id": "h",
    "attempt": 1,
    "turns": [],
    "remote_turns": [RemoteTurn(index=0, model="teacher", messages=[Message("user", "hello")])],
    "files": {"a.txt": b"1"},
    "texts": {"system": "0" * 16},
    "reward": 1.25,
    "reward_parts": {"environment": 1.5},
    "success": True,
    "status": "failed",
    "error": "ValueError: no",
    "truncated": True,
    "metrics": {"num_actions": 3.0},
}
TIMES = {"started_at", "duration_s", "timings"}
OTHER_TURN: dict[str, Any] = {
    "parent": None,
    "prompt_ids": [1, 2, 5],
    "completion_ids": [7, 9],
    "logprobs": [-0.1, -1.70001],
    "versions": [5, 5],
    "finish_reason": "length",
    "temperature": 0.5,
    "seed": 8,
    "overrides": SamplingOverrides(temperature=1.0),
    "constraint": Constraint(grammar="start: /a/", end_ids=(7,), masks="0"),
    "penalties": Penalties(presence=0.5),
    "routed_experts": RoutedExperts(layers=1, top_k=1, num_experts=2, data=bytes(5)),
    "teacher_logprobs": [-0.5, -2.0],
    "images": (ImageSpan(1, 2, (2,), "a" * 64),),
    "processor": "e",
    "tools": "[]",
    "reward": 0.0,
    "messages": [Message(role="user", content="hello")],
}


def test_every_field_of_a_trajectory_but_the_times_is_in_its_digest():
    """By introspection: a new field fails here until it is covered, or named as a time."""
    assert {*OTHER, *TIMES} == {*Trajectory.__struct_fields__}
    one = trajectory("a")
    for name, value in OTHER.items():
        other = msgspec.structs.replace(one, **{name: value})
        assert plan_digest([other]) != plan_digest([one]), name
    later = msgspec.structs.replace(one, started_at=5.0, duration_s=6.0, timings={"step": 7.0})
    assert plan_digest([later]) == plan_digest([one])


def test_every_field_of_a_turn_is_in_the_digest():
    assert {*OTHER_TURN, "index"} == {*Turn.__struct_fields__}  # its place says the index
    one = trajectory("a")
    for name, value in OTHER_TURN.items():
        other = trajectory("a", turn(0), turn(1, **{name: value}))
        assert plan_digest([other]) != plan_digest([one]), name


@pytest.mark.parametrize(
    "changed",
    [
        [trajectory("b"), trajectory("a")],
        [trajectory("a")],
        [trajectory("a", reward=1.25), trajectory("b")],
        [trajectory("a", turn(0)), trajectory("b")],
        [
            trajectory("a", turn(0, prompt_ids=[1, 2], completion_ids=[3, 7]), turn(1)),
            trajectory("b"),
        ],
    ],
)
def test_whatever_a_step_is_made_from_changes_the_digest(changed):
    assert plan_digest(changed) != plan_digest([trajectory("a"), trajectory("b")])


def test_log_probs_count_as_the_store_keeps_them():
    rounded = struct.unpack("f", struct.pack("f", -0.1))[0]
    assert plan_digest([trajectory("a")]) == plan_digest(
        [trajectory("a", turn(0, logprobs=[rounded, -1.7]), turn(1))]
    )


def test_a_plan_comes_back_from_its_record():
    plan = plan_of(
        [trajectory("a", reward=0.1 + 0.2)],
        {"a": 1.5},
        baselines={"t": 1 / 3},
        staleness=2,
        policy="mask",
        masked_tokens=3,
        dropped={"b": "stale", "c": "no-spread", "d": "stale"},
    )
    record = json.loads(json.dumps({"metrics": {}, "plan": plan.to_record()}))
    assert StepPlan.of(7, record) == plan
    assert plan.rewards == {"a": 0.1 + 0.2}
    assert plan.dropped == {"stale": ["b", "d"], "no-spread": ["c"]}


def test_a_record_without_a_plan_or_with_half_of_one_is_refused_by_name():
    with pytest.raises(TrainingError, match="record of step 7 has no plan"):
        StepPlan.of(7, {"metrics": {}})
    with pytest.raises(TrainingError, match=r"step 7 can't be read.*digest"):
        StepPlan.of(7, {"plan": {"ids": []}})


def test_trained_puts_order_and_rewards_back():
    """As shaping made them: the parts of the reward too, for those whose reward shaping left as it
    was."""
    stored = [
        trajectory("a", success=True),
        trajectory("b", turn(0), success=True),
        trajectory("c", turn(0), turn(1), turn(2)),
    ]
    section = AlgorithmSection(length_shaping="linear", length_weight=0.01)
    shaped = shape_by_length(stored[::-1], section, 100)
    plan = plan_of(shaped, {t.id: t.reward for t in stored})
    assert plan.restore_trained(stored) == shaped
    assert plan_of(stored).restore_trained(stored[::-1]) == stored


def test_trained_refuses_other_trajectories():
    plan = plan_of([trajectory("a"), trajectory("b")])
    with pytest.raises(TrainingError, match="names 'b'"):
        plan.restore_trained([trajectory("a")])
    with pytest.raises(TrainingError, match="not those that were trained on"):
        plan.restore_trained(
            [trajectory("a"), msgspec.structs.replace(trajectory("b"), reward=2.0)]
        )


def test_a_reward_of_the_recipe_may_be_called_length():
    """Its part is not a change by `length_shaping`: -0.16 + 0.84 - 0.84 is another number."""
    parts = {"length": -0.16, "numeric": 1.0}
    earned = trajectory("a", reward=0.84, reward_parts=parts)
    assert plan_of([earned]).restore_trained([earned]) == [earned]
