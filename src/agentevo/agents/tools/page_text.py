"""The text of an HTML page: its title and its visible text, one line per block.

The page is split into texts and tags as browsers do it, in one pass. html.parser reads the rest of
a page again for each unclosed tag, which takes hours for a page made to exploit that.
"""

from __future__ import annotations

import re
from contextlib import suppress
from html import unescape
from urllib.parse import urljoin

from agentevo.errors import ToolError

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
