"""Any Gymnasium environment as a text environment.

Observations: texts stay unchanged. An environment that renders as `ansi` shows that picture (a
highlighted cell becomes `[cell]`). Other spaces are written as text; of a Dict, the recipe can
choose the fields, and which of them are pictures. `image` shows the frame that the environment
renders as `rgb_array`, and an observation in a form with images (observation.py) shows its own.

Actions: a Discrete space accepts the action's name (`action_names`, default its number), and a
space of texts accepts any text that it contains. Box, Dict and the other structured spaces accept
JSON (json_actions.py). If a text is not such an action, the player sees the reason. The action
limit is `max_actions`. Gymnasium's own time limit is off. The old API of gym works too
(step_results.py).

Success is the environment's `info["success"]` or `info["is_success"]`, else `success_on` decides.
If the environment publishes its transitions (`env.unwrapped.P`, as Gymnasium's toy texts do), the
rates of both reference players are exact and there is a solver. Otherwise the random player's rate
is estimated by play, and the optimal player's is unknown.
"""

from __future__ import annotations

import inspect
import math
import random
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import gymnasium
import numpy as np
import pydantic
from gymnasium import spaces

from agentevo.environments.environment import EnvironmentConfig, environments
from agentevo.environments.episode import INVALID, ActionResult, EpisodicEnvironment, choose
from agentevo.environments.gymnasium_frames import RENDER_MODE, check_frames, render_frame
from agentevo.environments.gymnasium_views import (
    GymnasiumView,
    as_text,
    picture_as_text,
    view_fields,
)
from agentevo.environments.json_actions import (
    ActionError,
    can_be_said,
    describe_space,
    read_action,
    write_action,
)
from agentevo.environments.observation import Shown, has_form
from agentevo.environments.planning import SuccessTables, random_play_success
from agentevo.environments.step_results import read_reset, read_step
from agentevo.errors import ConfigError, EnvironmentFailure
from agentevo.types import Baselines

MAX_TABLE_STATES = 2000
"""The maximum number of states of a dense transition table."""
SAMPLED_PLAYS = 100
MAX_SHOWN_NUMBERS = 4096
"""An observation with a longer list of numbers, such as a picture, is not written as text."""


class GymnasiumConfig(EnvironmentConfig):
    """The environment, and the names of its actions."""

    type: Literal["gymnasium"] = "gymnasium"
    id: str = pydantic.Field(min_length=1)
    """Gymnasium's id, such as `FrozenLake-v1`, or `module:Id-v0` to import a module that registers
    it."""
    kwargs: dict[str, pydantic.JsonValue] = pydantic.Field(default_factory=dict)
    """The options of `gymnasium.make`."""
    action_names: tuple[str, ...] = ()
    """The names of a Discrete space's actions, in order. Empty: their numbers."""
    instructions: str = ""
    """The rules for the player. Empty: the id and the actions."""
    observation: Literal["auto", "text", "ansi", "image", "both"] = "auto"
    """`text`: the observation as text. `ansi`: the rendered characters. `auto`: the characters if
    the environment renders some and the observation is not a text. `image`: the rendered frame
    (`rgb_array`), which needs no display. `both`: the frame and the observation as text."""
    observation_fields: tuple[str, ...] = ()
    """The fields of a Dict observation that are written as text, in this order: one alone, several
    as lines `field: value`. Empty: all but `image_fields`."""
    image_fields: tuple[str, ...] = ()
    """The fields of a Dict observation that are pictures (uint8 [H, W, 3]). The player sees them
    before the text."""
    image_size: tuple[pydantic.PositiveInt, pydantic.PositiveInt] | None = None
    """The width and height that frames and pictures are resized to, in pixels. None: as they
    are."""
    success_on: Literal["reward", "termination"] = "reward"
    """Whether an ended episode succeeded if its last reward was positive (`reward`), or in any case
    (`termination`)."""

    @pydantic.model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.chooses_fields and self.observation in ("ansi", "image"):
            raise ValueError(
                f"observation={self.observation} shows no fields: leave observation_fields and "
                "image_fields out, or set observation to text or both"
            )
        return self

    @property
    def chooses_fields(self) -> bool:
        return bool(self.observation_fields or self.image_fields)

    @property
    def shows_images(self) -> bool:
        return self.observation in ("image", "both") or bool(self.image_fields)


