import random
from collections.abc import Iterator
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pydantic
import pytest
from gymnasium import spaces
from optimal_play import play_optimally

from agentevo.environments import make, mean_baselines
from agentevo.environments.gymnasium_adapter import (
    GymnasiumConfig,
    GymnasiumEnvironment,
)
from agentevo.environments.gymnasium_views import as_text, picture_as_text
from agentevo.environments.step_results import read_step
from agentevo.errors import ConfigError

LAKE = GymnasiumConfig(
    id="FrozenLake-v1", action_names=("Left", "Down", "Right", "Up"), max_actions=100
)
FIRM = GymnasiumConfig(
    id="FrozenLake-v1",
    kwargs={"is_slippery": False},
    action_names=("Left", "Down", "Right", "Up"),
    max_actions=6,
)
TAXI = GymnasiumConfig(
    id="Taxi-v4",
    action_names=("South", "North", "East", "West", "Pickup", "Dropoff"),
    max_actions=20,
)


class Echo(gymnasium.Env[str, str]):
    """Say the password."""

    observation_space: ClassVar[spaces.Text] = spaces.Text(100)  # type: ignore[misc]
    action_space: ClassVar[spaces.Text] = spaces.Text(8, charset="abcdefgh")  # type: ignore[misc]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.password = "".join(self.np_random.choice(list("abc"), size=3))
        return f"Password {self.password}?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "h":
            return "Out of time.", 0.0, False, True, {}
        return "Thanks.", 1.0, True, False, {"is_success": action == self.password}


class Graph(Echo):
    action_space = spaces.Graph(spaces.Discrete(2), None)  # type: ignore[misc, assignment]


class Camera(Echo):
    observation_space = spaces.Box(0, 255, (96, 96, 3), np.uint8)  # type: ignore[misc, assignment]


class Old(gymnasium.Env[Any, Any]):
    """The API of gym before 0.26: `seed`, a reset without one, and a step of four values."""

    observation_space: ClassVar[Any] = spaces.Dict(  # type: ignore[misc]
        {"place": spaces.Box(-9, 9, (2,)), "steps": spaces.Discrete(9)}
    )
    action_space: ClassVar[Any] = spaces.Dict(  # type: ignore[misc]
        {"by": spaces.Box(-1.0, 1.0, (2,)), "fire": spaces.Discrete(2)}
    )

    def seed(self, seed: int | None = None) -> list[int]:
        self.start = np.array([seed or 0, 0.0])
        return [seed or 0]

    def reset(self) -> Any:  # type: ignore[override]
        self.place = self.start.copy()
        self.steps = 0
        return self._seen()

    def _seen(self) -> Any:
        return {"place": self.place, "steps": self.steps}

    def step(self, action: Any) -> Any:  # type: ignore[override]
        assert self.action_space.contains(action)
        self.place = self.place + action["by"]
        self.steps += 1
        info = {"TimeLimit.truncated": self.steps == 3 and not action["fire"]}
        return self._seen(), float(action["fire"]), self.steps == 3 or action["fire"] == 1, info


class OldSeeded(Old):
    def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        self.seed(seed)
        return super().reset()


WORLDS: dict[str, type[gymnasium.Env[Any, Any]]] = {
    "AgentEvoEcho-v0": Echo,
    "AgentEvoGraph-v0": Graph,
    "AgentEvoCamera-v0": Camera,
    "AgentEvoOld-v0": Old,
    "AgentEvoOldSeeded-v0": OldSeeded,
}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    for name, world in WORLDS.items():
        gymnasium.register(name, entry_point=world)
    yield
    for name in WORLDS:
        del gymnasium.registry[name]


def test_drawn_environment_and_named_actions() -> None:
    environment = make(FIRM)
    shown, _ = environment.reset(seed=0)
    assert shown.strip() == "[S]FFF\nFHFH\nFFFH\nHFFG"
    shown, _, _, _, info = environment.step("down")
    assert shown.splitlines()[-4:] == ["SFFF", "[F]HFH", "FFFH", "HFFG"] and info["effective"]
    assert "Left, Down, Right, Up" in environment.instructions


def test_solver_and_exact_rates_from_published_transitions() -> None:
    assert mean_baselines(FIRM, [0]).optimal == 1.0
    assert mean_baselines(FIRM, [0], 5).optimal == 0.0

    rates = mean_baselines(LAKE, [0])
    assert rates.optimal == pytest.approx(
        0.744, abs=0.002
    )  # the 4x4 map's known optimum with 100 actions
    assert rates.random == pytest.approx(0.0139, abs=0.0005)

    for config in (FIRM, TAXI):
        environment = make(config)
        environment.reset(seed=3)
        assert play_optimally(environment, config.max_actions)["success"]


def test_cliff_succeeds_on_termination() -> None:
    config = GymnasiumConfig(id="CliffWalking-v1", success_on="termination", max_actions=13)
    assert mean_baselines(config, [0]).optimal == 1.0
    assert mean_baselines(config, [0], 12).optimal == 0.0
    never = GymnasiumConfig(id="CliffWalking-v1", max_actions=13)  # all its rewards are negative
    assert mean_baselines(never, [0]).optimal == 0.0


