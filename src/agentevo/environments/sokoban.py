"""Sokoban in generated, solvable rooms: push every box onto a target.

Symbols and rewards are RAGEN's: -0.1 for every action, +1 when the number of boxes on targets
rises, -1 when it falls, and +10 when all boxes are on targets. (So a solution with one box in n
actions earns 11 - 0.1 n.) The default rooms are about as hard as RAGEN's 6x6 rooms with one box. A
random player solves 19% of them within 10 actions. The shortest solution has at most 5 actions in
71% of the rooms, and at most 7 in all. `dim: [8, 8], num_boxes: 2, min_solution: 3, max_solution:
8` is similar to RAGEN's larger rooms.
"""

from __future__ import annotations

import random
from typing import ClassVar, Literal

import pydantic

from agentevo.environments.environment import EnvironmentConfig, environments
from agentevo.environments.episode import INVALID, ActionResult, EpisodicEnvironment, choose, stream
from agentevo.environments.planning import random_play_success
from agentevo.environments.sokoban_rooms import (
    ACTIONS,
    PLAYER_BITS,
    PLAYER_MASK,
    RoomSettings,
    distances,
    generate,
    random_player_success,
)
from agentevo.environments.words import offset
from agentevo.errors import EnvironmentFailure
from agentevo.types import Baselines

ALPHABETS = {"ragen": "#_O√XPS", "ascii": "#_OVXPS", "letters": "W.GCBA@"}
"""The symbols of: wall, floor, target, box on target, box, player, player on target."""
ACTION_REWARD = -0.1
BOX_REWARD = 1.0
SOLVED_REWARD = 10.0
EXACT_STATES = 20_000
"""Up to this many simultaneous states, the random player's rate is computed exactly. Beyond, it is
estimated by play."""
SAMPLED_PLAYS = 400


class SokobanConfig(EnvironmentConfig):
    """Rooms of one size. The length of the shortest solution sets the difficulty."""

    type: Literal["sokoban"] = "sokoban"
    dim: tuple[int, int] = (6, 6)
    """The rows and columns of the room, including its outer wall."""
    num_boxes: int = pydantic.Field(default=1, ge=1, le=4)
    """The number of boxes, and of targets."""
    min_solution: int = pydantic.Field(default=1, ge=1)
    """The minimum length of the shortest solution, in actions."""
    max_solution: int = pydantic.Field(default=7, ge=1)
    """The maximum length of the shortest solution, in actions. All lengths in the range are equally
    frequent."""
    view: Literal["grid", "words"] = "grid"
    """`grid`: the room as a grid of symbols. `words`: the position of each box relative to the
    player, its neighbours, and the positions of the targets."""
    alphabet: Literal["ragen", "ascii", "letters"] = "ragen"
    """The symbols of the room: RAGEN's `#_O√XPS`, `#_OVXPS` for tokenizers that split `√`, or the
    symbols of RAGEN's generalization test, `W.GCBA@`."""

    @pydantic.model_validator(mode="after")
    def _check_room(self) -> SokobanConfig:
        height, width = self.dim
        if min(height, width) < 4 or height * width > PLAYER_MASK + 1:
            raise ValueError(
                f"dim={list(self.dim)}: each side needs at least 4 cells, and the whole room at "
                f"most {PLAYER_MASK + 1}"
            )

        if (height - 2) * (width - 2) < self.num_boxes + 3:
            raise ValueError(
                f"num_boxes={self.num_boxes} don't fit into dim={list(self.dim)}: enlarge dim or "
                "take fewer boxes"
            )

        if self.min_solution > self.max_solution:
            raise ValueError(
                f"min_solution={self.min_solution} is above max_solution={self.max_solution}: "
                "swap or widen them"
            )

        if self.max_solution < self.num_boxes:
            raise ValueError(
                f"max_solution={self.max_solution} can't move {self.num_boxes} boxes: raise it "
                f"to at least {self.num_boxes}"
            )

        return self


