"""What is recorded of a call of the policy: small facts for the store, and for its span, if the run
is traced, what was said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from agentevo.models.chat import ChatFormat
from agentevo.store.call_log import RunningCall
from agentevo.store.trace_context import Said
from agentevo.types import Message, Turn

Prompt = Sequence[Message] | Sequence[int] | str


def note_answers(
    call: RunningCall,
    turns: Sequence[Turn],
    prompt: Prompt,
    tools: Sequence[Mapping[str, Any]] | None,
    ids: Sequence[int],
    chat: ChatFormat,
) -> None:
    """Notes the turns that answered a prompt, whose whole ids are given."""
    versions = [version for turn in turns for version in turn.versions]
    call.note(
        turn=turns[0].index,
        completions=len(turns),
        completion_tokens=sum(len(turn.completion_ids) for turn in turns),
        version=max(versions, default=-1),
    )
    tracing = call.tracing
    if tracing is None:
        return

    has_contents = tracing.contents
    call.said = Said(
        asked=_messages(prompt) if has_contents else (),
        answers=[turn.messages[-1] for turn in turns] if has_contents else (),
        tools=msgspec.json.encode(tools).decode() if has_contents and tools else "",
        finish_reasons=[turn.finish_reason for turn in turns],
        temperature=turns[0].temperature,
        texts=partial(_decoded, chat, ids, turns) if tracing.token2text else None,
    )


def _messages(prompt: Prompt) -> Sequence[Message]:
    """A copy, as the caller's list may grow. Token ids have no messages."""
    if isinstance(prompt, str):
        return (Message("user", prompt),)
    is_chat = bool(prompt) and not isinstance(prompt[0], int)
    return tuple(cast("Sequence[Message]", prompt)) if is_chat else ()


def _decoded(chat: ChatFormat, ids: Sequence[int], turns: Sequence[Turn]) -> tuple[str, list[str]]:
    decode = chat.tokenizer.decode
    return str(decode(list(ids))), [str(decode(list(turn.completion_ids))) for turn in turns]
