"""A running group: several attempts at one task. Each attempt is an asyncio task that can be
cancelled without losing its recorded turns.

A failure inside an agent is data: the attempt becomes a `failed` trajectory with the reason. A
failure of the engine is not data: the group raises `InfrastructureFailure` and cancels the other
attempts, and no part of the group may be written.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from msgspec.structs import replace

from agentevo import errors
from agentevo.agents.agent import Agent, outcome_of
from agentevo.agents.policy import Policy
from agentevo.rollout.attempt_images import AttemptImages
from agentevo.rollout.failures import TIMEOUT_PREFIX, ShowFailure
from agentevo.runtime.event_loop import TaskScope
from agentevo.runtime.retry import STORE_RETRY_S, with_retries
from agentevo.runtime.signals import Interrupt
from agentevo.runtime.tracebacks import traceback_of
from agentevo.store.call_log import AttemptCalls, RunningCall
from agentevo.store.codec import encode_trajectories
from agentevo.store.records import Lease, Split
from agentevo.store.store import Store
from agentevo.store.trace_context import TracedMessage
from agentevo.types import Outcome, Status, Task, Trajectory, group_of_agent
from agentevo.types.images import ImageFile

MAX_OBSERVATION_CHARS = 4_000
"""The maximum number of stored characters of the last observation."""
CANCEL_TIMEOUT_S = 5.0
"""The time limit in seconds for a cancelled agent to end. Beyond it, the attempt ends without the
agent, and the policy refuses the agent's further requests."""
POLL_INTERVAL_S = 0.05
"""The shortest interval between two checks of an attempt's time limit, in seconds. The clock of the
limit stops while the engine sleeps, so one wait is not enough."""


Score = Callable[
    [Sequence[Trajectory], Sequence[bool], Mapping[str, AttemptCalls], Mapping[str, ImageFile]],
    Awaitable[list[Trajectory]],
]
"""Returns the trajectories of one group with their rewards. The other arguments are whether each
trajectory needs a reward, the records of its calls, and the images that it may name (see
Scoring.score)."""


class InfrastructureFailure(errors.AgentEvoError):
    """The engine failed during an attempt. The group is discarded, and its task may be tried
    again."""


def _retrieve_exception(task: asyncio.Task[Outcome]) -> None:
    """Retrieves the task's exception, so that asyncio does not log it as never retrieved. Another
    cause may have ended the attempt first."""
    if not task.cancelled():
        task.exception()


