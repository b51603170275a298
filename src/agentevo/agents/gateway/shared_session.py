"""The session of a model that is served and not trained: one key that does not expire, for any
number of conversations.

A request continues the conversation whose history it extends, if that is one of the MAX_KEPT newest
conversations. The model then sees the tokens that it sampled, and the engine has their keys and
values. Any other request begins a new conversation, and its history is encoded as a whole. A
conversation processes one request at a time and has no branches, so its length is bounded by the
model's context.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import msgspec

from agentevo.agents.gateway.answer import OnPieces
from agentevo.agents.gateway.refusals import Refusal
from agentevo.agents.gateway.request import Delivery, ModelReply, ModelRequest
from agentevo.agents.gateway.session import GatewaySession
from agentevo.agents.posted_rewards import PostedReward
from agentevo.inference.conversations.conversation import Conversation
from agentevo.types import Message

MAX_KEPT = 256
"""The maximum number of conversations that can be continued."""
MAX_IMAGE_BYTES = 2**30
"""The maximum bytes of their images. Beyond it, the oldest conversations are dropped."""
IMAGE_OVERHEAD = 1024
"""What an image takes in memory besides the bytes of its file, in bytes."""


class SharedSession(GatewaySession):
    """The session of a served model. `new_conversation` makes an empty conversation. A client's
    temperature and filters replace those of the conversation. `whole_calls`: see GatewaySession."""

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
        self._sessions: dict[bytes, GatewaySession] = {}
        """Digest of a history -> the session with the conversation of this history, oldest
        first."""

    async def complete(
        self, request: ModelRequest, delivery: Delivery, on_pieces: OnPieces | None = None
    ) -> list[ModelReply]:
        with self._count_request():
            session = self._find_extended(request) or self._new_session()
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

    async def count_tokens(self, request: ModelRequest) -> int:
        """See GatewaySession. The images of the request are not kept."""
        with self._count_request():
            return await self._new_session().count_tokens(request)

    def _new_session(self) -> GatewaySession:
        return GatewaySession(
            {"": self._new_conversation()},
            self.base,
            follows_client=True,
            whole_calls=self._whole_calls,
        )

    def lose(self, delivery: Delivery) -> None:
        """Does nothing, because these turns are not trained on and need not be discarded."""

    def post(self, *rewards: PostedReward) -> None:
        raise Refusal("this model is served and not trained: it takes no rewards", status=404)

    def _find_extended(self, request: ModelRequest) -> GatewaySession | None:
        """Removes the session whose conversation the request continues, so that no other request
        can use it meanwhile, and returns it."""
        if not request.has_messages:
            return None
        digests = list(_digests(request.tools, cast("list[Message]", request.prompt)))
        candidates = (self._sessions.pop(digest, None) for digest in reversed(digests))
        return next((candidate for candidate in candidates if candidate is not None), None)

    async def _keep(
        self, session: GatewaySession, request: ModelRequest, reply: ModelReply
    ) -> None:
        answer = Message("assistant", reply.content)
        history = [*cast("list[Message]", request.prompt), answer]
        digest = list(_digests(request.tools, history))[-1]
        replaced = [self._sessions.pop(digest, None)]
        self._sessions[digest] = session
        while len(self._sessions) > MAX_KEPT or self._num_image_bytes() > MAX_IMAGE_BYTES:
            replaced.append(self._sessions.pop(next(iter(self._sessions))))

        for old in replaced:
            if old is not None:
                await old.close()

    def _num_image_bytes(self) -> int:
        return sum(
            len(image.data) + IMAGE_OVERHEAD
            for session in self._sessions.values()
            for conversation in session.conversations.values()
            for image in conversation.images.files.values()
        )


def _digests(
    tools: Sequence[dict[str, Any]] | None, messages: Sequence[Message]
) -> Iterator[bytes]:
    """A digest of each history that ends with an answer, the shortest first. Clients change the
    format of thoughts and calls, so of an answer only the text counts. Two histories with the same
    digest may therefore differ; the conversation distinguishes them."""
    digest = hashlib.sha256(msgspec.json.encode(tools))
    for message in messages:
        is_answer = message.role == "assistant"
        digested = (message.role, message.text.strip()) if is_answer else message
        digest.update(msgspec.json.encode(digested))
        if is_answer:
            yield digest.digest()
