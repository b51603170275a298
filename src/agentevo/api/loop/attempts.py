"""Records the running attempts of programs that have their own loop, in the process of the run's
engine. Everything happens on the run's event loop.

    open -> generate, or calls of a client of its own -> settle -> end

A program can repeat every request: an attempt begins once, and every request to end it gets the
same answer. Attempts beyond the limit wait for a slot. An attempt ends if no request arrives for
its time limit and MARGIN_S, because its program is gone.
"""

from __future__ import annotations

import asyncio
import contextvars
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NoReturn, TypeVar, cast

from agentevo.agents.policy import AttemptSession, Policy
from agentevo.api.loop.contents import Sealer, check_id
from agentevo.api.loop.records import (
    Answers,
    EndedAgent,
    EndedAttempts,
    NewAttempt,
    OpenedService,
    ServiceRequest,
    Settled,
    SettledAgent,
    UnknownAttemptError,
)
from agentevo.errors import BadRequestError, EngineUnavailableError
from agentevo.inference.conversations.conversation import Conversation
from agentevo.inference.remote_models import RemoteConversations
from agentevo.runtime.event_loop import in_thread
from agentevo.store.call_log import RunningCall
from agentevo.types import RemoteTurn, Trajectory, Turn, group_of_agent
from agentevo.types.images import ImageFile, images_of_messages

T = TypeVar("T")

MARGIN_S = 60.0
"""How long to wait for a program after its attempt's time limit."""
POLL_INTERVAL_S = 5.0
"""Seconds between two checks for attempts whose program is gone."""
KEPT = 1000
"""The number of ended attempts whose result is kept for repeated requests."""
MAX_ASKS = 10_000
"""Calls of one attempt."""


class _Elsewhere:
    """Replaces an attempt's remote models if its program calls them itself."""

    turns: tuple[RemoteTurn, ...] = ()

    def __init__(self, models: Sequence[str]) -> None:
        self.models = frozenset(models)

    def within_s(self, model: str) -> float:
        """See RemoteConversations.within_s. 0: `complete` refuses at once."""
        return 0.0

    def sees_images(self, model: str) -> bool:
        """See RemoteConversations.sees_images."""
        return False

    async def complete(self, model: str, *arguments: Any, **options: Any) -> NoReturn:
        raise BadRequestError(
            f"{model} is a remote model of the program, which alone has its key: call it there, "
            f"by policy.model({model!r})"
        )


class _AttemptUnderWay:
    def __init__(self, new: NewAttempt, policy: Policy) -> None:
        self.new = new
        self.policy = policy
        self.asks: dict[str, asyncio.Task[Answers]] = {}
        self.seen_at = time.monotonic()
        self.num_seen = 0
        self.opened: OpenedService | None = None

        self.calls: list[RunningCall] = [
            conversation.calls.attempt("loop") for conversation in policy.conversations.values()
        ]
        self.context = contextvars.copy_context()
        for call in self.calls:
            self.context.run(call.__enter__)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task in the attempt's context."""
        self.seen_at = time.monotonic()
        return asyncio.get_running_loop().create_task(work, context=self.context.copy())

    def conversation(self, agent: str) -> Conversation:
        """The conversation of one of several agents, or of the only one. Raises BadRequestError."""
        conversations = self.policy.conversations
        if agent not in conversations:
            agent_names = ", ".join(filter(None, conversations)) or "none: one agent has no name"
            raise BadRequestError(f"there is no agent {agent!r} (known: {agent_names})")
        return conversations[agent]

    def session(self, agent: str) -> AttemptSession:
        """The session of one of several agents, or of the whole attempt."""
        policy: Policy = self.policy[agent] if agent else self.policy
        return self.context.run(lambda: policy.session)

    def is_silent(self, limit_s: float) -> bool:
        """Whether no request arrived for `limit_s`, also none from the program's own API
        clients."""
        turns = sum(len(conversation.turns) for conversation in self.policy.conversations.values())
        if turns != self.num_seen or any(not task.done() for task in self.asks.values()):
            self.num_seen = turns
            self.seen_at = time.monotonic()
        return time.monotonic() - self.seen_at > limit_s


