"""Sokoban rooms: the rules of pushing, exact distances to the solved room, and a generator that
plays backwards.

A state is an integer, `boxes << 8 | player`. `boxes` has the bit `cell` set for each box, and cells
are numbered row by row. So a room has at most 256 cells. `distances` maps states to the smallest
number of actions that solve them, by breadth-first search from all solved states along reversed
moves. The generator uses it to find rooms with a given solution length, and the solver looks up its
next action in it.
"""

from __future__ import annotations

import random
from typing import NamedTuple

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
    cell there, or -1 for a wall."""

    height: int
    width: int
    neighbours: tuple[tuple[int, int, int, int], ...]
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
            (
                floor_next_to(cell, 0),
                floor_next_to(cell, 1),
                floor_next_to(cell, 2),
                floor_next_to(cell, 3),
            )
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
    (None: every solvable state, up to `MAX_STATES`)."""
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
