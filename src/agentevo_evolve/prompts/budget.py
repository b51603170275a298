"""The budget of a search: attempts and minutes, over all of its processes, with a reserve for the
comparison on held-out tasks. The remote models' own budget limits the money
(inference/remote_models/ledger.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentevo.config.optimize import OptimizeSection
from agentevo.config.recipe import RunConfig
from agentevo.errors import AgentEvoError, ConfigError
from agentevo_evolve.prompts.folder import Candidate, Record, SearchBegun, SearchSession

SAFETY = 1.3
"""An attempt of the comparison is assumed to take this many times the mean duration so far."""


class BudgetSpentError(AgentEvoError):
    """The budget is used up: no further attempt can start."""


@dataclass
class Budget:
    """Counts the attempts and the time of a search."""

    section: OptimizeSection
    reserve: int
    """The attempts that are reserved for the comparison."""
    num_begun: int = 0
    """Started attempts, including lost ones."""
    before_s: float = 0.0
    """The seconds that earlier processes used."""
    started: float = field(default_factory=time.monotonic)
    playing_s: float = 0.0
    """The seconds in which attempts were played."""
    num_played: int = 0

    def check(self) -> None:
        """Raises ConfigError if the comparison alone uses up the budget."""
        needed = self.reserve + self.section.tasks * self.section.attempts_per_task
        if self.section.attempts < needed:
            raise ConfigError(
                f"optimize.attempts={self.section.attempts}: the comparison on held-out tasks "
                f"needs {self.reserve} and a look at the agent's own texts "
                f"{needed - self.reserve}: raise it, or lower evaluation.tasks and optimize.tasks"
            )

    @property
    def attempts_left(self) -> int:
        return self.section.attempts - self.num_begun

    @property
    def used_s(self) -> float:
        return self.before_s + time.monotonic() - self.started

    def seconds_left(self, *, final: bool) -> float | None:
        """The seconds until the search, or with `final` the whole command, has to end. None without
        a limit."""
        if self.section.minutes is None:
            return None
        seconds = self.section.minutes * 60 - self.used_s
        if not final and self.num_played:
            seconds -= SAFETY * self.reserve * self.playing_s / self.num_played
        return max(0.0, seconds)

    def take(self, number: int, *, final: bool) -> None:
        """Counts attempts that are about to start. Raises BudgetSpentError if they are too many or
        too late. Zero attempts are always allowed, because the log has their results."""
        if not number:
            return

        num_left = self.attempts_left - (0 if final else self.reserve)
        if number > num_left:
            raise BudgetSpentError(f"optimize.attempts={self.section.attempts} are used up")
        if self.seconds_left(final=final) == 0.0:
            raise BudgetSpentError(f"optimize.minutes={self.section.minutes:g} are over")

        self.num_begun += number


def comparison(section: OptimizeSection, num_held_out: int) -> int:
    """The attempts of the comparison: the best text and the agent's own text play every held-out
    task."""
    return 2 * num_held_out * section.attempts_per_task


def budget_of(section: OptimizeSection, reserve: int, records: Sequence[Record]) -> Budget:
    """The budget that remains according to the log."""
    num_begun = sum(record.number for record in records if isinstance(record, SearchBegun))
    before = 0.0
    since = None
    last = 0.0
    for entry in records:
        if isinstance(entry, Candidate):
            continue
        if isinstance(entry, SearchSession):
            before += (max(0.0, last - since) if since is not None else 0.0) + entry.lead_s
            since = entry.at
        last = entry.at

    before += max(0.0, last - since) if since is not None else 0.0
    return Budget(section, reserve, num_begun, before)


def with_cost(config: RunConfig) -> RunConfig:
    """The configuration with a limit of `optimize.cost` for all remote models together. Each
    model's budget is an equal share. Raises ConfigError if no model has a price."""
    cost = config.optimize.cost
    if cost is None:
        return config

    priced = [
        name
        for name, remote_model in config.remote_models.items()
        if remote_model.price is not None
    ]
    if not priced:
        raise ConfigError(
            "optimize.cost counts money, and no remote model has a price: set "
            "remote_models.NAME.price, or leave optimize.cost out"
        )

    models = dict(config.remote_models)
    for name in priced:
        model_budget = models[name].budget
        share = min(cost / len(priced), model_budget.cost or cost)
        budget = model_budget.model_copy(update={"cost": share})
        models[name] = models[name].model_copy(update={"budget": budget})

    return config.model_copy(update={"remote_models": models})
