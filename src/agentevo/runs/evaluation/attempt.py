"""One attempt, played and shown live: the policy's prompts and replies, the calls of tools and code
with their results, and the reward."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentevo.config import RunConfig
from agentevo.errors import ConfigError
from agentevo.observability.call_view import duration
from agentevo.observability.trajectory_view import message_text, visible
from agentevo.rollout.given_tasks import TaskList
from agentevo.rollout.group import GroupAttempt
from agentevo.rollout.task_source import TaskSource
from agentevo.runs.evaluation.chat import with_checkpoint
from agentevo.runs.evaluation.contestants import Contestant, find_contestants
from agentevo.runs.evaluation.play import (
    LABEL,
    check_play,
    config_for_playing,
    open_player,
    scorer_of,
)
from agentevo.runs.orchestration.players import find_agent
from agentevo.runtime.event_loop import run_coroutine
from agentevo.store.call_log import RunningCall
from agentevo.types import RemoteTurn, Task, Trajectory, Turn
from agentevo.types.images import ImageFile

MAX_SHOWN_CHARS = 4000
"""The maximum number of characters of a text that are shown, half of them its head and half its
tail."""
TEXTS = ("code", "arguments", "output", "result", "stdout", "stderr")
"""The shown fields of a call, in this order."""
KINDS = ("tool", "environment", "scorer", "process", "sandbox")


def _task_to_try(
    config: RunConfig, text: str | None, answer: str | None, number: int
) -> tuple[RunConfig, Task, TaskList]:
    """The configuration, the task (the recipe's held-out task with that number, or the given text),
    and the tasks that it is one of. Raises ConfigError."""
    if text is None:
        source = TaskSource(config, None)
        tasks = TaskList(source.held_out(), source.images)
        if not 0 <= number < len(tasks):
            raise ConfigError(
                f"--number {number}: the number of held-out tasks is {len(tasks)}, counted from 0"
            )
        return config, tasks[number], tasks
    config = config_for_playing(config, ("--task",))
    return config, Task(id="try", query=text, answer=answer, seed=number), TaskList()


def try_attempt(
    target: str,
    overrides: Sequence[str],
    *,
    step: int | None = None,
    text: str | None,
    answer: str | None,
    number: int,
    temperature: float,
    show: Callable[[str], None],
    note: Callable[[str], None],
) -> Trajectory:
    """Plays one attempt. `target` and `step`: as those of `agentevo chat`. Raises ConfigError
    before anything is played."""
    target = with_checkpoint(target, step)
    (contestant,) = find_contestants(target, (), overrides, () if text is None else ("--task",))
    config, task, tasks = _task_to_try(contestant.config, text, answer, number)
    if judged := _is_judged(config, task, question=text, answer=answer):
        check_play(config, [task], has_engine=contestant.remote is None)
    return run_coroutine(
        _play_one(
            contestant,
            config,
            task,
            temperature,
            images=tasks.images,
            judged=judged,
            show=show,
            note=note,
        )
    )


def _is_judged(config: RunConfig, task: Task, *, question: str | None, answer: str | None) -> bool:
    """Whether an attempt can be scored. Without an answer, the scorer must be one that needs
    none."""
    if question is None or answer is not None:
        return True
    return not config.rewards and not find_agent(config, None).needs_scorer


async def _play_one(
    contestant: Contestant,
    config: RunConfig,
    task: Task,
    temperature: float,
    *,
    images: Mapping[str, ImageFile],
    judged: bool,
    show: Callable[[str], None],
    note: Callable[[str], None],
) -> Trajectory:
    async with open_player(contestant, config, note) as sampler:
        sampler.use_images(images)
        group = sampler.group(task, attempts=1, temperature=temperature, step=0, label=LABEL)
        (attempt,) = group.members
        live = LiveAttempt(attempt, show)
        for calls in attempt.calls.values():
            calls.listen = live.on_call

        if judged:
            trajectories = await group.run()
        else:
            trajectories = await attempt.run(task_id=task.id, group_id=group.group_id, number=0)

    for trajectory in trajectories:
        live.end(trajectory, scorer_of(task, config) if judged else "")

    return trajectories[0]


def _turn_of(attempt: GroupAttempt, call: RunningCall) -> Turn | RemoteTurn:
    """The record of a completed call of the policy or of a remote model."""
    number = int(call.record("").attributes.get("turn", 0))
    policy = attempt.policy
    if call.kind == "remote" and policy.remote is not None:
        return policy.remote.turns[number]

    conversations = policy.conversations.values()
    return next(c for c in conversations if c.calls is call.calls).turns[number]


class LiveAttempt:
    """Shows calls when they start and end."""

    def __init__(self, attempt: GroupAttempt, show: Callable[[str], None]) -> None:
        self._attempt = attempt
        self._show = show
        self._began = time.monotonic()

    def on_call(self, call: RunningCall) -> None:
        """See AttemptCalls.listen."""
        if call.kind in ("policy", "remote"):
            if call.has_ended:
                self._show_reply(call)
        elif call.kind == "attempt" and call.has_ended:
            if ending := call.record("").attributes.get("ending"):
                self._text("at the end", str(ending))
        elif call.kind in KINDS and (call.has_ended or call.kind in ("tool", "process")):
            self._show_call(call)

    def end(self, trajectory: Trajectory, scorer: str) -> None:
        """Shows the result. `scorer`: the name of the scorer, empty if there was none."""
        tokens = trajectory.num_completion_tokens() or trajectory.metrics.get("policy_tokens", 0)
        parts = ", ".join(f"{name} {value:g}" for name, value in trajectory.reward_parts.items())
        if trajectory.status != "completed":
            outcome = f"{trajectory.status}: {trajectory.error}"
        elif not scorer:
            outcome = "completed, but not scored (give --answer, or a recipe's own task)"
        else:
            success = "success" if trajectory.success else "no success"
            outcome = f"reward {trajectory.reward:g}{f' ({parts})' if parts else ''}, {success}"

        limit_note = ", ended by a limit" if trajectory.truncated else ""
        name_prefix = f"{trajectory.agent}: " if trajectory.agent else ""
        turns = len(trajectory.turns)
        self._line(
            f"{name_prefix}{outcome}{limit_note}; {turns} turn{'s' * (turns != 1)}, "
            f"{tokens:g} tokens, {duration(trajectory.duration_s)}"
        )

    def _show_reply(self, call: RunningCall) -> None:
        """Shows the new part of the prompt, and the reply."""
        record = call.record("")
        facts = record.attributes
        if record.status != "completed":
            self._line(f"{call.kind} {call.name}: {record.status}: {record.error}")
            return

        sizes = f"{facts.get('prompt_tokens', 0)} + {facts.get('completion_tokens', 0)} tokens"
        self._line(
            f"{call.kind} {call.name}, turn {facts.get('turn', 0)} "
            f"({sizes}{_duration_text(record)})"
        )
        for message in _turn_of(self._attempt, call).messages:
            self._text(message.role, message_text(message))

    def _show_call(self, call: RunningCall) -> None:
        """Shows a tool call: its input at the start, and its result at the end."""
        record = call.record("")
        texts = {name: str(record.attributes[name]) for name in TEXTS if name in record.attributes}
        if not call.has_ended:
            self._line(f"{call.kind} {call.name} ...")
            return

        problem = f": {record.status}" if record.status != "completed" else ""
        self._line(f"{call.kind} {call.name}{problem}{_duration_text(record)}")
        for name, text in texts.items():
            self._text(name, text)

        if record.error and record.error not in texts.values():
            self._text("error", record.error)

    def _line(self, text: str) -> None:
        self._show(visible(f"[{time.monotonic() - self._began:6.2f} s] {text}"))

    def _text(self, name: str, text: str) -> None:
        if len(text) > MAX_SHOWN_CHARS:
            half = MAX_SHOWN_CHARS // 2
            text = f"{text[:half]}\n... ({len(text)} characters) ...\n{text[-half:]}"
        first, *further_lines = map(visible, text.split("\n"))
        self._show(f"    {name}: {first}")
        for line in further_lines:
            self._show(f"    {'':{len(name)}}  {line}")


def _duration_text(record: Any) -> str:
    return "" if record.ended_at is None else f", {duration(record.ended_at - record.started_at)}"
