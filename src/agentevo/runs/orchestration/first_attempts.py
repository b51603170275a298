"""The defined end of a run whose agent, environment or scorer is broken: every attempt of its first
evaluation, or of its first step, has failed. Later failures are counted and do not end the run.

Nothing was trained at that point, so the run does not occupy its folder (`runs.chain.is_given_up`):
after a fix, the same command starts the run in the same folder.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentevo.config import RunConfig
from agentevo.errors import AttemptsFailedError
from agentevo.rollout.failures import summarize_failures
from agentevo.runs.folder.chain import HeadFile
from agentevo.runs.orchestration.components import Components
from agentevo.runs.orchestration.evaluation import Evaluated
from agentevo.runtime.paths import short
from agentevo.runtime.tracebacks import name_place
from agentevo.types import Trajectory


def check_evaluation(parts: Components, evaluated: Evaluated) -> None:
    """Raises AttemptsFailedError, with the place where the first error was raised, if every attempt
    has failed."""
    failed = _describe_failure(parts, "the evaluation", evaluated.errors, evaluated.num_attempts)
    if failed:
        raise AttemptsFailedError(failed)


def check_first_evaluation(
    parts: Components, evaluated: Evaluated, command: str, head: HeadFile
) -> None:
    """Does the same for a run's first evaluation. `head` records that the run is abandoned."""
    what = "the first evaluation"
    _give_up(
        parts,
        _describe_failure(parts, what, evaluated.errors, evaluated.num_attempts),
        command,
        head,
    )


def check_first_step(
    parts: Components, trajectories: Sequence[Trajectory], command: str, head: HeadFile
) -> None:
    """Does the same for the attempts of a run's first step. A step on given data has no
    attempts."""
    errors = [trajectory.error for trajectory in trajectories if trajectory.status == "failed"]
    _give_up(
        parts, _describe_failure(parts, "the first step", errors, len(trajectories)), command, head
    )


def _describe_failure(
    parts: Components, what: str, errors: list[str | None], num_attempts: int
) -> str:
    """Says what failed and where the first error was raised. Its traceback was already shown. Empty
    if at least one attempt did not fail."""
    if not num_attempts or len(errors) < num_attempts:
        return ""
    failed = f"{what}: {summarize_failures(errors, num_attempts)}"
    trace = parts.sampler.failures.trace_of(errors[0])
    place = name_place(trace)
    where = f"raised in {place}: its traceback is above" if place else trace
    return "\n".join(filter(None, (failed, where)))


def _give_up(parts: Components, failed: str, command: str, head: HeadFile) -> None:
    if failed:
        head.give_up()
        raise AttemptsFailedError(f"{failed}\n{_begin_again(parts.config, command)}")


def _begin_again(config: RunConfig, command: str) -> str:
    """Says how to continue a run that ended like this."""
    if config.agent.type == "function":
        how = "by the same call"
    elif command == "learn":
        how = f"with `agentevo learn {short(config.run_dir / 'config.yaml')}`, its samplers first"
    else:
        how = (
            f"by the same command, or with `agentevo {command} "
            f"{short(config.run_dir / 'config.yaml')}`, "
            "with --resume or without"
        )

    return f"nothing was trained: fix it, and start again in the same folder {how}"
