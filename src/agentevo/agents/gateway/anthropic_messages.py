"""Anthropic's Messages API: https://platform.claude.com/docs/en/api/messages, and its count of a
request's tokens.

A message of this API is a list of blocks. In the order of ours:

    system                                 a message of role system
    assistant: thinking, text, tool_use    one message: reasoning, content, tool_calls
    user: tool_result, ..., text, image    one message of role tool for each result, then the rest

Texts in blocks are joined unchanged. A result may have images too. If it has `is_error`, it begins
with "Error: ", because no chat template has a place for the flag. Its tool's name, which some
templates write, is that of the call that it answers.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from agentevo.agents.gateway import fields
from agentevo.agents.gateway.api import Api, Event, named_event
from agentevo.agents.gateway.images import RequestImages
from agentevo.agents.gateway.memory import Memory
from agentevo.agents.gateway.refusals import Refusal
from agentevo.agents.gateway.request import ModelReply, ModelRequest, PromptSize
from agentevo.data.messages import tools_of
from agentevo.errors import BadRequestError, shown
from agentevo.models import tool_calls
from agentevo.types import ImagePart, Message, ToolCall
from agentevo.types.content import Content, content_of

SIGNATURE = "agentevo"
"""The signature of every thought: many clients keep only signed ones. It is not checked."""
BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
"""Claude Code's beginning of the system message: it differs from request to request, so each would
be a history of its own, and it is not for the model."""
_KNOWN = fields.keys_of(
    "messages model system max_tokens stop_sequences stream tools tool_choice temperature top_k "
    "top_p thinking metadata service_tier cache_control inference_geo speed diagnostics "
    "output_config context_management user_profile_id"
)
_CONFIGURED = ("format", "effort")
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Names of failures by the gateway's status; see `_error`."""
NO_THREADS = "thread_unsupported_request"
"""With this code a client continues without a thread."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def request_of(body: Mapping[str, Any], memory: Memory, images: RequestImages) -> ModelRequest:
    """See Api. Keeps nothing: a request has its whole history."""
    if fields.whole_number(body, "max_tokens", 0) < 1:
        raise BadRequestError(
            f"max_tokens is {shown(body.get('max_tokens'))}: give a whole number from 1; this API "
            "has no default"
        )

    stops = body.get("stop_sequences")
    if stops is not None and not isinstance(stops, list):
        raise BadRequestError(f"stop_sequences is {shown(stops)}: give a list of texts")

    return _request(
        body,
        images,
        overrides=fields.sampling_of(body, max_tokens=("max_tokens",), stop="stop_sequences"),
        stream=fields.boolean(body, "stream"),
    )


def counted_of(body: Mapping[str, Any], images: RequestImages) -> ModelRequest:
    """The request whose prompt is counted; it needs no `max_tokens`."""
    return _request(body, images)


def _request(body: Mapping[str, Any], images: RequestImages, **values: Any) -> ModelRequest:
    if body.get("thread") is not None:
        raise Refusal("threads are not supported: send the whole history", code=NO_THREADS)

    fields.check_known(body, _KNOWN, "message")

    _check_configuration(body)
    schema = fields.schema_of(
        fields.object_in(body, "output_config").get("format"), "output_config.format"
    )
    choice = _choice(body)
    tools = _tools(body)

    return ModelRequest(
        prompt=prompt_of(body, images),
        tools=tools or None,
        form=choice.form(schema),
        model=str(body.get("model") or "policy"),
        **values,
    )


def _check_configuration(body: Mapping[str, Any]) -> None:
    """Raises Refusal for fields that would have to change the policy's answer."""
    for key, allowed in (("output_config", _CONFIGURED), ("context_management", ("edits",))):
        unknown = [
            name
            for name, value in fields.object_in(body, key).items()
            if name not in allowed and value
        ]
        if unknown:
            raise Refusal(f"{key}.{unknown[0]} is not supported: leave it out")

    edits = fields.object_in(body, "context_management").get("edits") or []
    for edit in edits if isinstance(edits, list) else [edits]:
        kind = edit.get("type") if isinstance(edit, Mapping) else edit
        # Old thoughts: the tokens of a recorded turn stay, and the template decides of others.
        if not str(kind).startswith("clear_thinking"):
            raise Refusal(
                f"context_management: the edit {shown(kind)} is not supported: edit the messages "
                "before you send them"
            )


