import random
import time
from collections import deque
from typing import Any

import numpy as np
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentevo.environments import sokoban
from agentevo.environments.sokoban import (
    PLAYER_BITS,
    SokobanConfig,
    SokobanEnvironment,
    SokobanRoom,
    distances,
    random_player_success,
)
from agentevo.errors import EnvironmentFailure
from examples import examples


def parse(drawing: str) -> tuple[SokobanRoom, int]:
    """A room and its state from RAGEN's symbols."""
    rows = drawing.splitlines()
    cells = "".join(rows)

    def bits(symbols: str) -> int:
        return sum(1 << index for index, symbol in enumerate(cells) if symbol in symbols)

    floor = {index for index, symbol in enumerate(cells) if symbol != "#"}
    player = next(index for index, symbol in enumerate(cells) if symbol in "PS")
    return SokobanRoom.build(len(rows), len(rows[0]), floor, bits("O√S")), bits(
        "X√"
    ) << PLAYER_BITS | player


class DrawnRoom(SokobanEnvironment):
    """The room of the test instead of a generated one."""

    drawing = ""

    def start(self, seed: int) -> None:
        super().start(seed)
        self.room, self._start = parse(self.drawing)
        self._state = self._start


def drawn(drawing: str, **options: Any) -> DrawnRoom:
    environment = DrawnRoom(SokobanConfig(**options))
    environment.drawing = drawing
    environment.reset(seed=0)
    return environment


def test_pushing_to_the_end_earns_eleven_less_a_tenth_per_action() -> None:
    environment = drawn("######\n#PX_O#\n######")
    assert environment.reset(seed=0)[0] == "######\n#PX_O#\n######"

    shown, reward, terminated, truncated, info = environment.step("right")
    assert (shown, terminated, truncated) == ("######\n#_PXO#\n######", False, False)
    assert reward == pytest.approx(-0.1) and info == {
        "valid": True,
        "effective": True,
        "success": False,
    }

    shown, last, terminated, _, info = environment.step("Right")
    assert shown == "######\n#__P√#\n######" and terminated and info["success"]
    assert reward + last == pytest.approx(11 - 0.1 * 2)


def test_boxes_on_and_off_targets() -> None:
    environment = drawn(
        "########\n#PXO__X#\n#____O_#\n########", dim=(4, 8), num_boxes=2, max_solution=9
    )
    assert environment.step("Right")[1] == pytest.approx(1 - 0.1)
    shown, reward, *_ = environment.step("Right")
    assert shown.splitlines()[1] == "#__SX_X#"
    assert reward == pytest.approx(-1 - 0.1)


def test_walls_and_boxes_block() -> None:
    blocked = "#####\n#PXX#\n#OO_#\n#####"
    environment = drawn(blocked, num_boxes=2, dim=(5, 5), max_solution=9)
    for action in ("Right", "Up", "Left"):  # two boxes in a row; the wall; the wall
        shown, reward, _, _, info = environment.step(action)
        assert shown == blocked and reward == pytest.approx(-0.1)
        assert info == {"valid": True, "effective": False, "success": False}
    assert environment.step("Down")[0] == "#####\n#_XX#\n#SO_#\n#####"


def test_an_invalid_action_costs_like_any_other() -> None:
    environment = drawn("#####\n#PXO#\n#####")
    assert environment.step("Push")[1] == pytest.approx(-0.1)


def test_other_alphabets_draw_the_same_room() -> None:
    rows = "#####\n#S√X#\n#_OO#\n#####"
    assert drawn(rows, alphabet="ascii").reset(seed=0)[0] == "#####\n#SVX#\n#_OO#\n#####"
    assert drawn(rows, alphabet="letters").reset(seed=0)[0] == "WWWWW\nW@CBW\nW.GGW\nWWWWW"


def test_words_say_what_the_room_shows() -> None:
    shown, _ = drawn("######\n#P__O#\n#_X__#\n######", view="words").reset(seed=0)
    for said in (
        "You: up wall, down floor, left wall, right floor",
        "Box one down, one right: up floor, down wall, left floor, right floor",
        "one up, two right",  # the target from the box
    ):
        assert said in shown


def test_a_lost_room_has_no_optimal_action() -> None:
    environment = drawn("#####\n#_XP#\n#_O_#\n#####")
    assert (
        environment.optimal_action() is None
    )  # the box is against the upper wall, no target there
    assert environment.solution_length() is None


def forward_distances(room: SokobanRoom, state: int) -> dict[int, int]:
    """Fewest actions from `state` to every state, stepping forwards."""
    found = {state: 0}
    queue = deque([state])
    while queue:
        here = queue.popleft()
        for action in range(4):
            there = room.step(here, action)
            if there not in found:
                found[there] = found[here] + 1
                queue.append(there)

    return found


@given(seed=st.integers(0, 10**6), num_boxes=st.sampled_from([1, 1, 2]))
@settings(max_examples=examples(25), deadline=None)
def test_distances_are_shortest(seed: int, num_boxes: int) -> None:
    environment = SokobanEnvironment(
        SokobanConfig(num_boxes=num_boxes, min_solution=2, max_solution=9)
    )
    environment.reset(seed=seed)
    state = environment._state
    ahead = forward_distances(environment.room, state)
    shortest = min(count for reached, count in ahead.items() if environment.room.is_solved(reached))
    assert environment.solution_length() == shortest
    assert 2 <= shortest <= 9
    assert not state >> PLAYER_BITS & environment.room.targets


