"""OpenAI's Responses API: https://platform.openai.com/docs/api-reference/responses.

An answer is built once, as items that grow with the pieces (`_ResponsesOutput`): a stream sends the
events of that growth, and an answer that is not streamed is its last state. Alternating texts and
calls of the policy become alternating items.

`previous_response_id` continues an answer of the same session. The session's memory has it with the
messages before it, but without `instructions`, as the API defines it.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentevo.agents.gateway import fields
from agentevo.agents.gateway.answer import pieces_of
from agentevo.agents.gateway.api import Api, Event, named_event
from agentevo.agents.gateway.chat_completions import error, token_logprobs
from agentevo.agents.gateway.images import RequestImages
from agentevo.agents.gateway.memory import KeptResponse, Memory, keep
from agentevo.agents.gateway.refusals import Refusal
from agentevo.agents.gateway.request import ModelReply, ModelRequest, PromptSize
from agentevo.agents.gateway.response_items import messages_of_items, name_within
from agentevo.data.messages import tools_of
from agentevo.errors import BadRequestError, shown
from agentevo.models import tool_calls
from agentevo.types import Message

LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (None, LOGPROBS, "reasoning.encrypted_content")
"""The values that `include` can have; a thought is readable in any case."""
_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "service_tier": None,
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}
"""The fields of a request that its answer repeats, and their defaults."""
_KNOWN = (fields.SAMPLING_KEYS | _ECHOED.keys()) | fields.keys_of(
    "input stream_options include background prompt_cache_retention prompt_cache_options "
    "client_metadata return_token_ids chat_template_kwargs"
)
_SCHEMA_KEYS = ("name", "description", "parameters", "strict")
_TOOL_KEYS = {*_SCHEMA_KEYS, "type"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest(ModelRequest):
    """A request, with the fields that its answer repeats."""

    history: tuple[Message, ...]
    """The prompt without `instructions`."""
    raw_input: Any
    """`input`, unchanged."""
    echoed: dict[str, Any]
    memory: Memory | None
    """The memory that keeps the answer; None if the client wants it not kept."""
    namespaces: Mapping[str, tuple[str, str]]
    """Tool -> its namespace and its name there, for the tools that have one."""


def request_of(body: Mapping[str, Any], memory: Memory, images: RequestImages) -> ResponseRequest:
    """See Api."""
    fields.check_known(body, _KNOWN, "response")
    fields.no_other_service(body)
    _no_other_service(body)

    echoed = {
        key: default if body.get(key) is None else body[key] for key, default in _ECHOED.items()
    }
    for key in ("text", "metadata"):
        if not isinstance(echoed[key], Mapping):
            raise BadRequestError(f"{key} is {shown(echoed[key])}: give an object")

    text_format = echoed["text"].get("format")
    schema = fields.schema_of(text_format, "text.format")
    include = _check_include(body.get("include"))

    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise BadRequestError("instructions must be a text")

    system = [Message("system", instructions)] if instructions else []
    history = _history(body, memory, images)
    if not system and not history:
        raise BadRequestError("input is empty: give a text or at least one item")

    choice = fields.choice_of(body)
    tools, namespaces = _tools(fields.tools_in(body))
    return ResponseRequest(
        prompt=[*system, *history],
        history=history,
        raw_input=body.get("input", []),
        echoed=echoed,
        memory=memory if body.get("store") is None or fields.boolean(body, "store") else None,
        namespaces=namespaces,
        tools=tools or None,
        form=choice.form(schema, strict=fields.is_strict(text_format)),
        overrides=fields.sampling_of(body, max_tokens=("max_output_tokens",), stop="stop"),
        model=str(body.get("model") or "policy"),
        stream=fields.boolean(body, "stream"),
        logprobs=LOGPROBS in include,
        top_logprobs=fields.top_logprobs_of(body, "top_logprobs"),
        token_ids=fields.boolean(body, "return_token_ids"),
        **fields.template_of(body, fields.object_in(body, "reasoning").get("effort")),
    )


def _no_other_service(body: Mapping[str, Any]) -> None:
    """Raises Refusal for features that only OpenAI's own service has."""
    if fields.boolean(body, "background"):
        raise Refusal("background is not supported: wait for the answer, or stream it")
    if body.get("truncation") not in (None, "disabled"):
        raise Refusal(
            f"truncation {shown(body['truncation'])} is not supported: a recorded history is "
            "never cut; leave truncation out, and send less"
        )


def _check_include(include: Any) -> Sequence[Any]:
    if include is None:
        return ()
    if not isinstance(include, Sequence) or isinstance(include, str):
        raise BadRequestError("include must be a list")

    for name in include:
        if name not in _INCLUDED:
            raise Refusal(f"include {shown(name)} is not supported: the policy has no such output")

    return include


