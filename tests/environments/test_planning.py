import numpy as np
import pytest

from agentevo.environments.frozen_lake import FrozenLakeConfig, FrozenLakeEnvironment
from agentevo.environments.planning import SuccessTables, random_play_success
from agentevo.environments.sokoban import SokobanConfig, SokobanEnvironment


def test_a_gamble_is_taken_only_when_time_is_short() -> None:
    """State 0: action 0 wins at once with 1/2 (else lost); action 1 walks to state 1, from which
    action 1 wins for sure."""
    win = np.array([[0.5, 0.0], [0.0, 1.0]])
    move = np.zeros((2, 2, 2))
    move[1, 0, 1] = 1.0
    tables = SuccessTables(win, move)
    assert [tables.optimal(0, limit) for limit in (0, 1, 2, 3)] == [0.0, 0.5, 1.0, 1.0]
    assert tables.best_action(0, 1) == 0 and tables.best_action(0, 2) == 1
    assert tables.random(0, 1) == 0.25 and tables.random(0, 2) == 0.25 + 0.5 * 0.5


def test_among_equals_the_soonest_success_is_taken() -> None:
    """Action 0 stays, action 1 wins: with three actions left both are worth 1."""
    tables = SuccessTables(np.array([[0.0], [1.0]]), np.array([[[1.0]], [[0.0]]]))
    assert tables.best_action(0, 3) == 1


def test_hopeless_for_want_of_time_still_goes_the_right_way() -> None:
    """A corridor of 5 to the right, one action left."""
    win = np.zeros((2, 5))
    move = np.zeros((2, 5, 5))
    for state in range(5):
        move[0, state, max(state - 1, 0)] = 1.0
        if state < 4:
            move[1, state, state + 1] = 1.0

    win[1, 4] = 1.0
    tables = SuccessTables(win, move)
    assert tables.optimal(0, 1) == 0.0 and tables.best_action(0, 1) == 1


@pytest.mark.slow
def test_random_play_agrees_with_the_exact_rate() -> None:
    config = SokobanConfig(max_actions=8)
    environment = SokobanEnvironment(config)
    for seed in (1, 2, 3):
        environment.reset(seed=seed)
        exact = environment.baselines().random
        assert exact is not None
        played = random_play_success(lambda: SokobanEnvironment(config), seed, 800)
        assert played == pytest.approx(exact, abs=4 * (exact * (1 - exact) / 800) ** 0.5)

    assert random_play_success(lambda: SokobanEnvironment(config), 1, 50) == random_play_success(
        lambda: SokobanEnvironment(config), 1, 50
    )


@pytest.mark.slow
def test_random_play_agrees_on_ice_over_many_seeds() -> None:
    config = FrozenLakeConfig()
    environment = FrozenLakeEnvironment(config)
    exact = []
    played = []
    for seed in range(400):
        environment.reset(seed=seed)
        exact.append(environment.baselines().random)
        played.append(random_play_success(lambda: FrozenLakeEnvironment(config), seed, 4))

    assert np.mean(played) == pytest.approx(
        np.mean(np.array(exact, dtype=float)), abs=4 * np.std(played) / 20
    )
