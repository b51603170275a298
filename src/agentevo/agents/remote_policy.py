"""A remote model that replaces the policy. Agents use it like the policy, but it is not trained.

Its replies have no token ids. A turn of such an attempt has only text: `prompt_ids` and
`completion_ids` are empty, and the number of tokens comes from the server (`policy_tokens` among
the trajectory's metrics). Tool calls come from the server's answer; no parser extracts them from
the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from agentevo.agents.named_texts import Texts
from agentevo.agents.policy import Policy, PolicyGateway
from agentevo.errors import BadRequestError, EngineError
from agentevo.inference.remote_models.conversations import POLICY, RemoteConversations
from agentevo.models.chat.answer_form import AnswerForm
from agentevo.store.call_log import AttemptCalls
from agentevo.types import Message, RemoteTurn, SamplingOverrides, Turn

if TYPE_CHECKING:
    from agentevo.inference.conversations.conversation import Conversation

POLICY_TOKENS = "policy_tokens"
"""The metric with the number of tokens that a trajectory's policy generated, if their ids are
unknown."""


class RemotePolicyConversation:
    """The Conversation of a policy that is a remote model. It is a view of the policy's remote
    turns."""

    slept_s = 0.0
    oldest_version = None
    broken: BaseException | None = None
    """Always None. A failure of the server fails the attempt, like any exception of an agent."""

    def __init__(
        self,
        remote: RemoteConversations,
        model: str,
        sampling: SamplingOverrides,
        *,
        name: str,
        calls: AttemptCalls,
    ) -> None:
        self.name = name
        self.calls = calls
        self.images = remote.images
        """See Conversation."""
        self.sees_images = remote.sees_images(model)
        """See Conversation: by the recipe's remote_models.NAME.sees_images."""
        self._remote = remote
        self._model = model
        self._sampling = sampling
        self._closed = False

    @property
    def _own(self) -> list[RemoteTurn]:
        return [turn for turn in self._remote.turns if turn.agent == POLICY]

    @property
    def turns(self) -> list[Turn]:
        return _views(self._own, {})

    @property
    def received(self) -> list[int]:
        received_turns = self._remote.received_turns()
        return [number for number, turn in enumerate(self._own) if turn.index in received_turns]

    async def complete(
        self,
        prompt: Sequence[Message] | Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        overrides: SamplingOverrides | None = None,
        form: AnswerForm | None = None,
        n: int = 1,
    ) -> list[Turn]:
        """See Conversation.complete. Raises what RemoteConversations.complete raises, and
        BadRequestError for token ids."""
        if self._closed:
            raise EngineError(f"the attempt {self.name} is over: it can't generate more replies")

        if not prompt or not isinstance(prompt[0], Message):
            raise BadRequestError(
                f"{self._model} is a remote model, which takes messages and not token ids"
            )

        values = {} if overrides is None else overrides.given()
        remote_turns = await self._remote.complete(
            self._model,
            cast("Sequence[Message]", prompt),
            tools=tools,
            form=form,
            overrides=msgspec.structs.replace(self._sampling, **values),
            n=n,
            agent=POLICY,
        )
        new = {turn.index for turn in remote_turns}
        views = zip(self._own, self.turns, strict=True)
        return [view for turn, view in views if turn.index in new]

    def opening(self, turn: Turn) -> str:
        """See Conversation.opening. Always empty, since a server does not show the prompt's
        text."""
        return ""

    def num_tokens(self, turn: int) -> tuple[int, int]:
        """The numbers of tokens of the prompt and of the answer, as counted by the server."""
        remote_turn = self._own[turn]
        return remote_turn.prompt_tokens, remote_turn.completion_tokens

    def turns_to_record(self, rewards: Mapping[int, float]) -> list[Turn]:
        remote_turns = self._own
        received = self.received
        earned = {place: rewards.get(turn, 0.0) for place, turn in enumerate(received)}
        return _views([remote_turns[turn] for turn in received], earned)

    def metrics(self) -> dict[str, float]:
        return {POLICY_TOKENS: float(sum(turn.completion_tokens for turn in self._own))}

    async def close(self) -> None:
        self._closed = True


def _views(remote_turns: Sequence[RemoteTurn], rewards: Mapping[int, float]) -> list[Turn]:
    """The turns in order. `rewards` has their rewards by index."""
    numbers: dict[int | None, int] = {
        turn.index: number for number, turn in enumerate(remote_turns)
    }
    return [
        Turn(
            index=number,
            parent=numbers.get(turn.parent),
            prompt_ids=[],
            completion_ids=[],
            logprobs=[],
            versions=[],
            finish_reason=turn.finish_reason,
            seed=turn.seed,
            reward=rewards.get(number, 0.0),
            messages=turn.messages,
            tools=turn.tools,
        )
        for number, turn in enumerate(remote_turns)
    ]


class RemoteModelPolicy(Policy):
    """See the module. `policy.base_url` is the gateway. There, every model name means this model,
    except the names of the recipe's other models."""

    def __init__(
        self,
        conversation: RemotePolicyConversation,
        gateway: PolicyGateway,
        remote: RemoteConversations,
        model: str,
        texts: Texts | None = None,
    ) -> None:
        super().__init__(cast("Conversation", conversation), gateway, remote, texts=texts)
        self.remote_model = model
        self._conversation = conversation
        self._remote_agents = {"": model}

    def num_tokens(self, turn: int) -> tuple[int, int]:
        return self._conversation.num_tokens(turn)
