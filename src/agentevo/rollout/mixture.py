"""Orders of given tasks, round after round. All of them follow from the run's seed. A round of a
mixture has tasks of each source in proportion to the source's weight, in whole numbers. The source
with the fewest tasks for its weight limits the size of the round, so no round has a task twice.
Each round takes the next part of a source's shuffled tasks. After the last part the tasks are
shuffled again, and a remainder smaller than a part is not played before that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentevo.errors import ConfigError
from agentevo.runtime.seeds import derive_seed
from agentevo.types import Task


class Mixture:
    """The rounds of tasks from several sources, mixed by weight. A task's number counts the tasks
    of all sources, source after source."""

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], seed: int, *, at_least: int
    ) -> None:
        """`sizes`: the number of tasks of each source. Raises ConfigError if a round has fewer than
        `at_least` tasks, the number that a step needs."""
        scarcest = min(size / weight for size, weight in zip(sizes, weights, strict=True))
        self.shares = [max(1, int(weight * scarcest + 1e-9)) for weight in weights]
        """The number of tasks of each source in a round."""
        self.round_size = sum(self.shares)
        self._sizes = list(sizes)
        self._seed = seed

        if self.round_size < at_least:
            raise ConfigError(
                f"tasks.weights: with {', '.join(map(str, sizes))} tasks a round has "
                f"{self.round_size}, and a step needs trainer.groups_per_step={at_least}: give the "
                "smaller source more tasks or less weight, or set fewer groups"
            )

    def order(self, round_: int) -> list[int]:
        """The numbers of a round's tasks, in order."""
        tasks: list[int] = []
        first = 0
        for source, (size, share) in enumerate(zip(self._sizes, self.shares, strict=True)):
            turn, part = divmod(round_, size // share)
            source_order = permutation(size, derive_seed(self._seed, "source", source, turn))
            tasks += [first + index for index in source_order[part * share : (part + 1) * share]]
            first += size

        shuffled = permutation(len(tasks), derive_seed(self._seed, "order", round_))
        return [tasks[place] for place in shuffled]


class TaskPool:
    """Given tasks, step after step, in rounds of all tasks or of a mixture. The tasks that are left
    at a round's end and do not fill a step are not played in that round, so no step has a task
    twice."""

    def __init__(
        self, tasks: Sequence[Task], seed: int, groups_per_step: int, mixture: Mixture | None = None
    ) -> None:
        self.tasks = list(tasks)
        self._seed = seed
        self._mixture = mixture
        self._round_size = len(self.tasks) if mixture is None else mixture.round_size
        self._count = min(groups_per_step, self._round_size)
        self._steps_per_round = self._round_size // self._count

    def of_step(self, place: int) -> list[Task]:
        """The tasks of the pool's step with the number `place`, counted from 0."""
        round_ = self.round_of(place)
        part = place % self._steps_per_round
        order = (
            self.shuffle("order", round_) if self._mixture is None else self._mixture.order(round_)
        )
        return [self.tasks[index] for index in order[part * self._count : (part + 1) * self._count]]

    def round_of(self, place: int) -> int:
        """The number of the round that contains the step."""
        return place // self._steps_per_round

    def shuffle(self, purpose: str, number: int) -> list[int]:
        """All tasks in a random order that follows from the purpose and the number."""
        return permutation(len(self.tasks), derive_seed(self._seed, purpose, number))


def permutation(size: int, seed: int) -> list[int]:
    """The numbers below `size` in a random order, the same as `torch.randperm` of a generator with
    this seed (Fisher-Yates with 32-bit draws of MT19937). For processes without torch."""
    draws = np.random.RandomState(seed % 2**32).randint(2**32, size=size, dtype=np.uint32)
    order = list(range(size))
    for index, draw in enumerate(draws[: max(size - 1, 0)].tolist()):
        target = index + draw % (size - index)
        order[index], order[target] = order[target], order[index]
    return order
