"""From trajectories to samples: token-exact, each chosen token once, every drop with its reason."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentevo.algorithms.estimators import bind_advantage
from agentevo.config import AlgorithmSection
from agentevo.training.batching.samples import (
    advantages_of,
    trajectory_rows,
    with_observed_logprobs,
)
from agentevo.training.batching.selection import select
from agentevo.types import SamplingOverrides, Trajectory, Turn
from agentevo.types.image_span import ImageSpan

GRPO = AlgorithmSection()


def made(trajectories: list[Trajectory], section: AlgorithmSection):
    """Samples, and why other trajectories gave none."""
    kept, dropped = select(trajectories, section)
    algorithm = section.resolve()
    advantage = bind_advantage(algorithm.advantage, algorithm.advantage_hyper)
    return advantages_of([row for t in kept for row in trajectory_rows(t)], advantage), dropped


def turn(index: int, parent: int | None, prompt: list[int], completion: list[int]) -> Turn:
    return Turn(
        index=index,
        parent=parent,
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=[-0.1 * token for token in completion],
        versions=[index] * len(completion),
        finish_reason="stop",
    )


def attempt(
    name: str, reward: float, group: str = "g", turns: list[Turn] | None = None, **fields
) -> Trajectory:
    turns = [turn(0, None, [1, 2], [3, 4])] if turns is None else turns
    return Trajectory(id=name, task_id=group, group_id=group, reward=reward, turns=turns, **fields)


def test_a_conversation_is_one_sample_of_what_the_engine_saw():
    turns = [turn(0, None, [1, 2], [3, 4]), turn(1, 0, [5], [6]), turn(2, 1, [7, 8], [9, 10])]
    (sample,), dropped = made([attempt("a", 0.5, turns=turns)], AlgorithmSection(name="arpo"))
    assert dropped == {}
    assert sample.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert sample.loss_mask.tolist() == [bool(m) for m in [0, 0, 1, 1, 0, 1, 0, 0, 1, 1]]
    assert sample.logprobs == pytest.approx([0, 0, -0.3, -0.4, 0, -0.6, 0, 0, -0.9, -1.0])
    assert sample.versions.tolist() == [-1, -1, 0, 0, -1, 1, -1, -1, 2, 2]
    assert sample.advantages.tolist() == [0.5] * 5


def test_what_was_read_between_turns_is_trained_only_if_asked_for():
    """The task's own prompt never is; what is read belongs to the turn that it leads to."""
    turns = [turn(0, None, [1, 2], [3, 4]), turn(1, 0, [5], [6]), turn(2, 1, [7, 8], [9, 10])]
    (row,) = trajectory_rows(attempt("a", 0.5, turns=turns), train_observations=True)
    assert row.sample.ids[row.sample.loss_mask].tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    assert row.turns.tolist() == [0, 0, 1, 1, 2, 2, 2, 2]
    assert row.sample.versions.tolist() == [-1, -1, 0, 0, 1, 1, 2, 2, 2, 2]

    (seeing,) = trajectory_rows(row.trajectory, train_observations=True, never_sampled={1, 7})
    assert seeing.sample.ids[seeing.sample.loss_mask].tolist() == [3, 4, 5, 6, 8, 9, 10]
    assert seeing.turns.tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert len(seeing.sample.advantages) == 7

    own = torch.tensor([[-float(place) for place in range(8)]])
    (filled,) = with_observed_logprobs([row], own)
    drawn = [0, 0, -0.3, -0.4, -2.0, -0.6, -4.0, -5.0, -0.9, -1.0]
    assert filled.sample.logprobs == pytest.approx(drawn)


def test_of_two_branches_each_reading_is_trained_once():
    turns = [turn(0, None, [1], [3]), turn(1, 0, [5], [6]), turn(2, 1, [7], [8])]
    turns.append(turn(3, 1, [9], [10]))
    rows = trajectory_rows(attempt("a", 0.5, turns=turns), train_observations=True)
    trained = [row.sample.ids[row.sample.loss_mask].tolist() for row in rows]
    assert trained == [[3, 5, 6, 7, 8], [9, 10]]


@st.composite
def turn_trees(draw) -> Trajectory:
    turns: list[Turn] = []
    for index in range(draw(st.integers(1, 8))):
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        turns.append(
            turn(
                index,
                parent,
                draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)),
                [100 + 10 * index + k for k in range(2)],
            )
        )

    return attempt("a", 1.0, turns=turns)


