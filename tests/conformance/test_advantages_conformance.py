"""Advantage estimators against their slow versions, and what must hold whatever the numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from by_name import advantage
from hypothesis import given, settings
from hypothesis import strategies as st
from slow import soak
from slow_advantages import (
    PER_TOKEN,
    PER_TRAJECTORY,
    Batch,
    observations,
    owned,
    slow_advantage,
)

from agentevo.algorithms.entries import FUNCTION
from agentevo.algorithms.estimators import ADVANTAGES
from examples import examples

NAMES = [name for name in ADVANTAGES if name != FUNCTION]
NEED_TURNS = [name for name in NAMES if "turn_ids" in ADVANTAGES[name].needs]
AGAINST_GROUP = [name for name in NAMES if ADVANTAGES[name].within_group]
each_name = pytest.mark.parametrize("name", NAMES)


@st.composite
def batches(draw: st.DrawFn, *, turns: bool, positive: bool = False) -> Batch:
    """Rows 0-7 of 0-12 tokens, with holes, empty rows, groups of one, ties, equal rewards, and
    trajectories of several rows."""
    num_rows = draw(st.integers(0, 7))
    width = draw(st.integers(0, 12))
    kind = draw(st.sampled_from(["grid", "real", "equal", "last", "zero"]))
    several_rows = draw(st.booleans())
    density = draw(st.sampled_from([0.3, 0.7, 1.0]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (num_rows, width)
    mask = random.random(shape) < density
    mask[random.random(num_rows) < 0.15] = False
    trajectories = (
        [f"t{number}" for number in random.integers(0, max(num_rows, 1), num_rows)]
        if several_rows
        else None
    )
    names = trajectories or [f"r{row}" for row in range(num_rows)]
    group_of = {name: int(random.integers(0, 3)) for name in names}
    rewards = {
        "grid": random.integers(-4, 5, shape) / 4,
        "real": random.normal(size=shape) * 10.0 ** random.integers(-3, 4),
        "equal": np.zeros(shape),
        "last": np.zeros(shape),
        "zero": np.zeros(shape),
    }[kind]
    batch = Batch(
        rewards=np.abs(rewards) if positive else rewards,
        mask=mask,
        groups=[group_of[name] for name in names],
        trajectories=trajectories,
        turns=_turns(random, mask, names) if turns else None,
        values=random.normal(size=shape),
        baseline=random.normal(size=num_rows),
        parts={
            key: _per_trajectory(random, names, spread)
            for key, spread in (("right", 2), ("short", 100), ("same", 1))
        },
        weights={"right": 1.0, "short": 0.25, "same": 2.0},
        logp=-random.exponential(size=shape),
        squares=np.zeros(shape),
        process=random.normal(size=shape),
        parents=None,
    )
    if batch.turns is not None:  # some name an earlier turn, some none, some one that is not there
        batch = replace(
            batch,
            parents=np.where(
                random.random(shape) < 0.5,
                random.choice([-1, 7, *batch.turns.reshape(-1)], shape),
                -1,
            ),
        )

    batch.squares[...] = np.exp(2 * batch.logp) + (1 - np.exp(batch.logp)) ** 2 / 10
    for tokens in owned(batch).values():  # one reward for all, or a solved-or-not at the end
        if kind in ("equal", "last"):
            batch.rewards[tokens[-1]] = 1.0 if kind == "equal" else float(random.random() < 0.4)

    return batch


def _per_trajectory(random: np.random.Generator, names: list[str], spread: int) -> np.ndarray:
    score = {name: random.integers(0, spread) / 4 for name in names}
    return np.array([score[name] for name in names], dtype=np.float64)


def _turns(random: np.random.Generator, mask: np.ndarray, names: list[str]) -> np.ndarray:
    """Turn numbers with gaps, growing along each row; the rows of a trajectory take turns of their
    own, in any order of rows."""
    turns = np.full(mask.shape, -7)
    for row in range(mask.shape[0]):
        start = 100 * int(random.permutation(len(names))[0]) + row
        turns[row] = start * 100 + np.cumsum(random.random(mask.shape[1]) < 0.4) * int(
            random.integers(1, 4)
        )
    return turns


def ours(
    name: str, batch: Batch, *, dtype: torch.dtype = torch.float64, **hyper: Any
) -> tuple[np.ndarray, np.ndarray]:
    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array, dtype=dtype)

    given = {
        "values": tensor(batch.values),
        "baseline_rewards": tensor(batch.baseline),
        "reward_parts": {key: tensor(part) for key, part in batch.parts.items()},
        "logp": tensor(batch.logp),
        "sum_pi_squared": tensor(batch.squares),
        "process_rewards": tensor(batch.process),
        "turn_credit": tensor(batch.process),
    }
    found = advantage(
        name,
        token_rewards=tensor(batch.rewards),
        mask=torch.tensor(batch.mask),
        group_ids=batch.groups,
        turn_ids=None if batch.turns is None else torch.tensor(batch.turns),
        turn_parents=torch.tensor(batch.parents) if name == "tree_returns" else None,
        turn_observations=torch.tensor(observations(batch)) if name == "gigpo" else None,
        trajectory_ids=batch.trajectories,
        reward_weights=batch.weights if name == "gdpo" else None,
        **{key: given[key] for key in ADVANTAGES[name].needs if key in given},
        **hyper,
    )
    assert all(
        part.dtype == dtype and part.shape == batch.mask.shape and not part.requires_grad
        for part in found
    )
    return found[0].double().numpy(), found[1].double().numpy()


def drawn(data: st.DataObject, name: str) -> tuple[Batch, dict[str, Any]]:
    batch = data.draw(
        batches(turns=name in NEED_TURNS or data.draw(st.booleans()), positive=name == "maxrl")
    )
    hyper: dict[str, Any] = {}
    for one in ADVANTAGES[name].hyper:
        if one.choices:
            hyper[one.name] = data.draw(st.sampled_from(one.choices), one.name)
        elif isinstance(one.default, bool):
            hyper[one.name] = data.draw(st.booleans(), one.name)
        elif one.name == "epsilon":
            hyper[one.name] = data.draw(st.sampled_from([1e-6, 1e-4, 1e-2]), one.name)
        else:
            hyper[one.name] = data.draw(st.sampled_from([0.0, 0.3, 0.95, 1.0]), one.name)

    return batch, hyper


def same(found: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-8, atol=1e-9)


def test_every_advantage_has_a_slow_version() -> None:
    assert sorted(NAMES) == sorted([*PER_TRAJECTORY, *PER_TOKEN])


@each_name
@settings(max_examples=examples(120))
@given(data=st.data())
def test_agrees_with_the_slow_version(name: str, data: st.DataObject) -> None:
    batch, hyper = drawn(data, name)
    same(ours(name, batch, **hyper), slow_advantage(name, batch, hyper))


@each_name
@settings(max_examples=examples(25))
@given(data=st.data())
def test_masked_places_padding_order_and_names_of_groups_do_not_matter(
    name: str, data: st.DataObject
) -> None:
    batch, hyper = drawn(data, name)
    advantages, returns = ours(name, batch, **hyper)
    assert not advantages[~batch.mask].any()
    assert not returns[~batch.mask].any()

    def garbage(array: np.ndarray) -> np.ndarray:
        return np.where(
            batch.mask, array, data.draw(st.sampled_from([np.nan, np.inf, -np.inf, 1e300]))
        )

    soiled = replace(
        batch,
        **{
            key: garbage(getattr(batch, key))
            for key in ("rewards", "values", "logp", "squares", "process")
        },
    )
    same(ours(name, soiled, **hyper), (advantages, returns))

    order = np.array(data.draw(st.permutations(range(len(batch.groups)))), dtype=np.int64)
    moved = {
        key: None if getattr(batch, key) is None else getattr(batch, key)[order]
        for key in (
            "rewards",
            "mask",
            "turns",
            "values",
            "baseline",
            "logp",
            "squares",
            "process",
            "parents",
        )
    }
    shuffled = replace(
        batch,
        **moved,
        groups=[("renamed", 2 - batch.groups[row]) for row in order],
        trajectories=None
        if batch.trajectories is None
        else [batch.trajectories[row] for row in order],
        parts={key: part[order] for key, part in batch.parts.items()},
    )
    same(ours(name, shuffled, **hyper), (advantages[order], returns[order]))

    at = data.draw(st.integers(0, batch.mask.shape[1]))
    wider = {
        key: None
        if getattr(batch, key) is None
        else np.insert(getattr(batch, key), [at, at], 9, axis=1)
        for key in ("rewards", "turns", "values", "logp", "squares", "process", "parents")
    }
    padded = replace(batch, **wider, mask=np.insert(batch.mask, [at, at], False, axis=1))
    same(
        ours(name, padded, **hyper),
        (np.insert(advantages, [at, at], 0, axis=1), np.insert(returns, [at, at], 0, axis=1)),
    )


@each_name
@settings(max_examples=examples(25))
@given(data=st.data())
def test_a_trajectory_may_be_cut_into_rows(name: str, data: st.DataObject) -> None:
    """One row per turn gives what one row per trajectory gives."""
    batch, hyper = drawn(data, name)
    random = np.random.default_rng(0)
    turns = np.sort(random.integers(0, 4, batch.mask.shape), axis=1)
    whole = replace(
        batch, turns=turns, parents=random.integers(-1, 3, batch.mask.shape), trajectories=None
    )
    pieces = [(row, turn) for turn in (2, 0, 3, 1) for row in range(len(batch.groups))]
    rows = np.array([row for row, _ in pieces], dtype=np.int64)
    shape = (len(pieces), batch.mask.shape[1])
    cut = replace(
        whole,
        **{
            key: getattr(whole, key)[rows]
            for key in (
                "rewards",
                "turns",
                "values",
                "baseline",
                "logp",
                "squares",
                "process",
                "parents",
            )
        },
        mask=np.array(
            [whole.mask[row] & (whole.turns[row] == turn) for row, turn in pieces], dtype=bool
        ).reshape(shape),
        groups=[batch.groups[row] for row in rows],
        trajectories=rows.tolist(),
        parts={key: part[rows] for key, part in batch.parts.items()},
    )

    expected = ours(name, whole, **hyper)
    found = ours(name, cut, **hyper)
    joined = [np.zeros(batch.mask.shape), np.zeros(batch.mask.shape)]
    for at, row in enumerate(rows):
        for total, part in zip(joined, found, strict=True):
            total[row] += part[at]

    same((joined[0], joined[1]), expected)


@each_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *soak(torch.float64)])
@settings(max_examples=examples(25))
@given(data=st.data())
def test_finite_in_finite_out(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    batch, hyper = drawn(data, name)
    if "epsilon" in hyper:
        hyper["epsilon"] = data.draw(st.sampled_from([0.0, 1e-6, 1e-2]))

    size = data.draw(
        st.sampled_from([torch.finfo(dtype).max, 1e30, 1e-30, torch.finfo(dtype).tiny])
    )
    random = np.random.default_rng(data.draw(st.integers(0, 99)))

    def extreme(shape: tuple[int, ...]) -> np.ndarray:
        return random.choice(
            [0.0, 1.0, size] if name == "maxrl" else [0.0, 1.0, size, -size], shape
        )

    shape = batch.mask.shape
    names = batch.trajectories or range(len(batch.groups))
    score = {one: float(extreme(())) for one in names}
    batch = replace(
        batch,
        rewards=extreme(shape),
        values=extreme(shape),
        baseline=extreme(shape[:1]),
        logp=random.choice([0.0, -1e-30, -60.0, -size, size], shape),
        squares=random.choice([0.0, 1.0, size], shape),
        process=extreme(shape),
        parts={"right": np.array([score[one] for one in names])},
        weights={"right": 1e50},
    )
    for part in ours(name, batch, dtype=dtype, **hyper):
        assert np.isfinite(part).all()


@pytest.mark.parametrize("name", AGAINST_GROUP)
@settings(max_examples=examples(25))
@given(data=st.data())
def test_a_group_of_one_has_advantage_0(name: str, data: st.DataObject) -> None:
    batch, hyper = drawn(data, name)
    names = batch.trajectories or list(range(len(batch.groups)))
    alone = replace(batch, groups=list(names))
    if hyper.get("turn_baseline") == "none":
        hyper["turn_baseline"] = "place"
    assert not ours(name, alone, **hyper)[0].any()


@pytest.mark.parametrize(
    "name",
    [
        *(
            name
            for name in AGAINST_GROUP
            if name not in ("turn_returns", "tree_returns", "gigpo", "prime")
        ),
        "batch_norm",
        "reinforce_pp",
    ],
)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -0.7, 1e6 / 3])
def test_equal_rewards_give_exactly_0(name: str, reward: float) -> None:
    random = np.random.default_rng(3)
    mask = random.random((12, 9)) < 0.7
    mask[:, 4] = True
    rewards = np.zeros(mask.shape)
    for row in range(len(mask)):
        rewards[row, mask[row].nonzero()[0][-1]] = abs(reward) if name == "maxrl" else reward

    batch = Batch(
        rewards=rewards,
        mask=mask,
        groups=[row // 4 for row in range(12)],
        trajectories=None,
        turns=None,
        values=np.zeros(mask.shape),
        baseline=np.zeros(12),
        parts={"one": np.full(12, reward), "two": np.full(12, 0.3)},
        weights={"one": 1.0, "two": 0.7},
        logp=-random.exponential(size=mask.shape),
        squares=np.full(mask.shape, 0.5),
        process=np.full(mask.shape, 0.3),
        parents=None,
    )
    hyper = {"handle_zero_tail": False} if name == "otb" else {}
    assert not ours(name, batch, **hyper)[0].any()


@each_name
def test_what_can_be_trained_gets_no_gradient(name: str) -> None:
    ones = torch.ones(2, 3, requires_grad=True)
    more = {
        "values": ones,
        "logp": -ones,
        "sum_pi_squared": ones,
        "turn_ids": torch.zeros(2, 3).long(),
    }
    more |= {"baseline_rewards": torch.zeros(2), "reward_parts": {"a": torch.zeros(2)}}
    more |= {"process_rewards": ones, "turn_credit": ones, "turn_parents": -torch.ones(2, 3).long()}
    more |= {"turn_observations": torch.zeros(2, 3).long()}
    needed = {key: more[key] for key in ADVANTAGES[name].needs}
    found = advantage(
        name, token_rewards=ones * 2, mask=torch.ones(2, 3), group_ids=[0, 0], **needed
    )
    assert not found[0].requires_grad
    assert not found[1].requires_grad
