"""Renders conversations with images through a model's chat template: one placeholder per image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from agentevo.models.chat.chat_template import (
    OWN_VALUES,
    TEMPLATE_ERRORS,
    ChatTemplate,
    TemplateValues,
)
from agentevo.models.chat.template_rendering import TemplateRenderer
from agentevo.types import ImagePart, Message, TextPart

_PROBE = "probetext"


class ImageChatTemplate(ChatTemplate):
    """A chat template that gets images as parts of a message's content. Some templates need parts
    for every message and would leave a plain text out. A text that spells one of `marks`, such as
    the placeholder of an image, is cut apart in every message."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        marks: frozenset[str],
        values: TemplateValues = OWN_VALUES,
        renderer: TemplateRenderer | None = None,
    ) -> None:
        super().__init__(tokenizer, values, renderer)
        self._marks = marks
        self.markers.cut_always(marks)

    def with_values(self, values: TemplateValues) -> ImageChatTemplate:
        """See ChatTemplate."""
        return ImageChatTemplate(self.tokenizer, self._marks, values, self._renderer)

    def parts_of(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Mappings in OpenAI's form, whose images are parts by digest, in the template's form."""
        return [{**message, "content": self._parts(message["content"])} for message in messages]

    def _parts(self, content: Any) -> Any:
        if isinstance(content, list):
            return [
                {"type": "image"} if part["type"] == "image" else part for part in content
            ]  # fmt: skip
        if not self._needs_parts or not isinstance(content, str):
            return content
        return [{"type": "text", "text": content}] if content else []

    def _content(self, message: Message) -> Any:
        if isinstance(message.content, str):
            return self._parts(message.content)

        parts: list[dict[str, str]] = []
        # A mark must not arise from two texts that a template writes one after the other.
        for kind, run in groupby(message.content, type):
            if kind is TextPart:
                text = "".join(part.text for part in run if isinstance(part, TextPart))
                parts.append({"type": "text", "text": text})
            else:
                parts += [{"type": "image"} for part in run if isinstance(part, ImagePart)]
        return parts

    @cached_property
    def _needs_parts(self) -> bool:
        messages = [{"role": "user", "content": _PROBE}]
        try:
            return _PROBE not in self._render_mappings(messages, None, prompt=True)
        except TEMPLATE_ERRORS:
            return True
