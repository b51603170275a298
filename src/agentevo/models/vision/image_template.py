"""Renders conversations with images through a model's chat template: one placeholder per image."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from agentevo.models.chat.chat_template import TEMPLATE_ERRORS, ChatTemplate
from agentevo.types import ImagePart, Message

_PROBE = "probetext"


class ImageChatTemplate(ChatTemplate):
    """A chat template that gets images as parts of a message's content. Some templates need parts
    for every message and would leave a plain text out."""

    def _content(self, message: Message) -> Any:
        if isinstance(message.content, str) and not self._needs_parts:
            return message.content
        if isinstance(message.content, str):
            return [{"type": "text", "text": message.content}] if message.content else []

        return [
            {"type": "image"}
            if isinstance(part, ImagePart)
            else {"type": "text", "text": part.text}
            for part in message.content
        ]

    @cached_property
    def _needs_parts(self) -> bool:
        messages = [{"role": "user", "content": _PROBE}]
        try:
            return _PROBE not in self._render_mappings(messages, None, prompt=True)
        except TEMPLATE_ERRORS:
            return True