def _choice(body: Mapping[str, Any]) -> fields.FieldChoice:
    """The ToolChoice of this API's tool_choice."""
    choice = fields.object_in(body, "tool_choice")
    kind = choice.get("type", "auto")
    name = choice.get("name")

    parallel = not fields.boolean(choice, "disable_parallel_tool_use")
    if kind in ("auto", "none"):
        return fields.FieldChoice(kind=kind, parallel=parallel)
    if kind == "any":
        return fields.FieldChoice(kind="required", parallel=parallel)
    if kind == "tool" and isinstance(name, str) and name:
        return fields.FieldChoice(kind="required", tool=name, parallel=False)

    raise Refusal(
        f"tool_choice {shown(dict(choice))} is not supported: its type is auto, none, any, or tool "
        "with a name"
    )


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools in OpenAI's form. A tool whose loading is deferred is left out of the prompt, since
    Anthropic's tool that would load it does not exist here."""
    return tools_of(
        [
            _tool(tool, f"tools.{number}")
            for number, tool in enumerate(fields.tools_in(body))
            if not (isinstance(tool, Mapping) and fields.boolean(tool, "defer_loading"))
        ]
    )


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str) or not tool["name"]:
        raise BadRequestError(f"{where} has no name")

    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise Refusal(
            f"{where} is of type {shown(kind)}, which Anthropic's servers run: give a tool of your "
            'own with "name", "description" and "input_schema"'
        )

    if tool.get("input_examples"):
        raise Refusal(f"{where}: input_examples is not supported: leave it out")

    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping):
        raise BadRequestError(f"{where}: input_schema is {shown(schema)}: give a JSON schema")

    described = {"description": tool["description"]} if tool.get("description") else {}
    strict = {} if tool.get("strict") is None else {"strict": tool["strict"]}
    return {
        "type": "function",
        "function": {"name": tool["name"], **described, "parameters": schema, **strict},
    }


def prompt_of(body: Mapping[str, Any], images: RequestImages) -> list[Message]:
    """The history in our messages; see the module."""
    raw_messages = body.get("messages")
    if not isinstance(raw_messages, list) or not raw_messages:
        raise BadRequestError("messages must be a list with at least one message")

    system = _text(body["system"], "system", billed=True) if body.get("system") else ""
    messages = [Message("system", system)] if system else []
    names: dict[str, str] = {}
    for number, message in enumerate(raw_messages):
        where = f"messages.{number}"
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if role == "assistant":
            answer = _assistant(content, where)
            names |= {call.id: call.name for call in answer.tool_calls}
            messages.append(answer)
        elif role == "user":
            messages += _user(content, where, names, images)
        elif role == "system":
            messages.append(Message("system", _text(content, f"{where}.content")))
        else:
            raise BadRequestError(f"{where} has the role {shown(role)}: use user or assistant")

    if messages[-1].role == "assistant":
        raise Refusal(
            "the last message is the assistant's: the policy can't continue a text that it did "
            "not write; end with a message of role user"
        )

    return messages


def _user(
    content: Any, where: str, names: Mapping[str, str], images: RequestImages
) -> list[Message]:
    messages: list[Message] = []
    parts: list[str | ImagePart] = []
    for kind, block, place in _blocks(content, f"{where}.content"):
        if kind in ("text", "image"):
            parts.append(_part(kind, block, place, images))
        elif kind != "tool_result":
            raise _no_place(kind, place)
        elif parts:
            raise BadRequestError(
                f"{place}: results of tools come before the texts and images of a message"
            )
        else:
            call = _field(block, "tool_use_id", place)
            result = _result(block, place, images)
            messages.append(Message("tool", result, tool_call_id=call, name=names.get(call)))

    if not messages and not parts:
        raise BadRequestError(f"{where}.content is empty: give a text or a list of blocks")

    return [*messages, Message("user", content_of(parts))] if parts else messages


