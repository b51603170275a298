"""The indexes of the shown stores. Each is kept up to date while pages request it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from agentevo_ui.index.indexer import Indexer
from agentevo_ui.index.reader import IndexReader, IndexState, IndexUnavailableError

IDLE_S = 600.0
"""After this many seconds without a page's request, an index is no longer updated."""


class _IndexEntry:
    def __init__(self, url: str, folder: Path | None) -> None:
        self.indexer = Indexer(url, folder)
        self.reader = IndexReader(self.indexer.path)
        self.used_at = time.monotonic()
        self.indexer.start()


class Indexes:
    """The indexes of a dashboard. Any thread may use them."""

    def __init__(self) -> None:
        self._entries: dict[str, _IndexEntry] = {}
        self._lock = threading.Lock()

    def reader(self, url: str, folder: Path | None) -> IndexReader:
        """The index of the store at `url`, which is kept up to date from now on."""
        with self._lock:
            for other_url, entry in list(self._entries.items()):
                if other_url != url and time.monotonic() - entry.used_at > IDLE_S:
                    del self._entries[other_url]
                    threading.Thread(target=entry.indexer.stop, daemon=True).start()

            if url not in self._entries:
                self._entries[url] = _IndexEntry(url, folder)

            self._entries[url].used_at = time.monotonic()
            return self._entries[url].reader

    def state(self, url: str) -> tuple[IndexState, str]:
        """The progress of the index, and the problem that stops it."""
        with self._lock:
            entry = self._entries.get(url)

        if entry is None:
            return IndexState("listing", 0, 0, 0.0, ""), ""

        try:
            return entry.reader.state(), entry.indexer.trouble
        except IndexUnavailableError as error:
            return IndexState("listing", 0, 0, 0.0, ""), entry.indexer.trouble or str(error)

    def close(self) -> None:
        """Ends all indexers. Blocks until they have ended."""
        with self._lock:
            entries = list(self._entries.values())
            self._entries.clear()
        for entry in entries:
            entry.indexer.stop(0.0)
        for entry in entries:
            entry.indexer.stop(5.0)
