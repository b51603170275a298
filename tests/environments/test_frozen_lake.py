from typing import Any

import numpy as np
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optimal_play import play_optimally

from agentevo.environments import mean_baselines
from agentevo.environments.frozen_lake import FrozenLakeConfig, FrozenLakeEnvironment, LakeMap
from examples import examples

NUM_MAPS = 256


class DrawnLake(FrozenLakeEnvironment):
    """The map of the test instead of a random one."""

    drawing = "P_\nO_\n_G"

    def start(self, seed: int) -> None:
        super().start(seed)
        tiles = self.drawing.replace("\n", "")
        size = len(self.drawing.splitlines()[0])
        holes = frozenset(index for index, tile in enumerate(tiles) if tile == "O")
        self.lake = LakeMap(size, holes, tiles.index("P"), tiles.index("G"))
        self._tile = self.lake.start


def drawn(drawing: str, **options: Any) -> DrawnLake:
    environment = DrawnLake(FrozenLakeConfig(**options))
    environment.drawing = drawing
    environment.reset(seed=0)
    return environment


def test_moves_edges_hole_and_goal() -> None:
    environment = drawn("P__\n_O_\n__G", slippery=False)
    assert environment.reset(seed=0)[0] == "P__\n_O_\n__G"
    assert environment.step("Up") == (
        "P__\n_O_\n__G",
        0.0,
        False,
        False,
        {"valid": True, "effective": False, "success": False},
    )
    assert environment.step("down")[0] == "___\nPO_\n__G"

    environment.step("Down")
    assert environment.step("Right")[0] == "___\n_O_\n_PG"
    assert environment.step("Right") == (
        "___\n_O_\n__√",
        1.0,
        True,
        False,
        {"valid": True, "effective": True, "success": True},
    )

    environment.reset(seed=0)
    environment.step("Right")
    assert environment.step("Down") == (
        "___\n_X_\n__G",
        0.0,
        True,
        False,
        {"valid": True, "effective": True, "success": False},
    )


def test_ascii_alphabet_on_the_goal() -> None:
    environment = drawn("PG\n__", slippery=False, alphabet="ascii")
    assert environment.step("Right")[0] == "_V\n__"
    assert "√" not in environment.instructions


@pytest.mark.slow
def test_ice_slips_to_the_sides_only() -> None:
    environment = drawn("_____\n_____\n__P__\n____G\n_____", max_actions=1)
    ends: dict[str, int] = {}
    for seed in range(3000):
        environment.reset(seed=seed)
        shown = environment.step("Left")[0]
        ends[shown] = ends.get(shown, 0) + 1

    places = {divmod(shown.replace("\n", "").index("P"), 5): count for shown, count in ends.items()}
    assert set(places) == {(2, 1), (1, 2), (3, 2)}
    assert all(
        count == pytest.approx(1000, abs=110) for count in places.values()
    )  # 4 standard errors


def test_exact_rates_by_hand() -> None:
    straight = drawn("PG\n__", slippery=False)
    assert straight.baselines(1).optimal == 1.0
    assert straight.baselines(1).random == pytest.approx(1 / 4)

    # Two actions: Right at once; or Left/Up (stay) then Right; Down then never in one.
    assert straight.baselines(2).random == pytest.approx(1 / 4 + 2 / 4 * 1 / 4)

    icy = drawn("PG\n__", slippery=True)
    # Right, Up and Down each go right with 1/3; Left never does.
    assert icy.baselines(1).optimal == pytest.approx(1 / 3)
    assert icy.baselines(1).random == pytest.approx(3 / 4 / 3)


def best_by_enumeration(environment: FrozenLakeEnvironment, tile: int, actions_left: int) -> float:
    """Expectimax without tables."""
    lake = environment.lake
    if tile == lake.goal:
        return 1.0
    if tile in lake.holes or actions_left == 0:
        return 0.0

    return max(
        sum(
            best_by_enumeration(
                environment, lake.neighbour(tile, (action + turn) % 4), actions_left - 1
            )
            for turn in (-1, 0, 1)
        )
        / 3
        for action in range(4)
    )