@pytest.mark.slow
def test_unpublished_transitions_are_sampled() -> None:
    config = GymnasiumConfig(id="Blackjack-v1", action_names=("stick", "hit"))
    rates = mean_baselines(config, range(5))
    assert rates.optimal is None and rates.random is not None and 0 <= rates.random < 0.6
    environment = make(config)
    shown, _ = environment.reset(seed=1)
    assert shown.count(",") == 2 and environment.optimal_action() is None


def test_max_actions_replaces_gymnasiums_limit() -> None:
    environment = make(LAKE.model_copy(update={"max_actions": 130, "kwargs": {"map_name": "8x8"}}))
    environment.reset(seed=1)
    ends = [environment.step("Up")[2:4] for _ in range(130)]
    assert ends == [(False, False)] * 129 + [(False, True)]


def test_text_environment() -> None:
    environment = GymnasiumEnvironment(
        GymnasiumConfig(id="AgentEvoEcho-v0", instructions="Repeat the password.", max_actions=3)
    )
    shown, _ = environment.reset(seed=4)
    password = shown.removeprefix("Password ").removesuffix("?")

    assert environment.reset(seed=4)[0] == shown
    assert environment.step("XYZ")[4] == {
        "valid": False,
        "effective": False,
        "success": False,
    }  # letters outside the space
    assert environment.step(password) == (
        "Thanks.",
        1.0,
        True,
        False,
        {"valid": True, "effective": True, "success": True},
    )

    environment.reset(seed=4)
    assert not environment.step("hh")[4][
        "success"
    ]  # the environment's own word wins over the reward

    environment.reset(seed=4)
    assert environment.step("h")[2:4] == (False, True)  # truncated by the environment
    assert environment.instructions == "Repeat the password."

    rates = environment.baselines()
    assert rates.random is None and rates.optimal is None
    assert spaces.Text(8, charset="abcdefgh").contains(environment.random_action(random.Random(0)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "FrozenLak-v1"}, "FrozenLak-v1"),
        ({"id": "no_such_module:World-v0"}, "no_such_module"),
        ({"id": "FrozenLake-v1", "kwargs": {"wetness": 3}}, "wetness"),
        ({"id": "FrozenLake-v1", "action_names": ["Left", "Right"]}, "action_names"),
        ({"id": "AgentEvoGraph-v0"}, "only actions of Discrete, Text, Box"),
        ({"id": "AgentEvoCamera-v0"}, "27648 numbers in one list, as a picture"),
        ({"id": "Pendulum-v1", "action_names": ["a"]}, "action_names is for Discrete actions"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(GymnasiumConfig.model_validate(options))


def test_id_is_needed() -> None:
    with pytest.raises(pydantic.ValidationError, match="id"):
        GymnasiumConfig.model_validate({})


def test_observations_as_text() -> None:
    assert as_text({"place": np.array([1, 2]), "mission": "go"}) == "place: 1 2\nmission: go"
    assert as_text((3, np.float32(0.25), np.int64(7))) == "3, 0.25, 7"
    assert as_text(np.array([[1, 0], [0, 1]])) == "1 0\n0 1"
    assert picture_as_text("a\x1b[41mb\x1b[0mc\n") == "a[b]c"


def test_an_action_of_numbers_is_json_and_what_is_wrong_with_it_is_shown() -> None:
    environment = make(GymnasiumConfig(id="Pendulum-v1", max_actions=4))
    assert environment.instructions == (
        "You play Pendulum-v1. An action is JSON: a list of 1 number within [-2, 2]."
    )
    before, _ = environment.reset(seed=1)
    shown, reward, _, _, info = environment.step("[2.5]")
    assert shown == (
        "Invalid action: the action is 2.5: give a list of 1 number within [-2, 2].\n" + before
    )
    assert (reward, info["valid"]) == (0.0, False)

    shown = read_step(environment.step('"\\ud800"')).observation
    assert shown.startswith("Invalid action: ") and shown.encode()

    shown, reward, _, _, info = environment.step("[-1.25]")
    assert shown.count(" ") == 2 and reward < 0 and info["valid"] and shown != before
    read = environment.random_action(random.Random(3))
    assert environment.step(read)[4]["valid"]
    assert environment.random_action(random.Random(3)) == read


@pytest.mark.parametrize("name", ["AgentEvoOld-v0", "AgentEvoOldSeeded-v0"])
def test_a_world_of_the_old_api_plays(name: str) -> None:
    environment = make(GymnasiumConfig(id=name, max_actions=5))
    assert environment.reset(seed=4)[0] == "place: 4 0\nsteps: 0"
    shown, reward, terminated, truncated, _ = environment.step('{"by": [0.5, -1], "fire": 0}')
    assert shown == "place: 4.5 -1\nsteps: 1"
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert environment.step('{"by": [0, 0], "fire": 1}')[1:4] == (1.0, True, False)

    environment.reset(seed=4)
    ends = [environment.step('{"by": [0, 0], "fire": 0}')[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]
    assert environment.baselines().random is not None
