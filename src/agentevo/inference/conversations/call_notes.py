"""Notes the answers of a call in the call log and, if the run is traced, in its span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec
from transformers import PreTrainedTokenizerBase

from agentevo.store.call_log import RunningCall
from agentevo.store.trace_context import TracedMessage
from agentevo.types import Message, Turn


def note_answers(
    call: RunningCall,
    turns: Sequence[Turn],
    prompt: Sequence[Message] | Sequence[int] | str,
    tools: Sequence[Mapping[str, Any]] | None,
    ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Records a call: its metadata for the store and, if the run is traced, the messages for its
    span. `ids`: the whole prompt of the turns."""
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
    call.traced_message = TracedMessage(
        messages=_messages_of(prompt) if has_contents else (),
        answers=[turn.messages[-1] for turn in turns] if has_contents else (),
        tools=msgspec.json.encode(tools).decode() if has_contents and tools else "",
        finish_reasons=[turn.finish_reason for turn in turns],
        temperature=turns[0].temperature,
        texts=partial(_decode, tokenizer, ids, turns) if tracing.token2text else None,
    )


def _decode(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], turns: Sequence[Turn]
) -> tuple[str, list[str]]:
    completions = [str(tokenizer.decode(list(turn.completion_ids))) for turn in turns]
    return str(tokenizer.decode(list(ids))), completions


def _messages_of(prompt: Sequence[Message] | Sequence[int] | str) -> Sequence[Message]:
    """A copy of the messages, since the caller's list may grow. Empty for token ids."""
    if isinstance(prompt, str):
        return (Message("user", prompt),)
    is_chat = bool(prompt) and not isinstance(prompt[0], int)
    return tuple(cast("Sequence[Message]", prompt)) if is_chat else ()
