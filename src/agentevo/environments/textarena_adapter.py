"""TextArena's games as text environments for one seat; a seeded random player plays the other
seats.

An observation consists of the game's messages to this seat since its last action, with only the
newest board. The reward is the game's reward of this seat, at the end. Success is a reward of at
least `success_reward` (in TextArena, 1 is a win or a fully solved puzzle). An invalid action never
ends the game, because the adapter lifts TextArena's limit of errors. It costs an action, and the
game repeats its board.

TextArena uses Python's and numpy's global generators. Each episode has its own pair of generator
states, which are installed under a lock during each call. So episodes affect neither each other nor
the random numbers of other code.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar, Literal

import numpy as np
import pydantic

from agentevo.environments.environment import EnvironmentConfig, environments
from agentevo.environments.episode import ActionResult, EpisodicEnvironment
from agentevo.environments.planning import random_play_success
from agentevo.errors import ConfigError, EnvironmentFailure
from agentevo.runtime.extras import load_extra
from agentevo.runtime.registry import nearest
from agentevo.types import Baselines

LISTING = re.compile(
    r"\b(?:available|valid|legal|allowed|possible)\s+(?:moves|actions)\b[^:\n]*:([^\n]*)",
    re.IGNORECASE,
)
BRACKETED = re.compile(r"\[[^\[\]\n]+\]")
UNLIMITED_ERRORS = 10**9
MAX_OPPONENT_TRIES = 200
SAMPLED_PLAYS = 50
_global_generators = threading.Lock()


class TextArenaConfig(EnvironmentConfig):
    """One game, one seat."""

    type: Literal["textarena"] = "textarena"
    max_actions: int = pydantic.Field(default=30, ge=1)
    """Actions after which an unfinished episode is truncated."""
    game: str = pydantic.Field(min_length=1)
    """TextArena's id, such as `TowerOfHanoi-v0`."""
    kwargs: dict[str, pydantic.JsonValue] = pydantic.Field(default_factory=dict)
    """The options of `textarena.make`."""
    num_players: int = pydantic.Field(default=1, ge=1)
    """The number of players."""
    seat: int = pydantic.Field(default=0, ge=0)
    """The agent's seat, from 0."""
    actions: tuple[str, ...] = ()
    """Every action of the game, for the random player and random opponents. Empty: the actions that
    the game lists in its messages."""
    success_reward: float = 1.0
    """The lowest final reward that counts as a win."""
    instructions: str = ""
    """The rules for the player. Empty: the game's own rules, which come with the first
    observation."""

    @pydantic.model_validator(mode="after")
    def _check_seat(self) -> TextArenaConfig:
        if self.seat >= self.num_players:
            raise ValueError(
                f"seat={self.seat}, but num_players={self.num_players}: seats count from 0"
            )
        return self


def listed_actions(text: str) -> list[str]:
    """The bracketed actions after the last "Available moves:" (or similar) in a message. Empty if
    it lists none."""
    listings = LISTING.findall(text)
    return list(dict.fromkeys(BRACKETED.findall(listings[-1]))) if listings else []


def _package(module: str) -> ModuleType:
    return load_extra(module, "textarena", "environment.type=textarena")


