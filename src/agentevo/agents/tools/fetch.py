"""A tool that reads web pages. The option `allow` lists the permitted hosts (web_hosts.py)."""

from __future__ import annotations

import codecs
import json
import sys
import threading
from collections.abc import Sequence

from agentevo.agents.tools.page_text import page_text
from agentevo.agents.tools.web_hosts import WebHosts, WebPage
from agentevo.config.tools import tool
from agentevo.errors import ConfigError, ToolError

KEPT_PAGES = 8
"""The number of pages that an attempt keeps, so that the next part needs no request."""
KEPT_BYTES = 16_000_000
"""The memory limit of these pages, if there is more than one."""
PYTHON_CHARSETS = frozenset(
    {"idna", "mbcs", "oem", "palmos", "punycode", "raw_unicode_escape", "undefined"}
    | {"unicode_escape"}
)
"""Python codecs that are not charsets of the web. Decoding with some of them takes unbounded
time."""
_TEXTS = ("application/json", "application/xml", "application/xhtml+xml")


@tool("fetch")
class Fetch:
    """Reads pages of the web, a part at a time."""

    def __init__(
        self,
        allow: Sequence[str],
        deny: Sequence[str] = (),
        allow_private: bool = False,
        max_bytes: int = 2_000_000,
        timeout_s: float = 20.0,
        part_chars: int = 8_000,
        links: bool = False,
    ) -> None:
        """`allow`, `deny`, `allow_private`: see web_hosts.py. A page of more than `max_bytes` is
        refused. `links`: the text shows the URLs of links. Raises ConfigError."""
        if not allow:
            raise ConfigError(
                "the tool fetch: allow is empty: list hosts, or ['*'] for any public host"
            )
        if max_bytes < 1 or timeout_s <= 0 or part_chars < 1:
            raise ConfigError("the tool fetch: max_bytes, timeout_s and part_chars must be above 0")

        self._hosts = WebHosts(allow, deny, allow_private=allow_private)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._part_chars = part_chars
        self._links = links
        self._lock = threading.Lock()
        self._read: dict[str, str] = {}

    def fetch(self, url: str, part: int = 1) -> str:
        """Reads a page of the web as text.

        Args:
            url: Its address, such as https://en.wikipedia.org/wiki/Perth.
            part: Which part of a long page, from 1 on.
        """
        text = self._read.get(url)
        if text is None:
            page = self._hosts.read(url, max_bytes=self._max_bytes, within_s=self._timeout_s)
            text = _text_of(page, links=self._links, max_chars=self._max_bytes)
            self._keep(url, text)

        parts = max(-(-len(text) // self._part_chars), 1)
        if not 1 <= part <= parts:
            raise ToolError(f"{url} has the parts 1 to {parts}, and no part {part}")

        shown = text[(part - 1) * self._part_chars : part * self._part_chars]
        return shown if parts == 1 else f"{shown}\n[part {part} of {parts}]"

    def _keep(self, url: str, text: str) -> None:
        with self._lock:
            self._read[url] = text
            while len(self._read) > 1 and (
                len(self._read) > KEPT_PAGES
                or sum(map(sys.getsizeof, self._read.values())) > KEPT_BYTES
            ):
                del self._read[next(iter(self._read))]


def _text_of(page: WebPage, *, links: bool, max_chars: int) -> str:
    """Raises ToolError for content other than text."""
    kind = page.media_type
    if kind and not kind.startswith("text/") and kind not in _TEXTS and not kind.endswith("+json"):
        raise ToolError(f"{page.url} is {kind}, and texts alone are read")

    text = _decode(page)
    if kind.endswith("json"):
        return _indent_json(text, max_chars)
    if kind in ("text/html", "application/xhtml+xml") or (not kind and "<html" in text.lower()):
        title, body = page_text(text, url=page.url, links=links, max_chars=max_chars)
        text = f"{title}\n\n{body}" if title else body
    return text.strip() or "The page has no text."


def _decode(page: WebPage) -> str:
    """The content in the page's charset, or in UTF-8 if that is not a text charset."""
    try:
        codec = codecs.lookup(page.charset or "utf-8")
        if codec.name.replace("-", "_") not in PYTHON_CHARSETS:
            return page.content.decode(codec.name, errors="replace")
    except (LookupError, ValueError):
        pass
    return page.content.decode(errors="replace")


def _indent_json(text: str, max_chars: int) -> str:
    """Indented JSON, one value per line, or the text itself if the result would be longer than
    `max_chars`. The indentation is one space per level."""
    pieces = []
    num_chars = 0
    try:
        for piece in json.JSONEncoder(indent=1, ensure_ascii=False).iterencode(json.loads(text)):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > max_chars:
                return text
    except (ValueError, RecursionError):
        return text
    return "".join(pieces)
