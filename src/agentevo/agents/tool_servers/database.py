"""A SQLite database for each attempt, made from its task.

    metadata: {"setup": "CREATE TABLE ...; INSERT ...", "solved_by": "UPDATE ..."}

`setup` runs before the attempt (after the option `file`, a database that is copied). The attempt
scores 1 if its tables have the same rows at the end as after `solved_by`, in any order, else 0. A
task without `solved_by` has no outcome.

The policy's SQL is one statement per call, within limits of time, rows, sizes and memory. It can't
open other files: ATTACH, PRAGMA, extensions and virtual tables are forbidden. Each call is one
transaction. A task's SQL, which clients of a server send, may use only the PRAGMAs of
SETUP_PRAGMAS, because others would change limits of the process or of the database. `query` changes
nothing. A process that serves a database (`agentevo tools serve`) also bounds the memory of all
SQLite in it; in a run's own process, only the time limit bounds it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from agentevo.config.tools import tool
from agentevo.errors import ConfigError, EnvironmentFailure, ToolError
from agentevo.types import Task

MAX_VALUE = 100_000
"""The maximum bytes of one value or row."""
MAX_READ = 2**20
"""The maximum characters and bytes of all rows of a statement."""
MAX_SQL = 10_000
MAX_MIB = 64
"""The maximum size of one database."""
HEAP_MIB = 512
"""The memory limit of all SQLite in a process that serves databases."""
OPS_PER_CHECK = 1000
"""The number of SQLite's virtual machine steps between two checks of the clock."""
SETUP_S = 30.0
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MAX_SQL,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}
_READS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_REFUSED = {
    sqlite3.SQLITE_ATTACH,
    sqlite3.SQLITE_DETACH,
    sqlite3.SQLITE_PRAGMA,
    sqlite3.SQLITE_TRANSACTION,
    sqlite3.SQLITE_SAVEPOINT,
    sqlite3.SQLITE_CREATE_VTABLE,
    sqlite3.SQLITE_DROP_VTABLE,
    sqlite3.SQLITE_ANALYZE,
    # The database's limits do not apply to temporary data in files.
    sqlite3.SQLITE_CREATE_TEMP_INDEX,
    sqlite3.SQLITE_CREATE_TEMP_TABLE,
    sqlite3.SQLITE_CREATE_TEMP_TRIGGER,
    sqlite3.SQLITE_CREATE_TEMP_VIEW,
}
_NOT_IN_SETUP = {"load_extension", "fts3_tokenizer"}
_NOT_FUNCTIONS = {*_NOT_IN_SETUP, "glob"}
"""Functions that are forbidden: `glob` takes unbounded time for patterns with many stars. `like` is
replaced by `_like`."""
SETUP_PRAGMAS = {
    "foreign_keys",
    "defer_foreign_keys",
    "foreign_key_check",
    "foreign_key_list",
    "ignore_check_constraints",
    "recursive_triggers",
    "legacy_alter_table",
    "user_version",
    "application_id",
    "encoding",
    "journal_mode",
    "synchronous",
    "table_info",
    "table_xinfo",
    "table_list",
    "index_info",
    "index_list",
    "integrity_check",
}
"""The PRAGMAs that a task's own SQL may use: those at the start of dumps, and read-only ones."""
Tables = dict[str, tuple[tuple[str, ...], list[tuple[Any, ...]]]]


