"""Gymnasium environments whose observation is the frame that they render."""

from __future__ import annotations

from importlib.util import find_spec
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from agentevo import Observation
from agentevo.environments import make, mean_baselines
from agentevo.environments.gymnasium_adapter import GymnasiumConfig
from agentevo.environments.observation import Picture, read_observation
from agentevo.errors import ConfigError, EnvironmentFailure


class Lamp(gymnasium.Env):
    """A lamp that the player makes brighter; 3 is bright enough. A frame is 6 x 4 pixels."""

    metadata: ClassVar = {"render_modes": ["rgb_array"]}
    observation_space = spaces.Discrete(9)
    action_space = spaces.Discrete(2)
    renders = 0

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.level = int(self.np_random.integers(3))
        return self.level, {}

    def step(self, action):
        self.level += int(action)
        return self.level, float(self.level >= 3), self.level >= 3, False, {}

    def render(self):
        assert self.render_mode == "rgb_array"
        Lamp.renders += 1
        frame = np.full((4, 6, 3), 60 * self.level, np.uint8)
        frame[:2] //= 2
        return frame


class Grey(Lamp):
    def render(self):
        return super().render()[..., 0]


class Unpainted(Lamp):
    def render(self):
        raise gymnasium.error.DependencyNotInstalled(
            'pygame is not installed, run `pip install "gymnasium[toy-text]"`'
        )


class Dull(Lamp):
    metadata: ClassVar = {"render_modes": ["human"]}


class Filmed(Lamp):
    """Returns an observation in a form with images."""

    action_space = spaces.Box(-1.0, 1.0, (1,))

    def reset(self, *, seed=None, options=None):
        return [{"type": "text", "text": "at "}, {"type": "image", "image": b"0"}], {}

    def step(self, action):
        return {"obs_str": "<image>", "multi_modal_data": {"<image>": [b"1"]}}, 0.0, False, {}


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr("agentevo.environments.gymnasium_frames._rendered", set())
    worlds = {f"AgentEvo{world.__name__}-v0": world for world in (Lamp, Grey, Unpainted, Dull)}
    worlds["AgentEvoFilmed-v0"] = Filmed
    for name, world in worlds.items():
        gymnasium.register(name, entry_point=world)
    yield
    for name in worlds:
        del gymnasium.registry[name]


def lamp(world="Lamp", observation="image", **options):
    return GymnasiumConfig(id=f"AgentEvo{world}-v0", observation=observation, **options)


def frame_of(observation):
    (image,) = observation.images
    return image


def test_the_observation_is_the_rendered_frame():
    environment = make(lamp())
    shown, _ = environment.reset(seed=1)
    level = environment._world.unwrapped.level
    assert isinstance(shown, Observation) and shown.text == ""
    assert frame_of(shown).tolist() == [
        [[30 * level] * 3] * 6,
        [[30 * level] * 3] * 6,
        [[60 * level] * 3] * 6,
        [[60 * level] * 3] * 6,
    ]

    same, _, _, _, info = environment.step("0")
    assert np.array_equal(frame_of(same), frame_of(shown)) and not info["effective"]
    other, _, _, _, info = environment.step("1")
    assert not np.array_equal(frame_of(other), frame_of(shown)) and info["effective"]
    assert frame_of(shown)[3, 0, 0] == 60 * level  # a copy, whatever is rendered later


def test_both_is_the_frame_and_the_observation_as_text():
    shown, _ = make(lamp(observation="both")).reset(seed=1)
    assert shown.text in ("0", "1", "2")
    assert frame_of(shown)[3, 0, 0] == 60 * int(shown.text)


def test_a_frame_is_resized_to_width_and_height():
    shown, _ = make(lamp(image_size=(3, 2))).reset(seed=1)
    whole, _ = make(lamp()).reset(seed=1)
    assert np.array_equal(frame_of(shown), frame_of(whole)[::2, ::2])
    with pytest.raises(ValueError, match="greater than 0"):
        lamp(image_size=(0, 2))


def test_estimated_rates_render_nothing():
    make(lamp())  # which renders the frame of the check
    before = Lamp.renders
    rates = mean_baselines(lamp(max_actions=8), [1])
    assert 0 < rates.random <= 1
    assert Lamp.renders - before == 1  # the frame of the reset before the estimate


@pytest.mark.parametrize(
    ("world", "words"),
    [
        ("Unpainted", r"can't be rendered .*gymnasium\[toy-text\]"),
        ("Grey", r"a frame of .* is \[4, 6\] of uint8, not uint8 \[H, W, 3\]"),
        ("Dull", "renders as human, and not as rgb_array: set environment.observation=auto"),
    ],
)
def test_a_world_that_cannot_be_rendered_is_refused_before_it_is_played(world, words):
    with pytest.raises(ConfigError, match=words):
        make(lamp(world))


def test_a_frame_of_another_form_fails_the_episode():
    environment = make(lamp())
    environment._world.unwrapped.render = lambda: None
    with pytest.raises(EnvironmentFailure, match="is a NoneType, not uint8"):
        environment.reset(seed=0)


def test_a_world_may_return_the_forms_with_images():
    environment = make(lamp("Filmed", observation="auto"))
    shown, _ = environment.reset(seed=0)
    picture = {"type": "image", "image": b"0"}
    assert read_observation(shown, "reset") == ("at ", Picture(picture))

    shown, _, _, _, info = environment.step("[9]")
    text, image = read_observation(shown, "step")
    assert text == "Invalid action: the action is 9: give a list of 1 number within [-1, 1].\nat "
    assert (image, info["valid"]) == (Picture(picture), False)

    shown, *_ = environment.step("[0.5]")
    assert read_observation(shown, "step") == (Picture({"type": "image", "image": b"1"}),)


@pytest.mark.skipif(find_spec("pygame") is not None, reason="pygame is installed")
def test_frozen_lake_without_pygame_names_the_line_that_installs_it():
    with pytest.raises(ConfigError, match=r'pip install "?gymnasium\[toy-text\]'):
        make(GymnasiumConfig(id="FrozenLake-v1", observation="image"))


@pytest.mark.skipif(find_spec("pygame") is None, reason="needs pygame")
@pytest.mark.parametrize("world", ["FrozenLake-v1", "CartPole-v1"])
def test_gymnasiums_own_worlds_render_without_a_display(world, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    config = GymnasiumConfig(id=world, observation="image", image_size=(64, 48))
    first, again = (frame_of(make(config).reset(seed=3)[0]) for _ in range(2))
    assert first.shape == (48, 64, 3)
    assert len(np.unique(first)) > 2
    assert np.array_equal(first, again)
