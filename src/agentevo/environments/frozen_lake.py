"""FrozenLake on random solvable maps: reach the goal, avoid the holes, slip on the ice.

The rules follow RAGEN's variant of Gymnasium's FrozenLake. Each tile is frozen with probability
0.8, and a path joins start and goal, which are random tiles. The reward is +1 at the goal, else 0.
A hole ends the episode. On slippery ice, a move goes in the intended direction with
probability 1/3, and in each perpendicular direction with probability 1/3. The success rates of both
reference players are computed exactly from the map (see `planning`).
"""

from __future__ import annotations

import random
from functools import cache
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import pydantic

from agentevo.environments.drawing import (
    Cell,
    cross,
    disc,
    empty_cell,
    grid_png,
    square,
    with_shape,
)
from agentevo.environments.environment import EnvironmentConfig, PicturedConfig, environments
from agentevo.environments.episode import INVALID, ActionResult, EpisodicEnvironment, choose, stream
from agentevo.environments.observation import Observation, text_or_picture
from agentevo.environments.planning import SuccessTables
from agentevo.environments.words import offset
from agentevo.types import Baselines

ACTIONS = ("Left", "Down", "Right", "Up")
"""The directions in turning order. The neighbours of a direction in this cycle are perpendicular
to it."""
DIRECTIONS = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""The (row, column) change of each action."""
ALPHABETS = {"ragen": "P_OGX√", "ascii": "P_OGXV"}
"""The symbols of: player, frozen tile, hole, goal, player in a hole, player on the goal."""
LEGEND = (
    "The picture shows the lake from above. Light blue: frozen; dark blue disc: hole; "
    "green square: goal; red disc: you; red cross: you in a hole."
)


class FrozenLakeConfig(PicturedConfig):
    """A square lake, with RAGEN's settings by default."""

    type: Literal["frozen_lake"] = "frozen_lake"
    size: int = pydantic.Field(default=4, ge=2, le=16)
    """Rows and columns of the map."""
    frozen_probability: float = pydantic.Field(default=0.8, gt=0, le=1)
    """The probability that a tile is frozen and not a hole, before maps without a path are
    rejected."""
    slippery: bool = True
    """Slippery ice: two of three moves go in a perpendicular direction."""
    view: Literal["grid", "words"] = "grid"
    """`grid`: RAGEN's map as a grid of symbols. `words`: the positions of goal and holes and the
    four neighbours, relative to the player."""
    alphabet: Literal["ragen", "ascii"] = "ragen"
    """The symbols of the map: RAGEN's `P_OGX√`, or `P_OGXV` for tokenizers that split `√`."""


RED = (214, 40, 40)


@cache
def lake_cells(pixels: int) -> dict[str, Cell]:
    """The cells of a lake's picture, without the player."""
    frozen = empty_cell(pixels, (205, 228, 250))
    return {
        "frozen": frozen,
        "hole": with_shape(frozen, disc(84), (22, 48, 110)),
        "goal": with_shape(frozen, square(76), (46, 160, 67)),
    }


class LakeMap(NamedTuple):
    """A map whose tiles are numbered row by row from the top left."""

    size: int
    holes: frozenset[int]
    start: int
    goal: int

    def neighbour(self, tile: int, direction: int) -> int:
        """The tile next to `tile` in that direction, or `tile` itself at the edge of the map."""
        row, column = divmod(tile, self.size)
        row += DIRECTIONS[direction][0]
        column += DIRECTIONS[direction][1]
        return (
            row * self.size + column if 0 <= row < self.size and 0 <= column < self.size else tile
        )

    def has_path(self) -> bool:
        """Whether the goal can be reached from the start over frozen tiles."""
        reached = {self.start}
        frontier = [self.start]
        while frontier:
            tile = frontier.pop()
            for direction in range(4):
                next_tile = self.neighbour(tile, direction)
                if next_tile not in reached and next_tile not in self.holes:
                    reached.add(next_tile)
                    frontier.append(next_tile)

        return self.goal in reached


def random_map(size: int, frozen_probability: float, rng: random.Random) -> LakeMap:
    """A random map with start != goal and a path between them, by rejection sampling. With very few
    frozen tiles, start and goal are adjacent."""
    num_tiles = size * size
    while True:
        holes = {tile for tile in range(num_tiles) if rng.random() >= frozen_probability}
        start, goal = rng.sample(range(num_tiles), 2)
        lake = LakeMap(size, frozenset(holes - {start, goal}), start, goal)
        if lake.has_path():
            return lake


def success_tables(lake: LakeMap, slippery: bool) -> SuccessTables:
    """The map as a Markov decision process whose states are the tiles."""
    num_tiles = lake.size**2
    win = np.zeros((4, num_tiles))
    move = np.zeros((4, num_tiles, num_tiles))
    for tile in range(num_tiles):
        if tile in lake.holes or tile == lake.goal:
            continue

        for action in range(4):
            directions = ((action - 1) % 4, action, (action + 1) % 4) if slippery else (action,)
            for direction in directions:
                next_tile = lake.neighbour(tile, direction)
                if next_tile == lake.goal:
                    win[action, tile] += 1 / len(directions)
                elif next_tile not in lake.holes:
                    move[action, tile, next_tile] += 1 / len(directions)

    return SuccessTables(win, move)


