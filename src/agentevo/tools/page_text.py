"""The text of an HTML page: its title and what a reader sees, a line for each block."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from urllib.parse import urljoin

UNSEEN = frozenset({"script", "style", "noscript", "template", "svg", "iframe", "select", "button"})
INLINE = frozenset(
    {"a", "abbr", "b", "bdi", "cite", "code", "em", "font", "i", "kbd", "mark", "q", "s", "small"}
    | {"span", "strong", "sub", "sup", "time", "u", "var", "wbr"}
)
"""Elements that begin no line."""
_SPACE = re.compile(r"[ \t\r\f\v\n\u00a0]+")


def page_text(html: str, *, url: str = "", links: bool = False) -> tuple[str, str]:
    """(title, text). With `links` a link is `[its text](its URL)`; `url` is the page's."""
    reader = _Reader(url, links)
    reader.feed(html)
    reader.close()
    lines = (_SPACE.sub(" ", line).strip() for line in "".join(reader.pieces).split("\n"))
    return _SPACE.sub(" ", reader.title).strip(), "\n".join(line for line in lines if line)


class _Reader(HTMLParser):
    def __init__(self, url: str, links: bool) -> None:
        super().__init__(convert_charrefs=True)
        self.title = ""
        self.pieces: list[str] = []
        self._url = url
        self._links = links
        self._unseen: str | None = None
        """The element that hides what is in it, and how deep it is in others of its name."""
        self._depth = 0
        self._in_title = False
        self._target: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._unseen is not None:
            self._depth += tag == self._unseen
            return
        if tag in UNSEEN:
            self._unseen = tag
            self._depth = 1
            return

        self._in_title = tag == "title" and not self.title
        if tag == "a":
            self._end_link()
            self._begin_link(dict(attrs).get("href"))
        elif tag in ("td", "th"):
            self.pieces.append(" ")
        elif tag not in INLINE:
            self._end_link()
            self.pieces.append("\n")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._unseen is None and tag not in INLINE and tag not in UNSEEN:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if self._unseen is not None:
            self._depth -= tag == self._unseen
            if self._depth == 0:
                self._unseen = None
            return

        if tag == "title":
            self._in_title = False
        elif tag == "a":
            self._end_link()
        elif tag not in INLINE and tag not in ("td", "th"):
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if self._unseen is not None:
            return
        if self._in_title:
            self.title += data
        else:
            self.pieces.append(data.replace("\n", " "))

    def _begin_link(self, href: str | None) -> None:
        if not self._links or not href:
            return
        try:
            target = urljoin(self._url, href.strip())
        except ValueError:
            return
        if target.startswith(("http://", "https://")):
            self._target = target
            self.pieces.append("[")

    def _end_link(self) -> None:
        if self._target is not None:
            self.pieces.append(f"]({self._target})")
            self._target = None
