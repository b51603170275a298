import random

import numpy as np
import pydantic
import pytest

from agentevo.environments import make
from agentevo.environments.textarena_adapter import TextArenaConfig, listed_actions
from agentevo.errors import ConfigError, EnvironmentFailure

pytest.importorskip("textarena")
HANOI = TextArenaConfig(
    game="TowerOfHanoi-v0", actions=tuple(f"[{a} {b}]" for a in "ABC" for b in "ABC" if a != b)
)
TICTACTOE = TextArenaConfig(game="TicTacToe-v0", num_players=2)
SOLUTION = ("A C", "A B", "C B", "A C", "B A", "B C", "A C")


def test_a_puzzle_for_one() -> None:
    environment = make(HANOI)
    shown, _ = environment.reset(seed=1)
    assert "Tower of Hanoi" in shown and "A: [3, 2, 1]" in shown

    for count, move in enumerate(SOLUTION, start=1):
        shown, reward, terminated, truncated, info = environment.step(
            move
        )  # TextArena's own wrapper adds the brackets
        assert info["valid"] and info["effective"]
        assert (
            "Tower of Hanoi" not in shown and move not in shown.splitlines()[0][:6]
        )  # only what is new
        assert terminated is (count == len(SOLUTION)) and not truncated

    assert reward == 1.0 and info["success"]


def test_invalid_actions_never_end_the_game() -> None:
    environment = make(HANOI.model_copy(update={"max_actions": 5}))
    environment.reset(seed=1)
    for count in range(1, 6):
        shown, reward, terminated, truncated, info = environment.step("lift all")
        assert (
            "A: [3, 2, 1]" in shown and reward == 0 and not terminated and truncated is (count == 5)
        )
        assert info == {"valid": False, "effective": False, "success": False}


@pytest.mark.parametrize("seat", [0, 1])
def test_a_game_for_two_against_a_seeded_random_player(seat: int) -> None:
    config = TICTACTOE.model_copy(update={"seat": seat})

    def play(seed: int, player: int) -> list[object]:
        environment = make(config)
        rng = random.Random(player)
        seen: list[object] = [environment.reset(seed=seed)]
        while True:
            step = environment.step(environment.random_action(rng))
            seen.append(step)
            if step[2] or step[3]:
                return seen

    games = [play(seed, player=seed) for seed in range(12)]
    assert games == [play(seed, player=seed) for seed in range(12)]
    assert len({str(game) for game in games}) > 6

    ends = [game[-1] for game in games]
    assert all(end[2] for end in ends)  # type: ignore[index]
    assert {end[1] for end in ends} <= {-1.0, 0.0, 1.0}  # type: ignore[index]
    assert all(end[4]["success"] is (end[1] == 1.0) for end in ends)  # type: ignore[index]
    assert any(end[4]["success"] for end in ends)  # type: ignore[index]


def test_the_opponent_moves_first_from_seat_one() -> None:
    shown, _ = make(TICTACTOE.model_copy(update={"seat": 1})).reset(seed=0)
    board = shown[shown.rindex("Current Board") :]
    assert "| O" in board or " O |" in board
    assert len(listed_actions(shown)) == 8


@pytest.mark.slow
def test_random_rate_is_known_where_actions_are() -> None:
    environment = make(TICTACTOE)
    environment.reset(seed=0)
    rate = environment.baselines().random
    assert rate is not None and 0.3 < rate < 0.9  # the first player wins 58% of random games
    assert environment.baselines().optimal is None and environment.optimal_action() is None

    guess = make(TextArenaConfig(game="TowerOfHanoi-v0"))
    guess.reset(seed=0)
    assert guess.baselines().random is None

    with pytest.raises(EnvironmentFailure, match="set `actions`"):
        guess.random_action(random.Random(0))


def test_global_random_numbers_are_left_alone() -> None:
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.rand()
    random.seed(5)
    np.random.seed(5)

    environment = make(TICTACTOE)
    environment.reset(seed=9)
    environment.step("[4]")
    assert (random.random(), np.random.rand()) == expected


def test_episodes_do_not_disturb_each_other() -> None:
    config = TextArenaConfig(
        game="2048-v0-ultra-easy", actions=("[up]", "[down]", "[left]", "[right]")
    )
    moves = ["[up]", "[left]", "[down]", "[right]"] * 3

    def boards(between: int) -> list[str]:
        environment = make(config)
        other = make(config)
        seen = [environment.reset(seed=3)[0]]
        for move in moves:
            if between:
                other.reset(seed=between)
                other.step(move)
            step = environment.step(move)
            seen.append(step[0])
            if step[2]:
                break

        return seen

    assert boards(0) == boards(7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"game": "TicTacTo-v0"}, "did you mean 'TicTacToe-v0'"),
        ({"game": "TicTacToe-v0"}, "num_players=1"),
        ({"game": "Nim-v0", "num_players": 2}, "set `actions`"),
        ({"game": "TowerOfHanoi-v0", "kwargs": {"colour": 1}}, "colour"),
    ],
)
def test_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(TextArenaConfig.model_validate(options))


def test_seat_must_exist() -> None:
    with pytest.raises(pydantic.ValidationError, match="seat=1"):
        TextArenaConfig(game="TicTacToe-v0", seat=1)


def test_listed_actions() -> None:
    assert listed_actions("Available Moves: '[0]', '[1]'\nNow\nAvailable moves: '[3]', '[3]'") == [
        "[3]"
    ]
    assert listed_actions("Your available actions are: '[check]', '[bet]'") == ["[check]", "[bet]"]
    assert listed_actions("Type [A B] to move.") == []