@environments.register("frozen_lake")
class FrozenLakeEnvironment(EpisodicEnvironment):
    """The player walks to the goal. A seed determines the map, and the direction of the slip of
    each action."""

    Config: ClassVar[type[EnvironmentConfig]] = FrozenLakeConfig
    config: FrozenLakeConfig

    @property
    def instructions(self) -> str:
        player, frozen, hole, goal, fallen, arrived = tuple(ALPHABETS[self.config.alphabet])
        ice = (
            " The ice is slippery: a move may go to either side instead."
            if self.config.slippery
            else ""
        )
        task = f"Walk on the frozen lake to the goal without falling into a hole.{ice}\n"
        if self.config.observation != "text":
            task += f"{LEGEND}\n"
        if self.config.view == "words" or self.config.observation == "image":
            return f"{task}Actions: {', '.join(ACTIONS)}."

        legend = (
            f"{player} player, {frozen} frozen, {hole} hole, {goal} goal, {fallen} player "
            f"in hole, {arrived} player on goal"
        )
        return f"{task}Symbols: {legend}.\nActions: {', '.join(ACTIONS)}."

    def start(self, seed: int) -> None:
        self.lake = random_map(
            self.config.size, self.config.frozen_probability, stream(self.config, seed, "map")
        )
        self._tile = self.lake.start
        self._slips = stream(self.config, seed, "slips")
        self._tables: SuccessTables | None = None

    def _describe(self) -> str:
        """The observation in words."""
        size = self.lake.size
        (row, column) = divmod(self._tile, self.lake.size)
        goal = divmod(self.lake.goal, self.lake.size)

        sides = []
        for name, (down, right) in zip(ACTIONS, DIRECTIONS, strict=True):
            neighbour = (row + down) * size + column + right
            is_inside = 0 <= row + down < size and 0 <= column + right < size
            tile_word = (
                "edge"
                if not is_inside
                else "hole"
                if neighbour in self.lake.holes
                else "goal"
                if neighbour == self.lake.goal
                else "ice"
            )
            sides.append(f"{name.lower()} {tile_word}")

        state = "You fell into a hole. " if self._tile in self.lake.holes else ""
        sorted_holes = sorted(
            (divmod(hole, size) for hole in self.lake.holes),
            key=lambda position: (abs(position[0] - row) + abs(position[1] - column), position),
        )
        holes_text = "; ".join(
            [
                "",
                *(
                    f"hole {offset(position[0] - row, position[1] - column)}"
                    for position in sorted_holes
                ),
            ]
        )
        return (
            f"{state}Goal {offset(goal[0] - row, goal[1] - column)}; {', '.join(sides)}{holes_text}"
        )

    def observe(self) -> str | Observation:
        return text_or_picture(self.config.observation, self._text, self._draw)

    def _draw(self) -> bytes:
        """The map as a PNG."""
        kinds = lake_cells(self.config.cell_pixels)
        cells = [
            kinds["hole" if tile in self.lake.holes else "frozen"]
            for tile in range(self.lake.size**2)
        ]
        cells[self.lake.goal] = kinds["goal"]
        fell = self._tile in self.lake.holes
        shape = cross(60) if fell else disc(50)
        cells[self._tile] = with_shape(cells[self._tile], shape, RED)
        return grid_png(cells, self.lake.size)

    def _text(self) -> str:
        if self.config.view == "words":
            return self._describe()

        player, frozen, hole, goal, fallen, arrived = tuple(ALPHABETS[self.config.alphabet])
        tiles = [hole if tile in self.lake.holes else frozen for tile in range(self.lake.size**2)]
        tiles[self.lake.goal] = goal
        tiles[self._tile] = (
            fallen
            if self._tile in self.lake.holes
            else arrived
            if self._tile == self.lake.goal
            else player
        )
        size = self.lake.size
        return "\n".join("".join(tiles[row * size : (row + 1) * size]) for row in range(size))

    def act(self, action: str) -> ActionResult:
        intended = choose(action, ACTIONS)
        if intended is None:
            return INVALID

        direction = (
            (intended + self._slips.choice((-1, 0, 1))) % 4 if self.config.slippery else intended
        )
        previous = self._tile
        self._tile = self.lake.neighbour(self._tile, direction)
        success = self._tile == self.lake.goal

        return ActionResult(
            reward=float(success),
            effective=self._tile != previous,
            terminated=success or self._tile in self.lake.holes,
            success=success,
        )

    def tables(self) -> SuccessTables:
        """The exact success rates on this episode's map, which the first call computes."""
        if self._tables is None:
            self._tables = success_tables(self.lake, self.config.slippery)
        return self._tables

    def random_action(self, rng: random.Random) -> str:
        return rng.choice(ACTIONS)

    def optimal_action(self) -> str | None:
        if not self._running:
            return None
        return ACTIONS[self.tables().best_action(self._tile, self.actions_left)]

    def baselines(self, max_actions: int | None = None) -> Baselines:
        limit = self.config.max_actions if max_actions is None else max_actions
        tables = self.tables()
        return Baselines(
            random=tables.random(self.lake.start, limit),
            optimal=tables.optimal(self.lake.start, limit),
        )