def _history(body: Mapping[str, Any], memory: Memory, images: RequestImages) -> tuple[Message, ...]:
    messages = messages_of_items(body.get("input", []), memory, images)
    name = body.get("previous_response_id")
    if name is None:
        return tuple(messages)

    previous = memory.find(name) if isinstance(name, str) else None
    if not isinstance(previous, KeptResponse):
        raise Refusal(
            f"previous response {shown(name)} is not found: it is not of this session, was sent "
            "with store=false, or is no longer kept; send the whole history as input",
            status=404,
            code="previous_response_not_found",
            param="previous_response_id",
        )

    return (*previous.history, *messages)


def _tools(tools: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]]]:
    """The tools in the form of the chat API; and for each tool in a namespace, the namespace and
    its name there."""
    nested: list[dict[str, Any]] = []
    namespaces: dict[str, tuple[str, str]] = {}
    for where, namespace, tool in _each_tool(tools):
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        if kind != "function":
            raise Refusal(
                f"{where} is {shown(kind)}: the policy calls functions only, as  "
                '{"type": "function", "name": ..., "parameters": {...}}'
            )

        unknown = [key for key in tool if key not in _TOOL_KEYS and tool[key]]
        if unknown:
            raise Refusal(f"{where} has {unknown[0]!r}, which is not supported: leave it out")

        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise BadRequestError(
                f"{where} has no name: write "
                '{"type": "function", "name": ..., "parameters": {...}}'
            )

        function = {key: tool[key] for key in _SCHEMA_KEYS if tool.get(key) is not None}
        if namespace is not None:
            function["name"] = name_within(namespace, tool["name"])
            namespaces[function["name"]] = (namespace, tool["name"])
        nested.append({"type": "function", "function": function})

    names = Counter(tool["function"]["name"] for tool in nested)
    twice = next((name for name in namespaces if names[name] > 1), None)
    if twice is not None:
        raise BadRequestError(
            f"the policy would see two tools named {shown(twice)}, because it joins a namespace "
            "and a name by __: rename one of them"
        )

    return tools_of(nested), namespaces


def _each_tool(tools: Sequence[Any]) -> Iterator[tuple[str, str | None, Any]]:
    """Each tool with its place, and its namespace if it is in one. A chat template has no place for
    the description of a namespace."""
    for number, tool in enumerate(tools, start=1):
        where = f"tool {number}"
        if not isinstance(tool, Mapping) or tool.get("type") != "namespace":
            yield where, None, tool
            continue

        namespace = tool.get("name")
        members = tool.get("tools")
        if not isinstance(namespace, str) or not namespace or not isinstance(members, list):
            raise BadRequestError(f"{where}: a namespace must have a name and a list of tools")
        for member_number, member in enumerate(members, start=1):
            yield f"{where}.{member_number}", namespace, member


