"""Turns one completion into pieces for a client: token ids in; pieces of content, reasoning and
tool calls out. The ids can come one by one or all at once. The pieces are the deltas of the parser,
with ids for the calls. If a call turns out to be malformed, its earlier pieces are void, and its
text follows as content.

Invariant: the pieces sum up to the same reply, however the ids come, and a piece that was passed on
is never changed. The pieces of a call's arguments are the arguments, byte for byte. Text that
begins as a call but is not one becomes content, unchanged: the agent sees it, and so does the
policy in the next prompt. A listener may have received its beginning by then, as a call that never
becomes complete. The brace that can end the arguments is sent only when the call is complete, so
the pieces of a malformed call are not JSON that a client could act on. With `whole_calls` a
listener receives nothing of a call before it is complete.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence

import msgspec

from agentevo.agents.gateway.request import ModelReply, ModelRequest, PromptSize, TokenLogprob
from agentevo.models import tool_calls
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.types import Alternatives, Message, ToolCall, Turn


def _pieces_of_call(index: int, call: ToolCall) -> list[tool_calls.Delta]:
    return [
        tool_calls.CallStarted(index, call.name, call.id),
        tool_calls.ArgumentsDelta(index, call.arguments),
        tool_calls.CallFinished(index, call),
    ]


def pieces_of(reply: ModelReply) -> list[tool_calls.Delta]:
    pieces: list[tool_calls.Delta] = (
        [tool_calls.ReasoningDelta(reply.reasoning)] if reply.reasoning else []
    )
    pieces += [tool_calls.ContentDelta(reply.content)] if reply.content else []
    for index, call in enumerate(reply.tool_calls):
        pieces += _pieces_of_call(index, call)
    return pieces


OnPieces = Callable[[int, list[tool_calls.Delta]], None]
"""A listener: it is called with the number of a completion, from 0, and its next pieces."""


class AnswerInProgress:
    """See the module. `opening`: the end of the prompt, which begins the assistant's message.
    `echo`: a text that the content begins with. `whole_calls`: calls are passed on only when they
    are complete."""

    def __init__(
        self,
        request: ModelRequest,
        chat: ChatFormat,
        opening: str,
        *,
        echo: str = "",
        whole_calls: bool = False,
    ) -> None:
        overrides = request.overrides
        self._stops = (overrides and overrides.stop_strings) or ()
        self._text = chat.text_stream(self._stops)
        self._parse = (
            None
            if request.is_plain
            else chat.parser.stream(opening=opening, tools=request.tools, calls=request.may_call)
        )
        self._echo = echo
        self._whole_calls = whole_calls
        self._request = request
        self._chat = chat
        self._told: list[tool_calls.Delta] = []
        """All that was passed on to a listener."""
        self._call_ids: list[str] = []
        """The ids of the calls that were passed on to a listener."""
        self.num_malformed = 0
        """The number of texts that began as a call but were not one."""

    def add(self, ids: Sequence[int]) -> list[tool_calls.Delta]:
        """The pieces that are certain after the next ids."""
        return self._tell(self._read(self._text.add(ids)))

    def finish(self, turn: Turn) -> list[tool_calls.Delta]:
        """The last pieces: those that were held back, and those of tokens that were not passed to
        `add`."""
        rest = self._read(self._text.finish(turn.messages[-1].text))
        return self._tell([*rest, *(self._parse.finish() if self._parse else ())])

    def _read(self, text: str) -> Iterable[tool_calls.Delta]:
        text = self._echo + text
        self._echo = ""
        if self._parse is not None:
            return self._parse.feed(text)
        return [tool_calls.ContentDelta(text)] if text else []

    def reply(
        self,
        turn: Turn,
        prompt: PromptSize,
        prompt_ids: list[int],
        top_logprobs: Sequence[Alternatives] = (),
    ) -> ModelReply:
        """The whole reply. Call it after `finish`."""
        parsed = tool_calls.Parsed.of(self._told)
        return ModelReply(
            turn=turn,
            content=parsed.content,
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
            prompt_ids=prompt_ids,
            prompt=prompt,
            num_completion_tokens=len(turn.completion_ids),
            stop_string=self._stop_string(turn),
            tokens=self._tokens(turn, top_logprobs) if self._request.logprobs else [],
        )

    def _tokens(self, turn: Turn, top_logprobs: Sequence[Alternatives]) -> list[TokenLogprob]:
        texts = self._chat.token_texts
        alternatives = [
            [
                TokenLogprob(text, logprob, [])
                for text, (_, logprob) in zip(texts([t for t, _ in top]), top, strict=True)
            ]
            for top in top_logprobs
        ] or [[]] * len(turn.logprobs)
        drawn = texts(turn.completion_ids)
        return list(map(TokenLogprob, drawn, turn.logprobs, alternatives))

    @property
    def message(self) -> Message:
        """The message as a client will send it back."""
        parsed = tool_calls.Parsed.of(self._told)
        return Message("assistant", parsed.content, parsed.tool_calls, reasoning=parsed.reasoning)

    @property
    def told_message(self) -> Message:
        """The message as a listener received it, with the beginnings of malformed calls."""
        calls = {}
        for piece in tool_calls.join_texts(self._told):
            match piece:
                case tool_calls.CallStarted(index, name, call_id):
                    calls[index] = ToolCall(name, "", call_id)
                case tool_calls.ArgumentsDelta(index, text):
                    call = calls[index]
                    calls[index] = ToolCall(call.name, call.arguments + text, call.id)

        return msgspec.structs.replace(self.message, tool_calls=tuple(calls.values()))

    def _stop_string(self, turn: Turn) -> str | None:
        """The first stop string of the request in the text. If two begin at the same place, the
        shorter one, which was complete first."""
        if not self._stops or turn.finish_reason != "stop":
            return None
        text = turn.messages[-1].text
        places = [
            (start, len(stop), stop) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        return min(places)[2] if places else None

    def _tell(self, deltas: Iterable[tool_calls.Delta]) -> list[tool_calls.Delta]:
        pieces: list[tool_calls.Delta] = []
        for delta in deltas:
            match delta:
                case tool_calls.CallStarted() | tool_calls.ArgumentsDelta() if self._whole_calls:
                    continue
                case tool_calls.CallFinished(_, call) if self._whole_calls:
                    call = ToolCall(call.name, call.arguments, self._add_call_id())
                    pieces += _pieces_of_call(len(self._call_ids) - 1, call)
                case tool_calls.CallStarted(index, name):
                    pieces.append(tool_calls.CallStarted(index, name, self._add_call_id()))
                case tool_calls.CallFinished(index, call):
                    call = ToolCall(call.name, call.arguments, self._call_ids[index])
                    pieces.append(tool_calls.CallFinished(index, call))
                case tool_calls.CallFailed(index, malformed):
                    self.num_malformed += 1
                    if index is not None and not self._whole_calls:
                        pieces.append(delta)
                    pieces.append(tool_calls.ContentDelta(malformed.text))
                case _:
                    pieces.append(delta)

        self._told += pieces
        return pieces

    def _add_call_id(self) -> str:
        self._call_ids.append(f"call_{secrets.token_hex(12)}")
        return self._call_ids[-1]
