"""The audit reports an image that is missing or changed, and who names it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from agentevo.runs.audit.audit import audit
from agentevo.runs.audit.findings import Audit
from agentevo.runs.audit.stored_images import check_images
from agentevo.store import open_store
from agentevo.types import Message, Trajectory, Turn
from agentevo.types.images import image_file

A, B, C = (image_file(bytes([n]) * 100, "image/png") for n in range(3))


def execute(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute(statement, values).rowcount == 1


def damage(path: Path) -> None:
    execute(path, "UPDATE images SET data = x'00' WHERE id = ?", B.part.sha256)


def delete(path: Path) -> None:
    execute(path, "DELETE FROM images WHERE id = ?", A.part.sha256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: None, ""),
        (damage, f"image '{B.part.sha256}': its bytes have another SHA-256: restore"),
        (delete, f"the image {A.part.sha256} of trajectory one is missing"),
    ],
)
def test_changed_and_missing_images(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "store.sqlite"
    turn = Turn(
        index=0,
        prompt_ids=[1],
        completion_ids=[2],
        logprobs=[0.0],
        versions=[0],
        finish_reason="stop",
        messages=[Message("user", (A.part, B.part))],
    )
    attempt = Trajectory(id="one", task_id="t", group_id="g", turns=[turn])

    async def scenario() -> Audit:
        report = Audit()
        async with await open_store(f"sqlite:///{path}") as store:
            await store.put_images([A, B, C])
            await store.write_trajectories([attempt], split="train", step=1)
            change(path)
            async for stored in store.trajectories():
                report.note(stored)
            await check_images(store, report)
        return report

    report = asyncio.run(scenario())
    assert [message in str(violation) for violation in report.violations] == [True] * bool(message)
    if not message:
        assert ("images", "3 stored, 2 named") in report.lines()


def test_the_audit_of_a_run_reads_its_images(run: Path) -> None:
    path = run / "store.sqlite"

    async def scenario() -> list[str]:
        async with await open_store(f"sqlite:///{path}") as store:
            await store.put_images([A, B])
            found = (await audit(store, run)).violations
            damage(path)
            return [*map(str, found), *map(str, (await audit(store, run)).violations)]

    (found,) = asyncio.run(scenario())
    assert B.part.sha256 in found