class Attempts:
    """See the module."""

    def __init__(
        self,
        make_policy: Callable[[NewAttempt, str], Policy],
        sealer: Sealer,
        *,
        limit: int,
        timeout_s: float,
        put_images: Callable[[list[ImageFile]], Awaitable[None]],
    ) -> None:
        """`make_policy(attempt, name)`; at most `limit` attempts at once; `timeout_s` is the time
        limit of an attempt. `put_images` stores the images that an attempt has shown."""
        self._make_policy = make_policy
        self._sealer = sealer
        self._limit = limit
        self._timeout_s = timeout_s
        self._put_images = put_images
        self._slots = asyncio.Semaphore(limit)
        self._open: dict[str, _AttemptUnderWay] = {}
        self._handles: dict[str, str] = {}
        """Id of an attempt that is open -> its handle."""
        self._ends: OrderedDict[str, asyncio.Task[EndedAttempts]] = OrderedDict()
        self._is_closed = False
        self._watching = asyncio.create_task(self._watch())

    async def open(self, new: NewAttempt, *, has_session: bool, within_s: float) -> OpenedService:
        """Begins an attempt; a repeated call gets the same answer. `has_session`: the answer has a
        key for the program's own API clients. Raises TimeoutError if no slot is free within
        `within_s`."""
        check_id(new.task_id, "a task")
        check_id(new.group_id, "a group")
        if new.id not in self._handles:
            async with asyncio.timeout(within_s):
                await self._slots.acquire()
            try:
                self._begin(new, has_session)
            except BaseException:
                self._slots.release()
                raise

        attempt = self._open[self._handles[new.id]]
        if attempt.new != new:
            raise BadRequestError(
                f"the attempt {new.id!r} has the id of another attempt: give "
                f"each attempt its own id"
            )
        assert attempt.opened is not None
        return attempt.opened

    def _begin(self, new: NewAttempt, has_session: bool) -> None:
        if self._is_closed:
            raise EngineUnavailableError("the run has ended: no new attempt can start")

        if new.id in self._handles:  # two requests waited for a slot
            self._slots.release()
            return

        policy = self._make_policy(new, f"{new.group_id}#{new.number}")
        if new.elsewhere:
            policy.remote = cast("RemoteConversations", _Elsewhere(new.elsewhere))

        attempt = _AttemptUnderWay(new, policy)
        names = {agent: conversation.name for agent, conversation in policy.conversations.items()}
        keys = {}
        if has_session:
            keys = {agent: attempt.session(agent).key for agent in dict.fromkeys(["", *names])}

        handle = secrets.token_urlsafe(24)
        attempt.opened = OpenedService(
            handle=handle, names=names, keys=keys, sees_images=policy.sees_images
        )
        self._open[handle] = attempt
        self._handles[new.id] = handle

    def session(self, handle: str, agent: str) -> AttemptSession:
        """The attempt's session at the gateway, or that of one of several agents."""
        return self._find(handle).session(agent)

    def remote(self, handle: str) -> RemoteConversations | None:
        """The attempt's conversations with the run's own remote models, if it has any."""
        return self._find(handle).policy.remote

    async def generate(self, handle: str, ask: ServiceRequest) -> Answers:
        """The answers to a call; a repeated call gets the same answers. Raises what
        Conversation.complete raises."""
        attempt = self._find(handle)
        if ask.id not in attempt.asks:
            if len(attempt.asks) >= MAX_ASKS:
                raise BadRequestError(f"an attempt can make at most {MAX_ASKS} calls")
            conversation = attempt.conversation(ask.agent)
            attempt.asks[ask.id] = attempt.start(self._generate(conversation, ask))

        task = attempt.asks[ask.id]
        await asyncio.wait([task])
        if task.cancelled():
            raise UnknownAttemptError("this attempt was ended during a call: start it again")

        return task.result()

    async def _generate(self, conversation: Conversation, ask: ServiceRequest) -> Answers:
        prompt: Any = ask.messages if ask.ids is None else ask.ids
        if not prompt:
            raise BadRequestError("messages is empty: give the whole history")

        for number, image in enumerate(ask.images, start=1):
            where = f"image {number} of the call"
            part = await in_thread(conversation.images.read, image.data, where)
            if part != image.part:
                raise BadRequestError(
                    f"{where} has the SHA-256 {part.sha256} and the type {part.media_type}, and "
                    f"was sent as {image.part.sha256} ({image.part.media_type})"
                )

        turns = await conversation.complete(
            prompt, tools=ask.tools, overrides=ask.overrides, form=ask.form, n=ask.n
        )
        openings = [conversation.opening(turn) for turn in turns]
        return Answers(turns=turns, openings=openings, slept_s=conversation.slept_s)

    async def settle(self, handle: str) -> Settled:
        attempt = self._find(handle)
        agents = {
            agent: SettledAgent(turns=conversation.turns, received=conversation.received)
            for agent, conversation in attempt.policy.conversations.items()
        }
        return Settled(agents=agents, posted=list(attempt.session("").posted))

    async def end(self, handle: str) -> EndedAttempts:
        """Ends an attempt; a repeated call returns the same record."""
        if handle not in self._ends:
            self._find(handle)
            self._ends[handle] = self._ending(handle)
            while len(self._ends) > KEPT:
                self._ends.popitem(last=False)
        return await asyncio.shield(self._ends[handle])

    def _ending(self, handle: str) -> asyncio.Task[EndedAttempts]:
        """Starts to end an attempt. It takes no more calls. Its slot is free once it has ended."""
        attempt = self._open.pop(handle)
        del self._handles[attempt.new.id]
        task = attempt.start(self._end(attempt))
        task.add_done_callback(self._retrieve_exception)
        return task

    def _retrieve_exception(self, task: asyncio.Task[EndedAttempts]) -> None:
        self._slots.release()
        if not task.cancelled():
            task.exception()  # marks it as retrieved, since perhaps no program asks for it

    async def _end(self, attempt: _AttemptUnderWay) -> EndedAttempts:
        for task in attempt.asks.values():
            task.cancel()

        await asyncio.gather(*attempt.asks.values(), return_exceptions=True)
        await attempt.policy.close()
        for call in attempt.calls:
            call.end("completed", None)

        agents = {
            agent: self._record(attempt.new, agent, conversation)
            for agent, conversation in attempt.policy.conversations.items()
        }
        turns = [turn for agent in agents.values() for turn in agent.turns]
        named = {part.sha256 for turn in turns for part in images_of_messages(turn.messages)}
        if named:
            images = attempt.policy.images
            await self._put_images([images[name] for name in sorted(named)])
        return EndedAttempts(agents=agents)

    def _record(self, new: NewAttempt, agent: str, conversation: Conversation) -> EndedAgent:
        turns: list[Turn] = conversation.turns_to_record({})
        sealed = Trajectory(
            id=conversation.name,
            task_id=new.task_id,
            group_id=group_of_agent(new.group_id, agent),
            attempt=new.number,
            turns=turns,
        )
        broken = conversation.broken

        return EndedAgent(
            turns=turns,
            numbers={index: number for number, index in enumerate(conversation.received)},
            metrics=conversation.metrics(),
            broken=None if broken is None else f"{type(broken).__name__}: {broken}",
            seal=self._sealer.seal(sealed),
        )

    async def close(self) -> None:
        """Ends all attempts, and waits also for those that are already ending."""
        self._is_closed = True
        self._watching.cancel()
        ends = [self._ending(handle) for handle in list(self._open)]
        await asyncio.gather(*ends, *self._ends.values(), return_exceptions=True)

    async def _watch(self) -> None:
        """Ends attempts whose programs are gone."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            limit = self._timeout_s + MARGIN_S
            for handle in [
                name for name, attempt in self._open.items() if attempt.is_silent(limit)
            ]:
                self._ending(handle)

    def _find(self, handle: str) -> _AttemptUnderWay:
        attempt = self._open.get(handle)
        if attempt is None:
            raise UnknownAttemptError(
                "this attempt is not under way: it has ended, had no request for too long, or "
                "the server was restarted; start it again"
            )

        attempt.seen_at = time.monotonic()
        return attempt
