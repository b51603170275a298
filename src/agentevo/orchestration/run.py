"""A training run, top to bottom: what `agentevo train`, `learn` and `sft` do, in that order.

    check -> load -> make the folder -> build -> resume, or cold start -> evaluate
    -> step by step: collect -> prepare -> reserve -> update -> publish -> evaluate, save -> commit
    -> evaluate -> summary and report

Version s of the weights is the result of step s. Reinforcement learning, preference and supervised
training, synchronous and asynchronous, differ only in the source of the batches (batch_sources.py)
and the source of the attempts (rollout_sources.py). A step is committed in one transaction with its
plan (what it trained on, in order), the run's progress and the checkpoint that was saved of it. A
resumed run therefore loads the newest whole checkpoint, replays the committed steps after it from
their plans (resume.py), and continues without loss.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

from agentevo.config import RunConfig
from agentevo.config.parallel import follows, world_size
from agentevo.event_loop import run_coroutine
from agentevo.heap import lasting_heap
from agentevo.inference.transports import local_transport
from agentevo.models.load import LoadedModel
from agentevo.observability import LiveView, report_at_end
from agentevo.observability.run_log import RunLog
from agentevo.orchestration.checks import (
    check_recipe,
    check_unloaded,
    check_weights,
    load_checked,
    remarks_before,
    serves_elsewhere,
)
from agentevo.orchestration.components import (
    AgentFunction,
    open_components,
)
from agentevo.orchestration.conversations import SFTData, read_sft_data
from agentevo.orchestration.progress import summary_of
from agentevo.orchestration.ranks import RunRanks, follow, join_ranks
from agentevo.orchestration.refusals import Refusals
from agentevo.orchestration.resume import ResumePoint, find_resume_point
from agentevo.orchestration.rollout_sources import SamplerSupervisor
from agentevo.orchestration.submissions import Submissions
from agentevo.orchestration.tracking import only_trainer_here, track
from agentevo.orchestration.training_run import Command, TrainingRun
from agentevo.paths import short
from agentevo.rollout.given_tasks import check_and_report
from agentevo.runs.chain import SUMMARY, is_given_up
from agentevo.runs.control import RunControl
from agentevo.runs.creation import check_place, kind_of, new_folder, write_config
from agentevo.runs.identity import confirm_run
from agentevo.runs.resume_rules import note_changes
from agentevo.signals import STOPPING, end_stopped, stop_on_interrupt
from agentevo.training.checkpoint import Checkpoints
from agentevo.types import Task


def train(
    config: RunConfig,
    *,
    command: Literal["train", "sft"] = "train",
    agent: AgentFunction | None = None,
    tasks: Sequence[Task] | None = None,
    resume: bool = False,
    view: LiveView | None = None,
    supervisor: Callable[[RunConfig, Callable[[str], None]], SamplerSupervisor] | None = None,
) -> None:
    """Trains to the end, or to a clean stop: at Ctrl-C, which then raises KeyboardInterrupt, or at
    SIGTERM, which raises SystemExit; blocks.

    `sft` trains on the conversations of the section `data`. `supervisor(config, note)` starts the
    other processes of a recipe with `rollout.samplers` above 0. Raises ConfigError before anything
    is created.
    """
    check_recipe(config, command, agent=agent, tasks=tasks, resume=resume)
    view = view if view is not None else LiveView(config.run.name)
    if follows():
        follow(config)
        return

    if resume and is_given_up(config.run_dir):
        view.note(f"nothing was trained in {short(config.run_dir)}, so its run starts again")
        resume = False

    confirm = None
    changed = check_place(config, command, resume=resume)
    if resume and command == "train" and config.rollout.weights.url is not None:
        # other machines read it too, so a change affects them
        confirm = partial(confirm_run, config, resume=True, note=view.note)
    else:
        note_changes(changed, view.note)

    run_coroutine(
        run_training(
            config,
            view,
            command=command,
            agent=agent,
            tasks=tasks,
            resume=resume,
            supervisor=supervisor if config.rollout.samplers else None,
            confirm=confirm,
        )
    )


def check_dry(
    config: RunConfig, command: Literal["train", "sft"] = "train", *, resume: bool = False
) -> list[str]:
    """Does the checks of `train` before it samples, and raises all problems in one ConfigError,
    without reading the weights of a saved model. Downloads and writes nothing. Returns the lines of
    `remarks_before`, and a line for each model whose weights were too large to compare with their
    digests. Raises ModelError and TornError too."""
    refusals = Refusals()
    given_tasks = refusals.collect(check_recipe, config, command, resume=resume, may_fetch=False)
    if follows():
        refusals.raise_all()
        return []

    goes_on = resume and not is_given_up(config.run_dir)
    lines: list[str] = []
    refusals.collect(check_place, config, command, resume=goes_on, may_create=False)
    if not goes_on:
        lines = refusals.collect(check_weights, config) or []
        loaded = refusals.collect(check_unloaded, config)
        if command == "sft" and loaded is not None:
            view = LiveView(config.run.name)
            refusals.collect(read_sft_data, config, loaded, view, lambda: False)

    refusals.raise_all()
    return remarks_before(config, given_tasks) + lines


Confirm = Callable[[], Awaitable[Callable[[], None]]]


async def run_training(
    config: RunConfig,
    view: LiveView,
    *,
    command: Command,
    agent: AgentFunction | None = None,
    tasks: Sequence[Task] | None = None,
    resume: bool = False,
    supervisor: Callable[[RunConfig, Callable[[str], None]], SamplerSupervisor] | None = None,
    loaded: LoadedModel | None = None,
    submissions: Submissions | None = None,
    confirm: Confirm | None = None,
) -> None:
    """The part of `train` after its checks. `submissions`: of a program's own loop. `confirm`: see
    `_resume_point`."""
    folder = config.run_dir
    checkpoints = Checkpoints(
        folder / "checkpoints",
        config.checkpoint.keep_last,
        keep_best=config.checkpoint.keep_best,
        is_only_caller=True,
    )
    with (
        RunLog() as log,
        view,
        stop_on_interrupt(view.note) as stop_signals,
        ExitStack() as stack,
    ):
        view.record = log.write
        ranks = _join(config, stack, stop_signals, view)

        def is_stopped() -> bool:
            return bool(stop_signals)

        start = ResumePoint()
        _begin_view(config, command, view)
        if resume:
            stack.enter_context(only_trainer_here(folder, view, is_stopped))
            start, make_final = await _resume_point(config, checkpoints, confirm, view.note)

        is_disaggregated = bool(supervisor) or command == "learn"  # others sample for training
        uses_run_engines = ranks is not None and serves_elsewhere(
            config, is_disaggregated=is_disaggregated
        )
        if loaded is None or start.checkpoint is not None:
            loaded = load_checked(config, start.checkpoint, for_part=uses_run_engines)

        conversations = (
            read_sft_data(config, loaded, view, is_stopped) if command == "sft" else None
        )
        end_stopped(stop_signals)
        if not resume:
            make_final = stack.enter_context(new_folder(config))
            stack.enter_context(only_trainer_here(folder, view, is_stopped))

        processes = None if supervisor is None else supervisor(config, view.note)
        async with open_components(
            config,
            agent=agent,
            tasks=tasks,
            checkpoint=start.checkpoint,
            loaded=loaded,
            transport=local_transport(config, is_separate=is_disaggregated or command == "sft"),
            note=view.note,
            may_play=submissions is None,
            traced=True,
            uses_run_engines=uses_run_engines,
        ) as parts:
            if parts.tasks.read is not None and command != "sft":
                check_and_report(config, parts.tasks.read, view.note)

            run = TrainingRun(
                parts,
                conversations,
                checkpoints=checkpoints,
                view=view,
                is_stopped=is_stopped,
                command=command,
                processes=processes,
                submissions=submissions,
                ranks=ranks,
            )
            _begin_folder(config, command, make_final, conversations)
            log.begin(folder, f"agentevo {command}, process {os.getpid()}")
            run.control = stack.enter_context(_open_control(folder, stop_signals, view))
            run.log.tracking = stack.enter_context(track(config, command, view, is_stopped))
            stack.enter_context(lasting_heap())

            with run.log, run.background, processes if processes is not None else nullcontext():
                await run.take_up(start, resumed=resume)
                await run.run()

            _conclude(run, resume)

        if config.tracking.report:
            await report_at_end(folder, lambda token: str(loaded.tokenizer.decode([token])), view)

    end_stopped(stop_signals)


def _join(
    config: RunConfig, stack: ExitStack, stop_signals: list[int], view: LiveView
) -> RunRanks | None:
    """Joins the processes that train together. A stop of another process also stops this one."""
    ranks = stack.enter_context(join_ranks(config))
    if ranks is not None:
        stack.enter_context(ranks.stops.watch(stop_signals, view.note))
    return ranks


async def _resume_point(
    config: RunConfig,
    checkpoints: Checkpoints,
    confirm: Confirm | None,
    note: Callable[[str], None],
) -> tuple[ResumePoint, Callable[[], None]]:
    """Where a resume starts, and the function to call once the folder has this configuration.
    `confirm` accepts or refuses the configuration, now that no other process can change the
    folder."""
    make_final = (lambda: None) if confirm is None else await confirm()
    return await find_resume_point(config, checkpoints, note=note), make_final


def _open_control(
    folder: Path, stop_signals: list[int], view: LiveView
) -> AbstractContextManager[RunControl | None]:
    """A context around a run's steps. A stop request acts as SIGTERM does."""

    def stop() -> None:
        stop_signals.append(signal.SIGTERM)
        view.note(f"asked to stop: {STOPPING}")

    return RunControl(folder, stop, note=view.note)


def _conclude(run: TrainingRun, resume: bool) -> None:
    if run.progress.step >= run.end.step and (run.progress.begun or not resume):
        run.head.write_file(SUMMARY, json.dumps(summary_of(run), indent=2))


def _begin_view(config: RunConfig, command: Command, view: LiveView) -> None:
    world = world_size()
    if world > 1:
        view.note(f"{world} processes train together: {config.trainer.parallel.shared_by(world)}")
        if command == "train" and not config.rollout.samplers and not config.data.given:
            view.note(
                f"the first of them samples, and {world - 1} wait for it: `agentevo launch "
                "... --set engines=N --set samplers=1` gives engines devices of their own"
            )

    view.phase("loading", config.model.name)


def _begin_folder(
    config: RunConfig,
    command: Command,
    make_final: Callable[[], None],
    conversations: SFTData | None,
) -> None:
    """The run's folder exists from this point on."""
    write_config(config, kind_of(command))
    make_final()
    if conversations is not None:
        conversations.write_reports(config.run_dir)
