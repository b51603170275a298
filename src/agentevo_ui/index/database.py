"""The file of an index: an SQLite file for each store, in the user's cache folder.

    attempts   a row for each number of a trajectory in the store. `alive` is 0 if the store no
               longer has it; `change` grows with every change of a row, so a reader finds the
               changed rows by it
    search     FTS5: the messages of the attempts, at most TEXT_CHARS characters each
    facts      version, progress, the newest committed step

A single process writes (indexer.py holds its lock), and any number of processes read. A file that
can't be read, or has another version, is deleted and rebuilt from the store.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from agentevo.runtime.credentials import all_but_password
from agentevo.runtime.files import cache_root, must_write

VERSION = 4
"""The version of the schema. An index with another version is rebuilt."""
BUSY_S = 30.0
"""The time in seconds that a reader or the writer waits for the other's lock."""
TEXT_CHARS = 16_000
"""The maximum number of characters of an attempt's text: three quarters from the start, the rest
from the end."""
MAX_FILE_BYTES = 4 << 30
"""If the file is larger than this number of bytes, no more texts are added."""

_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE attempts (
    seq INTEGER PRIMARY KEY, alive INTEGER NOT NULL, change INTEGER NOT NULL,
    id TEXT, task_id TEXT, group_id TEXT, attempt INTEGER, split TEXT, step INTEGER, status TEXT,
    state TEXT, trained_step INTEGER, drop_reason TEXT, reward REAL, success INTEGER, error TEXT,
    truncated INTEGER, metrics TEXT, num_turns INTEGER, num_completion_tokens INTEGER,
    started_at REAL, duration_s REAL, written_at REAL,
    agent TEXT, decoding TEXT, error_kind TEXT, judge_gap REAL,
    is_read INTEGER NOT NULL DEFAULT 0, kind TEXT, difficulty TEXT, lowest_logprob REAL,
    lowest_version INTEGER,
    is_valued INTEGER NOT NULL DEFAULT 0, advantage REAL, moved REAL
);
CREATE INDEX attempts_by_change ON attempts (change);
CREATE INDEX attempts_by_id ON attempts (id);
CREATE INDEX attempts_by_group ON attempts (group_id);
CREATE INDEX attempts_unread ON attempts (seq) WHERE alive AND NOT is_read;
CREATE INDEX attempts_unvalued ON attempts (trained_step)
    WHERE alive AND NOT is_valued AND state = 'committed';
CREATE INDEX attempts_open ON attempts (seq)
    WHERE alive AND split = 'train' AND state IN ('ready', 'reserved');
CREATE VIRTUAL TABLE search USING fts5 (text, tokenize = 'unicode61 remove_diacritics 2');
"""


def cache_file(url: str) -> Path:
    """The path of the index of the store at `url`. Any reader of the store may read it."""
    scheme, _, path = url.partition(":///")
    place = f"sqlite:///{Path(path).resolve()}" if scheme == "sqlite" else all_but_password(url)
    return cache_root() / "dashboard" / f"{hashlib.sha256(place.encode()).hexdigest()[:24]}.sqlite"


def connect(path: Path) -> sqlite3.Connection:
    """A connection to an existing index, in autocommit mode, so that transactions are explicit.
    Raises sqlite3.Error."""
    connection = sqlite3.connect(
        f"file:{path}?mode=rw", uri=True, timeout=BUSY_S, isolation_level=None
    )
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA synchronous = OFF")  # the index can be made again
    connection.execute("PRAGMA cache_size = -65536")
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


def is_usable(path: Path) -> bool:
    """Whether there is a readable index of this version."""
    try:
        with closing(connect(path)) as connection:
            version = connection.execute("SELECT value FROM facts WHERE name = 'version'")
            if version.fetchone()[0] != VERSION:
                return False
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
    except (sqlite3.Error, TypeError):
        return False


def make(path: Path) -> None:
    """Replaces the file by an empty index. Raises DiskError. Only the holder of the lock may call
    it."""
    with must_write(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove(path)
        new = path.with_suffix(".new")
        remove(new)

        with closing(sqlite3.connect(new, isolation_level=None)) as connection:
            connection.execute("PRAGMA page_size = 8192")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(_SCHEMA)
            connection.execute("INSERT INTO facts VALUES ('version', ?)", (VERSION,))

            index_id = os.urandom(8).hex()
            connection.execute("INSERT INTO facts VALUES ('made', ?)", (index_id,))
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

        os.chmod(new, 0o600)
        os.replace(new, path)
        remove(new)


def remove(path: Path) -> None:
    """Deletes an index and the files that SQLite keeps next to it."""
    for suffix in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            os.unlink(f"{path}{suffix}")
