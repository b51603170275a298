"""How a step trained an attempt: the advantages, and which tokens were fresh enough."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from agentevo.errors import AgentEvoError
from agentevo.observability.attempt_tokens import Training
from agentevo.runs.folder.run_state import RunView
from agentevo.runtime.event_loop import in_thread
from agentevo.store.records import StoredTrajectory
from agentevo.store.store import Store
from agentevo.types import Sample, Trajectory
from agentevo_ui.index.advantages import Rule, config_of, read_stored, rule_of, step_samples
from agentevo_ui.index.reader import IndexRow

MAX_ATTEMPTS = 2_048
"""The maximum number of attempts of a step that are read to compute the advantages of one of
them."""


class TokenTools(NamedTuple):
    """What is needed to show the tokens of a run."""

    decode: Callable[[Sequence[int]], str] | None
    """Converts ids to text. None if the run's tokenizer is not here."""
    rule: Rule | str
    """How advantages are computed, or why they can't be recomputed."""


READY_S = 2.0
"""The time in seconds that a page waits for the tools, because torch and the tokenizer load slowly
the first time."""
_tools: OrderedDict[str, asyncio.Task[TokenTools]] = OrderedDict()


async def tools_of(view: RunView) -> TokenTools | None:
    """The tools. None while they are loading."""
    task = _tools.get(view.key)
    is_old = task is not None and (
        task.get_loop() is not asyncio.get_running_loop()
        or _has_failed(task)
        or _lacks_tokenizer(task)
    )
    if task is None or is_old:
        folder = view.source.folder
        task = _tools[view.key] = asyncio.ensure_future(in_thread(_make_tools, folder))
        while len(_tools) > 8:
            _tools.popitem(last=False)

    await asyncio.wait([task], timeout=READY_S)
    return task.result() if task.done() else None


def _has_failed(task: asyncio.Task[TokenTools]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _lacks_tokenizer(task: asyncio.Task[TokenTools]) -> bool:
    """Whether to search for a tokenizer again, because a run's first checkpoint may add it."""
    return task.done() and task.result().decode is None


def _make_tools(folder: Path | None) -> TokenTools:
    from agentevo.runs.folder.run_folder import saved_tokenizer

    rule = rule_of(config_of(folder))
    tokenizer = None
    if folder is not None:
        with suppress(AgentEvoError):  # a damaged tokenizer: ids are shown
            tokenizer = saved_tokenizer(folder)

    if tokenizer is None:
        return TokenTools(None, rule)

    return TokenTools(
        lambda ids: str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)), rule
    )


MAX_STEPS = 2
_steps = OrderedDict[tuple[str, int], dict[str, list[Sample]]]()
"""Maps (run, step) to the samples of each attempt, for the steps that were requested last."""


async def training_of(
    view: RunView,
    store: Store,
    stored: StoredTrajectory,
    row: IndexRow | None,
    rule: Rule | str,
) -> tuple[Training, str]:
    """The training of an attempt, and why there are no advantages. Empty if there are."""
    step = stored.trained_step if stored.state == "committed" else None
    if step is None:
        why = f"it was not trained on: {stored.drop_reason or stored.state}"
        return Training(None, None, None), why

    records = await store.steps(after=step - 1, limit=1)
    plan = records[0].record.get("plan") if records else None
    bound = plan.get("staleness") if isinstance(plan, dict) else None
    bound = bound if isinstance(bound, int) else None
    training, why = await _advantages(view, store, stored, row, rule, step, bound)
    moved, entropies = await in_thread(token_measures, view, stored.trajectory, step)
    return training._replace(moved=moved, entropies=entropies), why


async def _advantages(
    view: RunView,
    store: Store,
    stored: StoredTrajectory,
    row: IndexRow | None,
    rule: Rule | str,
    step: int,
    bound: int | None,
) -> tuple[Training, str]:
    if isinstance(rule, str):
        return Training(step, bound, None), rule

    if not rule.advantage.is_recursion:
        advantage = None if row is None else row.advantage
        why = "" if advantage is not None else "the advantages of its step are not recomputed yet"
        return Training(step, bound, advantage), why

    try:
        samples = await _samples(view, store, step, rule)
    except AgentEvoError as error:
        return Training(step, bound, None), str(error)

    advantages = by_turn(stored.trajectory, samples.get(stored.trajectory.id, []))
    return Training(step, bound, advantages), ""


async def _samples(view: RunView, store: Store, step: int, rule: Rule) -> dict[str, list[Sample]]:
    """Maps an id to its samples, for a whole step. Raises AgentEvoError."""
    key = view.key, step
    if key not in _steps:
        records = await store.steps(after=step - 1, limit=1)
        if not records or records[0].step != step or records[0].num_trajectories > MAX_ATTEMPTS:
            raise AgentEvoError("its step is too large to recompute its advantages for a page")

        read = await read_stored(store, records[0])
        samples: dict[str, list[Sample]] = {}
        for sample in await in_thread(step_samples, step, records[0].record, read, rule):
            samples.setdefault(sample.trajectory_id, []).append(sample)

        _steps[key] = samples
        while len(_steps) > MAX_STEPS:
            _steps.popitem(last=False)

    _steps.move_to_end(key)
    return _steps[key]


ByTurn = dict[int, np.ndarray]


def token_measures(view: RunView, trajectory: Trajectory, step: int) -> tuple[ByTurn, ByTurn]:
    """Maps a turn to the log-prob change of each of its tokens, and to the entropies. NaN for a
    token that was not trained. Empty if the run stored none."""
    from agentevo.training.batching.samples import trajectory_rows
    from agentevo.training.token_numbers import name_of, path_of, read_numbers

    path = view.source.file(name_of(step))
    samples = [] if path is None else read_numbers(path).get(trajectory.id, [])
    by_path = {sample.path: sample for sample in samples}
    moved: ByTurn = {}
    entropies: ByTurn = {}
    for row in trajectory_rows(trajectory):
        sample = by_path.get(path_of(row.sample.ids))
        if sample is None:
            continue

        try:
            places, changes, entropy = sample.arrays()
        except ValueError:
            continue

        trained = np.flatnonzero(row.sample.loss_mask)
        for values, target in ((changes, moved), (entropy, entropies)):
            of_place = np.full(len(row.sample.ids), np.nan, dtype=np.float32)
            within = (places >= 0) & (places < len(of_place))
            of_place[places[within]] = values[within]
            of_row = of_place[trained]
            target.update({int(turn): of_row[row.turns == turn] for turn in np.unique(row.turns)})

    return moved, entropies


def by_turn(trajectory: Trajectory, samples: list[Sample]) -> dict[int, np.ndarray]:
    """Maps a turn to the advantage of each of its tokens, from the samples that it was trained
    in."""
    from agentevo.training.batching.samples import trajectory_rows

    advantages: dict[int, np.ndarray] = {}
    for row, sample in zip(trajectory_rows(trajectory), samples, strict=False):
        trained = sample.advantages
        if len(trained) == len(row.turns):
            for turn in np.unique(row.turns):
                advantages[int(turn)] = trained[row.turns == turn]

    return advantages
