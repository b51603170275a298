"""Measures the policy on held-out tasks, next to a random and an optimal player under the same
limits.

It also defines the end of a run whose agent, environment or scorer is broken: every attempt of its
first evaluation, or of its first step, has failed. Later failures are counted and do not end the
run. Nothing was trained at that point, so the run does not occupy its folder
(`runs.chain.is_given_up`): after a fix, the same command starts the run in the same folder.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from agentevo.config import EnvironmentAgentSection, RunConfig
from agentevo.config.named_agents import trained_agents
from agentevo.errors import AttemptsFailedError
from agentevo.observability import LiveView
from agentevo.rollout.failures import count_kinds, summarize_failures
from agentevo.runs.folder.chain import HeadFile
from agentevo.runs.folder.creation import RunCommand
from agentevo.runs.orchestration.batch_sources import BatchSource
from agentevo.runs.orchestration.components import Components
from agentevo.runs.orchestration.players import reference_players as players_of
from agentevo.runs.orchestration.rollout_sources import StopAskedError
from agentevo.runtime.paths import short
from agentevo.runtime.signals import finishes_before_stop
from agentevo.runtime.tracebacks import name_place
from agentevo.training.phases import phase
from agentevo.types import Baselines, Trajectory

if TYPE_CHECKING:
    from agentevo.runs.orchestration.run_record import RunRecord

BY_STAGE = "success_by_stage"


@dataclass(frozen=True)
class Evaluated:
    """An evaluation's metrics and errors."""

    metrics: dict[str, float]
    num_tokens: int
    """The number of generated tokens."""
    num_attempts: int
    errors: list[str | None]
    """The errors of the failed attempts."""

    @property
    def failures(self) -> str:
        """How many attempts failed and why, in words; empty if none failed."""
        if not self.errors:
            return ""
        words = summarize_failures(self.errors, self.num_attempts)
        return f"{words}; success and reward do not include them"

    def notes(self, config: RunConfig, *, is_first: bool = True) -> list[str]:
        """The lines under the table of an evaluation's numbers. Only the first table explains what
        success means."""
        meaning = meaning_of_success(config) if is_first else ""
        return [line for line in (self.stages, self.failures, meaning) if line]

    @property
    def stages(self) -> str:
        """Greedy success by stage, in words; empty if there are none."""
        rates = [
            f"{key.rpartition('/')[2]} {value:.1%}"
            for key, value in self.metrics.items()
            if f"/{BY_STAGE}/greedy/" in key
        ]
        return f"success by stage: {', '.join(rates)}" if rates else ""


def reference_players(parts: Components) -> Baselines | None:
    """Mean success of the two reference players on the held-out tasks; None for a user's own agent,
    and, with a note, for an environment that can't give it."""
    if parts.config.environment is None:
        return None
    return players_of(parts.config, parts.tasks.held_out(), parts.note)


def meaning_of_success(config: RunConfig) -> str:
    """Explains the numbers of a graded agent; empty for an environment's own success."""
    if config.environment is not None and isinstance(config.agent, EnvironmentAgentSection):
        return ""

    if config.rewards:
        return (
            f"success: a score of 1 or more by {config.rewards[0].title}, unless it says "
            "otherwise; reward: the mean of what the rewards give"
        )

    return (
        "success: a reward of 1 or more, or what Outcome(success=...) says; reward: the mean of "
        "what the agent returns"
    )


