"""Which trajectories are trained on: every reason, and nothing left without one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo.config import AlgorithmSection
from agentevo.training.batching.selection import select, usable
from agentevo.types import Trajectory, Turn

FILTERED = AlgorithmSection(dynamic_sampling=5)


def attempt(name: str, reward: float, *, tokens: int = 2, **fields) -> Trajectory:
    """Of the group that its name begins with."""
    turn = Turn(
        index=0,
        prompt_ids=[1],
        completion_ids=[2] * tokens,
        logprobs=[0.0] * tokens,
        versions=[0] * tokens,
        finish_reason="stop",
    )
    return Trajectory(
        id=name, task_id=name[0], group_id=name[0], reward=reward, turns=[turn], **fields
    )


def test_the_unusable_are_left_out_before_anything_is_compared():
    attempts = [
        attempt("a0", 9.0, status="failed", error="x"),
        attempt("a1", 9.0, tokens=0),
        attempt("a2", 9.0, truncated=True),
    ]
    attempts += [attempt("a3", 1.0), attempt("a4", 0.0)]
    kept, dropped = usable(attempts, AlgorithmSection(drop_truncated=True))
    assert [t.id for t in kept] == ["a3", "a4"]
    assert dropped == {"a0": "failed", "a1": "no-tokens", "a2": "truncated"}
    assert [t.id for t in usable(attempts, AlgorithmSection())[0]] == ["a2", "a3", "a4"]


def test_a_full_batch_is_the_first_groups_whose_rewards_differ():
    attempts = [
        attempt("a0", 1.0),
        attempt("a1", 1.0),
        attempt("b0", 0.0),
        attempt("b1", 1.0),
        attempt("c0", 0.5),
    ]
    attempts += [
        attempt("c1", 0.0, status="failed", error="x"),
        attempt("d0", 2.0),
        attempt("d1", 3.0),
        attempt("e0", 0.0),
        attempt("e1", 1),
    ]
    kept, dropped = select(attempts, FILTERED, num_groups=2)
    assert [t.id for t in kept] == ["b0", "b1", "d0", "d1"]
    assert dropped == {
        "a0": "zero-variance",
        "a1": "zero-variance",
        "c0": "group-of-one",
        "c1": "failed",
        "e0": "surplus",
        "e1": "surplus",
    }
    assert [t.id for t in select(attempts, FILTERED, num_groups=3)[0]] == [
        "b0",
        "b1",
        "d0",
        "d1",
        "e0",
        "e1",
    ]


def test_an_advantage_without_groups_gets_a_full_batch_all_the_same():
    attempts = [attempt("a0", 1.0), attempt("a1", 1.0), attempt("b0", 0.0), attempt("b1", 1.0)]
    kept, dropped = select(
        attempts, AlgorithmSection(name="arpo", dynamic_sampling=5), num_groups=2
    )
    assert [t.id for t in kept] == ["b0", "b1"]
    assert set(dropped.values()) == {"zero-variance"}
    assert select(attempts, AlgorithmSection(name="arpo"))[1] == {}
    assert select(attempts, AlgorithmSection(), needs_others=False)[1] == {}


def test_what_was_decided_before_stays_decided():
    attempts = [
        attempt("a0", 1.0),
        attempt("a1", 0.0),
        attempt("a2", 0.0),
        attempt("b0", 1.0),
        attempt("b1", 0.0),
    ]
    before = {"a0": "below-usual-spread", "b0": "no-baseline"}
    kept, dropped = select(attempts, AlgorithmSection(), before=before)
    assert kept == []
    assert dropped == before | {"a1": "zero-variance", "a2": "zero-variance", "b1": "group-of-one"}
    assert before == {"a0": "below-usual-spread", "b0": "no-baseline"}


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdef"),
            st.sampled_from([0.0, 0.5, 1.0]),
            st.booleans(),
            st.booleans(),
        ),
        max_size=25,
    ),
    st.none() | st.integers(1, 4),
    st.sampled_from(
        [
            AlgorithmSection(),
            AlgorithmSection(keep_groups=0.3, drop_truncated=True),
            AlgorithmSection(name="arpo"),
        ]
    ),
)
def test_each_is_kept_or_dropped_and_the_order_stays(rows, wanted, section):
    attempts = [
        attempt(
            f"{group}{place}",
            reward,
            status="failed" if failed else "completed",
            truncated=truncated,
        )
        for place, (group, reward, failed, truncated) in enumerate(rows)
    ]
    kept, dropped = select(attempts, section, num_groups=wanted)
    assert [t.id for t in attempts if t.id not in dropped] == [t.id for t in kept]
    assert set(dropped) | {t.id for t in kept} == {t.id for t in attempts}

    groups = {t.group_id for t in kept}
    if wanted is not None:
        assert len(groups) <= wanted
        assert all(len({t.reward for t in kept if t.group_id == group}) > 1 for group in groups)


@pytest.mark.parametrize("section", [AlgorithmSection(), FILTERED])
def test_nothing_in_nothing_out(section):
    assert select([], section, num_groups=2 if section is FILTERED else None) == ([], {})
