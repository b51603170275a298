"""Gets the reward of each turn from a function of the user, and converts these rewards to a table
for the advantage. The function is called for each group. If it fails for a group, the step
continues without this group. MAX_IN_A_ROW such groups, in one step or several, end the run before
its weights change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from agentevo.config.algorithm_functions import CREDITS
from agentevo.errors import TrainingError, describe_error
from agentevo.rewards.returned_values import plain_number
from agentevo.runtime.daemon_threads import call_in_thread
from agentevo.runtime.tracebacks import traceback_of
from agentevo.types import Trajectory
from agentevo.types.copies import copy_of_trajectory

TIME_LIMIT_S = 600.0
"""The time limit of a function for one group, in seconds."""
MAX_IN_A_ROW = 3
"""If the function fails in this many consecutive groups, the run ends."""
CREDIT_FAILED = "credit-failed"
"""The drop reason of the attempts in such a group."""

TurnCredits = Mapping[str, Sequence[float]]
"""Trajectory id -> the rewards of its turns."""


@dataclass(frozen=True)
class CreditedGroups:
    """The function's results for a step's groups."""

    of_turns: dict[str, list[float]] = field(default_factory=dict)
    """See TurnCredits."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Id of each attempt in a group where it failed -> CREDIT_FAILED."""
    warnings: list[str] = field(default_factory=list)
    """The first failure of each kind, with its traceback."""


class CreditAsker:
    """Calls the function that `algorithm.credit` names. The function gets copies, on a thread that
    is abandoned if it does not return."""

    def __init__(self, name: str) -> None:
        """Raises UnknownNameError."""
        self._name = name
        self._credit = CREDITS.find(name)
        self._num_failures = 0
        """The number of consecutive failures."""
        self._shown: set[str] = set()
        """The kinds of failures whose traceback was shown."""

    def ask(self, trajectories: Sequence[Trajectory]) -> CreditedGroups:
        """The reward of each turn of the groups. Raises TrainingError after MAX_IN_A_ROW
        failures."""
        groups: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            groups.setdefault(trajectory.group_id, []).append(trajectory)

        credited = CreditedGroups()
        for group_id, group in groups.items():
            try:
                credited.of_turns.update(self._of_group(group))
            except Exception as error:  # noqa: BLE001 (anything a user's function raises)
                self._note_failure(group_id, error, credited)
                credited.dropped.update(dict.fromkeys((t.id for t in group), CREDIT_FAILED))
            else:
                self._num_failures = 0

        return credited

    def _of_group(self, group: Sequence[Trajectory]) -> dict[str, list[float]]:
        copies = [copy_of_trajectory(trajectory) for trajectory in group]
        returned = call_in_thread(lambda: self._credit(copies), "credit function", TIME_LIMIT_S)
        if len(returned) != len(group):
            raise ValueError(f"it returned {len(returned)} lists for {len(group)} attempts")

        of_turns = {}
        for trajectory, numbers in zip(group, returned, strict=True):
            name = trajectory.id
            if len(numbers) != len(trajectory.turns):
                raise ValueError(
                    f"{name} has {len(trajectory.turns)} turns, and got {len(numbers)} numbers"
                )
            what = f"the credit of a turn of {name}"
            of_turns[name] = [plain_number(number, what) for number in numbers]

        return of_turns

    def _note_failure(self, group_id: str, error: Exception, credited: CreditedGroups) -> None:
        text = (
            f"algorithm.credit: {self._name} failed for the group {group_id}: "
            f"{describe_error(error)}: "
            "return a list for each attempt, with a number for each of its turns"
        )
        trace = traceback_of(error)
        shown = f"{text}\n{trace}" if trace else text

        self._num_failures += 1
        if self._num_failures >= MAX_IN_A_ROW:
            raise TrainingError(
                f"{shown}\n{self._num_failures} groups in a row have failed like this: the "
                f"weights were not changed; fix the function, and --resume repeats this step"
            ) from error

        kind = type(error).__name__
        if kind not in self._shown:
            self._shown.add(kind)
            credited.warnings.append(
                f"{shown}\n(such a group is left out; rollout/dropped/{CREDIT_FAILED} counts "
                "its attempts)"
            )


def credit_table(
    owners: Sequence[Trajectory], turn_ids: torch.Tensor, turn_credits: TurnCredits
) -> torch.Tensor:
    """[S, T] float64: for each trained token, the reward of its turn. `owners`: the trajectory of
    each row. `turn_ids`: [S, T], -1 where nothing is trained."""
    table = torch.zeros(turn_ids.shape, dtype=torch.float64)
    for row, trajectory in enumerate(owners):
        of_turns = torch.tensor([*turn_credits[trajectory.id], 0.0], dtype=torch.float64)
        table[row] = of_turns[turn_ids[row]]  # index -1 selects the last number

    return table
