"""A store that is opened for reading only: nothing of it is changed, whoever asks for what."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentevo.errors import StoreError, UnusableStoreError
from agentevo.store import open_store
from agentevo.types import Task

NOBODY = 65534


def task(number: int) -> Task:
    return Task(id=f"t{number}", environment="coins", seed=number)


async def fill(url: str, count: int = 5) -> None:
    async with await open_store(url) as store:
        await store.add_tasks([task(number) for number in range(count)])


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_reading_changes_no_byte_and_writing_is_refused(any_store: str) -> None:
    async def work() -> None:
        await fill(any_store)
        async with await open_store(any_store, read_only=True) as store:
            assert (await store.counts())["tasks/queued"] == 5
            assert [one.task.id async for one in store.tasks()] == [f"t{n}" for n in range(5)]
            assert await store.last_step() is None and await store.summaries() == []
            assert await store.outstanding("train") == 5 and await store.num_calls() == 0
            assert [call async for call in store.calls(state="running")] == []

            with pytest.raises(StoreError, match="for reading only"):
                await store.add_tasks([task(9)])
            with pytest.raises(StoreError, match="for reading only"):
                await store.lease_tasks("w", lease_s=1.0, limit=1)
            with pytest.raises(StoreError, match="for reading only"):
                await store.queue_again()
            with pytest.raises(StoreError, match="for reading only"):
                await store.gc()

            assert (await store.counts())["tasks/queued"] == 5
            assert await store.size_bytes() > 0

    asyncio.run(work())


def test_nothing_is_made_where_no_store_is(tmp_path: Path) -> None:
    async def opened(url: str) -> None:
        await open_store(url, read_only=True)

    with pytest.raises(UnusableStoreError, match="no store at"):
        asyncio.run(opened(f"sqlite:///{tmp_path}/a/none.sqlite"))

    (tmp_path / "empty.sqlite").touch()
    with pytest.raises(UnusableStoreError, match="not an AgentEvo store"):
        asyncio.run(opened(f"sqlite:///{tmp_path}/empty.sqlite"))

    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(("-wal", "-shm"))]
    assert (tmp_path / "empty.sqlite").stat().st_size == 0


@pytest.mark.parametrize("name", ["store.sqlite", "with space?#%.sqlite"])
def test_the_bytes_of_a_file_stay(name: str, tmp_path: Path) -> None:
    path = tmp_path / name

    async def work() -> None:
        await fill(f"sqlite:///{path}")
        before = digest(path)
        changed = path.stat().st_mtime_ns
        for _ in range(2):
            async with await open_store(f"sqlite:///{path}", read_only=True) as store:
                assert (await store.counts())["tasks/queued"] == 5
        assert (digest(path), path.stat().st_mtime_ns) == (before, changed)

    asyncio.run(work())


def test_an_older_schema_is_left_as_it_was_and_the_command_is_named(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"

    async def work() -> None:
        await fill(f"sqlite:///{path}")
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA user_version=2")

        connection.close()
        before = digest(path)
        with pytest.raises(UnusableStoreError, match=r"agentevo store URL\|RUN_DIR migrate"):
            await open_store(f"sqlite:///{path}", read_only=True)

        assert digest(path) == before

    asyncio.run(work())


def test_a_reader_sees_what_a_writer_commits_and_holds_it_up_never(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.sqlite'}"

    async def work() -> None:
        async with await open_store(url) as writer:
            await writer.add_tasks([task(1)])
            async with await open_store(url, read_only=True) as reader:
                assert (await reader.counts())["tasks/queued"] == 1
                await writer.add_tasks([task(2)])
                assert (await reader.counts())["tasks/queued"] == 2
            await writer.add_tasks([task(3)])
            assert (await writer.counts())["tasks/queued"] == 3

    asyncio.run(work())


LOOK = """
import asyncio, os, sys
import agentevo.store.sqlite
from agentevo.store import open_store

async def look():
    async with await open_store(sys.argv[1], read_only=True) as store:
        print((await store.counts())["tasks/queued"])

if os.geteuid() == 0:  # the libraries are read: another user need not be able to
    os.setuid(int(sys.argv[2]))
asyncio.run(look())
"""


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A folder that other users may read and not write."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def leave_log(path: Path) -> None:
    """A store as a writer leaves it that was killed, but for the file that readers share."""
    killed = path.with_name("killed.sqlite")
    killed.write_bytes(path.read_bytes())
    with sqlite3.connect(killed) as writer:
        writer.execute("DELETE FROM tasks WHERE id = 't4'")
        writer.commit()
        for suffix in ("", "-wal"):
            shutil.copy(f"{killed}{suffix}", f"{path}{suffix}")
    writer.close()
    killed.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("has_log", [False, True])
def test_somebody_without_the_right_to_write_can_look(elsewhere: Path, has_log: bool) -> None:
    path = elsewhere / "store.sqlite"
    asyncio.run(fill(f"sqlite:///{path}"))
    for left in elsewhere.glob("store.sqlite-*"):
        left.unlink()  # as on a copy
    if has_log:
        leave_log(path)

    names = sorted(one.name for one in elsewhere.iterdir())
    for name in names:
        (elsewhere / name).chmod(0o444)
    elsewhere.chmod(0o555)
    before = digest(path)
    command = [sys.executable, "-c", LOOK, f"sqlite:///{path}", str(NOBODY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.returncode) == (f"{4 if has_log else 5}\n", 0), done.stderr
    assert digest(path) == before
    assert sorted(one.name for one in elsewhere.iterdir()) == names
