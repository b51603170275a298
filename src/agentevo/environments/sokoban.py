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
from functools import cache
from typing import ClassVar, Literal, NamedTuple

import pydantic

from agentevo.environments.drawing import Cell, disc, empty_cell, grid_png, ring, square, with_shape
from agentevo.environments.environment import EnvironmentConfig, PicturedConfig, environments
from agentevo.environments.episode import INVALID, ActionResult, EpisodicEnvironment, choose, stream
from agentevo.environments.observation import Observation, text_or_picture
from agentevo.environments.planning import random_play_success
from agentevo.environments.words import offset
from agentevo.errors import EnvironmentFailure
from agentevo.types import Baselines

ACTIONS = ("Up", "Down", "Left", "Right")
STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1))
"""The (row, column) change of each action. The reverse of an action is `action ^ 1`."""
PLAYER_BITS = 8
PLAYER_MASK = (1 << PLAYER_BITS) - 1
MAX_STATES = 300_000
"""The maximum number of states in a search of distances (about 60 MB)."""
KEEP_DIRECTION = 0.6
"""The probability that the random walk keeps its direction."""


class SokobanRoom(NamedTuple):
    """The fixed parts of a room, which no action changes. `neighbours[cell][action]` is the floor
    cell there, or -1 for a wall.

    A state is an integer, `boxes << 8 | player`. `boxes` has the bit `cell` set for each box, and
    cells are numbered row by row. So a room has at most 256 cells."""

    height: int
    width: int
    neighbours: tuple[tuple[int, ...], ...]
    floor: tuple[int, ...]
    targets: int
    """The cells that are targets, as a bit set."""

    @classmethod
    def build(cls, height: int, width: int, floor: set[int], targets: int) -> SokobanRoom:
        """A room with the given floor cells. All other cells, and all outside, are walls."""

        def floor_next_to(cell: int, action: int) -> int:
            row = cell // width + STEPS[action][0]
            column = cell % width + STEPS[action][1]
            neighbour = row * width + column
            return (
                neighbour
                if 0 <= row < height and 0 <= column < width and neighbour in floor
                else -1
            )

        neighbours = tuple(
            tuple(floor_next_to(cell, action) for action in range(4))
            for cell in range(height * width)
        )
        return cls(height, width, neighbours, tuple(sorted(floor)), targets)

    def is_solved(self, state: int) -> bool:
        return state >> PLAYER_BITS == self.targets

    def step(self, state: int, action: int) -> int:
        """The state after the action: the player walks, or pushes a box onto free floor. A blocked
        move changes nothing."""
        boxes = state >> PLAYER_BITS
        ahead = self.neighbours[state & PLAYER_MASK][action]
        if ahead < 0:
            return state

        if boxes >> ahead & 1:
            beyond = self.neighbours[ahead][action]
            if beyond < 0 or boxes >> beyond & 1:
                return state
            boxes ^= 1 << ahead | 1 << beyond

        return boxes << PLAYER_BITS | ahead

    def before(self, state: int) -> list[int]:
        """The states from which an effective action leads to `state`. Reversed, the player steps
        back, and may pull a box along."""
        boxes = state >> PLAYER_BITS
        player = state & PLAYER_MASK
        states = []
        for action in range(4):
            back = self.neighbours[player][action ^ 1]
            if back < 0 or boxes >> back & 1:
                continue

            states.append(boxes << PLAYER_BITS | back)
            ahead = self.neighbours[player][action]
            if ahead >= 0 and boxes >> ahead & 1:
                pulled = boxes ^ (1 << ahead | 1 << player)
                states.append(pulled << PLAYER_BITS | back)

        return states


def distances(room: SokobanRoom, max_actions: int | None = None) -> dict[int, int]:
    """The smallest number of actions to the solved room, for every state within `max_actions`
    (None: every solvable state, up to `MAX_STATES`), by breadth-first search from all solved states
    along reversed moves."""
    frontier = [
        room.targets << PLAYER_BITS | cell for cell in room.floor if not room.targets >> cell & 1
    ]
    depths = dict.fromkeys(frontier, 0)
    depth = 0
    while frontier and len(depths) < MAX_STATES and (max_actions is None or depth < max_actions):
        depth += 1
        following = []
        for state in frontier:
            for previous in room.before(state):
                if previous not in depths:
                    depths[previous] = depth
                    following.append(previous)

        frontier = following

    return depths


def carve(height: int, width: int, num_floor: int, rng: random.Random) -> set[int]:
    """`num_floor` connected floor cells inside the outer wall, from a random walk."""
    row = rng.randrange(1, height - 1)
    column = rng.randrange(1, width - 1)
    floor = {row * width + column}
    direction = rng.randrange(4)
    while len(floor) < num_floor:
        if rng.random() > KEEP_DIRECTION:
            direction = rng.randrange(4)
        row = min(max(row + STEPS[direction][0], 1), height - 2)
        column = min(max(column + STEPS[direction][1], 1), width - 2)
        floor.add(row * width + column)

    return floor


