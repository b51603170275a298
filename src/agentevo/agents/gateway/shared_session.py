"""The session of a model that is served and not trained: one key that does not expire, for any
number of conversations.

A request continues the conversation whose history it extends, if that is among the last ones, so
that the model sees the tokens that it sampled and the engine has their keys and values. Otherwise
it begins a new conversation, whose history is encoded as a whole. A conversation takes one request
at a time and grows along one line, so it is bounded by the model's context, and at most MAX_KEPT
are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import msgspec

from agentevo.agents.gateway.answer import Hear
from agentevo.agents.gateway.refusals import Refusal
from agentevo.agents.gateway.request import Delivery, ModelReply, ModelRequest
from agentevo.agents.gateway.session import GatewaySession
from agentevo.agents.posted_rewards import PostedReward
from agentevo.inference.conversations.conversation import Conversation
from agentevo.types import Message

MAX_KEPT = 256
"""The maximum number of conversations that can be continued."""


class SharedSession(GatewaySession):
    """See the module. `new_conversation` makes an empty one. The client decides temperature and
    filters; by default those of the conversation apply. `whole_calls`: see Session."""

    def __init__(
        self,
        new_conversation: Callable[[], Conversation],
        base: str,
        key: str,
        *,
        whole_calls: bool = False,
    ) -> None:
        super().__init__(
            {"": new_conversation()}, base, follows_client=True, whole_calls=whole_calls, key=key
        )
        self._new_conversation = new_conversation
        self._kept: dict[bytes, GatewaySession] = {}
        """Digest of a history -> the conversation that has it; the oldest first."""

    async def complete(
        self, request: ModelRequest, delivery: Delivery, on_pieces: Hear | None = None
    ) -> list[ModelReply]:
        with self._one_more():
            session = self._find_extended(request)
            if session is None:
                session = GatewaySession(
                    {"": self._new_conversation()},
                    self.base,
                    follows_client=True,
                    whole_calls=self._whole_calls,
                )

            is_whole = False
            try:
                replies = await session.complete(request, delivery, on_pieces)
                is_whole = len(replies) == 1 and request.has_messages
            finally:
                if not is_whole:
                    await session.close()

            if is_whole:
                await self._keep(session, request, replies[0])

            return replies

    def lose(self, delivery: Delivery) -> None:
        """Does nothing: no turn is trained on here, so none is discarded."""

    def post(self, *rewards: PostedReward) -> None:
        raise Refusal("this model is served and not trained: it takes no rewards", status=404)

    def _find_extended(self, request: ModelRequest) -> GatewaySession | None:
        """The session whose conversation the request continues. It is taken out, so no other
        request has it at the same time."""
        if not request.has_messages:
            return None
        digests = list(_digests(request.tools, cast("list[Message]", request.prompt)))
        candidates = (self._kept.pop(digest, None) for digest in reversed(digests))
        return next((candidate for candidate in candidates if candidate is not None), None)

    async def _keep(
        self, session: GatewaySession, request: ModelRequest, reply: ModelReply
    ) -> None:
        answer = Message("assistant", reply.content)
        history = [*cast("list[Message]", request.prompt), answer]
        digest = list(_digests(request.tools, history))[-1]
        replaced = [self._kept.pop(digest, None)]
        self._kept[digest] = session
        if len(self._kept) > MAX_KEPT:
            replaced.append(self._kept.pop(next(iter(self._kept))))

        for old in replaced:
            if old is not None:
                await old.close()


def _digests(
    tools: Sequence[dict[str, Any]] | None, messages: Sequence[Message]
) -> Iterator[bytes]:
    """A digest of each history that ends with an answer, the shortest first. Clients write thoughts
    and calls in forms of their own, so only an answer's text counts. The conversation distinguishes
    histories that are equal here and differ otherwise."""
    digest = hashlib.sha256(msgspec.json.encode(tools))
    for message in messages:
        is_answer = message.role == "assistant"
        digested = (message.role, message.text.strip()) if is_answer else message
        digest.update(msgspec.json.encode(digested))
        if is_answer:
            yield digest.digest()
