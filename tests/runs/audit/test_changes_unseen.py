"""No column of the store and no file of a run's folder can be changed unseen: the audit names the
change, or the value plays no part in what the run computes. All columns are gone through by
introspection, so a new one fails here until somebody has decided which it is."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from audited_run import audited, change, violations
from slow import slow, soak
from store_changes import NO_PART, changed

from agentevo.cli.main import main
from agentevo.store import open_store
from agentevo.store.codec import encode_stored, encode_task
from agentevo.store.tables import metadata
from agentevo.types import Task

ATTEMPT = ("trajectories", "id = 'train-2-1/train@2#1'")
ROWS = [
    ("tasks", "id = 'train-2-1'"),
    ("tokens", "trajectory_seq = 5"),
    ("steps", "step = 2"),
    ("steps", "step = 3"),
]
NOT_COMMITTED = [
    ("trajectories", "id = 'lame/train@4#0'"),
    ("trajectories", "id = 'lame/train@4#2'"),
]
"""A dropped one and a failed one."""


def test_every_table_is_gone_through_or_plays_no_part() -> None:
    gone_through = {table for table, _ in [ATTEMPT, *ROWS]}
    for name, table in metadata.tables.items():
        columns = {*table.c.keys()}
        assert NO_PART[name] <= columns
        assert (name in gone_through) == (NO_PART[name] != columns), name


@pytest.mark.slow
@pytest.mark.parametrize("row", [*ROWS, *slow(ATTEMPT), *soak(*NOT_COMMITTED)], ids=" ".join)
def test_no_column_is_changed_unseen(run: Path, row: tuple[str, str]) -> None:
    table, where = row
    unseen = []
    for column in sorted({*metadata.tables[table].c.keys()} - NO_PART[table]):
        for folder, other in changed(run, table, where, column):
            report = audited(folder)
            if report.ok and not report.emptied:
                unseen.append(f"{table}.{column} = {other!r:.40}")

    assert not unseen, "\n".join(unseen)
    assert audited(run).ok


async def put_changed(folder: Path, name: str, **changes: Any) -> None:
    """Rewrites an attempt together with the digest of its row."""
    async with await open_store(f"sqlite:///{folder / 'store.sqlite'}", create=False) as store:
        (stored,) = [
            trajectory
            async for trajectory in store.trajectories()
            if trajectory.trajectory.id == name
        ]
    altered = msgspec.structs.replace(stored.trajectory, **changes)
    encoded = encode_stored(msgspec.structs.replace(stored, trajectory=altered, digest=b""))
    columns = {key: encoded.row[key] for key in (*changes, "digest")}
    places = ", ".join(f"{key} = ?" for key in columns)
    change(folder, f"UPDATE trajectories SET {places} WHERE id = ?", *columns.values(), name)


@pytest.mark.parametrize("name", ["eval-1/greedy@2#0", "lame/train@4#0", "lame/train@4#2"])
def test_no_attempt_is_rewritten_or_deleted_with_its_digest_unseen(run: Path, name: str) -> None:
    asyncio.run(put_changed(run, name, reward=7.5))
    (found,) = violations(run)
    assert f"trajectory {name}: it was changed: its digest is" in found

    change(run, "DELETE FROM trajectories WHERE id = ?", name)
    assert any(
        "is not in the store" in violation and name in violation for violation in violations(run)
    )


def test_no_task_that_was_played_is_rewritten_or_deleted_with_its_digest_unseen(run: Path) -> None:
    task = encode_task(Task(id="eval-1", query="2?"))
    columns = {"task": task.row["task"], "digest": task.digest}
    places = ", ".join(f"{key} = ?" for key in columns)
    change(run, f"UPDATE tasks SET {places} WHERE id = 'eval-1'", *columns.values())
    assert violations(run) == [
        "task eval-1 is not the one that was played, according to the record of its step"
    ]

    change(run, "DELETE FROM tasks WHERE id = 'eval-1'")
    assert violations(run) == [
        "task eval-1 was played, according to the record of its step, but is not in the store"
    ]


def test_what_nothing_holds_is_listed(run: Path, capsys: Any) -> None:
    (run / "report.html").write_text("")
    (run / "plots").mkdir()
    (run / "token_numbers" / "step_000099.bin").write_text("")
    (run / "texts").mkdir(exist_ok=True)
    (run / "texts" / "0123.txt").write_text("")
    assert main(["audit", str(run)]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "not vouched for" in line]
    assert [" ".join(line.split()) for line in told] == [
        "not vouched for tasks without a record: 1",
        "not vouched for times, leases and the calls of attempts",
        "not vouched for the files plots/, report.html, checkpoints/index.json, "
        "token_numbers/step_000099.bin, texts/0123.txt",
    ]


@pytest.mark.slow
def test_rows_of_the_log_after_the_last_step_are_listed_or_refused(run: Path) -> None:
    last = audited(run).steps
    log = run / "metrics.jsonl"
    lines = log.read_text()
    log.write_text(lines + json.dumps({"step": last + 1}) + "\n")
    report = audited(run)
    assert report.ok and f"metrics.jsonl after step {last}" in report.unproven_files

    log.write_text(lines + json.dumps({"step": last + 2}) + "\n")
    assert violations(run) == [
        f"metrics.jsonl has rows up to step {last + 2}, which was not committed"
    ]


def leaves(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of all that is no mapping or list, and of the empty ones of those."""
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in children:
        if isinstance(child, dict | list) and child:
            yield from leaves(child, *path, key)
        else:
            yield (*path, key)


