"""`agentevo optimize`: a search for better texts, from its settings to its summary.

The winner of the search is compared with the agent's own texts on the held-out tasks, which no
earlier step has used. Both play every task with the same seeds. If the 95% interval of the mean
paired difference is above 0 (runs/evaluation/estimates.py), `texts.yaml` contains the winner, else
the agent's own texts.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from agentevo.agents.named_texts import Declared, Kind
from agentevo.config import RunConfig
from agentevo.config.routing import without_routing
from agentevo.config.texts import digest_of_text
from agentevo.errors import AttemptsFailedError, ConfigError
from agentevo.rollout.sampler import Sampler
from agentevo.rollout.task_source import TaskSource
from agentevo.runs.evaluation.contestants import Contestant
from agentevo.runs.evaluation.estimates import Estimate, mean_of, paired_difference
from agentevo.runs.evaluation.play import check_play, open_player, run_folder
from agentevo.runs.evaluation.results import task_digest
from agentevo.runs.orchestration.components import AgentFunction, load_policy, open_components
from agentevo.runtime.event_loop import run_coroutine
from agentevo.runtime.registry import nearest
from agentevo.types import Task
from agentevo_evolve.prompts.budget import (
    Budget,
    BudgetSpentError,
    budget_of,
    comparison,
    with_cost,
)
from agentevo_evolve.prompts.folder import (
    RUN,
    Candidate,
    OptimizeFolder,
    Record,
    SearchBegun,
    SearchSession,
)
from agentevo_evolve.prompts.playing import HELD_OUT, Playing
from agentevo_evolve.prompts.report import report_of
from agentevo_evolve.prompts.search import Judged, TextSearch
from agentevo_evolve.prompts.writing import POLICY, TextWriter, ask_of

PROBE = "probe"
WRITTEN: dict[str, tuple[Kind, ...]] = {
    "apo": ("text", "tool", "examples"),
    "gepa": ("text", "tool", "examples"),
    "few_shot": ("examples",),
    "phrases": ("text",),
}
"""The kinds of texts that each method writes."""


@dataclass(frozen=True, kw_only=True)
class TextOptimization:
    """The settings of a search."""

    contestant: Contestant
    """The recipe of the agent. Its section `optimize` configures the search."""
    out: Path
    resume: bool = False
    agent: AgentFunction | None = None
    """A program's function that replaces the recipe's agent."""
    tasks: Sequence[Task] | None = None
    """A program's tasks that replace the recipe's."""


@dataclass(frozen=True)
class _SearchTasks:
    learning: Sequence[Task]
    judging: Sequence[Task]
    held_out: Sequence[Task]


def optimize(what: TextOptimization, note: Callable[[str], None]) -> dict[str, Any]:
    """Searches, compares, and returns the summary. Raises ConfigError before anything is created,
    and AttemptsFailedError if no attempt with the agent's own texts completes."""
    config = with_cost(what.contestant.config)
    _check_config(config)

    tasks = _tasks_of(config, what.tasks, note)
    if what.agent is None:
        check_play(config, tasks.judging, has_engine=what.contestant.remote is None)

    section = config.optimize
    Budget(section, comparison(section, len(tasks.held_out))).check()
    folder = OptimizeFolder(what.out)
    settings = _settings(config, what.contestant, tasks)

    if not (what.resume and folder.is_begun):
        folder.check_new()

    with folder.lock():
        goes_on = what.resume and folder.go_on(settings)
        if not goes_on:
            folder.check_new()
        return run_coroutine(
            _optimize_in_folder(what, config, tasks, folder, settings, goes_on, note)
        )