class GroupAttempt:
    """One attempt at `task` as a member of a group. `limit_s` is the agent's time limit in seconds,
    counted while the engine is awake."""

    def __init__(
        self,
        agent: Agent,
        task: Task,
        policy: Policy,
        *,
        name: str,
        limit_s: float,
        show: ShowFailure = lambda name, error, trace: None,
    ) -> None:
        """`show` receives each failure when it happens, with the traceback."""
        self.name = name
        self.policy = policy
        self._show = show
        self.unrewarded: set[str] = set()
        """Ids of the trajectories that need a reward from a scorer."""
        self._last_observations: dict[str, str] = {}
        self._agent = agent
        self._task = task
        self._limit_s = limit_s
        self._scope = TaskScope()
        self._agent_task: asyncio.Task[Outcome] | None = None
        self._cut_reason: str | None = None

    def cut(self, reason: str) -> None:
        """Cancels the attempt, which keeps its recorded turns. Has no effect on an attempt that has
        ended."""
        if self._cut_reason is None and (self._agent_task is None or not self._agent_task.done()):
            self._cut_reason = reason
            if self._agent_task is not None:
                self._agent_task.cancel()

    @property
    def calls(self) -> dict[str, AttemptCalls]:
        """Maps the id of a trajectory to the record of its calls."""
        return {
            conversation.name: conversation.calls
            for conversation in self.policy.conversations.values()
        }

    async def run(self, *, task_id: str, group_id: str, number: int) -> list[Trajectory]:
        """Plays until the agent ends, the time limit passes, or `cut` is called. The attempt is
        recorded as one call of each of its trajectories. There is a trajectory for every agent of
        the rollout."""
        with ExitStack() as stack:
            name = type(self._agent).__name__
            calls = [
                stack.enter_context(attempt_calls.attempt(name))
                for attempt_calls in self.calls.values()
            ]
            trajectories = await self._run(task_id, group_id, number)
            for call, trajectory in zip(calls, trajectories, strict=True):
                call.outcome(trajectory.status, trajectory.error)
                call.keep(ending=self._last_observations.get(trajectory.id, ""))
                self._note_result(call, trajectory)

            return trajectories

    def _note_result(self, call: RunningCall, trajectory: Trajectory) -> None:
        """Adds to the attempt's span, if there is one: the reward unless a scorer sets it, the
        first prompt and the last reply."""
        if call.tracing is None:
            return
        if trajectory.id not in self.unrewarded:
            call.note(reward=trajectory.reward, success=trajectory.success)
        if trajectory.truncated:
            call.note(truncated=True)

        if call.tracing.contents and trajectory.turns:
            first = trajectory.turns[0]
            last = trajectory.turns[-1]
            call.traced_message = TracedMessage(
                messages=first.messages[:-1], answers=last.messages[-1:]
            )

    async def _run(self, task_id: str, group_id: str, number: int) -> list[Trajectory]:
        """Plays the attempt and returns its trajectories. No other function catches the failures of
        an agent."""
        started_at = time.time()
        started_clock = time.perf_counter()
        self._agent_task = self._scope.start(self._play())
        self._agent_task.add_done_callback(_retrieve_exception)

        if self._cut_reason is not None:
            self._agent_task.cancel()

        try:
            await self._wait_until_over(self._agent_task)
            is_late = not self._agent_task.done() and self._cut_reason is None
        finally:
            await self._end_agent(self._agent_task)

        result, status, error, exception = self._outcome_of(self._agent_task, is_late)
        conversations = self.policy.conversations
        broken = next(
            (conversation.broken for conversation in conversations.values() if conversation.broken),
            None,
        )
        if broken is not None and status != "cancelled":
            raise InfrastructureFailure(
                f"{self.name}: {type(broken).__name__}: {broken}"
            ) from broken

        remote = self.policy.remote
        if status == "failed":
            self._show(self.name, error or "", traceback_of(exception))

        trajectories = []
        for agent, conversation in conversations.items():
            outcome = result.agents.get(agent, result)
            if outcome.reward is None:
                self.unrewarded.add(conversation.name)

            self._last_observations[conversation.name] = outcome.ending[:MAX_OBSERVATION_CHARS]
            is_main = conversation is self.policy.conversation
            remote_calls = remote if is_main else None
            trajectories.append(
                Trajectory(
                    id=conversation.name,
                    task_id=task_id,
                    group_id=group_of_agent(group_id, agent),
                    attempt=number,
                    turns=conversation.turns_to_record(outcome.turn_rewards),
                    remote_turns=[] if remote_calls is None else remote_calls.turns_to_record(),
                    files=self.policy.files_of(agent),
                    texts=dict(self.policy.texts.digests),
                    reward=outcome.reward or 0.0,
                    reward_parts=outcome.reward_parts,
                    success=outcome.success,
                    status=status,
                    error=error,
                    truncated=outcome.truncated,
                    metrics=conversation.metrics()
                    | ({} if remote_calls is None else remote_calls.metrics())
                    | outcome.metrics,
                    started_at=started_at,
                    duration_s=time.perf_counter() - started_clock,
                    timings=outcome.timings,
                )
            )

        return trajectories

    async def _play(self) -> Outcome:
        """Runs the agent. Raises OverreachError if the agent raises SystemExit or
        KeyboardInterrupt, which would end the event loop, and with it the sampler or trainer. A
        process that the agent forked must not continue as a second run, so the fork ends here."""
        process = os.getpid()
        try:
            return await self._agent.run(self._task, self.policy)
        except Interrupt:
            raise
        except (SystemExit, KeyboardInterrupt) as error:
            raise errors.OverreachError(error, "an agent") from error
        finally:
            if os.getpid() != process:
                os._exit(os.EX_SOFTWARE)

    async def _wait_until_over(self, agent_task: asyncio.Task[Outcome]) -> None:
        """Waits until the agent has ended, or has run for `limit_s` seconds. Time in which the
        engine sleeps and time in which the agent waits for its turn do not count."""
        deadline = time.monotonic() + self._limit_s - self._paused_s()
        while (
            not agent_task.done()
            and (remaining_s := deadline + self._paused_s() - time.monotonic()) > 0
        ):
            await asyncio.wait([agent_task], timeout=max(remaining_s, POLL_INTERVAL_S))

    def _paused_s(self) -> float:
        return self.policy.conversation.slept_s + self.policy.waited_s

    async def _end_agent(self, agent_task: asyncio.Task[Outcome]) -> None:
        """Ends the agent if it still runs, and frees the engine's memory of the attempt."""
        try:
            self._scope.cancel()
            if not agent_task.done():
                # on a user program's event loop, the scope does not know its tasks
                agent_task.cancel()
                await asyncio.wait([agent_task], timeout=CANCEL_TIMEOUT_S)
        finally:
            await self.policy.close()

    def _outcome_of(
        self, agent_task: asyncio.Task[Outcome], is_late: bool
    ) -> tuple[Outcome, Status, str | None, BaseException | None]:
        """The outcome of the attempt, its status, the reason, and the exception."""
        empty_outcome = Outcome(reward=0.0, success=False)
        if self._cut_reason is not None and (
            not agent_task.done() or agent_task.cancelled() or agent_task.exception() is not None
        ):
            return empty_outcome, "cancelled", self._cut_reason, None

        if is_late:
            reason = f"{TIMEOUT_PREFIX} agent.timeout_s={self._limit_s:g} s"
            return empty_outcome, "failed", reason, None

        if agent_task.cancelled():
            return empty_outcome, "failed", "CancelledError: the agent cancelled itself", None

        error = agent_task.exception()
        if error is None:
            try:
                return self._check_outcome(agent_task.result()), "completed", None, None
            except Exception as raised_error:  # noqa: BLE001 (a user's objects may raise anything)
                error = raised_error

        if isinstance(error, Interrupt):
            raise error

        return empty_outcome, "failed", errors.describe_error(error), error

    def _check_outcome(self, returned: Any) -> Outcome:
        """The outcome in a form that can be stored, averaged and trained on. Raises TypeError or
        ValueError if there is no such form."""
        outcome = outcome_of(returned, self.policy.rewarded)
        for agent, conversation in self.policy.conversations.items():
            turns = conversation.turns
            rewards = outcome.agents.get(agent, outcome).turn_rewards
            unknown = rewards.keys() - {turn.index for turn in turns}
            if unknown:
                agent_name = f"agent {agent!r}" if agent else "agent"
                raise ValueError(
                    f"the {agent_name}'s turn_rewards name the turn {min(unknown)}, but it took "
                    f"{len(turns)} turns, counted from 0"
                )

        return outcome


