"""Renders messages as text with a tokenizer's chat template.

A message becomes the mapping that templates read. Its content is a text. The arguments of a tool
call are parsed from JSON into a mapping (or stay a text if they are not a JSON object), because
most templates write JSON themselves. Reasoning is under the keys that the template mentions. Some
templates need calls in another form (DeepSeek-R1: arguments as a text, calls only if content is
None). Each template is tried once to find its `CallForm`. Messages whose content a template does
not render are refused, except for reasoning, which templates strip from earlier turns. A text that
spells a special token is cut apart (message_markers.py), so that `encode_rendering` does not encode
that special token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from agentevo.data.message_markers import MessageMarkers
from agentevo.data.messages import REASONING_KEYS
from agentevo.errors import BadRequestError, ModelError
from agentevo.models.chat.template_rendering import TemplateRenderer, current_renderer
from agentevo.models.chat.template_variables import variables_of
from agentevo.types import ImagePart, Message, ToolCall

TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    LookupError,
    AttributeError,
    ValueError,
    ArithmeticError,
    RuntimeError,
)
"""The exceptions that a template may raise, since it may do anything with its input."""
MAX_VALUES = 50_000
"""The most characters of the values of one request, as JSON. A chat format renders them about 20
times when it is made."""
_PROBE_CALL = "probecall"
_PROBE_ARGUMENT = "probeargument"


@dataclass(frozen=True)
class ToolSchemas:
    """Tools that the model may call, as JSON: a list of schemas in OpenAI's form, or empty."""

    as_json: str = ""

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]] | None) -> ToolSchemas:
        return cls(json.dumps(list(tools), ensure_ascii=False)) if tools else cls()


NO_TOOLS = ToolSchemas()


@dataclass(frozen=True)
class TemplateValues:
    """Values that a request gives to variables of the template, as a JSON object; empty for the
    values of the model's section."""

    as_json: str = ""

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> TemplateValues:
        """Raises BadRequestError for values that JSON does not have, and for more than MAX_VALUES
        characters. The order of the names has no meaning."""
        if not values:
            return cls()

        try:
            text = json.dumps(dict(sorted(values.items())), ensure_ascii=False, allow_nan=False)
            text.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequestError(
                f"the values of the chat template's variables can't be written as JSON: {error}"
            ) from error

        if len(text) > MAX_VALUES:
            raise BadRequestError(
                f"the values of the chat template's variables have {len(text):,} characters, and "
                f"at most {MAX_VALUES:,} are allowed: shorten them"
            )
        return cls(text)


OWN_VALUES = TemplateValues()


@dataclass(frozen=True)
class CallForm:
    """The form in which a template needs an assistant's tool calls."""

    content: str | None
    """The content for a message that has only calls."""
    arguments_as_text: bool
    """Whether the template receives the arguments as a text."""


USUAL_FORM = CallForm("", arguments_as_text=False)
"""The usual form, also for conversations without calls."""