def _result(block: Mapping[str, Any], where: str, images: RequestImages) -> Content:
    """The content of a tool_result."""
    parts: list[str | ImagePart] = ["Error: "] if fields.boolean(block, "is_error") else []
    for kind, part, place in _blocks(block.get("content") or "", f"{where}.content"):
        if kind not in ("text", "image"):
            raise _no_place(kind, place)
        parts.append(_part(kind, part, place, images))
    return content_of(parts)


def _part(
    kind: str, block: Mapping[str, Any], where: str, images: RequestImages
) -> str | ImagePart:
    return _field(block, "text", where) if kind == "text" else images.read(block, where)


def _assistant(content: Any, where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for kind, block, place in _blocks(content, f"{where}.content"):
        if kind == "text":
            texts.append(_field(block, "text", place))
        elif kind == "thinking":
            thoughts.append(_field(block, "thinking", place))
        elif kind == "tool_use":
            calls.append(_call(block, place))
        elif kind != "redacted_thinking":  # it can't be read; the recorded turn has its thought
            raise _no_place(kind, place)

    return Message("assistant", "".join(texts), tuple(calls), reasoning="".join(thoughts) or None)


def _call(block: Mapping[str, Any], where: str) -> ToolCall:
    arguments = block.get("input")
    name = _field(block, "name", where)
    if not name or not isinstance(arguments, Mapping):
        raise BadRequestError(f"{where} needs a name and an object as its input")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False), _field(block, "id", where))


def _text(content: Any, where: str, *, billed: bool = False) -> str:
    """A text, or the texts of blocks of texts only. `billed`: without BILLING."""
    texts: list[str] = []
    for kind, block, place in _blocks(content, where):
        if kind != "text":
            raise _no_place(kind, place)
        text = _field(block, "text", place)
        texts.append(BILLING.sub("", text) if billed else text)
    return "".join(texts)


