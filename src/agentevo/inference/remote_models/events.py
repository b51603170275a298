"""Server-sent events, as a client reads them: bytes in, the data of whole events out.
https://html.spec.whatwg.org/multipage/server-sent-events.html"""

from __future__ import annotations

from collections.abc import Iterator

DONE = b"[DONE]"
"""OpenAI's last event."""


class EventReader:
    """Takes bytes in pieces of any size. An event's name and id are ignored: only its data
    counts."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> Iterator[bytes]:
        """The data of the events that this part completes; without DONE."""
        *ended_lines, rest = part.split(b"\n")
        for line in ended_lines:
            self._line += line
            complete_line = bytes(self._line)
            self._line = bytearray()
            yield from self._taken(complete_line.removesuffix(b"\r"))
        self._line += rest

    def _taken(self, line: bytes) -> Iterator[bytes]:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            data = b"\n".join(self._data)
            self._data = []
            if data.strip() != DONE:
                yield data