@tool("database")
class DatabaseTools:
    """A SQLite database."""

    def __init__(
        self,
        task: Task,
        file: str | None = None,
        max_rows: int = 50,
        statement_timeout_s: float = 5.0,
    ) -> None:
        """Raises ConfigError for a `file` that is not a database, and EnvironmentFailure for a task
        whose SQL fails."""
        self._task = task
        self._file = file
        self._max_rows = max_rows
        self._timeout_s = statement_timeout_s
        self._connection = self._made()
        self._solved = self._solution()
        self._may_write = False
        self._until = 0.0
        self._confine()

    @staticmethod
    def _before_serving() -> None:
        """Bounds the memory of all SQLite in this process."""
        sqlite3.connect(":memory:").execute(f"PRAGMA hard_heap_limit={HEAP_MIB * 2**20}")

    def schema(self) -> str:
        """Shows the tables, as the statements that made them."""
        listed = "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL"
        rows = self._run(f"{listed} LIMIT {self._max_rows}", False)[1]

        ((number,),) = self._run(f"SELECT count(*) FROM ({listed})", False)[1]
        lines = [str(sql) for (sql,) in rows]
        if number > len(lines):
            lines.append(
                f"(the first {len(lines)} of {number}: query sqlite_schema for the others)"
            )

        return "\n".join(lines) or "There are no tables."

    def query(self, sql: str) -> str:
        """Reads the database.

        Args:
            sql: One SELECT statement of SQLite.
        """
        names, rows, _ = self._run(sql, False)
        lines = [" | ".join(names), *(" | ".join(map(_shown, row)) for row in rows)]
        if len(rows) > self._max_rows:
            lines[-1] = f"(only the first {self._max_rows} rows are shown)"
        return "\n".join(lines) if rows else "No rows."

    def execute(self, sql: str) -> str:
        """Changes the database.

        Args:
            sql: One statement of SQLite, such as INSERT, UPDATE, DELETE or CREATE TABLE.
        """
        count = max(self._run(sql, True)[2], 0)
        return f"Done: {count} row{'' if count == 1 else 's'} changed."

    def outcome(self) -> float | None:
        """1 if the tables match those of the task's solution, else 0."""
        if self._solved is None:
            return None

        self._connection.set_authorizer(None)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10**9)  # as setup may need
        self._until = time.monotonic() + SETUP_S

        try:
            return float(_tables(self._connection) == self._solved)
        except sqlite3.Error:  # the policy made a table that can't be read
            return 0.0

    def close(self) -> None:
        """Deletes the database."""
        self._connection.close()

    def _made(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            ":memory:", isolation_level=None, cached_statements=0, check_same_thread=False
        )
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # a client of a server sends `setup`
        connection.execute(f"PRAGMA max_page_count={MAX_MIB * 2**20 // 4096}")
        if self._file is not None:
            path = Path(self._file).expanduser().resolve()
            try:
                with sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True) as source:
                    source.backup(connection)
                source.close()
            except sqlite3.Error as error:
                raise ConfigError(
                    f"the tool database: file: {path} can't be read ({error}): give a database of "
                    "SQLite"
                ) from error

        self._run_script(connection, "setup")
        return connection

    def _solution(self) -> Tables | None:
        if "solved_by" not in self._task.metadata:
            return None
        solved = self._made()
        self._run_script(solved, "solved_by")
        tables = _tables(solved)
        solved.close()
        return tables

    def _run_script(self, connection: sqlite3.Connection, key: str) -> None:
        """Runs the task's own SQL. Only its time, memory and files are limited."""
        script = self._task.metadata.get(key, "")
        until = time.monotonic() + SETUP_S
        connection.set_progress_handler(lambda: time.monotonic() > until, OPS_PER_CHECK)
        refused: list[str] = []

        def authorize_all(action: int, first: str | None, second: str | None, *rest: Any) -> int:
            pragma = action == sqlite3.SQLITE_PRAGMA and (first or "").lower() not in SETUP_PRAGMAS
            if pragma or (action == sqlite3.SQLITE_FUNCTION and second in _NOT_IN_SETUP):
                refused.append(f"PRAGMA {first}" if pragma else f"{second}()")
                return sqlite3.SQLITE_DENY
            return sqlite3.SQLITE_OK

        connection.set_authorizer(authorize_all)
        try:
            if not isinstance(script, str):
                raise sqlite3.Error(f"it is a {type(script).__name__}, not a text")
            connection.executescript(script)
        except (sqlite3.Error, ValueError) as error:
            why = f"{refused[0]} is not allowed in it" if refused else str(error)
            raise EnvironmentFailure(
                f"the task {self._task.id!r}: the SQL of metadata.{key} fails: {why}"
            ) from error
        finally:
            connection.set_authorizer(None)

    def _confine(self) -> None:
        def like(pattern: Any, text: Any, escape: str = "") -> bool | None:
            return _like(pattern, text, escape, lambda: time.monotonic() > self._until)

        connection = self._connection
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)

        connection.create_function("like", 2, like, deterministic=True)
        connection.create_function("like", 3, like, deterministic=True)
        connection.set_progress_handler(lambda: time.monotonic() > self._until, OPS_PER_CHECK)
        connection.set_authorizer(self._authorize)

    def _authorize(self, action: int, first: str | None, second: str | None, *rest: Any) -> int:
        function = action == sqlite3.SQLITE_FUNCTION and second in _NOT_FUNCTIONS
        refused = action in _REFUSED or function or (action not in _READS and not self._may_write)
        return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK

    def _run(self, sql: str, may_write: bool) -> tuple[list[str], list[tuple[Any, ...]], int]:
        """The column names, the first rows (one more than are shown), and the number of changed
        rows."""
        self._may_write = may_write
        self._until = time.monotonic() + self._timeout_s
        cursor = self._connection.cursor()
        try:
            cursor.execute(sql)
            rows = []
            size = 0
            for row in islice(cursor, self._max_rows + 1):
                rows.append(row)
                size += sum(len(cell) for cell in row if isinstance(cell, (str, bytes)))
                if size > MAX_READ:
                    raise ToolError(
                        f"the rows have more than {MAX_READ:,} characters: ask for fewer of them, "
                        "or for parts of their texts by substr()"
                    )

            return [column[0] for column in cursor.description or ()], rows, cursor.rowcount
        except sqlite3.OperationalError as error:
            late = time.monotonic() > self._until
            why = f"it took longer than {self._timeout_s:g} s" if late else str(error)
            raise ToolError(f"the statement failed: {why}") from None
        except sqlite3.DatabaseError as error:
            hint = "" if may_write or "authorized" not in str(error) else ": query only reads"
            raise ToolError(f"the statement failed: {error}{hint}") from None
        except (sqlite3.Warning, ValueError, MemoryError) as error:
            raise ToolError(f"the statement failed: {error or 'too little memory'}") from None
        finally:
            cursor.close()