async def evaluate(
    parts: Components, step: int, *, samples: int, players: Baselines | None, label: str = ""
) -> Evaluated:
    """Plays one greedy attempt per held-out task, and `samples` sampled ones: metrics
    `val-core/...`. Success and reward are means over the attempts that completed, and left out
    where none did. `val-aux/.../failed` is the share of failed attempts, `.../failed_by/.../KIND`
    their number by kind, where there are any. `val-aux/.../success_by_stage/.../STAGE` is over the
    tasks of each of the recipe's stages.

    `label` begins the trajectories' own labels: needed where one step is evaluated twice.
    """
    config = parts.config
    name = config.environment.type if config.environment is not None else "agent"
    tasks = parts.tasks.held_out()

    metrics: dict[str, float] = {}
    by_agent: dict[str, float] = {}
    tokens = 0
    num_attempts = 0
    errors: list[str | None] = []
    passes = [("greedy", 1, 0.0)] + (
        [("sampled", samples, config.evaluation.temperature)] if samples else []
    )
    for decoding, attempts, temperature in passes:
        trajectories: list[Trajectory] = await parts.sampler.sample(
            tasks,
            attempts=attempts,
            temperature=temperature,
            split="eval",
            step=step,
            label=label + decoding,
        )
        tokens += sum(t.num_completion_tokens() for t in trajectories)

        played = {t.agent for t in trajectories}
        for agent in (
            config.agents if len(played) > 1 else ()
        ):  # a single agent has the numbers below
            if completed := [
                t for t in trajectories if t.agent == agent and t.status == "completed"
            ]:
                by_agent[f"val-core/{name}:{agent}/success/{decoding}"] = fmean(
                    t.success for t in completed
                )
                by_agent[f"val-core/{name}:{agent}/reward/{decoding}"] = fmean(
                    t.reward for t in completed
                )

        if config.agents:  # the numbers of the attempts are those of the main agent
            trajectories = [t for t in trajectories if t.agent == trained_agents(config)[0]]

        if done := [t for t in trajectories if t.status == "completed"]:
            metrics[f"val-core/{name}/success/{decoding}"] = fmean(t.success for t in done)
            metrics[f"val-core/{name}/reward/{decoding}"] = fmean(t.reward for t in done)
            metrics |= _by_stage(parts, done, f"val-aux/{name}/{BY_STAGE}/{decoding}")

        failed = [t.error for t in trajectories if t.status == "failed"]
        metrics[f"val-aux/{name}/failed/{decoding}"] = len(failed) / len(trajectories)
        for kind, count in count_kinds(failed).items():
            metrics[f"val-aux/{name}/failed_by/{decoding}/{kind}"] = float(count)

        num_attempts += len(trajectories)
        errors += failed
        metrics[f"val-aux/{name}/num_turns/{decoding}"] = fmean(len(t.turns) for t in trajectories)

    metrics[f"val-core/{name}/n"] = float(len(tasks))
    for player, value in (
        (("random", players.random), ("optimal", players.optimal)) if players is not None else ()
    ):
        if value is not None:
            metrics[f"val-core/{name}/{player}"] = value

    return Evaluated(metrics | by_agent, tokens, num_attempts, errors)


def _by_stage(parts: Components, done: Sequence[Trajectory], prefix: str) -> dict[str, float]:
    """Success of completed attempts at the tasks of each stage that has some, as PREFIX/STAGE."""
    metrics = {}
    stages = parts.tasks.held_out_by_stage() if parts.config.tasks.stages else {}
    for stage, ids in stages.items():
        if successes := [t.success for t in done if t.task_id in ids]:
            metrics[f"{prefix}/{stage}"] = fmean(successes)
    return metrics


def headline(metrics: dict[str, float]) -> float | None:
    """The greedy success rate among an evaluation's metrics; None if every attempt failed."""
    return next((value for key, value in metrics.items() if key.endswith("/success/greedy")), None)


def sampled_success(metrics: dict[str, float]) -> float | None:
    """The success rate of the sampled attempts among an evaluation's metrics."""
    return next((value for key, value in metrics.items() if key.endswith("/success/sampled")), None)


def failed_share(metrics: dict[str, float]) -> float:
    """The share of greedy attempts that failed."""
    return next((value for key, value in metrics.items() if key.endswith("/failed/greedy")), 0.0)


def solved_share(metrics: dict[str, float]) -> float:
    """The share of all greedy attempts that succeeded, counting failed ones. By this number,
    weights under which attempts fail are never the best."""
    return (headline(metrics) or 0.0) * (1.0 - failed_share(metrics))


def check_evaluation(parts: Components, evaluated: Evaluated) -> None:
    """Raises AttemptsFailedError, with the place where the first error was raised, if every attempt
    has failed."""
    failed = _describe_failure(parts, "the evaluation", evaluated.errors, evaluated.num_attempts)
    if failed:
        raise AttemptsFailedError(failed)


def check_first_attempts(
    parts: Components,
    what: str,
    errors: list[str | None],
    num_attempts: int,
    command: str,
    head: HeadFile,
) -> None:
    """Raises AttemptsFailedError if every attempt of a run's first evaluation or step has failed;
    `errors` are those of the failed ones. Then `head` records that the run is abandoned."""
    failed = _describe_failure(parts, what, errors, num_attempts)
    if not failed:
        return

    head.give_up()
    recipe = short(parts.config.run_dir / "config.yaml")
    how = f"by the same command, or with `agentevo {command} {recipe}`, with --resume or without"
    if parts.config.agent.type == "function":
        how = "by the same call"
    elif command == "learn":
        how = f"with `agentevo learn {recipe}`, its samplers first"

    raise AttemptsFailedError(
        f"{failed}\nnothing was trained: fix it, and start again in the same folder {how}"
    )


