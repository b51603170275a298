"""The reward `sqlite_state`: compares the final SQLite database of an attempt with the expectations
in the task's row.

The database is one of the trajectory's stored files (agent.keep_files_kib of the code agent,
`Policy.keep_files`). If the database may be among the files that were left out, the score fails.
The policy's code wrote the database, so a sandbox opens it. The rows of the queries are compared
outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from pydantic import Field, JsonValue

from agentevo.rewards.code_tests import OpensSandboxes, run_program, same_value
from agentevo.rewards.reward import RewardConfig, Score, reward
from agentevo.types import Task, Trajectory

RUNNER = Path(__file__).with_name("sqlite_runner.py")
SANDBOX: dict[str, JsonValue] = {"output_kib": 4096, "max_sandboxes": 8}
ENDINGS = (".db", ".sqlite", ".sqlite3")
MAX_ROWS = 10_000
"""The maximum number of rows of a query."""
LEFT_OUT_METRIC = "num_files_left_out"
"""The metric for the number of an attempt's files that were left out."""
WAL_MODE = 18, 2
"""The position and value in a database's header for the write-ahead mode. The newest rows can then
be in a -wal file."""
SIDE_FILES = ("-wal", "-journal")
"""Files that SQLite writes next to a database that was not closed."""
_FORM = (
    'give {"file": "shop.db", "tables": {"orders": [[1, "tea"]]}, "queries": [{"sql": "SELECT '
    'count(*) FROM orders", "rows": [[1]]}]}'
)


class SqliteStateConfig(RewardConfig):
    """A reward for the state of a database."""

    timeout_s: float = Field(default=600.0, gt=0)
    """The time limit of a score, in seconds, including the wait for a sandbox. Beyond it, the
    attempt is recorded as failed."""
    state_key: str = "expected_state"
    """The column of the row with the expectations."""
    partial: bool = False
    """If true, the score is the share of expectations that hold. Otherwise it is 1 if all hold,
    else 0."""
    queries_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """The time limit of all queries of an attempt, in seconds. If a database takes longer, the
    expectations fail."""
    sandbox: dict[str, JsonValue] = Field(default_factory=dict)
    """The sandbox that opens the database: the keys of agent.sandbox."""


class Expected(NamedTuple):
    """The expected rows of a query."""

    sql: str
    rows: list[Any]
    ordered: bool
    """Whether the order of rows counts."""


def expected_of(task: Task, key: str) -> tuple[str | None, list[Expected]]:
    """The file, if the row names it, and the expectations. Raises ValueError for any other form."""
    expectation = task.metadata.get(key)
    if not isinstance(expectation, Mapping):
        raise ValueError(f"the task {task.id!r} has no {key}: {_FORM}")

    tables = expectation.get("tables") or {}
    queries = expectation.get("queries") or []
    if not isinstance(tables, Mapping) or not isinstance(queries, list):
        raise ValueError(f"{key} of the task {task.id!r}: {_FORM}")

    expected = []
    for name, rows in tables.items():
        quoted = str(name).replace('"', '""')
        expected.append(Expected(f'SELECT * FROM "{quoted}"', rows, False))

    for query in queries:
        sql = query.get("sql") if isinstance(query, Mapping) else None
        if not isinstance(sql, str) or "rows" not in query:
            raise ValueError(f"{key} of the task {task.id!r}: a query needs sql and rows: {_FORM}")
        expected.append(Expected(sql, query["rows"], bool(query.get("ordered"))))

    if not expected or not all(isinstance(item.rows, list) for item in expected):
        raise ValueError(f"{key} of the task {task.id!r} expects nothing, or no rows: {_FORM}")

    file = expectation.get("file")
    return (None if file is None else str(file)), expected


@reward("sqlite_state")
class SqliteState:
    """1 if the final SQLite database of the attempt has the tables and query results that the task
    expects, or the share of them."""

    Config = SqliteStateConfig

    def __init__(self, config: SqliteStateConfig) -> None:
        self.config = config
        self.sandbox = SANDBOX | config.sandbox

    async def score(self, trajectory: Trajectory, task: Task, sandboxes: OpensSandboxes) -> Score:
        """See Scorer.score. Raises ValueError for a task without expectations, and SandboxError if
        no sandbox can be opened."""
        file, expected = expected_of(task, self.config.state_key)
        files = trajectory.files
        if file is None:
            file = next((path for path in files if path.endswith(ENDINGS)), None)

        _check_kept(trajectory, file)
        if file is None or file not in files:
            return Score(0.0)

        spec = {
            "file": "world.db",
            "queries": [item.sql for item in expected],
            "most_rows": MAX_ROWS,
        }
        async with sandboxes.open() as sandbox:
            for ending in ("", *SIDE_FILES):
                if (content := files.get(file + ending)) is not None:
                    await sandbox.write_file(f"world.db{ending}", content)

            program = RUNNER.read_bytes()
            ran = await run_program(sandbox, program, spec, self.config.queries_timeout_s)

        results = _read_results(ran.stdout, len(expected))
        right = sum(_rows_match(rows, item) for rows, item in zip(results, expected, strict=True))
        share = right / len(expected)
        return Score(share if self.config.partial else float(share == 1.0), success=share == 1.0)


def _check_kept(trajectory: Trajectory, file: str | None) -> None:
    """Raises ValueError if the database or its newest rows may be among the files that were left
    out."""
    num_left_out = int(trajectory.metrics.get(LEFT_OUT_METRIC, 0))
    content = trajectory.files.get(file or "")
    place, mode = WAL_MODE
    has_wal = content is not None and content[place : place + 1] == bytes([mode])
    if num_left_out and (content is None or (has_wal and f"{file}-wal" not in trajectory.files)):
        raise ValueError(
            f"the database can't be judged: {num_left_out} of the attempt's files were left out, "
            "and the database may be among them: raise agent.keep_files_kib"
        )


def _read_results(stdout: str, number: int) -> list[Any]:
    """The rows of each query. None for each query if the database was too slow, too large or too
    damaged."""
    try:
        results = msgspec.json.decode(stdout)
    except (msgspec.MsgspecError, RecursionError):
        return [None] * number
    return results if isinstance(results, list) and len(results) == number else [None] * number


def _rows_match(rows: Any, expected: Expected) -> bool:
    if not isinstance(rows, list):
        return False
    if expected.ordered:
        return same_value(rows, expected.rows)
    return same_value(sorted(rows, key=_rank), sorted(expected.rows, key=_rank))


def _rank(row: Any) -> list[tuple[str, Any]]:
    """A sort key for rows of any values: numbers sort among numbers, texts among texts."""
    values = row if isinstance(row, list) else [row]
    return [
        ("number", value) if isinstance(value, (int, float)) else (type(value).__name__, str(value))
        for value in values
    ]
