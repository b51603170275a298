"""What a function of the user's says that each turn has earned, as a table for the advantage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentevo.config.algorithm_functions import CreditFunction
from agentevo.console import to_stderr
from agentevo.copies import copy_of_trajectory
from agentevo.daemon_threads import call_within
from agentevo.errors import TrainingError, described
from agentevo.rewards.returned import plain_number
from agentevo.tracebacks import traceback_of
from agentevo.types import Trajectory

LONGEST_S = 600.0
"""How long a function may take for one group."""


def credit_table(
    owners: Sequence[Trajectory], turn_ids: torch.Tensor, credit: CreditFunction
) -> torch.Tensor:
    """[S, T] float64: what the turn of each trained token has earned. `owners`: the trajectory of
    each row; turn_ids [S, T], -1 where nothing is trained. Each group is judged once, as a whole of
    what is trained of it. Raises TrainingError for what the function does wrong."""
    groups: dict[str, dict[str, Trajectory]] = {}
    for one in owners:
        groups.setdefault(one.group_id, {})[one.id] = one

    earned: dict[str, list[float]] = {}
    for group_id, members in groups.items():
        values = _judged(group_id, list(members.values()), credit)
        earned |= dict(zip(members, values, strict=True))

    table = torch.zeros(turn_ids.shape, dtype=torch.float64)
    for row, one in enumerate(owners):
        of_turns = torch.tensor([*earned[one.id], 0.0], dtype=torch.float64)
        table[row] = of_turns[turn_ids[row]]  # the last one stands for -1

    return table


def _judged(group_id: str, group: list[Trajectory], credit: CreditFunction) -> list[list[float]]:
    """The numbers of one group, checked."""
    name = getattr(credit, "__name__", type(credit).__name__)
    try:
        copies = [copy_of_trajectory(one) for one in group]
        returned = call_within(lambda: credit(copies), LONGEST_S, "a credit function")
        if len(returned) != len(group):
            raise ValueError(f"it returned {len(returned)} lists for {len(group)} attempts")

        values = []
        for one, own in zip(group, returned, strict=True):
            if len(own) != len(one.turns):
                raise ValueError(f"{one.id} has {len(one.turns)} turns, and got {len(own)} numbers")
            values.append(
                [plain_number(value, f"the credit of a turn of {one.id}") for value in own]
            )

        return values
    except Exception as error:
        if shown := traceback_of(error):
            to_stderr(f"algorithm.credit: {name}:\n{shown}")
        raise TrainingError(
            f"algorithm.credit: {name} of the group {group_id}: {described(error)}: return a list "
            "for each attempt, with a number for each of its turns (the weights were not changed)"
        ) from error