def _describe_failure(
    parts: Components, what: str, errors: list[str | None], num_attempts: int
) -> str:
    """Says what failed and where the first error was raised. Its traceback was already shown. Empty
    if at least one attempt did not fail, or there was none."""
    if not num_attempts or len(errors) < num_attempts:
        return ""
    failed = f"{what}: {summarize_failures(errors, num_attempts)}"
    trace = parts.sampler.failures.trace_of(errors[0])
    place = name_place(trace)
    where = f"raised in {place}: its traceback is above" if place else trace
    return "\n".join(filter(None, (failed, where)))


class RunEvaluation:
    """The evaluations of a run: the policy on held-out tasks or data, logged and shown. `players`:
    the reference players on the held-out tasks, if there are any."""

    def __init__(
        self,
        parts: Components,
        source: BatchSource,
        record: RunRecord,
        view: LiveView,
        is_stopped: Callable[[], bool],
        command: RunCommand,
    ) -> None:
        self._parts = parts
        self._source = source
        self._record = record
        self._view = view
        self._is_stopped = is_stopped
        self._command = command
        self._has_played = False
        self.players = reference_players(parts)

    def is_due(self, step: int) -> bool:
        """Whether the recipe asks for an evaluation after this step."""
        every = self._parts.config.evaluation.every
        return bool(every) and step % every == 0

    def value_of(self, metrics: dict[str, float]) -> float | None:
        """The value by which the best checkpoint is chosen; None if nothing is held out, or if a
        gap on training tasks chooses it (gap.py)."""
        if self._record.chooses_by_gap:
            return None
        return solved_share(metrics) if self._parts.plays else self._source.value(metrics)

    async def rate(self, name: str, *, full: bool) -> float | None:
        """Makes an evaluation, and counts it as one of the progress. Returns its value. Raises as
        `evaluate`."""
        progress = self._record.progress
        progress.after = await self.evaluate(name, full=full)
        value = self.value_of(progress.after)
        progress.rate(value)
        return value

    async def evaluate(self, name: str, *, full: bool, label: str = "") -> dict[str, float]:
        """Logs and shows an evaluation of the current weights; `full` adds the sampled attempts.
        `label` distinguishes two evaluations of one step. Raises StopAskedError if the user asks to
        stop during the evaluation."""
        self._view.phase("evaluating", name)
        started = time.perf_counter()

        progress = self._record.progress
        step = progress.step
        with phase("evaluation"):
            held_out = self._source.evaluate(self._is_stopped)
            played: dict[str, float] = {}
            evaluated = None
            if self._parts.plays:
                evaluated = await self._play(step, full=full, label=label)
                played = evaluated.metrics
                progress.generated_tokens += evaluated.num_tokens

        metrics = held_out | played
        if held_out:
            texts = (
                f"{key.rpartition('/')[2].replace('_', ' ')} {value:.4g}"
                for key, value in held_out.items()
            )
            self._view.note(f"held-out conversations at step {step}: {', '.join(texts)}")

        self._record.log.log(step, metrics | {"timing_s/testing": time.perf_counter() - started})
        if evaluated is not None:
            if not progress.begun:
                check_first_attempts(
                    self._parts,
                    "the first evaluation",
                    evaluated.errors,
                    evaluated.num_attempts,
                    self._command,
                    self._record.head,
                )
            notes = evaluated.notes(self._parts.config, is_first=not self._has_played)
            self._view.evaluation(step, metrics, notes)
            self._has_played = True

        return metrics

    async def _play(self, step: int, *, full: bool, label: str) -> Evaluated:
        """Plays the evaluation's attempts."""
        run_engines = self._parts.run_engines
        async with nullcontext() if run_engines is None else run_engines.with_repairs():
            samples = self._parts.config.evaluation.samples if full else 0
            work = asyncio.create_task(
                evaluate(self._parts, step, samples=samples, players=self.players, label=label)
            )
            if not await finishes_before_stop(work, self._is_stopped):
                raise StopAskedError("stopped while evaluating")
            return work.result()