Transitions = dict[int, dict[int, list[tuple[float, int, float, bool]]]]
"""Maps a state to a mapping from an action to [(probability, next state, reward, ended), ...], as
in Gymnasium's toy texts."""


def transition_tables(published: Transitions, num_actions: int, success_on: str) -> SuccessTables:
    """Published transitions as success tables."""
    win = np.zeros((num_actions, len(published)))
    move = np.zeros((num_actions, len(published), len(published)))
    for state, actions in published.items():
        for action in range(num_actions):
            for chance, following, reward, terminated in actions[action]:
                if not terminated:
                    move[action, state, following] += chance
                elif success_on == "termination" or reward > 0:
                    win[action, state] += chance

    return SuccessTables(win, move)


def _longest_list(space: spaces.Space[Any]) -> float:
    """The size of the largest array in an observation of this space. Infinite for an array of any
    size, as BrowserGym's screenshots are."""
    if isinstance(space, spaces.Dict):
        return max(map(_longest_list, space.spaces.values()), default=0)
    if isinstance(space, spaces.Tuple):
        return max(map(_longest_list, space.spaces), default=0)
    shape = space.shape or ()
    return math.inf if any(size < 0 for size in shape) else math.prod(shape)


def _takes_text(space: spaces.Space[Any]) -> bool:
    """Whether actions are texts: of a Text space, or of a space of another package that contains
    them, as BrowserGym's Unicode does."""
    if isinstance(space, spaces.Text):
        return True
    is_foreign = type(space).__module__.partition(".")[0] != gymnasium.__name__
    return is_foreign and not can_be_said(space) and space.contains("text")


def _reset_names(world: gymnasium.Env[Any, Any]) -> set[str]:
    """The parameters of a world's own `reset`. With `**kwargs`, both of Gymnasium's."""
    takes = inspect.signature(world.unwrapped.reset).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes)
    return {"seed", "options"} if takes_all else {parameter.name for parameter in takes}