def _tables(connection: sqlite3.Connection) -> Tables:
    """Every table's columns and sorted rows."""
    names = connection.execute(
        "SELECT name FROM sqlite_schema WHERE type = 'table' AND substr(name, 1, 7) <> 'sqlite_'"
    )
    tables: Tables = {}
    for (name,) in names.fetchall():
        rows = connection.execute(f'SELECT * FROM "{name.replace(chr(34), chr(34) * 2)}"')
        columns = tuple(column[0] for column in rows.description)
        tables[name] = (columns, sorted(rows.fetchall(), key=repr))

    return tables


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return f"[{len(value)} bytes]"
    return "NULL" if value is None else str(value)


def _like(
    pattern: Any, text: Any, escape: str = "", is_late: Callable[[], bool] = lambda: False
) -> bool | None:
    """SQL's LIKE, in time linear in pattern times text: SQLite's own takes exponential time for
    patterns of many per cent signs. Raises TimeoutError when `is_late` says so."""
    if pattern is None or text is None:
        return None
    pieces = _pieces(str(pattern).lower(), escape.lower())
    return _matches(pieces, str(text).lower(), is_late)


def _pieces(pattern: str, escape: str) -> Sequence[str | None]:
    """The pattern's characters: "" matches any one character, None any number of them."""
    pieces: list[str | None] = []
    characters = iter(pattern)
    for character in characters:
        if escape and character == escape:
            pieces.append(next(characters, ""))
        else:
            pieces.append({"%": None, "_": ""}.get(character, character))

    return pieces


def _matches(pieces: Sequence[str | None], text: str, is_late: Callable[[], bool]) -> bool:
    place = at = steps = 0
    star = -1
    resume = 0
    while at < len(text):
        steps += 1
        if steps % OPS_PER_CHECK == 0 and is_late():  # SQLite does not check the clock in here
            raise TimeoutError

        if place < len(pieces) and pieces[place] is None:
            star = place
            resume = at
            place += 1
        elif place < len(pieces) and pieces[place] in ("", text[at]):
            place += 1
            at += 1
        elif star >= 0:
            resume += 1
            place = star + 1
            at = resume
        else:
            return False

    return all(piece is None for piece in pieces[place:])
