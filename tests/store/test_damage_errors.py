"""A store whose file was damaged is said to be so, with exit code 2, whatever says it: SQLite, or
Python where a text is no UTF-8."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from agentevo.cli.main import main
from agentevo.store import open_store
from agentevo.types import Task

PAGE = 16384


def no_utf8(path: Path) -> None:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("UPDATE tasks SET id = CAST(X'ff' || CAST(id AS BLOB) AS TEXT)")
    database.close()


def no_utf8_in_the_schema(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE tasks", b"CREATE TABLE \xff\xfesks"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: 3 * PAGE + 777])


def zeros(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:PAGE] + bytes(PAGE) + content[2 * PAGE :])


@pytest.mark.parametrize("damage", [no_utf8, no_utf8_in_the_schema, cut, zeros])
def test_a_damaged_store_is_said_to_be_so(
    damage: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "store.sqlite"
    url = f"sqlite:///{path}"

    async def fill() -> None:
        async with await open_store(url) as store:
            await store.add_tasks([Task(id=f"t{n}", query="?" * 500) for n in range(200)])

    asyncio.run(fill())
    for left in tmp_path.glob("store.sqlite-*"):
        left.unlink()

    damage(path)
    assert main(["store", url, "export", str(tmp_path / "out.jsonl")]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"the store {path} is damaged (" in errors[0]
    assert errors[0].endswith("): restore it from a copy")