def _blocks(content: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """The type, the block and its place, for each; a text is a block of text."""
    if isinstance(content, str):
        yield "text", {"text": content}, where
        return

    if not isinstance(content, list):
        kind = "missing" if content is None else shown(content)
        raise BadRequestError(f"{where} is {kind}: give a text or a list of blocks")

    for number, block in enumerate(content):
        place = f"{where}.{number}"
        of_type = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(of_type, str):
            raise BadRequestError(f"{place} is {shown(block)}: give an object with a type")
        yield of_type, block, place


def _field(block: Mapping[str, Any], key: str, where: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise BadRequestError(f"{where}: {key} is {shown(value)}: give a text")
    return value


def _no_place(kind: str, where: str) -> Refusal:
    return Refusal(
        f"{where} is of type {shown(kind)}, which has no place there: give text, image (of the "
        "user), thinking, tool_use or tool_result"
    )


def _answer(request: ModelRequest, replies: Sequence[ModelReply]) -> dict[str, Any]:
    (reply,) = replies
    content: list[dict[str, Any]] = []
    if reply.reasoning is not None:
        content.append({"type": "thinking", "thinking": reply.reasoning, "signature": SIGNATURE})
    if reply.content:
        content.append({"type": "text", "text": reply.content})

    content += [
        {**_tool_use(call), "input": msgspec.Raw(call.arguments.encode())}
        for call in reply.tool_calls
    ]
    return {
        **_message(request, content),
        **_ending(reply),
        "usage": _usage(reply.prompt, reply.num_completion_tokens),
    }


class MessagesStream:
    """See api.AnswerStream. Blocks come one after the other, in the order in which the policy says
    them."""

    def __init__(self, request: ModelRequest) -> None:
        self._request = request
        self._num_blocks = 0
        self._open: str | None = None
        """Type of the last block, while it is open."""

    def begin(self, prompt: PromptSize) -> list[Event]:
        message = _message(self._request, [])
        nothing = {"stop_reason": None, "stop_sequence": None, "usage": _usage(prompt, 0)}
        return [{"type": "message_start", "message": {**message, **nothing}}]

    def pieces(self, number: int, pieces: Sequence[tool_calls.Delta]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            match piece:
                case tool_calls.ContentDelta(text):
                    events += self._goes_on({"type": "text", "text": ""})
                    events.append(self._delta("text_delta", text=text))
                case tool_calls.ReasoningDelta(text):
                    thought = {"type": "thinking", "thinking": "", "signature": ""}
                    events += self._goes_on(thought)
                    events.append(self._delta("thinking_delta", thinking=text))
                case tool_calls.CallStarted(_, name, call_id):
                    call = ToolCall(name, "", call_id)
                    events += [*self._close(), *self._goes_on({**_tool_use(call), "input": {}})]
                case tool_calls.ArgumentsDelta(_, text):
                    events.append(self._delta("input_json_delta", partial_json=text))
                case tool_calls.CallFinished() | tool_calls.CallFailed():
                    events += self._close()

        return events

    def end(self, replies: Sequence[ModelReply]) -> list[Event]:
        (reply,) = replies
        usage = _usage(reply.prompt, reply.num_completion_tokens)
        return [
            *self._close(),
            {"type": "message_delta", "delta": _ending(reply), "usage": usage},
            {"type": "message_stop"},
        ]

    def failure_events(self, refusal: Refusal) -> list[Event]:
        return [_error(refusal)]

    def _goes_on(self, block: dict[str, Any]) -> list[Event]:
        """Begins a block, unless the open one is of its type."""
        if self._open == block["type"]:
            return []
        events = self._close()
        self._open = block["type"]
        start = {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        return [*events, start]

    def _close(self) -> list[Event]:
        """Ends the open block."""
        if self._open is None:
            return []

        signed = self._open == "thinking"
        events = [self._delta("signature_delta", signature=SIGNATURE)] if signed else []
        events.append({"type": "content_block_stop", "index": self._num_blocks})
        self._num_blocks += 1
        self._open = None
        return events

    def _delta(self, kind: str, **what: str) -> Event:
        delta = {"type": kind, **what}
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}


def _message(request: ModelRequest, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
    }


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _ending(reply: ModelReply) -> dict[str, Any]:
    reason = _STOP_REASONS[reply.finish_reason]
    if reason == "end_turn" and reply.stop_string is not None:
        reason = "stop_sequence"
    stop = reply.stop_string if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(prompt: PromptSize, completion: int) -> dict[str, Any]:
    """`input_tokens` are those that the conversation did not have yet."""
    return {
        "input_tokens": prompt.num_tokens - prompt.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": prompt.num_cached,
        "output_tokens": completion,
    }


def _error(refusal: Refusal) -> dict[str, Any]:
    """A status without a name is the server's fault from 500 on, and the client's below."""
    fallback = "api_error" if refusal.status >= 500 else "invalid_request_error"
    # Clients that shorten a full history recognise that by these words.
    full = "prompt is too long: " if refusal.code == "context_length_exceeded" else ""
    named: dict[str, Any] = {
        "type": _ERRORS.get(refusal.status, fallback),
        "message": f"{full}{refusal}",
    }
    if refusal.code == NO_THREADS:
        named["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}

    return {"type": "error", "error": named}


API = Api(
    path="/messages",
    request_of=request_of,
    answer=_answer,
    stream=MessagesStream,
    error=_error,
    statuses={503: 529},
    encode=named_event,
)
COUNT_PATH = f"{API.path}/count_tokens"
