"""A run: training from a configuration, and what can be asked of it afterwards."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Protocol, Self

from agentevo.config import RunConfig
from agentevo.errors import ConfigError
from agentevo.event_loop import run_coroutine
from agentevo.inference.engines import engines
from agentevo.inference.transports import check_transport
from agentevo.models.adapters import check_lora
from agentevo.models.resolve import resolve
from agentevo.observability import LiveView
from agentevo.orchestration.components import AgentFunction, check_memory, make_environment
from agentevo.orchestration.preference_data import check_preference
from agentevo.orchestration.training_run import run_training
from agentevo.rollout.task_source import TaskSource
from agentevo.runs.creation import prepare_folder, write_config
from agentevo.runs.lock import only_trainer
from agentevo.runs.resume_rules import check_resume
from agentevo.training.checkpoint import Checkpoints
from agentevo.types import Task


class Supervisor(Protocol):
    """Keeps the run's other processes alive while it is entered."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def check(self) -> None:
        """Raises AgentEvoError when one of them can't be kept alive."""


def train(
    config: RunConfig,
    *,
    agent: AgentFunction | None = None,
    tasks: Sequence[Task] | None = None,
    resume: bool = False,
    view: LiveView | None = None,
    supervisor: Callable[[RunConfig, Callable[[str], None]], Supervisor] | None = None,
) -> None:
    """Trains to the end, or to a clean stop at Ctrl-C; blocks. Raises ConfigError before anything
    is created."""
    if agent is not None and tasks is None:
        raise ConfigError("an agent function needs tasks: pass tasks=[...]")
    if tasks is not None and config.rollout.samplers:
        raise ConfigError(
            "an agent function and given tasks live in this process: set rollout.samplers=0"
        )
    view = view if view is not None else LiveView(config.run.name)
    checkpoints = Checkpoints(config.run_dir / "checkpoints", config.checkpoint.keep_last)
    check_parts(config, tasks, resume)
    if resume:
        for key, (was, now) in check_resume(config, checkpoints).items():
            view.note(f"from here on with {key}={now!r}, which was {was!r}")
    else:
        prepare_folder(config)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    with only_trainer(config.run_dir):
        write_config(config)
        with (
            supervisor(config, view.note)
            if supervisor is not None and config.rollout.samplers
            else nullcontext() as children
        ):
            check = children.check if children is not None else lambda: None
            run_coroutine(
                run_training(
                    config,
                    view,
                    agent=agent,
                    tasks=tasks,
                    resume=resume,
                    apart=children is not None,
                    check=check,
                )
            )


def check_parts(
    config: RunConfig, tasks: Sequence[Task] | None, resume: bool, *, apart: bool = False
) -> None:
    """Tells before anything is created or deleted what would otherwise fail while the parts are
    built: an unknown engine or transport, a missing package or option of the environment or of
    child processes, too few tasks, a model that can't be had (a known one is downloaded here).
    `apart`: samplers and engines are other processes, whoever starts them."""
    if config.rollout.samplers:
        importlib.import_module("agentevo.inference.server")  # raises MissingExtraError
    if tasks is None:
        make_environment(config).close()
    TaskSource(config, tasks)
    engines.get(config.engine.type)
    check_transport(config, apart=apart or config.rollout.samplers > 0)
    check_preference(config)
    check_memory(config)
    if config.model.name != "tiny" and not resume:
        resolve(config.model.name)
        check_lora(config.model.lora)
    if config.reward_model.name is not None:
        resolve(config.reward_model.name)