async def _optimize_in_folder(
    what: TextOptimization,
    config: RunConfig,
    tasks: _SearchTasks,
    folder: OptimizeFolder,
    settings: Mapping[str, Any],
    goes_on: bool,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """The part of `optimize` that works in the folder."""
    records: list[Record] = folder.records() if goes_on else []
    section = config.optimize
    budget = budget_of(section, comparison(section, len(tasks.held_out)), records)
    async with _open_sampler(what, config, folder.path / RUN, note) as sampler:
        declared = folder.read_declared() if goes_on else {}
        if not declared:
            budget.take(1, final=False)
            declared = await _find_declared(sampler, tasks.learning[0], config)

        method = _method(config, declared)
        start, kinds = _start(config, declared, method)
        if not goes_on:
            folder.begin(settings, declared)
            folder.add(SearchBegun(candidate="", task=tasks.learning[0].id, label=PROBE, number=1))

        folder.add(SearchSession(lead_s=budget.used_s - budget.before_s))
        most = max(1, config.engine.max_running // section.attempts_per_task)
        playing = Playing(sampler, folder, budget, records, config.agent.texts, most)

        writer = None
        if section.writer is not None and method in ("apo", "gepa"):
            ask = ask_of(config, sampler)
            writer = TextWriter(ask, folder, records, section.max_chars, note)

        search = TextSearch(
            section=section,
            method=method,
            seed=config.run.seed,
            kinds=kinds,
            playing=playing,
            writer=writer,
            folder=folder,
            learning=tasks.learning,
            judging=tasks.judging,
            note=note,
        )
        search.restore(records)
        best = await search.run(start)
        compared = await _compare_held_out(playing, start, best.candidate, tasks.held_out, note)
        remote_totals = sampler.remote_models.totals()

    summary = _summary(search, best, compared, budget, config)
    summary |= {"settings": dict(settings), "remote_models": remote_totals}
    texts = best.candidate.texts if summary["better"] else start.texts
    winner_texts = {
        name: text for name, text in texts.items() if text or name in config.agent.texts
    }
    folder.end({**config.agent.texts, **winner_texts}, summary, report_of(summary, search.pool))

    return summary


@asynccontextmanager
async def _open_sampler(
    what: TextOptimization, config: RunConfig, run: Path, note: Callable[[str], None]
) -> AsyncIterator[Sampler]:
    if what.agent is None and what.tasks is None:
        async with open_player(what.contestant, config, note, run) as sampler:
            yield sampler
        return

    config = without_routing(config)
    loaded = load_policy(config, what.contestant.checkpoint)
    with run_folder(config, run) as opened_config, tempfile.TemporaryDirectory() as store:
        url = f"sqlite:///{store}/store.sqlite"
        async with open_components(
            opened_config,
            agent=what.agent,
            tasks=what.tasks,
            store_url=url,
            loaded=loaded,
            note=note,
        ) as parts:
            yield parts.sampler


async def _find_declared(sampler: Sampler, task: Task, config: RunConfig) -> dict[str, Declared]:
    """The texts that the agent requests in an attempt. Raises AttemptsFailedError."""
    (trajectory, *_) = await sampler.play(
        task, attempts=1, temperature=0.0, step=0, label=PROBE, texts=config.agent.texts
    )
    if not sampler.declared:
        if trajectory.status != "completed":
            raise AttemptsFailedError(f"the first attempt failed: {trajectory.error}")
        raise ConfigError(
            "the agent asks for no named text, so there is nothing to search: get its prompts "
            'from policy.text("system", "You are ...") or agentevo.text, and examples from '
            "policy.examples() (docs/prompts.md)"
        )

    return dict(sampler.declared)


def _method(config: RunConfig, declared: Mapping[str, Declared]) -> str:
    section = config.optimize
    if section.method != "auto":
        return section.method
    if section.writer is not None:
        return "gepa"

    names = section.texts or list(declared)
    kinds = {declared[name].kind for name in names if name in declared}
    return "few_shot" if "examples" in kinds else "phrases"


def _start(
    config: RunConfig, declared: Mapping[str, Declared], method: str
) -> tuple[Candidate, dict[str, Kind]]:
    """The agent's own texts that are searched, and their kinds. Raises ConfigError."""
    chosen_names = config.optimize.texts
    unknown = next((name for name in chosen_names if name not in declared), None)
    if unknown is not None:
        guess = nearest(unknown, list(declared))
        hint = f"did you mean {guess}? " if guess else ""
        raise ConfigError(
            f"optimize.texts: the agent asks for no text {unknown!r}: {hint}it asks for "
            f"{', '.join(sorted(declared))}"
        )

    kinds = {
        name: declaration.kind
        for name, declaration in declared.items()
        if declaration.kind in WRITTEN[method] and (name in chosen_names or not chosen_names)
    }
    if not chosen_names and any(kind != "tool" for kind in kinds.values()):
        kinds = {name: kind for name, kind in kinds.items() if kind != "tool"}

    if not kinds or any(name not in kinds for name in chosen_names):
        of_kind = " or ".join(WRITTEN[method])
        raise ConfigError(
            f"optimize.method={method} writes texts of the kind {of_kind}, and the agent asks for "
            + ", ".join(
                f"{name} ({declaration.kind})" for name, declaration in sorted(declared.items())
            )
            + ": choose another method, or other optimize.texts"
        )

    configured = config.agent.texts
    texts = {name: configured.get(name, declared[name].default) for name in sorted(kinds)}
    return Candidate(texts=texts), kinds


def _check_config(config: RunConfig) -> None:
    section = config.optimize
    if config.agents:
        raise ConfigError(
            "agents: several agents in one rollout are not optimized: leave the section out"
        )

    if section.writer not in (None, POLICY) and section.writer not in config.remote_models:
        guess = nearest(section.writer or "", list(config.remote_models))
        hint = f"did you mean {guess}? " if guess else ""
        raise ConfigError(
            f"optimize.writer: there is no remote model {section.writer!r}: {hint}add it to "
            "remote_models, or take policy, the model that plays"
        )


def _tasks_of(
    config: RunConfig, given_tasks: Sequence[Task] | None, note: Callable[[str], None]
) -> _SearchTasks:
    """The tasks of the search, and the held-out ones. A task with the same question as a held-out
    task is left out of the search. A curriculum has no effect here, because it depends on solved
    tasks of training, and no step is trained."""
    in_order = config.tasks.model_copy(update={"curriculum": None})
    source = TaskSource(config.model_copy(update={"tasks": in_order}), given_tasks)
    held_out = source.held_out()
    held_out_questions = {_question(task) for task in held_out}
    tasks_by_id: dict[str, Task] = {}
    left_out = 0
    for step in count(1):
        before = len(tasks_by_id) + left_out
        for task in source.train(step):
            if _question(task) in held_out_questions:
                left_out += 1
            elif task.id not in tasks_by_id:
                tasks_by_id[task.id] = task

        if len(tasks_by_id) >= config.optimize.tasks or len(tasks_by_id) + left_out == before:
            break
        if step > config.optimize.tasks and left_out > len(tasks_by_id):
            break

    if left_out:
        note(f"{left_out} training tasks have the query of a held-out task, and are left out")

    tasks = list(tasks_by_id.values())[: config.optimize.tasks]
    if len(tasks) < 6:
        raise ConfigError(
            f"tasks: {len(tasks)} to search with, at least 6 are needed, and {len(held_out)} "
            "more are held out: give more tasks, or lower evaluation.tasks"
        )

    third = len(tasks) // 3
    return _SearchTasks(tasks[:third], tasks[third:], held_out)


def _question(task: Task) -> tuple[str | int | None, ...]:
    """The identity of a task without its id. A query with two answers gives two tasks, because
    `metadata` is part of the identity."""
    return task.environment, task.seed, task.query, repr(task.answer)


def _settings(config: RunConfig, contestant: Contestant, tasks: _SearchTasks) -> dict[str, Any]:
    """The settings that a resumed search must repeat."""
    every = [*tasks.learning, *tasks.judging]
    optimize = config.optimize.model_dump(mode="json", exclude={"minutes", "cost", "attempts"})
    return {
        "model": contestant.origin,
        "agent": config.agent.model_dump(mode="json"),
        "optimize": optimize,
        "tasks": len(every),
        "tasks_digest": task_digest(every),
        "held_out": len(tasks.held_out),
        "held_out_digest": task_digest(tasks.held_out),
        "sampling": config.sampling.model_dump(mode="json"),
        "rewards": [reward.model_dump(mode="json") for reward in config.rewards],
        "seed": config.run.seed,
    }


@dataclass(frozen=True)
class _Compared:
    """Two candidates, compared on the held-out tasks that both have played."""

    before: Estimate | None
    after: Estimate | None
    difference: Estimate | None
    success: tuple[Estimate | None, Estimate | None]
    failed: tuple[int, int]
    problem: str = ""


async def _compare_held_out(
    playing: Playing,
    start: Candidate,
    winner: Candidate,
    held_out: Sequence[Task],
    note: Callable[[str], None],
) -> _Compared:
    """Plays pairs of candidates, some tasks at a time, so that the results stay paired if the
    budget ends."""
    pairs = [start] if winner.id == start.id else [start, winner]
    means: list[list[float]] = [[] for _ in pairs]

    successes: list[list[float]] = [[] for _ in pairs]
    failed = [0, 0]
    problem = ""
    some = 8
    for first in range(0, len(held_out), some):
        chunk = held_out[first : first + some]
        try:
            played = [await playing.play(pair, chunk, label=HELD_OUT) for pair in pairs]
        except BudgetSpentError as error:
            problem = (
                f"{error}: only {len(means[0])} of {len(held_out)} held-out tasks are compared"
            )
            note(problem)
            break

        for task in chunk:
            of_it = [
                [attempt for attempt in each[task.id] if attempt.status == "completed"]
                for each in played
            ]
            for index, completed in enumerate(of_it):
                failed[index] += len(played[index][task.id]) - len(completed)
                if all(of_it):
                    means[index].append(
                        sum(attempt.reward for attempt in completed) / len(completed)
                    )
                    successes[index].append(
                        sum(attempt.success for attempt in completed) / len(completed)
                    )

    same = len(pairs) == 1
    return _Compared(
        mean_of(means[0]),
        mean_of(means[-1]),
        None if same else paired_difference(means[0], means[1]),
        (mean_of(successes[0]), mean_of(successes[-1])),
        (failed[0], failed[0] if same else failed[1]),
        problem,
    )


def _summary(
    search: TextSearch, best: Judged, compared: _Compared, budget: Budget, config: RunConfig
) -> dict[str, Any]:
    difference = compared.difference
    fails_more = compared.failed[1] > compared.failed[0]
    better = difference is not None and difference.low > 0 and not fails_more
    estimates = {
        "before": compared.before,
        "after": compared.after,
        "difference": difference,
        "success_before": compared.success[0],
        "success_after": compared.success[1],
    }
    start = search.pool[0]

    return {
        "method": search.method,
        "better": better,
        "winner": best.candidate.id,
        "own": start.candidate.id,
        "texts": best.candidate.texts,
        "own_texts": start.candidate.texts,
        "digests": {name: digest_of_text(text) for name, text in best.candidate.texts.items()},
        "held_out": {
            name: None if estimate is None else estimate.as_json()
            for name, estimate in estimates.items()
        },
        "failed": {"before": compared.failed[0], "after": compared.failed[1]},
        "problem": compared.problem,
        "search": {
            "own": start.mean,
            "best": best.mean,
            "tried": search.num_tried,
            "judged": len(search.pool),
            "ended": search.end_reason,
            "writer_failures": [] if search.writer is None else search.writer.failures[:20],
        },
        "budget": {
            "attempts": budget.num_begun,
            "of": config.optimize.attempts,
            "seconds": round(budget.used_s, 1),
        },
    }
