"""Attempts of agents in other programs: one request opens an attempt, later requests post its
rewards and end it.

    open(task, group) ── claims ──► an attempt of the group, which waits for an agent
    end(session)      ── ends   ──► its agent has ended with the posted rewards
    all of the group ended      ──► the group is scored, and written like a sampler's

For the sampler, such an agent is like any other (`OutsideAgent`), and the rules of attempts apply.
`agent.timeout_s` ends an attempt that no request ends. Failures are data, a group is written whole,
and a failure of the engine ends the whole group. A session without a group name is alone in its
group, which is stored and never trained on (split `eval`). The sessions belong to the event loop of
the sampler.

Not guaranteed: a group in progress is lost if its process ends.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from agentevo.agents.gateway.refusals import Refusal
from agentevo.agents.gateway.session import GatewaySession
from agentevo.agents.policy import Policy
from agentevo.agents.posted_rewards import PostedReward, outcome_of_rewards
from agentevo.config import RunConfig
from agentevo.errors import (
    AgentEvoError,
    DeadlineExceededError,
    EngineUnavailableError,
    StoreError,
    StoreUnavailableError,
    describe_error,
)
from agentevo.inference.engine import Engine
from agentevo.rollout.attempt_images import put_images_of_tasks
from agentevo.rollout.group import RolloutGroup, write_group
from agentevo.rollout.sampler import BASELINE, Sampler
from agentevo.runtime.retry import with_retries
from agentevo.runtime.trace_header import trace_headers
from agentevo.store.records import Lease, Split
from agentevo.store.store import Store
from agentevo.types import Outcome, Status, Task, Trajectory

MAX_OPEN = 4096
"""The maximum number of attempts that are in progress or wait for an agent."""
MAX_ENDED = 1000
"""The number of sessions that are remembered after their group was written. The oldest are
forgotten first."""
CLAIM_TIMEOUT_S = 30.0
"""The time limit for an attempt to be ready for its agent, in seconds."""
STOP_TIMEOUT_S = 10.0
_GROUP = re.compile(r"\w[\w.:-]{0,99}")
_LABEL = re.compile(r"/([^/@]+)@[^/@]*$")
"""Finds the label in a group's id (see sampler.group_name)."""
_RESERVED_LABELS = {
    BASELINE,
    "train",
    "greedy",
    "sampled",
    "untaught-greedy",
    "untaught-sampled",
    "doctor",
}
"""The labels of groups that a run makes itself."""


class OutsideFailure(AgentEvoError):
    """An outside agent reported a failure, or no client claimed the attempt."""


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of an attempt, as a client sees it."""

    id: str
    object: Literal["session"] = "session"
    state: Literal["open", "ended"] | Status
    """`ended`: this attempt's agent has ended, and other agents of its group have not."""
    task_id: str
    group: str
    """The group's id in the run's store."""
    trajectory_id: str
    turns: int
    completion_tokens: int
    posted: list[PostedReward]
    reward: float | None
    """The reward, after the group was written."""
    error: str | None
    is_written: bool


class OutsideSession:
    """An attempt from the moment at which it waits for an agent."""

    def __init__(self, task: Task, policy: Policy) -> None:
        self.id = secrets.token_hex(8)
        self.task = task
        self.policy = policy
        self.group_id, _, self.attempt = policy.name.rpartition("#")
        self.trace: Mapping[str, str] = {}
        """Headers that identify the attempt's place in a trace."""
        self.gateway_session: GatewaySession | None = None
        """The gateway session of the attempt's agent, after a client has claimed the attempt."""
        self.opened_at = 0.0
        self.claimed = asyncio.Event()
        self.opened = asyncio.Event()
        self.ended = asyncio.Event()
        self.over = asyncio.Event()
        self.failure: str | None = None
        """The failure that the agent reported."""
        self.trajectory: Trajectory | None = None
        """The trajectory as it was written."""

    @property
    def posted(self) -> Sequence[PostedReward]:
        """The rewards posted so far, in order."""
        return () if self.gateway_session is None else self.gateway_session.posted

    def export(self) -> Trajectory:
        """The recorded turns with the posted rewards. Rewards from scorers are missing until the
        group is scored."""
        if self.trajectory is not None:
            return self.trajectory

        outcome = outcome_of_rewards(self.posted, self.policy.received)
        error = self.failure if self.ended.is_set() else "its agent did not end it"
        return Trajectory(
            id=self.policy.name,
            task_id=self.task.id,
            group_id=self.group_id,
            attempt=int(self.attempt),
            turns=self.policy.conversation.turns_to_record(outcome.turn_rewards),
            reward=outcome.reward or 0.0,
            reward_parts=outcome.reward_parts,
            success=outcome.success,
            status="completed" if error is None else "failed",
            error=error,
            metrics=self.policy.conversation.metrics(),
            started_at=self.opened_at,
        )

    def state(self) -> SessionState:
        """The progress of the session, for its agent."""
        turns = self.policy.conversation.turns
        done = self.trajectory
        has_ended = self.over.is_set() or self.ended.is_set()
        return SessionState(
            id=self.id,
            state=("ended" if done is None else done.status) if has_ended else "open",
            task_id=self.task.id,
            group=self.group_id,
            trajectory_id=self.policy.name,
            turns=len(turns),
            completion_tokens=sum(len(turn.completion_ids) for turn in turns),
            posted=list(self.posted),
            reward=None if done is None else done.reward,
            error=self.failure if done is None else done.error,
            is_written=done is not None,
        )


