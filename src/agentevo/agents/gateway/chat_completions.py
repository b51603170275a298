"""OpenAI's chat completions: https://platform.openai.com/docs/api-reference/chat, with vLLM's
`return_token_ids` for clients that want the tokens."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from agentevo.agents.gateway import fields
from agentevo.agents.gateway.api import Api, Event, data_event
from agentevo.agents.gateway.images import RequestImages
from agentevo.agents.gateway.memory import Memory
from agentevo.agents.gateway.refusals import Refusal
from agentevo.agents.gateway.request import ModelReply, ModelRequest, PromptSize, TokenLogprob
from agentevo.data.messages import MESSAGE_KEYS, messages_of, tools_of
from agentevo.errors import BadRequestError
from agentevo.models import tool_calls
from agentevo.types import Message, ToolCall

DONE: Event = {}
"""The last event of a stream; it only marks the end."""
_CONTENT_KEYS = ("refusal", "annotations", "audio", "function_call", "images", "videos")
"""Keys whose values no template has a place for. All other keys are ignored as a client's own."""
_KNOWN = fields.SAMPLING_KEYS | fields.keys_of(
    "messages tools tool_choice parallel_tool_calls n stream_options logprobs top_logprobs "
    "return_token_ids return_tokens_as_token_ids max_tokens max_completion_tokens response_format "
    "user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "reasoning_effort verbosity client_metadata chat_template_kwargs functions function_call "
    "modalities prediction"
)


def request_of(body: Mapping[str, Any], memory: Memory, images: RequestImages) -> ModelRequest:
    """See Api. Keeps nothing: a request has its whole history."""
    fields.check_known(body, _KNOWN, "chat completion")
    fields.no_other_service(body)
    response_format = body.get("response_format")
    choice = fields.choice_of(body)
    schema = fields.schema_of(response_format, "response_format")
    tools = tools_of(fields.tools_in(body))

    logprobs = fields.boolean(body, "logprobs")
    top_logprobs = fields.top_logprobs_of(body, "top_logprobs")
    if top_logprobs and not logprobs:
        raise Refusal("top_logprobs needs logprobs: true", param="top_logprobs")

    return ModelRequest(
        prompt=prompt_of(body.get("messages"), images),
        tools=tools or None,
        form=choice.form(schema, strict=fields.is_strict(response_format)),
        overrides=fields.sampling_of(
            body,
            max_tokens=("max_completion_tokens", "max_tokens"),
            stop="stop",
        ),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        **fields.template_of(body, body.get("reasoning_effort")),
        **fields.of_completions(body),
    )


def prompt_of(messages: Any, images: RequestImages) -> list[Message]:
    """Messages in OpenAI's form; `developer` is the newer word for `system`."""
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages must be a list with at least one message")
    return messages_of([_plain(message, n) for n, message in enumerate(messages, start=1)], images)


def _plain(message: Any, number: int) -> Any:
    if not isinstance(message, Mapping):
        return message  # refused with its number

    for key in _CONTENT_KEYS:
        if message.get(key):
            raise BadRequestError(
                f"message {number} has {key!r}, which no chat template can render: leave it out"
            )

    plain = {key: value for key, value in message.items() if key in MESSAGE_KEYS}
    if plain.get("role") == "developer":
        plain["role"] = "system"
    if plain.get("role") == "assistant" and plain.get("content") is None:
        plain["content"] = ""  # how some clients keep an answer that says nothing

    return plain


def answer(request: ModelRequest, replies: Sequence[ModelReply]) -> dict[str, Any]:
    return {
        **head(request, "chatcmpl", "chat.completion"),
        "choices": [_choice(request, number, reply) for number, reply in enumerate(replies)],
        "usage": usage(replies),
        **({"prompt_token_ids": replies[0].prompt_ids} if request.token_ids else {}),
    }


