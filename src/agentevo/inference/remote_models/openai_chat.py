"""A client of OpenAI's chat completions: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from agentevo.data.messages import REASONING_KEYS, messages_of
from agentevo.errors import BadRequestError
from agentevo.inference.remote_models.images import EncodedImage
from agentevo.inference.remote_models.wire import (
    BadAnswerError,
    RemoteReply,
    Usage,
    Wire,
    WireRequest,
    with_call_ids,
)
from agentevo.models.chat.answer_form import ANY_OBJECT, AnswerForm
from agentevo.models.tool_calls import ContentDelta, ReasoningDelta
from agentevo.types import ImagePart, Message, TextPart
from agentevo.types.content import parts_of

_CHOICES = ("auto", "none", "required")
NO_TEXT = "(an image, which follows)"
"""The text of a tool's result that is only images."""
RESULTS = "The images of the results above, in their order:"
"""The text before the images of tools' results."""
LARGEST_SEED = 2**31 - 1
"""The largest seed, because some servers store a seed in 32 bits."""


def body_of(url: str, model: str, request: WireRequest) -> dict[str, Any]:
    """See Wire.body. OpenAI's own servers have another name for the limit of new tokens than most
    servers."""
    is_openai = (urlsplit(url).hostname or "").endswith("openai.com")
    sampling = request.sampling
    fields = {
        "max_completion_tokens" if is_openai else "max_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": None if sampling.stop_strings is None else list(sampling.stop_strings),
        "seed": None if sampling.seed is None else sampling.seed & LARGEST_SEED,
    }
    body: dict[str, Any] = {
        "model": model,
        "messages": _messages(with_call_ids(request.messages), request.images),
        **{name: value for name, value in fields.items() if value is not None},
    }
    if request.tools:
        choice = request.tool_choice
        named = {"type": "function", "function": {"name": choice}}
        body |= {"tools": request.tools, "tool_choice": choice if choice in _CHOICES else named}

    return (
        body if request.form is None else body | _form(request.form, has_tools=bool(request.tools))
    )


def _messages(
    messages: Sequence[Message], images: Mapping[str, EncodedImage]
) -> list[dict[str, Any]]:
    """The messages in OpenAI's form. Results of tools have no images in this API, so the images of
    adjacent results follow them in a message of the user."""
    sent: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for message in messages:
        if waiting and message.role != "tool":
            sent.append(_user_message(waiting))
            waiting = []

        fields = as_openai(message)
        parts = [_part(part, images) for part in parts_of(message)]
        shown = [part for part in parts if part["type"] == "image_url"]
        if message.role == "tool" and shown:
            fields["content"] = message.text or NO_TEXT
            waiting += shown
        elif shown:
            fields["content"] = parts
        else:
            fields["content"] = message.text
        sent.append(fields)

    return [*sent, _user_message(waiting)] if waiting else sent


def _user_message(images: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": RESULTS}, *images]}


def _part(part: TextPart | ImagePart, images: Mapping[str, EncodedImage]) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "image_url", "image_url": {"url": images[part.sha256].url}}


def _form(form: AnswerForm, *, has_tools: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if form.schema == ANY_OBJECT:
        fields["response_format"] = {"type": "json_object"}
    elif form.schema is not None:
        schema = form.schema if isinstance(form.schema, Mapping) else {"not": {}}
        named = {"name": "answer", "schema": {} if form.schema is True else schema}
        strict = {"strict": True} if form.strict else {}
        fields["response_format"] = {"type": "json_schema", "json_schema": named | strict}

    if has_tools and not form.parallel and form.tool is None:  # not every server has this field
        fields["parallel_tool_calls"] = False

    return fields


def as_openai(message: Message) -> dict[str, Any]:
    """A message in OpenAI's form, without reasoning, because the API has no field for it."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]

    for name in ("tool_call_id", "name"):
        if getattr(message, name) is not None:
            fields[name] = getattr(message, name)

    return fields


def reply_of(answer: Mapping[str, Any]) -> RemoteReply:
    """See Wire.reply."""
    try:
        choice = answer["choices"][0]
        answer_message = choice["message"]
        kept_keys = ("content", "tool_calls", *REASONING_KEYS)
        fields = {key: answer_message[key] for key in kept_keys if answer_message.get(key)}
        fields.setdefault("content", answer_message.get("refusal") or "")
        (message,) = messages_of([{**fields, "role": "assistant"}])
        return RemoteReply(
            message=message,
            finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
            usage=usage_of(answer.get("usage")),
        )
    except (LookupError, TypeError, ValueError, AttributeError, BadRequestError) as error:
        raise BadAnswerError(f"no chat completion ({type(error).__name__}: {error})") from error


class StreamedChat:
    """See wire.StreamedAnswer. It reads the chunks of a chat completion."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._refusal: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish: str | None = None
        self._usage: Any = None

    def add(self, event: Any) -> Sequence[ContentDelta | ReasoningDelta]:
        if event.get("error"):
            error = event["error"]
            error_text = error.get("message") if isinstance(error, Mapping) else error
            raise BadAnswerError(f"it failed in the middle: {error_text}")

        self._usage = event.get("usage") or self._usage
        if not event.get("choices"):
            return []

        choice = event["choices"][0]
        delta = choice.get("delta") or {}
        self._finish = choice.get("finish_reason") or self._finish

        for call in delta.get("tool_calls") or ():
            self._add_call(call)

        self._refusal += [delta["refusal"]] if delta.get("refusal") else []
        news: list[ContentDelta | ReasoningDelta] = []
        reasoning = next((delta[key] for key in REASONING_KEYS if delta.get(key)), "")
        if reasoning:
            self._reasoning.append(_text(reasoning))
            news.append(ReasoningDelta(reasoning))

        if content := delta.get("content"):
            self._content.append(_text(content))
            news.append(ContentDelta(content))

        return news

    def _add_call(self, part: Mapping[str, Any]) -> None:
        place = part.get("index")
        if place is None:  # some servers don't number their calls
            place = len(self._calls) - (not part.get("id"))

        call = self._calls.setdefault(place, {"id": None, "type": "function", "name": ""})
        call["id"] = part.get("id") or call["id"]
        function = part.get("function") or {}
        call["name"] += function.get("name") or ""
        call.setdefault("arguments", []).append(function.get("arguments") or "")

    def answer(self) -> Mapping[str, Any]:
        if self._finish is None:
            raise BadAnswerError("it ended in the middle")

        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": "".join(call["arguments"])},
            }
            for call in self._calls.values()
        ]
        message = {
            "content": "".join(self._content),
            REASONING_KEYS[0]: "".join(self._reasoning),
            "refusal": "".join(self._refusal),
            "tool_calls": calls,
        }
        return {
            "choices": [{"message": message, "finish_reason": self._finish}],
            "usage": self._usage,
        }


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of a text")
    return value


def usage_of(usage: Any) -> Usage | None:
    """The tokens of an answer, from its `usage`; None if it has none."""
    if not isinstance(usage, Mapping) or "prompt_tokens" not in usage:
        return None

    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=int(usage["prompt_tokens"]),
        cached_tokens=int(details.get("cached_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
    )


WIRE = Wire(
    path=lambda url: f"{url}/chat/completions",
    headers=lambda key: {} if key is None else {"Authorization": f"Bearer {key}"},
    body=body_of,
    reply=reply_of,
    stream={"stream": True, "stream_options": {"include_usage": True}},
    streamed=StreamedChat,
)
