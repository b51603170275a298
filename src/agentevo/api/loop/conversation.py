"""An attempt's conversations as its program sees them. The run records them elsewhere
(inference/conversations/conversation.py): on another thread's event loop, or on a server."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from agentevo.agents.policy import AttemptSession, Policy
from agentevo.api.loop import records
from agentevo.data.message_images import ImageCollector
from agentevo.errors import EngineError, EngineUnavailableError
from agentevo.inference.remote_models import RemoteConversations
from agentevo.models.chat.answer_form import AnswerForm
from agentevo.store.call_log import AttemptCalls
from agentevo.types import Message, SamplingOverrides, Turn
from agentevo.types.images import ImageFile, file_of, images_of_messages


class RemoteAttempt:
    """The common part of its conversations: one running attempt."""

    def __init__(self, connection: records.LoopConnection, opened: records.OpenedService) -> None:
        self.connection = connection
        self.opened = opened
        self.settled: records.Settled | None = None
        """The work of its own clients; None without such clients."""
        self.sessions: list[AttemptSession] = []
        """The sessions of its own clients. Their posted rewards are known once it is settled."""
        self.ended: records.EndedAttempts | None = None
        self.images = ImageCollector()
        self.sent_images: set[str] = set()
        """Digests of the images that the run has."""
        self.conversations = {name: LoopConversation(self, name) for name in opened.names}

    async def settle(self) -> None:
        """From now on the work of the clients is known."""
        self.settled = await self.connection.settle(self.opened)
        for session in self.sessions:
            session.posted = self.settled.posted
        for name, conversation in self.conversations.items():
            conversation.take(self.settled.agents[name].turns)

    async def end(self) -> records.EndedAttempts:
        """Ends it. Raises EngineUnavailableError."""
        if self.ended is None:
            self.ended = await self.connection.end(self.opened)
        return self.ended


class LoopConversation:
    """The part of a Conversation that a Policy and an Attempt need."""

    def __init__(self, attempt: RemoteAttempt, agent: str) -> None:
        self.attempt = attempt
        self.agent = agent
        self.images = attempt.images
        """See Conversation."""
        self.calls = AttemptCalls(None, self.name)
        self.broken: BaseException | None = None
        self.slept_s = 0.0
        self._turns: dict[int, Turn] = {}
        self._openings: dict[int, str] = {}
        self._is_closed = False

    @property
    def name(self) -> str:
        return self.attempt.opened.names[self.agent]

    @property
    def turns(self) -> list[Turn]:
        """The turns that this process knows so far."""
        return [self._turns[index] for index in sorted(self._turns)]

    @property
    def received(self) -> list[int]:
        settled = self.attempt.settled
        return sorted(self._turns) if settled is None else settled.agents[self.agent].received

    async def complete(
        self,
        prompt: Sequence[Message] | Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        overrides: SamplingOverrides | None = None,
        form: AnswerForm | None = None,
        n: int = 1,
    ) -> list[Turn]:
        is_ids = bool(prompt) and isinstance(prompt[0], int)
        images = {} if is_ids else self._unsent(cast("Sequence[Message]", prompt))
        ask = records.ServiceRequest(
            id=uuid.uuid4().hex,
            agent=self.agent,
            messages=None if is_ids else cast("list[Message]", list(prompt)),
            ids=cast("list[int]", list(prompt)) if is_ids else None,
            tools=None if tools is None else [dict(tool) for tool in tools],
            overrides=overrides,
            form=form,
            n=n,
            images=list(images.values()),
        )
        try:
            answers = await self.attempt.connection.generate(self.attempt.opened, ask)
        except EngineUnavailableError as error:
            self.broken = self.broken or error
            raise

        self.attempt.sent_images |= images.keys()
        self.slept_s = answers.slept_s
        self.take(answers.turns)
        for turn, opening in zip(answers.turns, answers.openings, strict=True):
            self._openings[turn.index] = opening

        return answers.turns

    def _unsent(self, messages: Sequence[Message]) -> dict[str, ImageFile]:
        """The images of the messages that the run does not have yet. Raises ImageError for one that
        is missing."""
        named = dict.fromkeys(part.sha256 for part in images_of_messages(messages))
        return {
            name: file_of(name, self.images.files)
            for name in named
            if name not in self.attempt.sent_images
        }

    def take(self, turns: Sequence[Turn]) -> None:
        """These turns are recorded."""
        self._turns |= {turn.index: turn for turn in turns}

    def opening(self, turn: Turn) -> str:
        return self._openings.get(turn.index, "")

    async def close(self) -> None:
        """Ends the attempt, and gets its record."""
        if self._is_closed:
            return

        self._is_closed = True
        try:
            ended_agent = (await self.attempt.end()).agents[self.agent]
        except EngineUnavailableError as error:
            self.broken = self.broken or error
            return

        self._turns = {
            index: msgspec.structs.replace(ended_agent.turns[number], index=index)
            for index, number in ended_agent.numbers.items()
        }
        if ended_agent.broken is not None:
            self.broken = self.broken or EngineError(ended_agent.broken)

    @property
    def ended_agent(self) -> records.EndedAgent | None:
        """The record, once the attempt has ended."""
        ended_attempt = self.attempt.ended
        return None if ended_attempt is None else ended_attempt.agents[self.agent]

    def turns_to_record(self, rewards: Mapping[int, float]) -> list[Turn]:
        if self.ended_agent is None:
            return []

        numbers = self.ended_agent.numbers
        reward_of_turn = {
            numbers[index]: reward for index, reward in rewards.items() if index in numbers
        }
        return [
            msgspec.structs.replace(turn, reward=reward_of_turn.get(turn.index, 0.0))
            for turn in self.ended_agent.turns
        ]

    def metrics(self) -> dict[str, float]:
        return {} if self.ended_agent is None else self.ended_agent.metrics


class _AttemptGateway:
    """Opens the sessions of a RemotePolicy."""

    def __init__(self, attempt: RemoteAttempt) -> None:
        self._attempt = attempt

    def open(
        self, conversations: Mapping[str, Any], remote: Any, remote_agents: Mapping[str, str]
    ) -> AttemptSession:
        only_conversation: LoopConversation | None = conversations.get("")
        agent = "" if only_conversation is None else only_conversation.agent
        opened = self._attempt.connection.session(self._attempt.opened, agent)
        session = AttemptSession(opened.base, opened.key)
        self._attempt.sessions.append(session)
        return session

    def end(self, session: Any) -> None:
        """It ends with its attempt."""


class RemotePolicy(Policy):
    """The policy that an agent of a program's own loop asks."""

    def __init__(self, attempt: RemoteAttempt, remote: RemoteConversations | None = None) -> None:
        """`remote`: the attempt's conversations with remote models, if there are any."""
        conversations: Mapping[str, Any] = attempt.conversations
        super().__init__(
            next(iter(conversations.values())),
            _AttemptGateway(attempt),
            remote,
            {} if "" in conversations else conversations,
            attempt.connection.remote_agents,
        )
        self._attempt = attempt

    @property
    def sees_images(self) -> bool:
        """See Policy."""
        return self._attempt.opened.sees_images

    async def settle(self) -> None:
        if self._attempt.sessions:
            await self._attempt.settle()