class _ResponsesOutput:
    """The items of one answer, and the events of their growth."""

    def __init__(self, answer_id: str, namespaces: Mapping[str, tuple[str, str]]) -> None:
        self._answer_id = answer_id
        self._namespaces = namespaces
        self.items: list[dict[str, Any]] = []
        self._open: str | None = None
        """The type of the last item, if it still grows."""
        self._texts: list[str] = []
        """The texts of the item that grows."""

    def add(self, piece: tool_calls.Delta) -> list[Event]:
        match piece:
            case tool_calls.ContentDelta(text):
                return self._said("message", text)
            case tool_calls.ReasoningDelta(text):
                return self._said("reasoning", text)
            case tool_calls.CallStarted(_, name, call_id):
                return self._call_events(name, call_id)
            case tool_calls.ArgumentsDelta(_, text):
                return self._argument_events(text)
            case tool_calls.CallFinished():
                return self._close("completed")
            case tool_calls.CallFailed():
                return self._close("incomplete")

    def finish(self, *, is_whole: bool) -> list[Event]:
        """The last item is done. An answer without a call has a text, even an empty one, unless it
        was cut off within a thought."""
        kinds = {item["type"] for item in self.items}
        events: list[Event] = []
        if not kinds & {"function_call", "message"} and (is_whole or not kinds):
            events = self._said("message", "")
        return events + self._close("completed" if is_whole else "incomplete")

    def _said(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if self._open != kind:
            events = self._close("completed")
            if kind == "message":
                item = {"role": "assistant", "content": []}
            else:
                item = {"summary": [], "content": []}

            events.append(self._begin("msg" if kind == "message" else "rs", kind, item))
            events.append(self._of_part("response.content_part.added", part=_part(kind, "")))
            self._open = kind
            self._texts = []

        self._texts.append(text)
        delta = {"delta": text, **({"logprobs": []} if kind == "message" else {})}
        return [*events, self._of_part(f"response.{_part_type(kind)}.delta", **delta)]

    def _call_events(self, name: str, call_id: str) -> list[Event]:
        events = self._close("completed")
        item = {"call_id": call_id, "name": name, "arguments": ""}
        if name in self._namespaces:
            item["namespace"], item["name"] = self._namespaces[name]
        events.append(self._begin("fc", "function_call", item))
        self._open = "function_call"
        self._texts = []
        return events

    def _argument_events(self, text: str) -> list[Event]:
        self._texts.append(text)
        return [self._of_item("response.function_call_arguments.delta", delta=text)]

    def _close(self, status: str) -> list[Event]:
        """The item that grows, if there is one, is done."""
        if self._open is None:
            return []

        kind = self._open
        text = "".join(self._texts)
        self._open = None

        if kind == "function_call":
            self.items[-1] |= {"arguments": text, "status": status}
            call = {"name": self.items[-1]["name"], "arguments": text}
            done_events = [self._of_item("response.function_call_arguments.done", **call)]
            return [*(done_events if status == "completed" else ()), self._done()]

        self.items[-1] |= {"content": [_part(kind, text)], "status": status}
        content = {"text": text, **({"logprobs": []} if kind == "message" else {})}
        return [
            self._of_part(f"response.{_part_type(kind)}.done", **content),
            self._of_part("response.content_part.done", part=_part(kind, text)),
            self._done(),
        ]

    def _begin(self, prefix: str, kind: str, item: dict[str, Any]) -> Event:
        name = f"{prefix}_{self._answer_id}_{len(self.items)}"
        self.items.append({"id": name, "type": kind, "status": "in_progress", **item})
        return {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": dict(self.items[-1]),
        }

    def _done(self) -> Event:
        return {
            "type": "response.output_item.done",
            "output_index": len(self.items) - 1,
            "item": dict(self.items[-1]),
        }

    def _of_item(self, kind: str, **values: Any) -> Event:
        index = len(self.items) - 1
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": index, **values}

    def _of_part(self, kind: str, **values: Any) -> Event:
        return self._of_item(kind, content_index=0, **values)


def _part_type(kind: str) -> str:
    return "output_text" if kind == "message" else "reasoning_text"


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


class ResponsesStream:
    """See api.AnswerStream. Every event has its number in the stream."""

    def __init__(self, request: ResponseRequest) -> None:
        answer_id = secrets.token_hex(24)
        self._request = request
        self._output = _ResponsesOutput(answer_id, request.namespaces)
        self._id = f"resp_{answer_id}"
        self._created_at = int(time.time())
        self._num_events = 0

    def begin(self, prompt: PromptSize) -> list[Event]:
        response = self._response("in_progress")
        return self._number_events(
            [
                {"type": "response.created", "response": response},
                {"type": "response.in_progress", "response": response},
            ]
        )

    def pieces(self, number: int, pieces: Sequence[tool_calls.Delta]) -> list[Event]:
        """The next pieces of the only completion."""
        return self._number_events([event for piece in pieces for event in self._output.add(piece)])

    def end(self, replies: Sequence[ModelReply]) -> list[Event]:
        (reply,) = replies
        events = self._output.finish(is_whole=reply.finish_reason != "length")
        response = self.whole(reply)
        return self._number_events(
            [*events, {"type": f"response.{response['status']}", "response": response}]
        )

    def failure_events(self, refusal: Refusal) -> list[Event]:
        code = "rate_limit_exceeded" if refusal.status == 429 else "server_error"
        response = self._response("failed", error={"code": code, "message": str(refusal)})
        return self._number_events([{"type": "response.failed", "response": response}])

    def whole(self, reply: ModelReply) -> dict[str, Any]:
        """The answer whose items are done; from now on it is kept."""
        request = self._request
        turn = reply.turn

        texts = [item for item in self._output.items if item["type"] == "message"]
        if request.logprobs and texts:
            texts[-1]["content"][0]["logprobs"] = token_logprobs(reply)

        details = None
        if cut := reply.finish_reason == "length":
            details = {"reason": "max_output_tokens"}

        response = self._response(
            "incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details=details,
            temperature=turn.temperature,
            usage=_usage(reply),
        )
        if request.token_ids:
            response |= {
                "token_ids": list(turn.completion_ids),
                "versions": list(turn.versions),
                "prompt_token_ids": reply.prompt_ids,
            }

        if request.memory is not None:
            completion = Message(
                "assistant", reply.content, reply.tool_calls, reasoning=reply.reasoning
            )
            history = (*request.history, completion)
            keep(request.memory, history, response, request.raw_input, request.images)

        return response

    def _response(self, status: str, **values: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._request.model,
            "output": self._output.items,
            **self._request.echoed,
            "temperature": None,
            "top_p": None,
            "usage": None,
            **values,
        }

    def _number_events(self, events: list[Event]) -> list[Event]:
        for event in events:
            event["sequence_number"] = self._num_events
            self._num_events += 1
        return events


def answer(request: ResponseRequest, replies: Sequence[ModelReply]) -> dict[str, Any]:
    """The last state of the stream of this reply: its thought, text and calls."""
    (reply,) = replies
    stream = ResponsesStream(request)
    stream.pieces(0, pieces_of(reply))
    response: dict[str, Any] = stream.end(replies)[-1]["response"]
    return response


def _usage(reply: ModelReply) -> dict[str, Any]:
    prompt = reply.prompt.num_tokens
    completion = reply.num_completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": reply.prompt.num_cached, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


API = Api(
    path="/responses",
    request_of=request_of,
    answer=answer,
    stream=ResponsesStream,
    error=error,
    encode=named_event,
)