class OutsideAgent:
    """The agent that the sampler runs: it waits while an outside agent plays."""

    def __init__(self, within_s: float) -> None:
        """`within_s`: how long an attempt waits for a client after the last event of its group, in
        seconds."""
        self._claim_timeout_s = within_s
        self._waiting: dict[str, asyncio.Queue[OutsideSession]] = {}
        self._last_event_at: dict[str, float] = {}

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """See Agent.run. Raises OutsideFailure."""
        session = OutsideSession(task, policy)
        try:
            with policy.waiting():
                await self._wait_until_claimed(session)

            gateway_session = policy.session
            assert isinstance(gateway_session, GatewaySession)

            session.gateway_session = gateway_session
            session.opened_at = time.time()
            session.trace = trace_headers()
            session.opened.set()
            await session.ended.wait()

            if session.failure is not None:
                raise OutsideFailure(session.failure)

            return outcome_of_rewards(session.posted, policy.received)
        finally:
            session.over.set()

    async def claim(self, group_id: str) -> OutsideSession:
        """The next attempt of a running group, with a gateway session for its agent."""
        async with asyncio.timeout(CLAIM_TIMEOUT_S):
            while True:
                session = await self._queue(group_id).get()
                if session.over.is_set():
                    continue
                self._last_event_at[group_id] = time.monotonic()
                session.claimed.set()
                await session.opened.wait()
                return session

    def forget(self, group_id: str) -> None:
        """Removes the queue of a group that has ended."""
        self._waiting.pop(group_id, None)
        self._last_event_at.pop(group_id, None)

    def _queue(self, group_id: str) -> asyncio.Queue[OutsideSession]:
        return self._waiting.setdefault(group_id, asyncio.Queue())

    async def _wait_until_claimed(self, session: OutsideSession) -> None:
        group = session.group_id
        self._queue(group).put_nowait(session)

        touched = self._last_event_at.setdefault(group, time.monotonic())
        while (remaining_s := touched + self._claim_timeout_s - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(remaining_s):
                    await session.claimed.wait()
                return
            except TimeoutError:
                touched = self._last_event_at.get(group, touched)

        raise OutsideFailure(
            f"no client opened this attempt within agent.timeout_s={self._claim_timeout_s:g} s of "
            "the "
            "last one of its group"
        )


@dataclass(eq=False)
class _OpenedGroup:
    """A group whose attempts are opened by clients."""

    name: str
    task: Task
    size: int
    group: RolloutGroup
    split: Split
    step: int
    lease: Lease | None
    """The lease of its task, if the task is one of the run's."""
    playing: asyncio.Task[None] | None = None
    sessions: list[OutsideSession] = field(default_factory=list)
    num_claimed: int = 0

    @property
    def id(self) -> str:
        return self.group.group_id


class OutsideSessions:
    """Opens, finds and ends the attempts of outside agents. `note` is called with messages for the
    user."""

    def __init__(
        self,
        config: RunConfig,
        sampler: Sampler,
        agent: OutsideAgent,
        engine: Engine,
        store: Store,
        note: Callable[[str], None],
    ) -> None:
        """`sampler` plays with `agent` and samples from `engine`."""
        self._config = config
        self._sampler = sampler
        self._agent = agent
        self._engine = engine
        self._store = store
        self._note = note
        self._groups: dict[str, _OpenedGroup] = {}
        """The groups in progress, by the names that clients gave them."""
        self._sessions: dict[str, tuple[OutsideSession, _OpenedGroup]] = {}
        self._ended: dict[str, None] = {}
        """Ids of sessions whose group was written, the oldest first."""
        self._opening = asyncio.Lock()
        self._names: set[str] | None = None
        """The names of the written groups. None until they are read from the store."""
        self._counts = Counter[str]()

    def stats(self) -> dict[str, float]:
        under_way = sum(not session.over.is_set() for session, _ in self._sessions.values())
        return {"sessions/open": float(under_way)} | {
            f"sessions/{name}": float(self._counts[name])
            for name in ("opened", "groups_written", "groups_failed")
        }

    @property
    def num_named(self) -> int:
        """The number of groups in progress that will be trained on and whose task has no lease."""
        return sum(
            group.split == "train" and group.lease is None for group in self._groups.values()
        )

    def is_under_way(self, group: str) -> bool:
        return group in self._groups

    async def open(
        self,
        task: Task | None,
        group: str | None,
        size: int | None,
        shown: Task | None = None,
        *,
        lease: Lease | None = None,
    ) -> OutsideSession:
        """Opens the next attempt of the group. The first call starts the group with `size` attempts
        (default: `trainer.group_size`). Without a group name, the attempt is alone in its group.
        `shown` is the task as the agent receives it. `lease` is the lease on the task of a new
        group. The group then owns the lease. Raises Refusal if the attempt can't be opened, and
        EngineUnavailableError while no engine serves."""
        if self._engine.version < 0:
            raise EngineUnavailableError("no engine serves weights of this run yet: try again")

        async with self._opening:
            opened = self._groups.get(group) if group is not None else None
            if opened is None:
                opened = await self._start_group(task, group, size, shown, lease)
            self._check_same(opened, task, size)
            session = await self._agent.claim(opened.id)
            opened.num_claimed += 1

        opened.sessions.append(session)
        self._sessions[session.id] = (session, opened)
        self._counts["opened"] += 1
        return session

    def find(self, session_id: str) -> OutsideSession:
        """The session with this id. Raises Refusal if there is none."""
        if session_id not in self._sessions:
            raise Refusal(
                f"there is no session {session_id!r}, or its group was written long ago: look in "
                f"the run's store",
                status=404,
            )
        return self._sessions[session_id][0]

    def find_by_key(self, session_id: str, key: str) -> GatewaySession | None:
        """The gateway's session with this id, if this is its key. It may be called on any
        thread."""
        session, _ = self._sessions.get(session_id, (None, None))
        own = None if session is None else session.gateway_session
        is_own = own is not None and hmac.compare_digest(key.encode(), own.key.encode())
        return own if is_own else None

    def all(self) -> list[OutsideSession]:
        return [session for session, _ in self._sessions.values()]

    def post(self, session: OutsideSession, *rewards: PostedReward) -> None:
        """Posts rewards. Raises Refusal if the session accepts no more."""
        own = session.gateway_session
        if session.over.is_set() or session.ended.is_set() or own is None:
            raise Refusal("this session has ended and accepts no more rewards", status=409)
        own.post(*rewards)

    async def end(self, session: OutsideSession, failure: str | None = None) -> None:
        """Ends a session, with its agent's failure if there was one. Returns after the attempt has
        ended. After the last attempt of a group, returns when the group is written. A repeated call
        changes nothing."""
        if not session.ended.is_set() and not session.over.is_set():
            session.failure = failure
            session.ended.set()

        await session.over.wait()
        _, opened = self._sessions[session.id]
        is_last = opened.num_claimed == opened.size and all(
            sibling.over.is_set() for sibling in opened.sessions
        )
        if is_last and opened.playing is not None:
            await asyncio.shield(opened.playing)

    async def close(self) -> None:
        """Cancels the open attempts, and writes the complete ones."""
        opened = list(self._groups.values())
        for opened_group in opened:
            opened_group.group.cut("the gateway was stopped")

        playing = [
            opened_group.playing for opened_group in opened if opened_group.playing is not None
        ]
        if playing:
            await asyncio.wait(playing, timeout=STOP_TIMEOUT_S)

        for task in playing:
            task.cancel()

        await asyncio.gather(*playing, return_exceptions=True)

    async def _start_group(
        self,
        task: Task | None,
        name: str | None,
        size: int | None,
        shown: Task | None,
        lease: Lease | None,
    ) -> _OpenedGroup:
        if name is not None:
            await self._check_group(name)

        least = self._config.trainer.group_size
        size = 1 if name is None else least if size is None else size
        if name is not None and size < least:
            raise Refusal(
                f"size is {size}, and the trainer takes groups of trainer.group_size={least} or "
                "more",
                param="size",
            )

        busy = sum(len(opened_group.group.members) for opened_group in self._groups.values())
        if busy + size > MAX_OPEN:
            raise Refusal(
                f"{busy} attempts are in progress or wait for an agent, and the limit is "
                f"{MAX_OPEN}: end some",
                status=429,
                kind="rate_limit_error",
            )

        label = name or f"session-{secrets.token_hex(8)}"
        task = task if task is not None else Task(id=label)
        step = self._engine.version + 1
        self._check_scorer(task)
        if lease is None:
            await self._add(task)

        group = self._sampler.group(
            task,
            attempts=size,
            temperature=self._config.sampling.temperature,
            step=step,
            label=label,
            shown=shown,
        )
        split: Split = "eval" if name is None else "train"
        opened = _OpenedGroup(label, task, size, group, split, step, lease)
        self._groups[label] = opened
        opened.playing = asyncio.create_task(self._play(opened))
        return opened

    def _check_scorer(self, task: Task) -> None:
        """Raises Refusal if no reward can score the task."""
        try:
            self._sampler.check_scorer(task)
        except AgentEvoError as error:
            raise Refusal(f"the task's scorer: {error}", param="task") from error

    async def _add(self, task: Task) -> None:
        """Registers the task. Raises Refusal if the run has another task with the same id."""
        await put_images_of_tasks(self._store, [task], self._sampler.task_images)
        try:
            await self._retry(lambda: self._store.add_tasks([task], queue=False))
        except StoreUnavailableError:
            raise
        except StoreError as error:
            raise Refusal(
                f"the task {task.id[:60]!r} has other content in this run: give the task its own "
                f"id, or send it unchanged",
                status=409,
                param="task",
            ) from error

    async def _check_group(self, name: str) -> None:
        if not _GROUP.fullmatch(name) or name in _RESERVED_LABELS:
            raise Refusal(
                f"group {name[:60]!r}: use 1 to 100 letters, digits and `_ . : -`, and none of "
                f"{', '.join(sorted(_RESERVED_LABELS))}",
                param="group",
            )

        if self._names is None:
            written = await self._retry(lambda: self._store.summaries(split="train"))
            matches = (_LABEL.search(summary.group_id) for summary in written)
            self._names = {label[1] for label in matches if label is not None}

        if name in self._names:
            raise Refusal(f"the group {name} was already written: use another name", status=409)

        if self._config.rollout.policy == "wait":
            raise Refusal(
                "this run trains on its own tasks in their order (rollout.policy=wait), so it "
                "would not train on a group: set rollout.staleness=1 rollout.policy=mask, or leave "
                "the group out",
                param="group",
            )

    def _check_same(self, opened: _OpenedGroup, task: Task | None, size: int | None) -> None:
        """Raises Refusal if the request does not fit the group."""
        if task is not None and task != opened.task:
            raise Refusal(
                f"the group {opened.name} has another task: only attempts at the same task are "
                f"compared",
                status=409,
                param="task",
            )

        if size is not None and size != opened.size:
            raise Refusal(
                f"the group {opened.name} has {opened.size} attempts", status=409, param="size"
            )

        if opened.num_claimed >= opened.size:
            raise Refusal(f"the group {opened.name} has all its attempts", status=409)

    async def _play(self, opened: _OpenedGroup) -> None:
        """Plays the group from its first attempt until it is written or fails."""
        lease = opened.lease
        beats = asyncio.create_task(self._keep_lease(lease, opened)) if lease is not None else None
        try:
            trajectories = await opened.group.run()
            trajectories = await write_group(
                self._store, trajectories, split=opened.split, step=opened.step, lease=lease
            )
            self._counts["groups_written"] += 1

            if opened.split == "train" and self._names is not None:
                self._names.add(opened.name)
        except Exception as error:  # noqa: BLE001 (its sessions get any error)
            self._counts["groups_failed"] += 1
            self._note(f"the group {opened.id} is lost: {describe_error(error)}")
            trajectories = [_lost_trajectory(session, error) for session in opened.sessions]
            if lease is not None:
                with suppress(StoreError):  # if the lease is lost, another process plays the task
                    await self._store.retry_task(lease, describe_error(error))
        finally:
            if beats is not None:
                beats.cancel()
            del self._groups[opened.name]
            self._agent.forget(opened.id)

        self._record_end(opened, trajectories)

    async def _keep_lease(self, lease: Lease, opened: _OpenedGroup) -> None:
        """Renews the lease. Cancels the group after another process got the lease."""
        while True:
            await asyncio.sleep(self._config.rollout.lease_s / 3)
            try:
                await self._store.renew(lease)
            except (StoreUnavailableError, DeadlineExceededError):
                continue  # no other process gets the lease while the database is unavailable
            except StoreError:
                opened.group.cut("the lease on its task is lost")
                return

    def _record_end(self, opened: _OpenedGroup, trajectories: Sequence[Trajectory]) -> None:
        by_id = {trajectory.id: trajectory for trajectory in trajectories}
        for session in opened.sessions:
            session.trajectory = by_id.get(session.policy.name)
            self._ended[session.id] = None
        while len(self._ended) > MAX_ENDED:
            oldest = next(iter(self._ended))
            del self._ended[oldest], self._sessions[oldest]

    async def _retry(self, call: Callable[[], Any]) -> Any:
        return await with_retries(call, what="writing a session's group")


def _lost_trajectory(session: OutsideSession, error: Exception) -> Trajectory:
    """The record of an attempt that an infrastructure failure ended. It is in no store."""
    return msgspec.structs.replace(
        session.export(), status="cancelled", error=f"nothing was written: {error}"
    )