class RolloutGroup:
    """The attempts at one task that are compared with each other. The greedy baseline attempt runs
    with them, and belongs to a separate group."""

    def __init__(
        self,
        task_id: str,
        group_id: str,
        members: Sequence[GroupAttempt],
        *,
        num_wanted: int,
        baseline: tuple[str, GroupAttempt] | None,
        score: Score,
        images: AttemptImages | None = None,
        on_ended: Callable[[int], None] = lambda number: None,
    ) -> None:
        """The group is complete with `num_wanted` completed members. `baseline`: (group id,
        attempt). `images`: where the images of the task come from and those of the attempts go.
        `on_ended` receives the number of ended attempts whenever an attempt ends."""
        self.task_id = task_id
        self.group_id = group_id
        self.members = list(members)
        self.baseline = baseline
        self._num_wanted = num_wanted
        self._score = score
        self._images = images
        self._on_ended = on_ended

    @property
    def attempts(self) -> list[GroupAttempt]:
        return [*self.members, *([self.baseline[1]] if self.baseline is not None else [])]

    async def run(self) -> list[Trajectory]:
        """Runs all attempts and returns their trajectories with rewards: the members in order, then
        the baseline. With several agents, the list has this order for each agent, one agent after
        the other. The images that they name are in the store. Raises InfrastructureFailure. If this
        call fails or is cancelled, it cancels all attempts."""
        policies = [attempt.policy for attempt in self.attempts]
        if self._images is not None:
            await self._images.give(policies)

        runs = [
            asyncio.create_task(
                attempt.run(task_id=self.task_id, group_id=self.group_id, number=number)
            )
            for number, attempt in enumerate(self.members)
        ]
        members = set(runs)
        if self.baseline is not None:
            runs.append(
                asyncio.create_task(
                    self.baseline[1].run(task_id=self.task_id, group_id=self.baseline[0], number=0)
                )
            )

        try:
            pending = set(runs)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for failed in done:
                    failed.result()

                self._on_ended(len(runs) - len(pending))
                if len(self.members) > self._num_wanted and pending & members:
                    completed = sum(
                        run.done() and run.result()[0].status == "completed" for run in members
                    )
                    if completed >= self._num_wanted:
                        self.cut(f"cut: {completed} attempts of its group had completed")

            scored = await self._score_attempts([run.result() for run in runs])
            if self._images is not None:
                await self._images.keep(policies, scored)

            return scored
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)

    async def _score_attempts(self, attempts: list[list[Trajectory]]) -> list[Trajectory]:
        """Scores the group and its baseline separately, and each agent separately."""
        unrewarded = set[str]().union(*(attempt.unrewarded for attempt in self.attempts))
        calls = {name: call for attempt in self.attempts for name, call in attempt.calls.items()}
        images = {
            digest: image
            for attempt in self.attempts
            for digest, image in list(attempt.policy.images.items())  # a thread may add some
        }
        count = len(self.members)
        scored = list[Trajectory]()
        for agent_trajectories in zip(*attempts, strict=True):
            for compared in (agent_trajectories[:count], agent_trajectories[count:]):
                if compared:
                    needs_reward = [trajectory.id in unrewarded for trajectory in compared]
                    scored += await self._score(compared, needs_reward, calls, images)

        return scored

    def cut(self, reason: str) -> None:
        """Cancels the members that are still running."""
        for member in self.members:
            member.cut(reason)