def other_json(value: Any) -> Any:
    if isinstance(value, str):
        return f"{value}x"
    return value + 1 if isinstance(value, int | float) else "something"


def change_leaf(tree: Any, path: tuple[Any, ...]) -> Any:
    """A copy with one value changed."""
    tree = json.loads(json.dumps(tree))
    branch = tree
    for key in path[:-1]:
        branch = branch[key]
    branch[path[-1]] = other_json(branch[path[-1]])
    return tree


@pytest.mark.slow
def test_no_value_of_a_record_is_changed_unseen(run: Path) -> None:
    """Of the last one too, which no later one holds."""
    store = run / "store.sqlite"
    for step in (2, 3):
        database = sqlite3.connect(store)
        (text,) = database.execute("SELECT record FROM steps WHERE step = ?", (step,)).fetchone()
        database.close()
        before = store.read_bytes()
        record = json.loads(text)
        paths = [path for path in leaves(record) if path[-1] not in (1, 2, 3)]  # of lists the first
        assert ("plan", "staleness") in paths and ("plan", "digests", 0) in paths

        for path in paths:
            database = sqlite3.connect(store, isolation_level=None)
            text = json.dumps(change_leaf(record, path))
            database.execute("UPDATE steps SET record = ? WHERE step = ?", (text, step))
            database.close()
            assert violations(run), f"step {step}: {path}"
            store.write_bytes(before)


def test_the_last_step_can_t_be_deleted_unseen(run: Path) -> None:
    """With all that was committed to it, as if it had never been."""
    database = sqlite3.connect(run / "store.sqlite", isolation_level=None)
    database.execute("DELETE FROM steps WHERE step = 3")
    database.execute(
        "UPDATE trajectories SET state = 'ready', trained_step = NULL WHERE trained_step = 3"
    )
    database.close()
    assert "step 3: head.json says that it was committed, but the store has no record of it" in (
        violations(run)
    )


@pytest.mark.slow
def test_no_value_of_head_json_is_changed_unseen(run: Path) -> None:
    file = run / "head.json"
    head = json.loads(file.read_text())
    for path in leaves(head):
        if path == ("checkpoints",):  # more than there are: none of that step is there
            continue
        file.write_text(json.dumps(change_leaf(head, path)))
        assert violations(run), path

    file.write_text("{")
    (found,) = violations(run)
    assert "head.json can't be read" in found

    file.unlink()
    (found,) = violations(run)
    assert found == "head.json is missing: the last step is unknown"


FILES_NO_PART = {"store.sqlite", "trainer.lock"}
"""The store is gone through above."""


@pytest.mark.slow
def test_no_file_is_changed_or_deleted_unseen(run: Path) -> None:
    names = [path for path in run.rglob("*") if path.is_file() and path.name not in FILES_NO_PART]
    assert {"config.yaml", "metrics.jsonl", "checkpoint.json"} <= {path.name for path in names}
    for path in names:
        content = path.read_bytes()
        path.write_bytes(content.replace(b"1", b"2", 1) if b"1" in content else content + b"x")
        assert violations(run), path
        path.unlink()
        assert violations(run) or path.parent.name == "token_numbers", path
        path.write_bytes(content)

    assert audited(run).ok


def test_a_run_of_an_older_version_is_told_so_and_not_accused(run: Path, capsys: Any) -> None:
    database = sqlite3.connect(run / "store.sqlite", isolation_level=None)
    for step, text in database.execute("SELECT step, record FROM steps").fetchall():
        record = {key: value for key, value in json.loads(text).items() if key != "chain"}
        record["plan"] |= {"digest": "ab", "digests": []}
        database.execute("UPDATE steps SET record = ? WHERE step = ?", (json.dumps(record), step))

    database.close()
    (run / "head.json").unlink()
    assert main(["audit", str(run)]) == 1

    told = capsys.readouterr().err.splitlines()
    assert len([line for line in told if "older version of AgentEvo" in line]) == 1
    assert not any("not what was trained on" in line for line in told)


def test_an_export_that_was_changed_is_not_imported(run: Path, tmp_path: Path, capsys: Any) -> None:
    exported = tmp_path / "all.jsonl"
    assert main(["store", str(run), "export", str(exported)]) == 0
    text = exported.read_text()
    exported.write_text(text.replace('"reward":1.0', '"reward":1.5', 1))
    assert exported.read_text() != text
    assert main(["store", f"sqlite:///{tmp_path / 'copy.sqlite'}", "import", str(exported)]) == 1
    assert "is not the one that was exported" in capsys.readouterr().err
