"""The file of an index: an SQLite file for each store, in the user's cache folder.

    attempts   a row for each trajectory that the store has or had (`alive`), with the columns of
               a list; `change` grows with every change of a row, so a reader finds new rows by it
    texts      the messages of an attempt, compressed, at most TEXT_CHARS characters
    words      numbers for the few words that filters choose from
    tasks      a number for each task that was attempted, from 1 on
    search     FTS5 over `texts`, which keeps no text itself
    steps      the committed steps that the rows agree with
    gaps       numbers that were skipped a short time ago: their transaction may still commit
    facts      schema, progress, errors

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

VERSION = 3
"""The version of the schema. An index with another version is rebuilt."""
BUSY_S = 30.0
"""The time in seconds that a reader or the writer waits for the other's lock."""
TEXT_CHARS = 16_000
"""The maximum number of characters of an attempt's text: three quarters from the start, the rest
from the end."""
MAX_TEXT_BYTES = 4 << 30
"""If the file is larger than this number of bytes, no more texts are added. That is about a million
attempts of the longest kind, or five million of 2,000 characters."""

_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE words (number INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
CREATE TABLE tasks (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE);
CREATE TABLE attempts (
    place INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE, seq INTEGER NOT NULL,
    task_id TEXT NOT NULL, group_id TEXT NOT NULL, attempt INTEGER NOT NULL,
    split TEXT NOT NULL, step INTEGER NOT NULL, status TEXT NOT NULL, state TEXT NOT NULL,
    trained_step INTEGER, drop_reason TEXT, reward REAL NOT NULL, success INTEGER NOT NULL,
    error TEXT, truncated INTEGER NOT NULL, metrics TEXT NOT NULL,
    num_turns INTEGER NOT NULL, num_completion_tokens INTEGER NOT NULL,
    started_at REAL NOT NULL, duration_s REAL NOT NULL, written_at REAL NOT NULL,
    agent INTEGER NOT NULL, error_kind INTEGER NOT NULL, reason INTEGER NOT NULL,
    task INTEGER NOT NULL, decoding INTEGER NOT NULL,
    kind INTEGER NOT NULL DEFAULT 0, difficulty INTEGER NOT NULL DEFAULT 0,
    judge_gap REAL,
    is_read INTEGER NOT NULL DEFAULT 0,
    lowest_logprob REAL, mean_logprob REAL, lowest_version INTEGER,
    advantage REAL, moved REAL,
    alive INTEGER NOT NULL DEFAULT 1, change INTEGER NOT NULL
);
CREATE INDEX attempts_by_change ON attempts (change);
CREATE INDEX attempts_by_seq ON attempts (seq);
CREATE INDEX attempts_by_group ON attempts (group_id);
CREATE INDEX attempts_by_step ON attempts (step);
CREATE INDEX attempts_by_trained_step ON attempts (trained_step) WHERE trained_step IS NOT NULL;
CREATE INDEX attempts_unread ON attempts (seq) WHERE NOT is_read AND alive;
CREATE INDEX attempts_open ON attempts (seq)
    WHERE alive AND split = 'train' AND state IN ('ready', 'reserved');
CREATE TABLE texts (place INTEGER PRIMARY KEY, text BLOB NOT NULL);
CREATE VIRTUAL TABLE search USING fts5
    (text, content = '', tokenize = 'unicode61 remove_diacritics 2');
CREATE TABLE steps (
    step INTEGER PRIMARY KEY, committed_at REAL NOT NULL, mark TEXT NOT NULL,
    num_trajectories INTEGER NOT NULL, plan TEXT, has_advantages INTEGER NOT NULL DEFAULT 0,
    has_moves INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE gaps (first INTEGER PRIMARY KEY, last INTEGER NOT NULL, since REAL NOT NULL);
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
            connection.execute("INSERT INTO words VALUES (0, '')")
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
