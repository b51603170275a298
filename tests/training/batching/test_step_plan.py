"""What a step's record says of its trajectories."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import msgspec
import pytest

from agentevo.config import AlgorithmSection
from agentevo.errors import TrainingError
from agentevo.training.batching.shaping import shape_by_length
from agentevo.training.batching.step_plan import Plan, plan_digest
from agentevo.types import Trajectory, Turn


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
) -> Plan:
    earned = {t.id: t.reward for t in trained} if earned is None else earned
    return Plan.make(
        trained, earned=earned, **{"baselines": {}, "staleness": 0, "policy": "wait"} | changes
    )


def test_the_digest_is_the_documented_one():
    """By hand: sizes before contents, little-endian."""
    found = hashlib.sha256()
    found.update(struct.pack("<q", 1) + b"a" + struct.pack("<dq", 1.5, 1))
    found.update(struct.pack("<qdd", -1, 1.0, 0.25))
    for ids in ([1, 2, 3], [7, 8], [4, 5]):
        found.update(struct.pack("<q", 4 * len(ids)) + struct.pack(f"<{len(ids)}i", *ids))
    found.update(struct.pack("<q", 8) + struct.pack("<2f", -0.1, -1.7))
    assert plan_digest([trajectory("a", turn(0))]) == hashlib.sha256(found.digest()).hexdigest()
    assert plan_of([trajectory("a", turn(0))]).digests == [found.hexdigest()[:16]]


@pytest.mark.parametrize(
    "changed",
    [
        [trajectory("b"), trajectory("a")],
        [trajectory("a")],
        [trajectory("a", reward=1.25), trajectory("b")],
        [trajectory("a", turn(0)), trajectory("b")],
        [trajectory("a", turn(0), turn(1, parent=None)), trajectory("b")],
        [trajectory("a", turn(0), turn(1, temperature=0.5)), trajectory("b")],
        [trajectory("a", turn(0), turn(1, reward=0.0)), trajectory("b")],
        [trajectory("a", turn(0), turn(1, prompt_ids=[1, 2, 5])), trajectory("b")],
        [trajectory("a", turn(0), turn(1, completion_ids=[7, 9])), trajectory("b")],
        [trajectory("a", turn(0), turn(1, logprobs=[-0.1, -1.70001])), trajectory("b")],
        [trajectory("a", turn(0), turn(1, versions=[5, 5])), trajectory("b")],
        [
            trajectory("a", turn(0, prompt_ids=[1, 2, 3, 7], completion_ids=[8]), turn(1)),
            trajectory("b"),
        ],
    ],
)
def test_whatever_a_step_is_made_from_changes_the_digest(changed):
    assert plan_digest(changed) != plan_digest([trajectory("a"), trajectory("b")])


def test_what_a_step_is_not_made_from_does_not():
    other = trajectory(
        "a", turn(0, seed=5, finish_reason="length"), turn(1), metrics={"x": 1.0}, started_at=3.0
    )
    rounded = struct.unpack("f", struct.pack("f", -0.1))[0]
    assert (
        plan_digest([other])
        == plan_digest([trajectory("a")])
        == plan_digest([trajectory("a", turn(0, logprobs=[rounded, -1.7]), turn(1))])
    )


def test_a_plan_comes_back_from_its_record():
    plan = plan_of(
        [trajectory("a", reward=0.1 + 0.2)],
        {"a": 1.5},
        baselines={"t": 1 / 3},
        staleness=2,
        policy="mask",
        masked_tokens=3,
    )
    record = json.loads(json.dumps({"metrics": {}, "plan": plan.to_record()}))
    assert Plan.of(7, record) == plan
    assert plan.rewards == {"a": 0.1 + 0.2}


def test_a_record_without_a_plan_or_with_half_of_one_is_refused_by_name():
    with pytest.raises(TrainingError, match="record of step 7 has no plan"):
        Plan.of(7, {"metrics": {}})
    with pytest.raises(TrainingError, match=r"step 7 can't be read.*digest"):
        Plan.of(7, {"plan": {"ids": []}})


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
    assert plan.trained(stored) == shaped
    assert plan_of(stored).trained(stored[::-1]) == stored


def test_trained_refuses_other_trajectories():
    plan = plan_of([trajectory("a"), trajectory("b")])
    with pytest.raises(TrainingError, match="names 'b'"):
        plan.trained([trajectory("a")])
    with pytest.raises(TrainingError, match="not those that were trained on"):
        plan.trained([trajectory("a"), msgspec.structs.replace(trajectory("b"), reward=2.0)])