@given(seed=st.integers(0, 10**6), data=st.data())
@settings(max_examples=examples(25), deadline=None)
def test_reversed_moves_are_moves(seed: int, data: st.DataObject) -> None:
    environment = SokobanEnvironment(SokobanConfig(num_boxes=2, max_solution=8))
    environment.reset(seed=seed)
    room = environment.room
    state = data.draw(st.sampled_from(sorted(distances(room))))
    for previous in room.before(state):
        assert previous != state and state in {room.step(previous, action) for action in range(4)}

    for action in range(4):
        following = room.step(state, action)
        if following != state:
            assert state in room.before(following)


def test_the_solver_recovers_from_random_actions() -> None:
    environment = SokobanEnvironment(SokobanConfig(max_actions=100))
    rng = random.Random(0)
    recovered = 0
    for seed in range(60):
        environment.reset(seed=seed)
        info: dict[str, Any] = {"success": False}
        for _ in range(3):
            if not info["success"]:
                _, _, _, _, info = environment.step(environment.random_action(rng))

        while not info["success"] and (action := environment.optimal_action()) is not None:
            before = environment.solution_length()
            _, _, _, _, info = environment.step(action)
            assert before is not None and environment.solution_length() == before - 1

        recovered += info["success"]

    assert recovered >= 40


@pytest.mark.slow
def test_difficulty_is_about_ragens() -> None:
    """6x6 with one box (shared/reference/recipes.md 1.9): random 12, 19, 27% in 5, 10, 20 actions;
    optimum 74-78% in 5, all in 10."""
    environment = SokobanEnvironment(SokobanConfig())
    rates: dict[int, list[float]] = {5: [], 10: [], 20: []}
    lengths = []
    for seed in range(400):
        environment.reset(seed=seed)
        lengths.append(environment.solution_length() or 0)
        for limit, values in rates.items():
            values.append(environment.baselines(limit).random or 0.0)

    for limit, known in ((5, 0.120), (10, 0.190), (20, 0.269)):
        assert np.mean(rates[limit]) == pytest.approx(known, abs=0.035)

    assert 0.65 < np.mean(np.array(lengths) <= 5) < 0.80
    assert max(lengths) <= 10


@pytest.mark.slow
def test_larger_rooms_are_about_ragens_larger() -> None:
    """The same table, 8x8 with two boxes: random 2.6% in 10 actions, optimum 45.7% in 5."""
    environment = SokobanEnvironment(
        SokobanConfig(dim=(8, 8), num_boxes=2, min_solution=3, max_solution=8)
    )
    rates = []
    lengths = []
    for seed in range(60):
        environment.reset(seed=seed)
        rates.append(environment.baselines(10).random or 0.0)
        lengths.append(distances(environment.room, 8)[environment._state])

    assert np.mean(rates) == pytest.approx(0.026, abs=0.02)
    assert 0.3 < np.mean(np.array(lengths) <= 5) < 0.7


def test_random_rate_by_hand_and_optimal_by_limit() -> None:
    environment = drawn("######\n#PX_O#\n######", max_solution=7)
    assert environment.baselines(1).random == 0.0
    assert environment.baselines(2).random == pytest.approx(1 / 16)

    # In three: right, right within the three with one idle action (left, up or down against a wall)
    # first, or up/down between.
    assert environment.baselines(3).random == pytest.approx(1 / 16 + 3 / 64 + 2 / 64)
    assert environment.baselines(1).optimal == 0.0
    assert environment.baselines(2).optimal == 1.0


@pytest.mark.slow
def test_sampled_rate_matches_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = SokobanEnvironment(SokobanConfig(min_solution=2, max_solution=3))
    environment.reset(seed=5)
    exact = environment.baselines(10).random
    assert (
        exact is not None
        and random_player_success(environment.room, environment._state, 10, max_states=1) is None
    )

    monkeypatch.setattr(sokoban, "EXACT_STATES", 1)
    sampled = environment.baselines(10).random
    assert sampled != exact  # so it was sampled
    assert sampled == pytest.approx(
        exact, abs=4 * (exact * (1 - exact) / sokoban.SAMPLED_PLAYS) ** 0.5
    )


def test_rooms_are_made_fast() -> None:
    environment = SokobanEnvironment(SokobanConfig())
    began = time.process_time()
    for seed in range(200):
        environment.reset(seed=seed)
    assert (time.process_time() - began) / 200 < 0.02


def test_impossible_rooms_are_refused() -> None:
    for wrong in (
        {"dim": [3, 6]},
        {"dim": [20, 20]},
        {"num_boxes": 5},
        {"dim": [4, 4], "num_boxes": 2},
        {"min_solution": 9},
        {"num_boxes": 3, "max_solution": 2},
    ):
        with pytest.raises(pydantic.ValidationError):
            SokobanConfig.model_validate(wrong)

    with pytest.raises(EnvironmentFailure, match="enlarge dim"):
        SokobanEnvironment(SokobanConfig(dim=(4, 4), min_solution=60, max_solution=60)).reset(
            seed=0
        )