@environments.register("sokoban")
class SokobanEnvironment(EpisodicEnvironment):
    """Walk and push. A box can't be pulled, so a wrong push may be irreversible."""

    Config: ClassVar[type[EnvironmentConfig]] = SokobanConfig
    config: SokobanConfig

    @property
    def instructions(self) -> str:
        wall, floor, target, stored, box, player, on_target = tuple(ALPHABETS[self.config.alphabet])
        task = "Push every box onto a target. You can push one box at a time and can't pull.\n"
        if self.config.view == "words":
            return f"{task}Actions: {', '.join(ACTIONS)}."

        return (
            f"{task}Symbols: {wall} wall, {floor} floor, {target} target, {stored} box on "
            f"target, {box} box, {player} player, "
            f"{on_target} player on target.\n"
            f"Actions: {', '.join(ACTIONS)}."
        )

    def start(self, seed: int) -> None:
        config = self.config
        settings = RoomSettings(
            *config.dim,
            config.num_boxes,
            max(config.min_solution, config.num_boxes),
            config.max_solution,
        )
        generated = generate(settings, stream(config, seed, "room"))
        if generated is None:
            raise EnvironmentFailure(
                f"sokoban: no room found for {settings}, seed {seed}: enlarge dim or shorten the "
                "solution"
            )

        self._seed = seed
        self.room, self._start = generated
        self._state = self._start
        self._distances: dict[int, int] | None = None

    def _sides(self, cell: int) -> str:
        """The four sides of a cell in words."""
        boxes = self._state >> PLAYER_BITS
        width = self.room.width
        sides = []
        for name, step in zip(ACTIONS, (-width, width, -1, 1), strict=True):
            neighbour = cell + step
            free = "you" if neighbour == self._state & PLAYER_MASK else "floor"
            holds = "box" if boxes >> neighbour & 1 else free
            what = holds if neighbour in self.room.floor else "wall"
            sides.append(f"{name.lower()} {what}")

        return ", ".join(sides)

    def _describe(self) -> str:
        """The observation in words."""
        boxes = self._state >> PLAYER_BITS
        player = self._state & PLAYER_MASK
        targets = self.room.targets
        width = self.room.width
        lines = [f"You: {self._sides(player)}"]
        for box in [cell for cell in self.room.floor if boxes >> cell & 1]:
            lines.append(
                f"Box {offset(box // width - player // width, box % width - player % width)}: "
                f"{self._sides(box)}"
            )
            for target in [cell for cell in self.room.floor if targets >> cell & 1]:
                lines.append(
                    "Target from box "
                    f"{offset(target // width - box // width, target % width - box % width)}"
                )

        return "\n".join(lines)

    def observe(self) -> str:
        if self.config.view == "words":
            return self._describe()

        wall, floor, target, stored, box, player, on_target = tuple(ALPHABETS[self.config.alphabet])
        boxes = self._state >> PLAYER_BITS
        player_cell = self._state & PLAYER_MASK
        targets = self.room.targets
        cells = [wall] * (self.room.height * self.room.width)
        for cell in self.room.floor:
            is_target = targets >> cell & 1
            if cell == player_cell:
                cells[cell] = on_target if is_target else player
            elif boxes >> cell & 1:
                cells[cell] = stored if is_target else box
            else:
                cells[cell] = target if is_target else floor

        width = self.room.width
        return "\n".join(
            "".join(cells[row * width : (row + 1) * width]) for row in range(self.room.height)
        )

    def _num_stored(self) -> int:
        return (self._state >> PLAYER_BITS & self.room.targets).bit_count()

    def act(self, action: str) -> ActionResult:
        chosen = choose(action, ACTIONS)
        if chosen is None:
            return INVALID._replace(reward=ACTION_REWARD)

        stored = self._num_stored()
        previous = self._state
        self._state = self.room.step(previous, chosen)
        solved = self.room.is_solved(self._state)
        reward = ACTION_REWARD + BOX_REWARD * (self._num_stored() - stored) + SOLVED_REWARD * solved
        return ActionResult(
            reward=reward, effective=self._state != previous, terminated=solved, success=solved
        )

    def solution_length(self) -> int | None:
        """The smallest number of actions from the current state to the solved room. None if it can
        no longer be solved."""
        if self._distances is None:
            self._distances = distances(self.room)
        return self._distances.get(self._state)

    def random_action(self, rng: random.Random) -> str:
        return rng.choice(ACTIONS)

    def optimal_action(self) -> str | None:
        length = self.solution_length()
        if not length or self._distances is None:
            return None
        following = [
            self._distances.get(self.room.step(self._state, action)) for action in range(4)
        ]
        return ACTIONS[following.index(length - 1)]

    def baselines(self, max_actions: int | None = None) -> Baselines:
        limit = self.config.max_actions if max_actions is None else max_actions
        by_chance = random_player_success(self.room, self._start, limit, EXACT_STATES)
        if by_chance is None:
            config = self.config.model_copy(update={"max_actions": limit})
            by_chance = random_play_success(
                lambda: SokobanEnvironment(config), self._seed, SAMPLED_PLAYS
            )

        shortest = distances(self.room, self.config.max_solution)[self._start]
        return Baselines(random=by_chance, optimal=float(shortest <= limit))
