"""The success rates of reference players in an environment: exact for a small Markov decision
process, and by seeded play for any environment.

`win[a, s]` is the probability that action `a` in state `s` succeeds at once. `move[a, s, t]` is the
probability that it leads to state `t`. (Rows may sum to less than 1, because the rest has ended,
won or lost.) V_0 = 0. The success rate with k actions left is

    Q_k[a, s] = win[a, s] + sum_t move[a, s, t] V_{k-1}[t]
    V_k       = max_a Q_k (optimal)  or  mean_a Q_k (uniform random)
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from agentevo.environments.environment import TextEnvironment

Table = NDArray[np.float64]
DISCOUNT = 0.95
"""The discount per action that breaks ties between optimal actions, so that the player takes the
shortest way."""


class SuccessTables:
    """Success rates by state and number of actions left, computed when they are needed, and cached.

    Args: `win` float64 [A, S] and `move` float64 [A, S, S], as in the module's docstring.
    """

    def __init__(self, win: Table, move: Table) -> None:
        self._win = win
        self._move = move
        self._optimal: list[Table] = [np.zeros(win.shape[1])]  # V_k, each [S]
        self._random: list[Table] = [np.zeros(win.shape[1])]
        self._discounted: Table | None = None  # [A, S]

    def _values(self, following: Table) -> Table:
        return self._win + self._move @ following  # [A, S]

    def optimal(self, state: int, num_actions: int) -> float:
        """The success rate of the best player that starts in `state` with `num_actions` actions."""
        while len(self._optimal) <= num_actions:
            self._optimal.append(self._values(self._optimal[-1]).max(axis=0))
        return float(self._optimal[num_actions][state])

    def random(self, state: int, num_actions: int) -> float:
        """The success rate of the uniformly random player that starts in `state` with `num_actions`
        actions."""
        while len(self._random) <= num_actions:
            self._random.append(self._values(self._random[-1]).mean(axis=0))
        return float(self._random[num_actions][state])

    def best_action(self, state: int, num_actions: int) -> int:
        """The action that maximizes success with `num_actions` left. Among equals, the action with
        the soonest success."""
        self.optimal(state, num_actions - 1)
        values = self._values_of(state, self._optimal[num_actions - 1])
        equals = values >= values.max() - 1e-12
        return int(np.where(equals, self._discounted_values()[:, state], -1.0).argmax())

    def _values_of(self, state: int, following: Table) -> Table:
        return self._win[:, state] + self._move[:, state] @ following  # [A]

    def _discounted_values(self) -> Table:
        """Discounted action values [A, S] without a limit, by value iteration."""
        if self._discounted is None:
            value = np.zeros(self._win.shape[1])
            for _ in range(1000):
                previous = value
                value = DISCOUNT * self._values(value).max(axis=0)
                if np.abs(value - previous).max() < 1e-9:
                    break
            self._discounted = self._values(value)

        return self._discounted


def random_play_success(make: Callable[[], TextEnvironment], seed: int, num_plays: int) -> float:
    """The share of `num_plays` episodes of the environment `seed` that a random player solves. The
    player's choices also follow from `seed`."""
    environment = make()
    rng = random.Random(f"random player/{seed}")
    wins = 0
    for _ in range(num_plays):
        environment.reset(seed=seed)
        is_over = False
        while not is_over:
            _, _, terminated, truncated, info = environment.step(environment.random_action(rng))
            is_over = terminated or truncated
        wins += bool(info["success"])

    return wins / num_plays