@environments.register("textarena")
class TextArenaEnvironment(EpisodicEnvironment):
    """A seat of a TextArena game."""

    Config: ClassVar[type[EnvironmentConfig]] = TextArenaConfig
    config: TextArenaConfig

    def __init__(self, config: TextArenaConfig) -> None:
        super().__init__(config)
        self._package = _package("textarena")

        registry = _package("textarena.envs.registration").ENV_REGISTRY
        if config.game not in registry:
            guess = nearest(config.game, list(registry))
            raise ConfigError(
                f"textarena: no game is called {config.game!r}"
                + (f": did you mean {guess!r}?" if guess else "")
            )

        try:
            self._game: Any = self._package.make(config.game, **config.kwargs)
        except LookupError as error:
            reason = next(
                (
                    line.strip()
                    for line in str(error).splitlines()
                    if any(letter.isalpha() for letter in line)
                ),
                "",
            )
            raise ConfigError(
                f"textarena: {config.game} needs data that is not on this machine: {reason} "
                "Choose another game."
            ) from error
        except TypeError as error:
            raise ConfigError(
                f"textarena: {config.game} refuses kwargs {config.kwargs}: {error}"
            ) from error

        self._table: Any = self._game
        while isinstance(self._table, self._package.Wrapper):
            self._table = self._table.env

        self._check_opponents()

    def _check_opponents(self) -> None:
        """Raises an error before any episode for a game whose other seats can't be played."""
        try:
            self.start(0)
        except EnvironmentFailure as error:
            raise ConfigError(str(error)) from error

        if self.config.num_players > 1 and not self._known_actions(self.config.seat):
            raise ConfigError(
                f"textarena: {self.config.game} doesn't list its legal actions, so the other "
                "seats can't be played at random: "
                "set `actions`, or choose a game for one"
            )

    _random_state: tuple[Any, Any]

    @property
    def instructions(self) -> str:
        return self.config.instructions or f"You play the game {self.config.game}."

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        with _global_generators:
            other_states = random.getstate(), np.random.get_state()
            random.setstate(self._random_state[0])
            np.random.set_state(self._random_state[1])

            try:
                yield
            finally:
                self._random_state = random.getstate(), np.random.get_state()
                random.setstate(other_states[0])
                np.random.set_state(other_states[1])

    def start(self, seed: int) -> None:
        config = self.config
        self._seed = seed
        self._random_state = (
            random.Random(seed).getstate(),
            np.random.RandomState(seed % 2**32).get_state(),
        )
        self._opponent = random.Random(f"textarena/opponent/{seed}")

        try:
            with self._own_randomness():
                self._game.reset(num_players=config.num_players, seed=seed)
        except (AssertionError, ValueError, TypeError) as error:
            raise ConfigError(
                f"textarena: {config.game} does not support num_players={config.num_players}: "
                f"{error}"
            ) from error

        self._table.state.error_allowance = UNLIMITED_ERRORS
        self._board: dict[int, str] = {}
        self._shown: dict[int, str] = {}
        self._listed: dict[int, list[str]] = {}
        self._play_others()

    def _read(self, seat: int) -> None:
        """Reads the seat's new messages."""
        kinds = self._package.ObservationType
        state = self._table.state
        lines: list[str] = []
        for sender, message, kind in state.observations.get(seat, []):
            if kind is kinds.GAME_BOARD:
                self._board[seat] = message.strip()
            elif kind is not kinds.PLAYER_ACTION:
                lines.append(message.strip())
            elif (
                sender != seat and self.config.num_players > 1
            ):  # some games don't say who acted; in a game for one, it was the agent
                lines.append(
                    f"[{state.role_mapping.get(sender, f'Player {sender}')}] {message.strip()}"
                )

        state.observations[seat] = []
        board = self._board.get(seat)
        self._shown[seat] = "\n".join([*lines, *([board] if board else [])])
        self._listed[seat] = listed_actions(self._shown[seat]) or self._listed.get(seat, [])

    def observe(self) -> str:
        return self._shown.get(self.config.seat, "")

    def _known_actions(self, seat: int) -> list[str]:
        return list(self.config.actions) or self._listed.get(seat, [])

    def _move(self, action: str) -> bool:
        """Plays for the current seat. False if the game refused the action."""
        state = self._table.state
        errors = getattr(state, "error_count", 0)
        with self._own_randomness():
            self._game.step(action)
        return bool(state.done) or getattr(state, "error_count", 0) <= errors

    def _play_others(self) -> None:
        """Plays the other seats until it is the agent's turn or the game is over."""
        state = self._table.state
        tries = 0
        while not state.done and state.current_player_id != self.config.seat:
            seat = state.current_player_id
            self._read(seat)

            actions = self._known_actions(seat)
            if not actions or tries > MAX_OPPONENT_TRIES:
                raise EnvironmentFailure(
                    f"textarena: {self.config.game} lists no legal action for seat {seat}: set "
                    "`actions` to all of its actions"
                )

            tries = 0 if self._move(self._opponent.choice(actions)) else tries + 1

        self._read(self.config.seat)

    def act(self, action: str) -> ActionResult:
        valid = self._move(action)
        self._play_others()
        state = self._table.state
        reward = float((state.rewards or {}).get(self.config.seat, 0.0)) if state.done else 0.0
        success = bool(state.done) and reward >= self.config.success_reward

        return ActionResult(
            reward=reward,
            valid=valid,
            effective=valid,
            terminated=bool(state.done),
            success=success,
        )

    def random_action(self, rng: random.Random) -> str:
        actions = self._known_actions(self.config.seat)
        if not actions:
            raise EnvironmentFailure(
                f"textarena: {self.config.game} doesn't list its actions, so none can be chosen: "
                "set `actions`"
            )
        return rng.choice(actions)

    def optimal_action(self) -> str | None:
        return None

    def baselines(self, max_actions: int | None = None) -> Baselines:
        limit = self.config.max_actions if max_actions is None else max_actions
        config = self.config.model_copy(update={"max_actions": limit})
        try:
            return Baselines(
                random=random_play_success(
                    lambda: TextArenaEnvironment(config), self._seed, SAMPLED_PLAYS
                ),
                optimal=None,
            )
        except EnvironmentFailure:
            return Baselines(random=None, optimal=None)