class RoomSettings(NamedTuple):
    """The settings of `generate`."""

    height: int
    width: int
    num_boxes: int
    min_solution: int
    max_solution: int


OPENNESS = (0.4, 0.9)
"""The lowest and highest share of the inner cells that are floor. With the default lengths, the
rooms are as hard as RAGEN's."""
MAX_TRIES = 500


def generate(settings: RoomSettings, rng: random.Random) -> tuple[SokobanRoom, int] | None:
    """A room and a start state whose shortest solution has a random number of actions. None if
    `MAX_TRIES` rooms had no such state.

    The length is uniform over `min_solution..max_solution`, and targets are random floor cells. The
    start is a uniformly random state at that exact distance in which no box is on a target.
    """
    height, width, num_boxes, shortest, longest = settings
    inner = (height - 2) * (width - 2)
    length = rng.randint(shortest, longest)
    for _ in range(MAX_TRIES):
        num_floor = max(round(rng.uniform(*OPENNESS) * inner), min(num_boxes + 2, inner))
        floor = carve(height, width, num_floor, rng)
        targets = sum(1 << cell for cell in rng.sample(sorted(floor), num_boxes))
        room = SokobanRoom.build(height, width, floor, targets)
        lengths = distances(room, length).items()
        starts = [
            state
            for state, actions in lengths
            if actions == length and not state >> PLAYER_BITS & targets
        ]
        if starts:
            return room, rng.choice(starts)

    return None


def random_player_success(
    room: SokobanRoom, state: int, num_actions: int, max_states: int
) -> float | None:
    """The exact success rate of a uniformly random player within `num_actions`. None if the player
    can be in more than `max_states` states."""
    chances = {state: 1.0}
    success = 0.0
    for _ in range(num_actions):
        following: dict[int, float] = {}
        for position, chance in chances.items():
            for action in range(4):
                reached = room.step(position, action)
                if room.is_solved(reached):
                    success += chance / 4
                else:
                    following[reached] = following.get(reached, 0.0) + chance / 4

        if len(following) > max_states:
            return None

        chances = following

    return success


ALPHABETS = {"ragen": "#_O√XPS", "ascii": "#_OVXPS", "letters": "W.GCBA@"}
"""The symbols of: wall, floor, target, box on target, box, player, player on target."""
LEGEND = (
    "The picture shows the room from above. Grey: wall; pale: floor; red ring: target; "
    "brown square: box; green square: box on target; blue disc: you."
)
BLUE = (31, 90, 214)
ACTION_REWARD = -0.1
BOX_REWARD = 1.0
SOLVED_REWARD = 10.0
EXACT_STATES = 20_000
"""Up to this many simultaneous states, the random player's rate is computed exactly. Beyond, it is
estimated by play."""
SAMPLED_PLAYS = 400


@cache
def room_cells(pixels: int) -> dict[str, Cell]:
    """The cells of a room's picture, without the player."""
    floor = empty_cell(pixels, (240, 234, 220))
    return {
        "wall": empty_cell(pixels, (92, 92, 100)),
        "floor": floor,
        "target": with_shape(floor, ring(88, 64), (214, 40, 40)),
        "box": with_shape(floor, square(76), (166, 103, 48)),
        "stored": with_shape(floor, square(76), (46, 160, 67)),
    }


class SokobanConfig(PicturedConfig):
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
        if self.config.observation != "text":
            task += f"{LEGEND}\n"
        if self.config.view == "words" or self.config.observation == "image":
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

    def observe(self) -> str | Observation:
        return text_or_picture(self.config.observation, self._text, self._draw)

    def _draw(self) -> bytes:
        """The room as a PNG."""
        kinds = room_cells(self.config.cell_pixels)
        boxes = self._state >> PLAYER_BITS
        cells = [kinds["wall"]] * (self.room.height * self.room.width)
        for cell in self.room.floor:
            is_target = self.room.targets >> cell & 1
            if boxes >> cell & 1:
                cells[cell] = kinds["stored" if is_target else "box"]
            else:
                cells[cell] = kinds["target" if is_target else "floor"]

        player = self._state & PLAYER_MASK
        cells[player] = with_shape(cells[player], disc(50), BLUE)
        return grid_png(cells, self.room.width)

    def _text(self) -> str:
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
            config = self.config.model_copy(update={"max_actions": limit, "observation": "text"})
            by_chance = random_play_success(
                lambda: SokobanEnvironment(config), self._seed, SAMPLED_PLAYS
            )

        shortest = distances(self.room, self.config.max_solution)[self._start]
        return Baselines(random=by_chance, optimal=float(shortest <= limit))
