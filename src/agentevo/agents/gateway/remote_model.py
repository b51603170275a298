"""A client names a remote model of the recipe in place of the policy: its request goes there, and
the answer comes back in the form of the client's API."""

from __future__ import annotations

import secrets
from contextlib import suppress

import msgspec

from agentevo.agents.gateway.answer import OnPieces, pieces_of
from agentevo.agents.gateway.refusals import Refusal
from agentevo.agents.gateway.request import Delivery, ModelReply, ModelRequest, PromptSize
from agentevo.inference.remote_models import RemoteConversations
from agentevo.models.tool_calls import ContentDelta, ReasoningDelta
from agentevo.types import RemoteTurn, Turn


async def completed_remotely(
    remote: RemoteConversations,
    request: ModelRequest,
    delivery: Delivery,
    on_pieces: OnPieces | None,
    *,
    model: str,
    agent: str,
) -> list[ModelReply]:
    """The answers of a remote model. `on_pieces` gets their texts and thoughts as they arrive, and
    tool calls when they are complete. `agent`: the agent that they are attributed to."""
    if (
        isinstance(request.prompt, str)
        or isinstance(request.prompt[0], int)
        or request.token_ids
        or request.logprobs
    ):
        raise Refusal(
            f"{request.model} is a remote model, whose tokens the gateway does not know: send "
            "messages, and leave out token ids and log-probs"
        )

    passed_on: set[tuple[int, type]] = set()

    def pass_on(number: int, delta: ContentDelta | ReasoningDelta) -> None:
        passed_on.add((number, type(delta)))
        if on_pieces is not None:
            with suppress(RuntimeError):  # the gateway has ended
                on_pieces(number, [delta])

    turns = await remote.complete(
        model,
        request.prompt,
        tools=request.tools,
        form=request.form,
        overrides=request.overrides,
        n=request.n,
        agent=agent,
        listen=None if on_pieces is None else pass_on,
    )
    delivery.remote_turns = [turn.index for turn in turns]
    delivery.prompt = PromptSize(turns[0].prompt_tokens, turns[0].cached_tokens)

    replies = [_reply(turn) for turn in turns]
    for number, reply in enumerate(replies):
        pieces = [piece for piece in pieces_of(reply) if (number, type(piece)) not in passed_on]
        if on_pieces is not None and pieces:
            on_pieces(number, pieces)

    return replies


def _reply(turn: RemoteTurn) -> ModelReply:
    answer = turn.messages[-1]
    calls = tuple(
        call if call.id else msgspec.structs.replace(call, id=f"call_{secrets.token_hex(12)}")
        for call in answer.tool_calls
    )
    return ModelReply(
        turn=Turn(
            index=turn.index,
            prompt_ids=[],
            completion_ids=[],
            logprobs=[],
            versions=[],
            finish_reason=turn.finish_reason,
        ),
        content=answer.text,
        reasoning=answer.reasoning,
        tool_calls=calls,
        prompt_ids=[],
        prompt=PromptSize(turn.prompt_tokens, turn.cached_tokens),
        num_completion_tokens=turn.completion_tokens,
        tokens=[],
    )
