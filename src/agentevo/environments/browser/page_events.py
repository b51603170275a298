"""What a page does on its own during an episode: errors, dialogs, popups, downloads and requests
that are not allowed. Each kind is counted, and a page that floods the browser is broken."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

MAX_DIALOGS = 20
MAX_POPUPS = 20
MAX_KEPT = 20
MAX_CHARACTERS = 300


@dataclass
class PageEvents:
    """The events of one episode. `counts` has the keys page_errors, dialogs, popups, downloads and
    blocked_requests."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    """The first messages of uncaught exceptions in the page."""
    blocked: list[str] = field(default_factory=list)
    """The first addresses that were not allowed."""
    news: list[str] = field(default_factory=list)
    """What the player has not been told yet, in sentences."""
    in_flight: int = 0
    """The number of requests without an answer."""
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the page can't go on."""
    reason: str = ""
    """Why the page is broken."""

    def break_off(self, reason: str) -> None:
        """Ends the episode."""
        if not self.broken.is_set():
            self.reason = reason
            self.broken.set()

    def record_error(self, message: str) -> None:
        self.counts["page_errors"] += 1
        if len(self.errors) < MAX_KEPT:
            self.errors.append(message[:MAX_CHARACTERS])

    def record_blocked(self, url: str) -> None:
        self.counts["blocked_requests"] += 1
        if len(self.blocked) < MAX_KEPT:
            self.blocked.append(url[:MAX_CHARACTERS])

    def record_dialog(self, kind: str, message: str) -> bool:
        """Whether to answer the dialog. After MAX_DIALOGS the page is broken."""
        self.counts["dialogs"] += 1
        self._tell(f"The page showed a dialog ({kind}): {message[:MAX_CHARACTERS]}")
        if self.counts["dialogs"] > MAX_DIALOGS:
            self.break_off(f"the page showed more than {MAX_DIALOGS} dialogs")
        return not self.broken.is_set()

    def record_popup(self, is_followed: bool) -> None:
        """After MAX_POPUPS the page is broken."""
        self.counts["popups"] += 1
        self._tell(
            f"The page opened a new window, which {'is shown' if is_followed else 'was closed'}."
        )
        if self.counts["popups"] > MAX_POPUPS:
            self.break_off(f"the page opened more than {MAX_POPUPS} windows")

    def record_download(self, is_allowed: bool) -> None:
        self.counts["downloads"] += 1
        self._tell(f"The page started a download, which was {'kept' if is_allowed else 'refused'}.")

    def take_news(self) -> list[str]:
        """The news since the last call."""
        news, self.news = self.news, []
        return news

    def _tell(self, sentence: str) -> None:
        if len(self.news) < MAX_KEPT:
            self.news.append(sentence)