class ChatTemplate:
    """Renders conversations. Raises ModelError for a tokenizer without a chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        values: TemplateValues = OWN_VALUES,
        renderer: TemplateRenderer | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template: set model.chat_template=plain for a base "
                "model, or choose an instruction-tuned one"
            )
        self.tokenizer = tokenizer
        self._renderer = current_renderer() if renderer is None else renderer
        self.markers = MessageMarkers(
            tokenizer, lambda messages: self._render_mappings(messages, None, prompt=True)
        )
        self._values = self.markers.cut(json.loads(values.as_json or "{}"), "system")

    def with_values(self, values: TemplateValues) -> Self:
        """The same template, with other values of its variables."""
        return type(self)(self.tokenizer, values, self._renderer)

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables of the template that a request may set."""
        return variables_of(self.tokenizer, self._renderer)

    def _render_mappings(
        self, messages: list[dict[str, Any]], schemas: Any, *, prompt: bool
    ) -> str:
        return self._renderer.render(self.tokenizer, messages, schemas, prompt, self._values)

    def render(
        self, messages: Sequence[Message], *, prompt: bool, tools: ToolSchemas = NO_TOOLS
    ) -> str:
        """The conversation's text. With `prompt`, it includes the generation prompt. Raises
        ModelError for messages that the template refuses or does not render."""
        form = USUAL_FORM
        if any(message.tool_calls for message in messages):
            if isinstance(self.call_form, ModelError):
                raise self.call_form

            form = self.call_form
            has_content_and_calls = any(message.tool_calls and message.text for message in messages)
            if has_content_and_calls and not self._renders_calls_with_content:
                raise ModelError(
                    "the chat template leaves out tool_calls of a message that has content: give "
                    "a message either content or calls, or choose a model whose template renders "
                    "both"
                )

        return self._apply(
            [self._message_mapping(message, form) for message in messages], prompt, tools
        )

    def to_call_form(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Converts mappings in OpenAI's form, whose calls have arguments as mappings, to the form
        that the template needs. Returns them unchanged if the template does not render calls."""
        form = self.call_form
        if isinstance(form, ModelError) or form == USUAL_FORM:
            return list(messages)
        return [_to_form(message, form) for message in messages]

    @cached_property
    def reasoning_keys(self) -> tuple[str, ...]:
        """The keys of a message from which the template reads the reasoning."""
        source = str(self.tokenizer.get_chat_template())
        return tuple(key for key in REASONING_KEYS if re.search(rf"\b{key}\b", source))

    @cached_property
    def call_form(self) -> CallForm | ModelError:
        """The form in which the template needs calls, or a ModelError if the template renders calls
        in no known form."""
        for as_text in (False, True):
            for content in ("", None):
                form = CallForm(content, as_text)
                text = self._render_call("", form)
                if text is not None and repr({"a": _PROBE_ARGUMENT}) not in text:
                    return form

        return ModelError(
            "the chat template leaves out tool_calls: set model.chat_template=hermes for a model "
            "that speaks ChatML, or choose a model whose template has a place for them"
        )

    @cached_property
    def _renders_calls_with_content(self) -> bool:
        form = self.call_form
        return isinstance(form, CallForm) and self._render_call("probetext", form) is not None

    def _render_call(self, content: str, form: CallForm) -> str | None:
        """Renders a conversation with a tool call. None if the template leaves the call out."""
        call = ToolCall(_PROBE_CALL, json.dumps({"a": _PROBE_ARGUMENT}), "probe0001")
        messages = [Message("user", "q"), Message("assistant", content, (call,))]
        try:
            mappings = [self._message_mapping(message, form) for message in messages]
            text = self._apply(mappings, False, NO_TOOLS)
        except ModelError:
            return None

        return text if _PROBE_CALL in text and _PROBE_ARGUMENT in text else None

    def check_tools(self, tools: ToolSchemas) -> None:
        """Raises ModelError if the template leaves the tools out."""
        messages = [Message("user", "q")]
        if self.render(messages, prompt=True, tools=tools) == self.render(messages, prompt=True):
            raise ModelError(
                "the chat template leaves out tools: set model.chat_template=hermes for a model "
                "that speaks ChatML (such as smollm2-135m-instruct), choose a model whose template "
                "has a place for them, or describe them in the system message"
            )

    def _message_mapping(self, message: Message, form: CallForm) -> dict[str, Any]:
        mapping: dict[str, Any] = {"content": self._content(message)}
        if message.tool_calls:
            mapping["content"] = mapping["content"] or form.content
            mapping["tool_calls"] = [
                _call_mapping(call, form.arguments_as_text) for call in message.tool_calls
            ]

        if message.tool_call_id is not None:
            mapping["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            mapping["name"] = message.name
        if message.reasoning is not None:
            mapping |= dict.fromkeys(self.reasoning_keys, message.reasoning)

        calls = mapping.pop("tool_calls", None)
        mapping = self.markers.cut(mapping, message.role)
        if calls is not None:  # the template itself writes the calls as JSON
            mapping["tool_calls"] = self.markers.cut(calls, "user")
        return {"role": message.role, **mapping}

    def _content(self, message: Message) -> Any:
        """The content as the template reads it. Raises ModelError for an image."""
        return _text_content(message)

    def _apply(self, messages: list[dict[str, Any]], prompt: bool, tools: ToolSchemas) -> str:
        schemas = self.markers.cut(json.loads(tools.as_json), "system") if tools.as_json else None
        try:
            return self._render_mappings(messages, schemas, prompt=prompt)
        except TEMPLATE_ERRORS as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ModelError(
                f"the chat template refuses a conversation of {roles}: {error}"
            ) from error


def _text_content(message: Message) -> str:
    if not isinstance(message.content, str):
        image = next((part for part in message.content if isinstance(part, ImagePart)), None)
        if image is not None:
            raise ModelError(
                f"a message of role {message.role} holds an image ({image.media_type}, SHA-256 "
                f"{image.sha256[:12]}...), and the model reads text only: choose one that sees, "
                "such as Qwen/Qwen2.5-VL-3B-Instruct or HuggingFaceTB/SmolVLM-256M-Instruct "
                "(docs/messages.md), or leave images out"
            )

    return message.text


def _call_mapping(call: ToolCall, as_text: bool) -> dict[str, Any]:
    try:
        arguments = None if as_text else json.loads(call.arguments or "{}")
    except ValueError:
        arguments = None

    return {
        **({"id": call.id} if call.id else {}),
        "type": "function",
        "function": {
            "name": call.name,
            "arguments": arguments if isinstance(arguments, dict) else call.arguments,
        },
    }


def _to_form(message: Mapping[str, Any], form: CallForm) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = message["tool_calls"]
    if form.arguments_as_text:
        calls = [{**call, "function": _with_text_arguments(call["function"])} for call in calls]
    return {**message, "content": message["content"] or form.content, "tool_calls": calls}


def _with_text_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": text}
