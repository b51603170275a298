"""What a group's attempts are compared as."""

from __future__ import annotations

import random

import msgspec
import pytest

from agentevo.config import AlgorithmSection
from agentevo.training.pairs import Pair, PairData, make_pairs, win_probabilities
from agentevo.training.preference import mismatch_answers
from agentevo.types import Sample, Trajectory, Turn


def turn(index: int, parent: int | None, prompt: list[int], completion: list[int]) -> Turn:
    size = len(completion)
    return Turn(
        index=index,
        parent=parent,
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=[-1.0] * size,
        versions=[0] * size,
        finish_reason="stop",
    )


def attempt(
    name: str,
    reward: float,
    *,
    group: str = "g",
    says: int = 0,
    turns: list[Turn] | None = None,
    success: bool = False,
):
    number = int(name[-1]) if name[-1].isdigit() else 0
    turns = [turn(0, None, [1, 2], [says or 3 + number, 4])] if turns is None else turns
    return Trajectory(
        id=name,
        task_id=f"train-{group}",
        group_id=group,
        attempt=number,
        reward=reward,
        success=success,
        turns=turns,
    )


def pairs_of(trajectories, section: AlgorithmSection, demonstrations=None):
    return make_pairs(trajectories, section.preference(), section, demonstrations)


def names(pairs) -> list[tuple[str | None, str | None]]:
    return [
        (pair.chosen and pair.chosen.name, pair.rejected and pair.rejected.name) for pair in pairs
    ]


GROUP = [
    attempt("a0", 0.2),
    attempt("a1", 1.0),
    attempt("a2", 0.0),
    attempt("a3", 0.5),
    attempt("a4", 0.5),
]


def test_best_against_worst():
    assert names(pairs_of(GROUP, AlgorithmSection(name="dpo"))) == [("a1", "a2")]
    several = AlgorithmSection(name="dpo", pairs_per_group=3)
    assert names(pairs_of(GROUP, several)) == [("a1", "a2"), ("a3", "a0")], (
        "the middle one of five has nobody left"
    )
    assert names(pairs_of(GROUP, several.model_copy(update={"pair_margin": 0.5}))) == [("a1", "a2")]


def test_every_two_that_differ():
    section = AlgorithmSection(name="dpo", pairs="all")
    found = names(pairs_of(GROUP, section))
    rewards = {t.id: t.reward for t in GROUP}
    expected = {(a, b) for a in rewards for b in rewards if rewards[a] > rewards[b]}
    assert set(found) == expected
    assert len(found) == 9, "ten pairs, one of equals"

    gaps = [rewards[a] - rewards[b] for a, b in found]
    assert gaps == sorted(gaps, reverse=True)
    assert names(pairs_of(GROUP, section.model_copy(update={"pairs_per_group": 2}))) == found[:2]
    assert len(pairs_of(GROUP, section.model_copy(update={"pair_margin": 0.5}))) == 6


def test_the_order_of_attempts_does_not_matter_and_groups_are_kept_apart():
    two = [*GROUP, attempt("b0", 0.0, group="h"), attempt("b1", 3.0, group="h")]
    shuffled = list(two)
    random.Random(3).shuffle(shuffled)

    for section in (
        AlgorithmSection(name="dpo", pairs="all"),
        AlgorithmSection(name="sppo"),
        AlgorithmSection(name="kto"),
    ):
        assert sorted(names(pairs_of(two, section)), key=str) == sorted(
            names(pairs_of(shuffled, section)), key=str
        )

    assert names(pairs_of(two, AlgorithmSection(name="dpo"))) == [("a1", "a2"), ("b1", "b0")]
    assert {pair.group_id for pair in pairs_of(two, AlgorithmSection(name="dpo"))} == {"g", "h"}


def test_equal_rewards_and_equal_answers_make_no_pair():
    assert pairs_of([attempt("a0", 0.5), attempt("a1", 0.5)], AlgorithmSection(name="dpo")) == []
    assert (
        pairs_of(
            [attempt("a0", 0.5, says=9), attempt("a1", 0.7, says=9)], AlgorithmSection(name="dpo")
        )
        == []
    )
    assert pairs_of([attempt("a0", 0.5)], AlgorithmSection(name="ipo")) == []


def test_kto_takes_every_attempt_by_its_success():
    members = [attempt("a0", 0.9), attempt("a1", 0.1, success=True), attempt("a2", 0.9)]
    assert sorted(names(pairs_of(members, AlgorithmSection(name="kto"))), key=str) == [
        ("a1", None),
        (None, "a0"),
        (None, "a2"),
    ]


def test_rejection_sampling_keeps_the_best_that_succeeded_and_none_twice():
    members = [
        attempt(f"a{n}", reward, says=says, success=n != 0)
        for n, (reward, says) in enumerate([(9, 5), (1, 6), (3, 7), (3, 7), (2, 8)])
    ]
    assert names(pairs_of(members, AlgorithmSection(name="rft"))) == [("a2", None)], (
        "a0 earned more and failed"
    )
    assert names(pairs_of(members, AlgorithmSection(name="rft", pairs_per_group=3))) == [
        ("a2", None),
        ("a4", None),
        ("a1", None),
    ]
    assert pairs_of([attempt("a0", 1.0)], AlgorithmSection(name="rft")) == []