class ChatCompletionStream:
    """See api.AnswerStream. The last event is "[DONE]"."""

    def __init__(self, request: ModelRequest) -> None:
        self._request = request
        self._head = head(request, "chatcmpl", "chat.completion.chunk")

    def begin(self, prompt: PromptSize) -> list[Event]:
        return [
            self._chunk(n, {"role": "assistant", "content": ""}) for n in range(self._request.n)
        ]

    def pieces(self, number: int, pieces: Sequence[tool_calls.Delta]) -> list[Event]:
        """The event for a completion's next pieces."""
        deltas = map(_delta, pieces)
        return [self._chunk(number, delta) for delta in deltas if delta is not None]

    def end(self, replies: Sequence[ModelReply]) -> list[Event]:
        """How all of them ended."""
        events = [self._last(number, reply) for number, reply in enumerate(replies)]
        if self._request.include_usage:
            events.append({**self._head, "choices": [], "usage": usage(replies)})

        return [*events, DONE]

    def failure_events(self, refusal: Refusal) -> list[Event]:
        """Why it ends here."""
        return [error(refusal)]

    def _last(self, number: int, reply: ModelReply) -> Event:
        """How one of them ended."""
        last = self._chunk(number, {}, reply.finish_reason)
        if self._request.logprobs:
            last["choices"][0]["logprobs"] = _logprobs(reply)
        if self._request.token_ids:
            last["choices"][0] |= _token_ids(reply)
            last["prompt_token_ids"] = reply.prompt_ids
        return last

    def _chunk(
        self, number: int, delta: dict[str, Any], finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**self._head, "choices": [choice]}


def _delta(piece: tool_calls.Delta) -> dict[str, Any] | None:
    match piece:
        case tool_calls.ContentDelta(text):
            return {"content": text}
        case tool_calls.ReasoningDelta(text):
            return {"reasoning_content": text}
        case tool_calls.CallStarted(index, name, call_id):
            return {"tool_calls": [{"index": index, **_tool_call(ToolCall(name, "", call_id))}]}
        case tool_calls.ArgumentsDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case tool_calls.CallFinished() | tool_calls.CallFailed():
            return None


def error(refusal: Refusal) -> dict[str, Any]:
    """The body of an answer that is an error."""
    return {
        "error": {
            "message": str(refusal),
            "type": refusal.kind,
            "param": refusal.param or None,
            "code": refusal.code or None,
        }
    }


def usage(replies: Sequence[ModelReply]) -> dict[str, Any]:
    """Tokens of the prompt, which is counted once, and of all completions."""
    prompt = replies[0].prompt.num_tokens
    completion = sum(reply.num_completion_tokens for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": replies[0].prompt.num_cached},
    }


def head(request: ModelRequest, prefix: str, kind: str) -> dict[str, Any]:
    """The fields that every answer and event begins with; the id has the prefix."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
    }


def _choice(request: ModelRequest, number: int, reply: ModelReply) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.content if reply.content or not reply.tool_calls else None,
        "refusal": None,
    }
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [_tool_call(call) for call in reply.tool_calls]

    return {
        "index": number,
        "message": message,
        "logprobs": _logprobs(reply) if request.logprobs else None,
        "finish_reason": reply.finish_reason,
        **(_token_ids(reply) if request.token_ids else {}),
    }


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _token_ids(reply: ModelReply) -> dict[str, Any]:
    turn = reply.turn
    return {"token_ids": list(turn.completion_ids), "versions": list(turn.versions)}


def _logprobs(reply: ModelReply) -> dict[str, Any]:
    return {"content": token_logprobs(reply), "refusal": None}


def token_logprobs(reply: ModelReply) -> list[dict[str, Any]]:
    """The log-prob of every sampled token, in the form of OpenAI's APIs."""
    return [
        {**_token(token), "top_logprobs": list(map(_token, token.alternatives))}
        for token in reply.tokens
    ]


def _token(drawn: TokenLogprob) -> dict[str, Any]:
    text, octets = drawn.token
    return {"token": text, "logprob": drawn.logprob, "bytes": octets}


def encode_event(event: Event) -> bytes:
    """An event as OpenAI's completions send it."""
    return b"data: [DONE]\n\n" if event is DONE else data_event(event)


API = Api(
    path="/chat/completions",
    request_of=request_of,
    answer=answer,
    stream=ChatCompletionStream,
    error=error,
    encode=encode_event,
)
