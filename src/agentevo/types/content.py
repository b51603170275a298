"""The content of a message as parts."""

from __future__ import annotations

from collections.abc import Iterable

from agentevo.types import ImagePart, Message, TextPart

Content = str | tuple[TextPart | ImagePart, ...]


def content_of(parts: Iterable[str | TextPart | ImagePart]) -> Content:
    """The parts as a content in its only form: texts without an image between them are one text,
    and a content without an image is a text."""
    joined: list[TextPart | ImagePart] = []
    for part in parts:
        if isinstance(part, ImagePart):
            joined.append(part)
            continue

        text = part if isinstance(part, str) else part.text
        last = joined[-1] if joined else None
        if isinstance(last, TextPart):
            joined[-1] = TextPart(last.text + text)
        elif text:
            joined.append(TextPart(text))

    if any(isinstance(part, ImagePart) for part in joined):
        return tuple(joined)
    return "".join(part.text for part in joined if isinstance(part, TextPart))


def parts_of(message: Message) -> tuple[TextPart | ImagePart, ...]:
    """The content as parts."""
    content = message.content
    return (TextPart(content),) if isinstance(content, str) else content
