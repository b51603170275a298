"""A tool that reads web pages. The option `allow` lists the permitted hosts (web_hosts.py).

An HTML page is split into texts and tags as browsers do it, in one pass. html.parser reads the rest
of a page again for each unclosed tag, which takes hours for a page made to exploit that.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from html import unescape
from urllib.parse import urljoin

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


HIDDEN_ELEMENTS = frozenset(
    {"script", "style", "noscript", "template", "svg", "iframe", "select", "button"}
)
INLINE_ELEMENTS = frozenset(
    {"a", "abbr", "b", "bdi", "cite", "code", "em", "font", "i", "kbd", "mark", "q", "s", "small"}
    | {"span", "strong", "sub", "sup", "time", "u", "var", "wbr"}
)
"""Elements that do not start a new line."""
RAW_TEXT_ELEMENTS = ("script", "style")
"""Elements whose content is plain text up to their own end tag."""
_SPACE = re.compile(r"[ \t\r\f\v\n\u00a0]+")
# A failed match reads little text. A token without an end extends to the end of the page.
_TOKEN = re.compile(
    r"""
    (?P<text> [^<]++ | <(?![a-zA-Z!?/]) )
    | <(?P<end>/?)(?P<tag>[a-zA-Z][^\s/>]*+)
      (?P<attributes>(?: [^=/>]++ | /(?!>) | =\s*+(?: "[^"]*+"? | '[^']*+'? | [^\s>]*+ ) )*+)
      (?P<empty>/?)>?
    | <!--(?: -?> | .*?(?: --!?> | \Z ) )
    | <[!?/][^>]*+>?
    """,
    re.VERBOSE | re.DOTALL,
)
_ATTRIBUTE = re.compile(
    r"""([^\s=/>]++)(?:\s*+=\s*+(?:"([^"]*+)"?|'([^']*+)'?|([^\s>]*+)))?+""", re.DOTALL
)
_ENDS = {name: re.compile(rf"</{name}(?=[\s/>])|\Z", re.IGNORECASE) for name in RAW_TEXT_ELEMENTS}


def page_text(
    html: str, *, url: str = "", links: bool = False, max_chars: int = 10_000_000
) -> tuple[str, str]:
    """(title, text). With `links` a link is `[its text](its URL)`; `url` is the page's. Raises
    ToolError if links make the text longer than `max_chars`."""
    reader = _PageParser(url, links, max_chars)
    reader.read(html)
    lines = (_SPACE.sub(" ", line).strip() for line in "".join(reader.pieces).split("\n"))
    title = _SPACE.sub(" ", "".join(reader.title)).strip()
    return title, "\n".join(line for line in lines if line)


class _PageParser:
    def __init__(self, url: str, links: bool, max_chars: int) -> None:
        self.title: list[str] = []
        self.pieces: list[str] = []
        self._url = url
        self._links = links
        self._max_chars = max_chars
        self._num_link_chars = 0
        self._hiding_element: str | None = None
        """The element that hides the text now. `_depth` counts open elements of that name."""
        self._depth = 0
        self._in_title = False
        self._target: str | None = None

    def read(self, html: str) -> None:
        """Reads the whole page."""
        at = 0
        while token := _TOKEN.match(html, at):
            at = token.end()
            if token["text"]:
                self._read_text(token["text"])
            if not token["tag"]:
                continue

            tag = token["tag"].lower()
            if token["end"]:
                self._end(tag)
            elif token["empty"]:
                self._read_empty(tag)
            else:
                self._begin(tag, token["attributes"])
                if tag in RAW_TEXT_ELEMENTS:
                    at = _ENDS[tag].search(html, at).start()  # type: ignore[union-attr]

        self._end_link()

    def _begin(self, tag: str, attributes: str) -> None:
        if self._hiding_element is not None:
            self._depth += tag == self._hiding_element
            return
        if tag in HIDDEN_ELEMENTS:
            self._hiding_element = tag
            self._depth = 1
            return

        self._in_title = tag == "title" and not self.title
        if tag == "a":
            self._end_link()
            self._begin_link(attributes)
        elif tag in ("td", "th"):
            self.pieces.append(" ")
        elif tag not in INLINE_ELEMENTS:
            self._end_link()
            self.pieces.append("\n")

    def _read_empty(self, tag: str) -> None:
        if (
            self._hiding_element is None
            and tag not in INLINE_ELEMENTS
            and tag not in HIDDEN_ELEMENTS
        ):
            self.pieces.append("\n")

    def _end(self, tag: str) -> None:
        if self._hiding_element is not None:
            self._depth -= tag == self._hiding_element
            if self._depth == 0:
                self._hiding_element = None
            return

        if tag == "title":
            self._in_title = False
        elif tag == "a":
            self._end_link()
        elif tag not in INLINE_ELEMENTS and tag not in ("td", "th"):
            self.pieces.append("\n")

    def _read_text(self, text: str) -> None:
        if self._hiding_element is not None:
            return
        with suppress(ValueError):  # a number of more digits than Python reads
            text = unescape(text)
        if self._in_title:
            self.title.append(text)
        else:
            self.pieces.append(text.replace("\n", " "))

    def _begin_link(self, attributes: str) -> None:
        if not self._links:
            return
        matches = _ATTRIBUTE.finditer(attributes)
        href = next((match for match in matches if match[1].lower() == "href"), None)
        address = "" if href is None else href[2] or href[3] or href[4] or ""
        try:
            address = unescape(address).strip()
            target = urljoin(self._url, address) if address else ""
        except ValueError:
            return
        if target.startswith(("http://", "https://")):
            self._num_link_chars += len(target)
            if self._num_link_chars > self._max_chars:
                raise ToolError(
                    f"{self._url} has links of more than {self._max_chars:,} characters"
                )
            self._target = target
            self.pieces.append("[")

    def _end_link(self) -> None:
        if self._target is not None:
            self.pieces.append(f"]({self._target})")
            self._target = None
