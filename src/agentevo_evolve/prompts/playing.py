"""Candidates play tasks. The seeds of a task are the same for every candidate. Attempts that were
already played are read from the log, and no attempt starts without room in the budget.

In the search, a failed attempt counts as the lowest reward so far, or as 0 if that is lower. So a
text that makes attempts fail does not look better for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from agentevo.errors import AttemptsFailedError
from agentevo.inference.remote_models.ledger import BudgetExceededError
from agentevo.rollout.sampler import Sampler
from agentevo.runs.folder.sft_export import as_row
from agentevo.runtime.event_loop import gather_all
from agentevo.types import Message, RemoteTurn, Task, Trajectory, Turn
from agentevo_evolve.prompts.budget import Budget, BudgetSpentError
from agentevo_evolve.prompts.folder import (
    MAX_TALK_CHARS,
    Candidate,
    OptimizeFolder,
    PlayedAttempt,
    Record,
    SearchBegun,
)

JUDGED = "judged"
"""The label of plays with the recipe's sampling."""
SAMPLED = "sampled"
"""The label of extra plays at temperature 1."""
HELD_OUT = "held_out"
"""The label of plays of held-out tasks."""


class Playing:
    """Plays tasks with candidates, within the budget."""

    def __init__(
        self,
        sampler: Sampler,
        folder: OptimizeFolder,
        budget: Budget,
        records: Sequence[Record],
        recipe_texts: dict[str, str],
        at_once: int,
    ) -> None:
        """`recipe_texts`: the recipe's texts, which a candidate's texts replace. `at_once`: the
        number of concurrent groups."""
        self._sampler = sampler
        self._folder = folder
        self.budget = budget
        self._recipe_texts = recipe_texts
        self._room = asyncio.Semaphore(at_once)
        self._played: dict[tuple[str, str, str], dict[int, PlayedAttempt]] = {}
        self._lowest = 0.0

        for record in records:
            if isinstance(record, PlayedAttempt):
                self._add_played(record)

    async def play(
        self,
        candidate: Candidate,
        tasks: Sequence[Task],
        *,
        label: str = JUDGED,
        attempts: int | None = None,
    ) -> dict[str, list[PlayedAttempt]]:
        """The attempts at each task, by its id. Raises BudgetSpentError before any attempt starts,
        if they do not all fit into the budget."""
        section = self.budget.section
        size = attempts or section.attempts_per_task
        missing = [task for task in tasks if len(self._of(candidate, task, label)) < size]
        final = label == HELD_OUT
        self.budget.take(size * len(missing), final=final)

        started_at = time.monotonic()
        try:
            async with asyncio.timeout(self.budget.seconds_left(final=final)):
                await gather_all([self._group(candidate, task, label, size) for task in missing])
        except TimeoutError as error:
            raise BudgetSpentError(f"optimize.minutes={section.minutes:g} are over") from error
        finally:
            self.budget.playing_s += time.monotonic() - started_at
            self.budget.num_played += size * len(missing)

        attempts_by_task = {
            task.id: list(self._of(candidate, task, label).values()) for task in tasks
        }
        self._check(candidate, attempts_by_task)
        return attempts_by_task

    def scores(self, played: dict[str, list[PlayedAttempt]]) -> dict[str, float]:
        """The mean reward of each task, by its id. Failed attempts count as in the module's
        docstring."""
        return {
            task: sum(
                attempt.reward if attempt.status == "completed" else min(0.0, self._lowest)
                for attempt in of_it
            )
            / len(of_it)
            for task, of_it in played.items()
        }

    async def _group(self, candidate: Candidate, task: Task, label: str, size: int) -> None:
        temperature = 1.0 if label == SAMPLED else self.budget.section.temperature
        async with self._room:
            self._folder.add(
                SearchBegun(candidate=candidate.id, task=task.id, label=label, number=size)
            )
            trajectories = await self._sampler.play(
                task,
                attempts=size,
                temperature=temperature,
                step=0,
                label=label,
                texts={**self._recipe_texts, **candidate.texts},
            )
            for trajectory in trajectories[:size]:
                if (trajectory.error or "").startswith(BudgetExceededError.__name__):
                    raise BudgetSpentError(trajectory.error)
                played = _as_played(candidate, trajectory, label)
                self._folder.add(played)
                self._add_played(played)

    def _of(self, candidate: Candidate, task: Task, label: str) -> dict[int, PlayedAttempt]:
        return self._played.get((candidate.id, task.id, label), {})

    def _add_played(self, played: PlayedAttempt) -> None:
        key = (played.candidate, played.task, played.label)
        self._played.setdefault(key, {})[played.attempt] = played
        if played.status == "completed":
            self._lowest = min(self._lowest, played.reward)

    def _check(
        self, candidate: Candidate, attempts_by_task: dict[str, list[PlayedAttempt]]
    ) -> None:
        """Raises AttemptsFailedError if no attempt with the agent's own texts completed."""
        every = [attempt for of_it in attempts_by_task.values() for attempt in of_it]
        if (
            every
            and not candidate.parent
            and all(attempt.status != "completed" for attempt in every)
        ):
            raise AttemptsFailedError(
                f"all {len(every)} attempts with the agent's own texts failed, the first with: "
                f"{every[0].error}"
            )


def _as_played(candidate: Candidate, trajectory: Trajectory, label: str) -> PlayedAttempt:
    completed = trajectory.status == "completed"
    return PlayedAttempt(
        candidate=candidate.id,
        task=trajectory.task_id,
        label=label,
        attempt=trajectory.attempt,
        status=trajectory.status,
        reward=trajectory.reward if completed else 0.0,
        success=trajectory.success and completed,
        error=(trajectory.error or "")[:1000],
        messages=_talk(trajectory),
        texts=trajectory.texts,
    )


def _talk(trajectory: Trajectory) -> list[dict[str, object]]:
    """The conversation that ends with the last turn."""
    turns: Sequence[Turn | RemoteTurn] = trajectory.turns or trajectory.remote_turns
    place: int | None = len(turns) - 1 if turns else None
    messages: list[Message] = []
    while place is not None:
        messages = [*turns[place].messages, *messages]
        place = turns[place].parent

    rows = [as_row(message) | {"content": message.text} for message in messages]
    return rows if sum(len(str(row)) for row in rows) <= MAX_TALK_CHARS else []