@given(seed=st.integers(0, 10**6))
@settings(max_examples=examples(15), deadline=None)
def test_optimum_equals_expectimax(seed: int) -> None:
    environment = FrozenLakeEnvironment(FrozenLakeConfig(size=3, max_actions=4))
    environment.reset(seed=seed)
    assert environment.baselines().optimal == pytest.approx(
        best_by_enumeration(environment, environment.lake.start, 4)
    )


@given(seed=st.integers(0, 2**31 - 1), size=st.integers(2, 9), frozen=st.floats(0.3, 1.0))
@settings(max_examples=examples(60), deadline=None)
def test_maps_are_solvable(seed: int, size: int, frozen: float) -> None:
    environment = FrozenLakeEnvironment(
        FrozenLakeConfig(
            size=size, frozen_probability=frozen, slippery=False, max_actions=size * size
        )
    )
    shown, _ = environment.reset(seed=seed)
    assert shown.count("P") == shown.count("G") == 1 and len(shown) == size * (size + 1) - 1
    assert play_optimally(environment, size * size)["success"]


def test_the_solver_takes_the_shortest_way_on_firm_ice() -> None:
    environment = drawn("P___\nOOO_\n____\nG___", slippery=False, max_actions=50)
    ways = []
    while not ways or not ways[-1][2]:
        action = environment.optimal_action()
        assert action is not None
        ways.append(environment.step(action))
    assert len(ways) == 9


def test_frozen_share_is_as_asked() -> None:
    environment = FrozenLakeEnvironment(FrozenLakeConfig(size=12))
    holes = []
    for seed in range(100):
        environment.reset(seed=seed)
        holes.append(len(environment.lake.holes) / 144)
    assert np.mean(holes) == pytest.approx(0.2, abs=0.02)


@pytest.mark.slow
def test_rates_match_the_published_calibration() -> None:
    """256 of RAGEN's maps, slippery (shared/reference/recipes.md 1.9); 3 standard errors of the
    difference of two samples are allowed."""
    published = {5: (0.157, 0.290), 10: (0.212, 0.483), 20: (0.264, 0.698)}
    for limit, (by_chance, best) in published.items():
        environment = FrozenLakeEnvironment(FrozenLakeConfig())
        rates = []
        for seed in range(NUM_MAPS):
            environment.reset(seed=seed)
            rates.append(environment.baselines(limit))

        for known, ours in (
            (by_chance, [rate.random for rate in rates]),
            (best, [rate.optimal for rate in rates]),
        ):
            values = np.array(ours, dtype=float)
            assert values.mean() == pytest.approx(
                known, abs=3 * values.std() * (2 / NUM_MAPS) ** 0.5
            )


@pytest.mark.slow
def test_played_rates_match_the_tables() -> None:
    """The solver and a random player, played on 1000 lakes with their slips, against the exact
    means; 4 standard errors."""
    import random

    config = FrozenLakeConfig()
    environment = FrozenLakeEnvironment(config)
    wins = {"optimal": 0, "random": 0}
    rng = random.Random(0)
    for player in wins:
        for seed in range(1000):
            environment.reset(seed=seed)
            over = False
            while not over:
                action = (
                    environment.optimal_action()
                    if player == "optimal"
                    else environment.random_action(rng)
                )
                assert action is not None
                _, _, terminated, truncated, info = environment.step(action)
                over = terminated or truncated

            wins[player] += info["success"]

    exact = mean_baselines(config, range(1000))
    for player, known in (("optimal", exact.optimal), ("random", exact.random)):
        assert known is not None
        assert wins[player] / 1000 == pytest.approx(
            known, abs=4 * (known * (1 - known) / 1000) ** 0.5
        )


def test_words_say_what_the_map_shows() -> None:
    environment = drawn("P__\nO__\n__G", slippery=False, view="words")
    shown, _ = environment.reset(seed=0)
    assert shown.startswith("Goal two down, two right; left edge, down hole, right ice, up edge")
    assert shown.count("one down, same column") == 1  # the hole
    environment.step("Right")
    assert environment.step("Down")[0].startswith(
        "Goal one down, one right; left hole, down ice, right ice, up ice"
    )
    assert "fell" in environment.step("Left")[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 1},
        {"frozen_probability": 0},
        {"alphabet": "runes"},
        {"slipery": True},
        {"max_actions": 0},
    ],
)
def test_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError):
        FrozenLakeConfig.model_validate(wrong)