@environments.register("gymnasium")
class GymnasiumEnvironment(EpisodicEnvironment):
    """A Gymnasium environment with the text contract."""

    Config: ClassVar[type[EnvironmentConfig]] = GymnasiumConfig
    config: GymnasiumConfig

    def __init__(self, config: GymnasiumConfig, *, draws: bool = True) -> None:
        """`draws`: whether frames are rendered, if the config asks for them."""
        super().__init__(config)
        self._has_frames = draws and config.observation in ("image", "both")
        self._world = self._make()
        # Gymnasium's wrappers would add the new API's parameters
        if "options" not in _reset_names(self._world):
            self._world = self._world.unwrapped

        space = self._world.action_space
        self._has_texts = _takes_text(space)
        if not self._has_texts and not can_be_said(space):
            raise ConfigError(
                f"gymnasium: {config.id} takes {space}; only actions of Discrete, Text, Box, "
                "MultiDiscrete, MultiBinary, Dict and Tuple can be written as text"
            )

        self._check_fields()
        self._check_size()

        if config.action_names and not isinstance(space, spaces.Discrete):
            raise ConfigError(
                f"gymnasium: action_names is for Discrete actions, and {config.id} takes {space}"
            )

        if self._has_frames:
            check_frames(config.id, self._world, lambda: self._reset(0))

        self._problem = ""
        """Why the last text was not an action of a structured space."""
        self._names: list[str] = []
        if isinstance(space, spaces.Discrete):
            self._names = list(config.action_names) or [
                str(number) for number in range(space.start, space.start + space.n)
            ]
            if len(self._names) != space.n:
                raise ConfigError(
                    f"gymnasium: action_names has {len(self._names)} entries, but {config.id} "
                    f"has {space.n} actions: name each"
                )

        self._is_structured = not self._names and not self._has_texts

        published = getattr(self._world.unwrapped, "P", None)
        has_table = (
            isinstance(published, dict) and bool(self._names) and len(published) <= MAX_TABLE_STATES
        )
        self._published: Transitions | None = published if has_table else None

    def _check_fields(self) -> None:
        config, space = self.config, self._world.observation_space
        names = tuple(space.spaces) if isinstance(space, spaces.Dict) else ()
        for key in ("observation_fields", "image_fields"):
            for field in getattr(config, key):
                if field not in names:
                    raise ConfigError(
                        f"gymnasium: environment.{key}: an observation of {config.id} has no field "
                        f"{field!r}: it has {', '.join(names) or f'none, it is {space}'}"
                    )

    def _check_size(self) -> None:
        """Refuses observations of which a part is too large to be written as text."""
        config, space = self.config, self._world.observation_space
        parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
        for field, part in parts.items():
            is_shown = field not in config.image_fields
            if config.observation_fields:
                is_shown = field in config.observation_fields

            longest = _longest_list(part)
            if longest <= MAX_SHOWN_NUMBERS or not is_shown or not self._is_written:
                continue

            where = f" in its field {field!r}" if field else ""
            fields = (
                f"choose from its fields ({', '.join(parts)}) by environment.observation_fields, "
                "and name its pictures in environment.image_fields; or "
            )
            raise ConfigError(
                f"gymnasium: an observation of {config.id} has "
                f"{longest if longest < math.inf else 'any number of'} numbers in one list{where}, "
                f"as a picture has, and at most {MAX_SHOWN_NUMBERS} can be written as text: "
                f"{fields if field else ''}set environment.observation=image to show its frames, "
                "or wrap the environment so that its observation is a text"
            )

    @cached_property
    def _tables(self) -> SuccessTables | None:
        """The success tables of the published transitions. They are computed at the first use,
        because playing does not need them."""
        return (
            None
            if self._published is None
            else transition_tables(self._published, len(self._names), self.config.success_on)
        )

    def _make(self) -> gymnasium.Env[Any, Any]:
        config = self.config
        options: dict[str, Any] = {
            "max_episode_steps": -1,
            "disable_env_checker": True,
            **config.kwargs,
        }
        try:
            if self._has_frames:
                options = {"render_mode": RENDER_MODE, **options}
            environment = gymnasium.make(config.id, **options)
            modes = environment.metadata.get("render_modes") or ()
            drawable = "ansi" in modes and not isinstance(
                environment.observation_space, spaces.Text
            )
            self._drawn = config.observation == "ansi" or (
                config.observation == "auto" and drawable and not config.chooses_fields
            )
            self._is_written = not self._drawn and config.observation != "image"
            if not self._drawn:
                return environment

            environment.close()
            return gymnasium.make(config.id, **{"render_mode": "ansi", **options})
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ConfigError(
                f"gymnasium: can't make {config.id!r} with kwargs {config.kwargs}: {error}"
            ) from error

    @property
    def instructions(self) -> str:
        if self.config.instructions:
            return self.config.instructions

        actions = f" Actions: {', '.join(self._names)}." if self._names else ""
        if self._is_structured:
            actions = f" An action is JSON: {describe_space(self._world.action_space)}."
        return f"You play {self.config.id}.{actions}"

    def start(self, seed: int) -> None:
        self._seed = seed
        self._problem = ""
        observation = read_reset(self._reset(seed))
        self._start_state = self._state()
        self._view = self._look(observation)

    def _reset(self, seed: int) -> Any:
        """Returns the result of `reset`. If `reset` accepts no seed, as in the oldest API, calls
        `seed(seed)` first."""
        if "seed" in _reset_names(self._world):
            return self._world.reset(seed=seed)

        set_seed = getattr(self._world, "seed", None)
        if callable(set_seed):
            set_seed(seed)
        return self._world.reset()

    def _state(self) -> int:
        """The state's number in the published transitions."""
        return int(getattr(self._world.unwrapped, "s", 0)) if self._published else 0

    def _look(self, observation: object) -> GymnasiumView:
        config = self.config
        is_whole = self._is_written and not config.chooses_fields
        if is_whole and not self._has_frames and has_form(observation):
            return GymnasiumView(form=observation)

        frames: tuple[np.ndarray, ...] = ()
        if self._has_frames:
            frames = (render_frame(config.id, self._world, config.image_size),)
        if not self._is_written:
            return GymnasiumView(self._characters() if self._drawn else "", frames)
        if is_whole:
            return GymnasiumView(as_text(observation), frames)

        view = view_fields(
            config.id,
            observation,
            config.observation_fields,
            config.image_fields,
            config.image_size,
        )
        return view._replace(images=frames + view.images)

    def _characters(self) -> str:
        """The state as the world renders it for a terminal."""
        picture = self._world.render()
        if not isinstance(picture, str):
            raise EnvironmentFailure(
                f"gymnasium: {self.config.id} rendered {type(picture).__name__}, not text: set "
                "observation: text"
            )

        return picture_as_text(picture)

    def observe(self) -> Shown:
        return self._view.with_problem(self._problem)

    def act(self, action: str) -> ActionResult:
        self._problem = ""
        move: Any = choose(action, self._names)
        if self._is_structured:
            try:
                move = read_action(action, self._world.action_space)
            except ActionError as error:
                self._problem = f"Invalid action: {error}."
        elif isinstance(self._world.action_space, spaces.Discrete) and move is not None:
            move += int(self._world.action_space.start)
        elif self._has_texts and self._world.action_space.contains(action):
            move = action

        if move is None:
            return INVALID

        observation, reward, terminated, truncated, info = read_step(self._world.step(move))
        before = self._view
        self._view = self._look(observation)
        ended_well = terminated and (self.config.success_on == "termination" or float(reward) > 0)

        return ActionResult(
            reward=float(reward),
            valid=bool(info.get("valid", True)),
            effective=bool(info.get("effective", self._view.differs(before))),
            terminated=bool(terminated),
            success=bool(info.get("success", info.get("is_success", ended_well))),
            truncated=bool(truncated),
        )

    def random_action(self, rng: random.Random) -> str:
        if self._names:
            return rng.choice(self._names)
        self._world.action_space.seed(rng.randrange(2**31))
        try:
            sample = self._world.action_space.sample()
        except NotImplementedError as error:
            raise EnvironmentFailure(
                f"gymnasium: {self.config.id} has no random player: its actions "
                f"{self._world.action_space} can't be drawn, so wrap it with a space that has "
                "sample()"
            ) from error
        return write_action(sample) if self._is_structured else str(sample)

    def optimal_action(self) -> str | None:
        if self._tables is None or not self._running:
            return None
        return self._names[self._tables.best_action(self._state(), self.actions_left)]

    def baselines(self, max_actions: int | None = None) -> Baselines:
        limit = self.config.max_actions if max_actions is None else max_actions
        if self._tables is not None:
            start = self._start_state
            return Baselines(
                random=self._tables.random(start, limit), optimal=self._tables.optimal(start, limit)
            )

        if not self._names and not self._is_structured:
            return Baselines(random=None, optimal=None)

        config = self.config.model_copy(update={"max_actions": limit})
        return Baselines(
            random=random_play_success(
                lambda: GymnasiumEnvironment(config, draws=False), self._seed, SAMPLED_PLAYS
            ),
            optimal=None,
        )

    def close(self) -> None:
        self._world.close()