@given(turn_trees())
def test_every_chosen_token_is_trained_once_in_the_context_in_which_it_was_chosen(trajectory):
    samples = [sample for _, sample, _ in trajectory_rows(trajectory)]
    trained = [
        (tuple(s.ids[:place]), token)
        for s in samples
        for place, (token, m) in enumerate(zip(s.ids, s.loss_mask, strict=True))
        if m
    ]

    chosen = []
    for one in trajectory.turns:
        context = trajectory.context_ids(one.index)
        for place, token in enumerate(one.completion_ids):
            chosen.append(((*context, *one.completion_ids[:place]), token))

    assert sorted(trained) == sorted(chosen)

    parents = {one.parent for one in trajectory.turns}
    assert len(samples) == sum(one.index not in parents for one in trajectory.turns)
    for sample in samples:
        for token, m, logprob, version in zip(
            sample.ids, sample.loss_mask, sample.logprobs, sample.versions, strict=True
        ):
            said = (np.float32(-0.1 * int(token)), (token - 100) // 10)
            assert (logprob, version) == (said if m else (0.0, -1))


@given(turn_trees(), st.randoms(use_true_random=False))
def test_a_turn_from_another_distribution_is_context_alone(trajectory, rng):
    """One more temperature in a path costs no step and trains nothing at the wrong one."""
    changed = SamplingOverrides(temperature=0.1)
    others = {one.index for one in trajectory.turns if rng.random() < 0.5}
    turns = [
        msgspec.structs.replace(one, overrides=changed, temperature=0.1)
        if one.index in others
        else one
        for one in trajectory.turns
    ]
    mixed = msgspec.structs.replace(trajectory, turns=turns)
    rows = trajectory_rows(mixed)
    trained = [int(index) for row in rows for index in row.turns]
    assert sorted(set(trained)) == [one.index for one in turns if one.index not in others]
    assert len(trained) == mixed.num_trainable_tokens()
    assert all(row.sample.temperature == 1.0 and len(row.turns) for row in rows)

    if len(others) == len(turns):
        _, dropped = made([mixed], AlgorithmSection(name="arpo"))
        assert dropped == {"a": "no-tokens"}


def test_advantages_come_from_the_group_by_id():
    """Members of two groups in mixed order; what failed takes no part in its group's mean."""
    attempts = [
        attempt("a0", 1.0, "a"),
        attempt("b0", 3.0, "b"),
        attempt("a1", 0.0, "a"),
        attempt("b1", 5.0, "b"),
        attempt("a2", 100.0, "a", status="failed", error="broke"),
    ]
    samples, dropped = made(attempts, GRPO)
    found = {sample.trajectory_id: max(sample.advantages, key=abs) for sample in samples}
    half = 0.5**0.5
    assert found == pytest.approx({"a0": half, "a1": -half, "b0": -half, "b1": half}, abs=1e-5)
    assert dropped == {"a2": "failed"}


def test_why_a_trajectory_gives_no_sample():
    attempts = [
        attempt("same0", 0.3, "same"),
        attempt("same1", 0.3, "same"),
        attempt("alone", 1.0, "alone"),
        attempt("failed", 1.0, "few", status="failed", error="x"),
        attempt("left", 1.0, "few"),
        attempt("silent", 0.0, "silent", turns=[]),
        attempt("spoke0", 0.0, "silent"),
        attempt("spoke1", 1.0, "silent"),
    ]
    samples, dropped = made(attempts, GRPO)
    assert dropped == {
        "same0": "zero-variance",
        "same1": "zero-variance",
        "alone": "group-of-one",
        "failed": "failed",
        "left": "group-of-one",
        "silent": "no-tokens",
    }
    assert {sample.trajectory_id for sample in samples} == {"spoke0", "spoke1"}


def test_groups_of_equal_rewards_can_be_kept():
    attempts = [attempt("a0", 0.3), attempt("a1", 0.3)]
    samples, dropped = made(attempts, GRPO.model_copy(update={"drop_zero_variance": False}))
    assert dropped == {}
    assert [sample.advantages.tolist() for sample in samples] == [
        [0.0] * samples[0].num_trained
    ] * 2


def test_without_the_deviation():
    samples, _ = made(
        [attempt("a0", 4.0), attempt("a1", 0.0)], GRPO.model_copy(update={"scale_by_std": False})
    )
    assert [sample.advantages[-1] for sample in samples] == [2.0, -2.0]


def test_nothing_in_nothing_out():
    assert made([], GRPO) == ([], {})


def test_each_turn_gets_what_came_after_it():
    """turn_grpo: one attempt earns 1 in its last turn, one in its first: returns (1, 1) and (1, 0),
    each turn against all four."""

    def two_turns(name: str, first: float, second: float) -> Trajectory:
        turns = [
            msgspec.structs.replace(turn(0, None, [1], [3, 4]), reward=first),
            msgspec.structs.replace(turn(1, None, [1], [5]), reward=second),
        ]
        return attempt(name, first + second, turns=turns)

    section = AlgorithmSection(name="turn_grpo", scale_by_std=False)
    samples, dropped = made(
        [two_turns("a", 0.0, 1.0), two_turns("b", 1.0, 0.0)],
        section.model_copy(update={"drop_zero_variance": False}),
    )
    assert dropped == {}
    assert [sample.advantages.tolist() for sample in samples] == [
        [0.25, 0.25],
        [0.25],
        [0.25, 0.25],
        [-0.75],
    ]


def test_turns_are_compared_with_those_that_answer_the_same_observation():
    """gigpo: both attempts answer [1] first, where b earned 1 and a 0; each answers something else
    in its second turn, or sees another picture there."""
    seen = ImageSpan(0, 1, (1, 1, 1), "a" * 64)
    unlike = ImageSpan(0, 1, (1, 1, 1), "b" * 64)

    def two_turns(name: str, reward: float, image: ImageSpan) -> Trajectory:
        second = msgspec.structs.replace(
            turn(1, None, [7], [5]), images=(image,), processor="p", reward=reward
        )
        return attempt(name, reward, turns=[turn(0, None, [1], [3, 4]), second])

    section = AlgorithmSection(name="gigpo", gamma=0.5, turn_weight=2.0, scale_by_std=False)
    apart, _ = made([two_turns("a", 0.0, seen), two_turns("b", 1.0, unlike)], section)
    alike, _ = made([two_turns("a", 0.0, seen), two_turns("b", 1.0, seen)], section)
    assert [sample.advantages.tolist() for sample in apart] == [
        [-1.0, -1.0],
        [-0.5],
        [1.0, 1.0],
        [0.5],
    ]
    assert [sample.advantages.tolist() for sample in alike] == [
        [-1.0, -1.0],
        [-1.5],
        [1.0, 1.0],
        [1.5],
    ]


def test_a_shorter_way_to_the_same_reward_is_better():
    """Both attempts earn 1, the one in its first turn, the other in its second."""
    short = [turn(0, None, [1], [3])]
    detour = [turn(0, None, [1], [4]), turn(1, None, [1], [3])]
    section = AlgorithmSection(name="gigpo", scale_by_std=False)
    samples, dropped = made(
        [attempt("a", 1.0, turns=short), attempt("b", 1.0, turns=detour)], section
    )
    assert dropped == {}
    first, second, last = [sample.advantages[-1] for sample in samples]
    assert first == last > 0 > second


def test_what_is_paid_beside_the_turns_is_paid_at_the_end():
    turns = [msgspec.structs.replace(turn(0, None, [1], [3]), reward=0.5), turn(1, 0, [2], [4])]
    section = AlgorithmSection(name="turn_grpo", scale_by_std=False)
    samples, _ = made([attempt("a", 2.5, turns=turns), attempt("b", 0.5, turns=turns)], section)
    assert samples[0].advantages.tolist() == [1.25, 0.75], (
        "returns 2.5 and 2 against the mean of 2.5, 2, 0.5 and 0"
    )


def test_a_batch_is_compared_where_a_group_is_not():
    samples, dropped = made(
        [attempt("a", 1.0, "a"), attempt("b", 0.0, "b")], AlgorithmSection(name="brpo")
    )
    assert dropped == {}
    assert [sample.advantages[-1] for sample in samples] == pytest.approx(
        [0.5**0.5, -(0.5**0.5)], abs=1e-5
    )


def test_truncated_attempts_and_groups_of_small_spread_can_be_left_out():
    attempts = [
        attempt("a0", 1.0, "a"),
        attempt("a1", 0.0, "a"),
        attempt("a2", 0.5, "a", truncated=True),
    ]
    attempts += [
        attempt("b0", 1.0, "b"),
        attempt("b1", 0.9, "b"),
        attempt("c0", 1.0, "c"),
        attempt("c1", 1.0, "c"),
    ]
    samples, dropped = made(attempts, AlgorithmSection(drop_truncated=True, keep_groups=2 / 3))
    assert dropped == {"a2": "truncated", "c0": "small-spread", "c1": "small-spread"}, (
        "two of the step's three groups stay"
    )
    assert {sample.trajectory_id for sample in samples} == {"a0", "a1", "b0", "b1"}