async def write_group(
    store: Store,
    trajectories: Sequence[Trajectory],
    *,
    split: Split,
    step: int,
    lease: Lease | None = None,
    within_s: float = STORE_RETRY_S,
) -> list[Trajectory]:
    """Writes all of the attempts or none, and returns them as they were written. Waits `within_s`
    for an unavailable database. An attempt that the store can't hold, because of a value from an
    agent, environment or scorer, is written as a failed one without turns."""

    async def write(attempts: list[Trajectory]) -> None:
        await with_retries(
            lambda: store.write_trajectories(attempts, split=split, step=step, lease=lease),
            within_s=within_s,
            what="write_trajectories",
        )

    attempts = list(trajectories)
    try:
        await write(attempts)
    except errors.StoreUnavailableError:
        raise
    except errors.StoreError:
        storable = [_storable_or_failed(attempt) for attempt in attempts]
        if storable == attempts:
            raise
        attempts = storable
        await write(attempts)

    return attempts


def _storable_or_failed(trajectory: Trajectory) -> Trajectory:
    try:
        encode_trajectories([trajectory], "train", 0)
    except errors.StoreError as error:
        return replace(
            trajectory,
            turns=[],
            reward=0.0,
            reward_parts={},
            metrics={},
            success=False,
            status="failed",
            error=errors.describe_error(error),
        )

    return trajectory
