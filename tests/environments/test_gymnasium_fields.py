"""Gymnasium environments with a Dict observation and spaces of their own, as BrowserGym's are."""

from __future__ import annotations

import random
from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from agentevo import Observation
from agentevo.environments import make
from agentevo.environments.gymnasium_adapter import GymnasiumConfig
from agentevo.errors import ConfigError, EnvironmentFailure


class Unicode(spaces.Space[str]):
    """Any text. Nothing can be drawn from it."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


class AnyDict(spaces.Space[dict[str, Any]]):
    def contains(self, x: Any) -> bool:
        return isinstance(x, dict)


class AnyBox(spaces.Space[Any]):
    def contains(self, x: Any) -> bool:
        return isinstance(x, np.ndarray)


class Calls(Unicode):
    """The calls that a page allows."""

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return f"click('{self.np_random.integers(12, 14)}')"


class Page(gymnasium.Env[Any, str]):
    """A page with the buttons 12 and 13. The seed chooses the right one."""

    metadata: ClassVar[Any] = {"render_modes": None}  # type: ignore[misc]
    observation_space: ClassVar[Any] = spaces.Dict(  # type: ignore[misc]
        {
            "goal": Unicode(),
            "open_pages_urls": spaces.Sequence(Unicode()),
            "axtree_object": AnyDict(),
            "screenshot": AnyBox((-1, -1, 3), np.uint8),
            "last_action_error": Unicode(),
            "elapsed_time": spaces.Box(0, np.inf, dtype=float),
        }
    )
    action_space: ClassVar[Any] = Unicode()  # type: ignore[misc]
    pixels = np.uint8

    def reset(self, seed: int | None = None, *args: Any, **kwargs: Any) -> Any:
        super().reset(seed=seed)
        self.right = f"click('{12 + int(self.np_random.integers(2))}')"
        self.error = ""
        return self._seen(), {}

    def _seen(self) -> dict[str, Any]:
        return {
            "goal": f"Do {self.right}.",
            "open_pages_urls": ("file:///a.html",),
            "axtree_object": {"nodes": [{"bid": 12}, {"bid": 13}]},
            "screenshot": np.full((4, 6, 3), len(self.error), self.pixels),
            "last_action_error": self.error,
            "elapsed_time": np.asarray([0.5]),
        }

    def step(self, action: str) -> Any:
        is_call = action.startswith("click(")
        self.error = "" if is_call else f"ValueError: {action}"
        return self._seen(), float(action == self.right), is_call, False, {"valid": is_call}


class Playable(Page):
    action_space: ClassVar[Any] = Calls()  # type: ignore[misc]


class Torn(Page):
    pixels = np.float32  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _registered() -> Any:
    worlds = (Page, Playable, Torn)
    for world in worlds:
        gymnasium.register(f"browser/AgentEvo{world.__name__}-v0", entry_point=partial(world))
    yield
    for world in worlds:
        del gymnasium.registry[f"browser/AgentEvo{world.__name__}-v0"]


def page(world: str = "Page", **options: Any) -> GymnasiumConfig:
    return GymnasiumConfig(id=f"browser/AgentEvo{world}-v0", **options)


def reset(config: GymnasiumConfig) -> Any:
    return make(config).reset(seed=1)[0]


def test_chosen_fields_in_their_order_and_pictures_before_them() -> None:
    environment: Any = make(
        page(observation_fields=("last_action_error", "goal"), image_fields=("screenshot",))
    )
    assert environment.config.shows_images
    shown, _ = environment.reset(seed=3)
    assert isinstance(shown, Observation)
    first, goal = shown.text.splitlines()
    assert (first, goal[:13]) == ("last_action_error: ", "goal: Do clic")
    assert shown.images[0].shape == (4, 6, 3)

    other, reward, terminated, _, info = environment.step("jump")
    assert other.text.startswith("last_action_error: ValueError: jump\n")
    assert np.unique(other.images[0]).tolist() == [len("ValueError: jump")]
    assert (reward, terminated, info["valid"], info["effective"]) == (0.0, False, False, True)
    assert not environment.step("jump")[4]["effective"]  # neither text nor picture has changed

    right = goal.removeprefix("goal: Do ").removesuffix(".")
    _, reward, terminated, _, info = environment.step(right)
    assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_one_field_is_shown_alone_and_pictures_are_resized() -> None:
    goal = reset(page(observation_fields=("goal",)))
    assert goal.startswith("Do click")

    options: dict[str, Any] = {"observation_fields": ("goal",), "image_fields": ("screenshot",)}
    shown = reset(page(image_size=(3, 2), **options))
    assert shown.images[0].shape == (2, 3, 3)


def test_all_but_the_pictures_are_shown_if_no_field_is_chosen() -> None:
    shown = reset(page(image_fields=("screenshot",)))
    assert [line.partition(":")[0] for line in shown.text.splitlines()] == [
        "goal", "open_pages_urls", "axtree_object", "last_action_error", "elapsed_time",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"any number of numbers in one list in its field 'screenshot'.*its fields \(.*goal"),
        ({"observation_fields": ["screenshot"]}, "any number of numbers"),
        (
            {"observation_fields": ["gaol"]},
            r"observation_fields: .* no field 'gaol': it has .*goal",
        ),
        ({"image_fields": ["picture"]}, "image_fields: an observation of .* no field 'picture'"),
        ({"id": "FrozenLake-v1", "image_fields": ["a"]}, r"no field 'a': it has none, it is Discr"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(GymnasiumConfig.model_validate({"id": "browser/AgentEvoPage-v0", **options}))


def test_fields_are_refused_where_nothing_of_the_observation_is_shown() -> None:
    with pytest.raises(ValueError, match="observation=image shows no fields"):
        page(observation="image", image_fields=("screenshot",))


def test_a_picture_of_another_form_fails_the_attempt() -> None:
    environment: Any = make(page("Torn", image_fields=("screenshot",)))
    with pytest.raises(EnvironmentFailure, match=r"'screenshot' .* is \[4, 6, 3\] of float32"):
        environment.reset(seed=1)


def test_a_missing_field_fails_the_attempt() -> None:
    environment: Any = make(page(observation_fields=("goal",)))
    environment.reset(seed=1)
    environment._world.unwrapped._seen = lambda: {"url": ""}
    with pytest.raises(EnvironmentFailure, match="has no field 'goal', only url"):
        environment.step("jump")


def test_a_random_player_draws_from_a_space_of_another_package() -> None:
    environment: Any = make(page("Playable", observation_fields=("goal",)))
    environment.reset(seed=1)
    drawn = {environment.random_action(random.Random(seed)) for seed in range(20)}
    assert drawn == {"click('12')", "click('13')"}
    assert environment.random_action(random.Random(5)) == environment.random_action(
        random.Random(5)
    )

    silent: Any = make(page(observation_fields=("goal",)))
    with pytest.raises(EnvironmentFailure, match="has no random player"):
        silent.random_action(random.Random(0))