def shown(*says: int) -> list[Sample]:
    ids = [1, 2, *says]
    mask = [False, False, *[True] * len(says)]
    return [
        Sample(
            trajectory_id="x",
            group_id="x",
            ids=ids,
            loss_mask=mask,
            logprobs=[0.0] * len(ids),
            versions=[0] * len(ids),
            advantages=[0.0] * len(says),
        )
    ]


def test_the_solver_against_each_attempt():
    asked: list[str] = []

    def solver(task_id: str) -> list[Sample]:
        asked.append(task_id)
        return shown(7, 4) if task_id == "train-g" else []

    members = [
        attempt("a0", 0.5),
        attempt("a4", 1.0),
        attempt("a1", 0.0),
        attempt("b0", 0.0, group="h"),
    ]
    section = AlgorithmSection(name="spin")
    pairs = pairs_of(members, section, solver)
    assert [(pair.chosen.rows[0].ids.tolist(), pair.rejected.name) for pair in pairs] == [
        ([1, 2, 7, 4], "a1"),
        ([1, 2, 7, 4], "a0"),
    ], "a4 said the same"
    assert asked == ["train-g", "train-h"], "once for a group; who knows nothing makes no pair"
    assert {row.group_id for pair in pairs for row in pair.chosen.rows} == {"g"}
    assert names(pairs_of(members, section.model_copy(update={"pairs_per_group": 1}), solver)) == [
        ("g by the solver", "a1")
    ]


def test_an_answer_is_all_that_was_said_in_a_trajectory():
    turns = [turn(0, None, [1, 2], [3, 4]), turn(1, 0, [5], [6]), turn(2, None, [1, 9], [7])]
    (pair,) = pairs_of(
        [attempt("a0", 1.0, turns=turns), attempt("a1", 0.0)], AlgorithmSection(name="dpo")
    )
    assert [row.ids.tolist() for row in pair.chosen.rows] == [[1, 2, 3, 4, 5, 6], [1, 9, 7]]
    assert pair.chosen.num_tokens == 4


def test_chances_of_winning_by_hand():
    assert win_probabilities([0.0, 1.0]) == [0.25, 0.75]
    assert win_probabilities([2.0, 2.0, 2.0]) == [0.5, 0.5, 0.5]
    assert win_probabilities([0.0, 1.0, 1.0, 3.0]) == [0.125, 0.5, 0.5, 0.875]

    (pair,) = pairs_of(GROUP, AlgorithmSection(name="sppo"))
    assert pair.win_probs == (0.9, 0.1), "the best of five beats four and ties with itself"

    chances = {
        pair.rejected.name: pair.win_probs
        for pair in pairs_of(GROUP, AlgorithmSection(name="sppo", pairs="all"))
    }
    assert chances["a3"] == (0.9, pytest.approx(0.6)), "of five it beats two and ties with two"


def test_given_pairs_come_round_in_an_order_of_their_seed():
    groups = [
        pairs_of(
            [attempt("a0", 0.0, group=f"g{n}"), attempt("a1", 1.0, group=f"g{n}")],
            AlgorithmSection(name="dpo"),
        )
        for n in range(7)
    ]
    data = PairData(groups, per_step=3, seed=4)
    steps = [[pair.group_id for pair in data.of_step(step)] for step in range(1, 7)]
    for first in (0, 2, 4):
        assert len({*steps[first], *steps[first + 1]}) == 6, "no group twice in a round"

    assert steps[:2] != steps[2:4]
    assert steps == [
        [pair.group_id for pair in PairData(groups, 3, 4).of_step(step)] for step in range(1, 7)
    ]
    assert steps != [
        [pair.group_id for pair in PairData(groups, 3, 5).of_step(step)] for step in range(1, 7)
    ]
    assert len(PairData(groups, per_step=99, seed=0).of_step(5)) == 7
    assert data.digest() == PairData(groups, 1, 0).digest(), "of what is trained on, not of when"
    assert data.digest() != PairData(groups[1:], 3, 4).digest()

    swapped = [Pair(pair.group_id, pair.rejected, pair.chosen) for pair in groups[0]]
    assert data.digest() != PairData([swapped, *groups[1:]], 3, 4).digest()


def answers_of(*trajectories):
    return [pair.answers[0] for pair in pairs_of(trajectories, AlgorithmSection(name="kto"))]


def test_mismatched_answers_stand_after_other_prompts():
    one = attempt("a0", 0.0, group="a", turns=[turn(0, None, [1, 2], [3]), turn(1, 0, [8], [4])])
    other = attempt("b0", 0.0, group="b", turns=[turn(0, None, [1, 5, 6], [7])])
    (first,), (second,) = mismatch_answers(answers_of(other, one), 100)
    assert (first.ids.tolist(), first.loss_mask.tolist()) == ([1, 2, 7], [False, False, True])
    assert (second.ids.tolist(), second.loss_mask.tolist()) == (
        [1, 5, 6, 3, 8, 4],
        [False, False, False, True, False, True],
    )
    assert [first.trajectory_id, second.trajectory_id] == ["a0", "b0"]

    (_,), (cut,) = mismatch_answers(answers_of(other, one), 5)
    assert cut.ids.tolist() == [1, 5, 6, 3, 8]
    assert cut.loss_mask.tolist() == [False, False, False, True, False]
    assert mismatch_answers(answers_of(other, one), 3)[1] == [], "nothing trained is left of it"
    assert mismatch_answers(answers_of(attempt("a0", 0.0), attempt("a1", 0.0)), 100) == [[], []], (
        "one task alone"
    )
    assert msgspec.structs.asdict(first)["group_id"] == "b"
