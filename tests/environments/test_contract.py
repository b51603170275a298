"""What every environment of ours promises: seeds, limits, invalid actions, configs by type."""

import os
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optimal_play import play_optimally

from agentevo.environments import EnvironmentConfig, make, mean_baselines
from agentevo.environments.bandit import BanditConfig
from agentevo.environments.coins import CoinsConfig
from agentevo.environments.countdown import CountdownConfig
from agentevo.environments.frozen_lake import FrozenLakeConfig
from agentevo.environments.gymnasium_adapter import GymnasiumConfig
from agentevo.environments.sokoban import SokobanConfig
from agentevo.errors import EnvironmentFailure, UnknownNameError
from agentevo.types import Baselines
from examples import examples

ENVIRONMENTS: list[EnvironmentConfig] = [
    BanditConfig(),
    CoinsConfig(rule="match"),
    CoinsConfig(rule="hidden"),
    CoinsConfig(rule="table", names="colours"),
    CoinsConfig(rule="value", num_coins=5, max_actions=3),
    CountdownConfig(operations="+-*/"),
    CountdownConfig(num_numbers=4, max_actions=2),
    FrozenLakeConfig(),
    FrozenLakeConfig(size=6, slippery=False, alphabet="ascii", view="words"),
    SokobanConfig(),
    SokobanConfig(dim=(7, 8), num_boxes=2, min_solution=3, max_solution=9, alphabet="letters"),
    SokobanConfig(view="words"),
    FrozenLakeConfig(observation="image"),
    SokobanConfig(observation="both", cell_pixels=8),
    GymnasiumConfig(id="FrozenLake-v1", action_names=("Left", "Down", "Right", "Up")),
]
seeds = st.integers(0, 2**31 - 1)
every_environment = pytest.mark.parametrize("config", ENVIRONMENTS, ids=lambda config: config.type)


def play(config: EnvironmentConfig, seed: int, player: int) -> list[Any]:
    """Everything that a random player sees."""
    environment = make(config)
    rng = random.Random(player)
    seen: list[Any] = [environment.reset(seed=seed)]
    while True:
        action = environment.random_action(rng)
        step = environment.step(action)
        seen.append((action, step))
        if step[2] or step[3]:
            return seen


@every_environment
@given(seed=seeds)
@settings(max_examples=examples(10), deadline=None)
def test_a_seed_fixes_the_whole_episode(config: EnvironmentConfig, seed: int) -> None:
    assert play(config, seed, player=1) == play(config, seed, player=1)


@every_environment
def test_reset_starts_afresh(config: EnvironmentConfig) -> None:
    environment = make(config)
    fresh = play(config, 11, player=3)
    environment.reset(seed=5)
    environment.step(environment.random_action(random.Random(0)))
    assert environment.reset(seed=11) == fresh[0]
    for action, step in fresh[1:]:
        assert environment.step(action) == step


@every_environment
def test_seeds_give_different_environments(config: EnvironmentConfig) -> None:
    environment = make(config)
    shown = {repr(environment.reset(seed=seed)[0]) for seed in range(60)}
    assert len(shown) > 1 or config.type == "gymnasium"


@every_environment
def test_an_invalid_action_changes_nothing_and_counts(config: EnvironmentConfig) -> None:
    environment = make(config.model_copy(update={"max_actions": 2}))
    before, _ = environment.reset(seed=3)
    for last in (False, True):
        after, reward, terminated, truncated, info = environment.step("I would rather not.")
        assert (after, terminated, truncated) == (before, False, last)
        assert reward <= 0
        assert info == {"valid": False, "effective": False, "success": False}


@every_environment
def test_names_are_read_without_case_and_space(config: EnvironmentConfig) -> None:
    environment = make(config)
    environment.reset(seed=4)
    action = environment.random_action(random.Random(1))
    plain = environment.step(action)
    environment.reset(seed=4)
    assert environment.step(f" \n{action.upper()}\t") == plain
    assert plain[4]["valid"]


@every_environment
def test_no_step_outside_an_episode(config: EnvironmentConfig) -> None:
    environment = make(config)
    with pytest.raises(EnvironmentFailure, match="reset"):
        environment.step("Left")

    play_on = make(config.model_copy(update={"max_actions": 1}))
    play_on.reset(seed=0)
    play_on.step("I would rather not.")
    with pytest.raises(EnvironmentFailure, match="reset"):
        play_on.step("Left")


@every_environment
def test_baselines_leave_the_episode_alone(config: EnvironmentConfig) -> None:
    fresh = play(config, 21, player=8)
    environment = make(config)
    assert environment.reset(seed=21) == fresh[0]
    first = environment.baselines()
    for action, step in fresh[1:]:
        assert environment.step(action) == step
        assert environment.baselines() == first  # always those of the start


@every_environment
def test_baselines_are_rates_and_ordered(config: EnvironmentConfig) -> None:
    few = mean_baselines(config, range(20), 3)
    many = mean_baselines(config, range(20), 12)
    for rates in (few, many):
        assert rates.random is not None and rates.optimal is not None
        assert 0 <= rates.random <= rates.optimal <= 1
    assert few.random is not None and many.random is not None and few.random <= many.random


@pytest.mark.parametrize(
    "config",
    [config for config in ENVIRONMENTS if config.type not in ("frozen_lake", "gymnasium")],
    ids=lambda c: c.type,
)
@given(seed=seeds)
@settings(max_examples=examples(20), deadline=None)
def test_the_solver_solves(config: EnvironmentConfig, seed: int) -> None:
    environment = make(config)
    environment.reset(seed=seed)
    assert play_optimally(environment, config.max_actions)["success"]


def test_a_reset_without_seed_draws_one() -> None:
    environment = make(FrozenLakeConfig(size=8))
    assert len({environment.reset()[0] for _ in range(5)}) > 1


def test_every_option_is_explained() -> None:
    for config in {type(config) for config in ENVIRONMENTS}:
        unexplained = [
            name
            for name, field in config.model_fields.items()
            if name != "type" and not field.description
        ]
        assert not unexplained, config.__name__


def test_mean_baselines_averages_and_keeps_the_unknown() -> None:
    environment = make(FrozenLakeConfig())
    rates = []
    for seed in (1, 2, 3):
        environment.reset(seed=seed)
        rates.append(environment.baselines(7).optimal)
    assert mean_baselines(FrozenLakeConfig(), [1, 2, 3], 7).optimal == pytest.approx(
        sum(rate for rate in rates if rate is not None) / 3
    )

    with pytest.raises(ValueError, match="seed"):
        mean_baselines(FrozenLakeConfig(), [])

    assert mean_baselines(GymnasiumConfig(id="Blackjack-v1"), [1]).optimal is None
    assert Baselines(random=None, optimal=None) == Baselines(random=None, optimal=None)


def test_unknown_environment_is_named() -> None:
    class Nowhere(EnvironmentConfig):
        type: str = "sokobann"

    with pytest.raises(UnknownNameError, match="did you mean 'sokoban'"):
        make(Nowhere())


@pytest.mark.slow
def test_importing_the_room_is_light() -> None:
    heavy = "{'torch', 'transformers', 'reasoning_gym', 'textarena'}"
    code = (
        f"import sys, agentevo.environments; sys.exit(str({heavy} & set(sys.modules)) if "
        f"{heavy} & set(sys.modules) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
