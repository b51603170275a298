"""A small run as its store and folder have it, written without training, and changes to it behind
the ledger's back."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from agentevo.observability import MetricsLog
from agentevo.runs.audit.audit import audit
from agentevo.runs.audit.findings import Audit
from agentevo.runs.folder.chain import NUMBERS, ROWS, SUMMARY, End, HeadFile, file_digest
from agentevo.runs.orchestration.ledger import RowDigests
from agentevo.runs.orchestration.ledger import commit as write_step
from agentevo.store import RetryPolicy, StoredTrajectory, open_store
from agentevo.store.codec import encode_stored
from agentevo.store.store import Store
from agentevo.training.batching.step_plan import StepPlan
from agentevo.training.token_numbers import name_of, write_numbers
from agentevo.types import Task, Trajectory, Turn

GROUPS = 2
MEMBERS = 2


def trajectory(task: str, attempt: int, *, version: int, **changes: Any) -> Trajectory:
    group = f"{task}/train@{version + 1}"
    turns = [
        Turn(
            index=index,
            parent=index - 1 if index else None,
            prompt_ids=[1, 2, 3 + index],
            completion_ids=[7 + attempt, 8, 9],
            logprobs=[-0.5, -0.25, 0.0],
            versions=[version] * 3,
            finish_reason="stop",
            seed=100 * attempt + index,
        )
        for index in range(2)
    ]
    fields = {
        "id": f"{group}#{attempt}",
        "task_id": task,
        "group_id": group,
        "attempt": attempt,
        "turns": turns,
        "reward": float(attempt),
    }
    return Trajectory(**(fields | changes))


async def commit(store: Store, step: int, trained: list[Trajectory], **changes: Any) -> None:
    """`changes` of the plan, or of the record: `checkpoint`, `log`."""
    own = {name: changes.pop(name) for name in ("checkpoint", "log", NUMBERS) if name in changes}
    rewards = {t.id: t.reward for t in trained}
    plan = StepPlan.make(
        trained, earned=rewards, **{"baselines": {}, "staleness": 0, "policy": "wait"} | changes
    )
    await store.reserve([t.id for t in trained], step)
    last = await store.last_step()
    before = End() if last is None else End(last.step, last.record["chain"])
    sampled = trained + [
        row.trajectory
        async for row in store.trajectories(step=step, split="train")
        if row.state in ("dropped", "failed", "ready")
    ]
    rows = await RowDigests(store).of_step(step, sampled, plan.ids)
    await write_step(store, before, plan, {"metrics": {}, ROWS: msgspec.to_builtins(rows), **own})


def write_checkpoint(folder: Path, step: int, weights: bytes = b"weights" * 1000) -> dict[str, str]:
    """As training/checkpoint.py writes them: every file's sha256, and one over all."""
    path = folder / "checkpoints" / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(weights)
    (path / "state.json").write_text("{}")

    files = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())
    }
    content = {"step": step, "value": None, "files": files}
    sealed = hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
    (path / "checkpoint.json").write_text(
        json.dumps(content | {"sha256": sealed}, sort_keys=True, separators=(",", ":"))
    )

    return {"path": f"checkpoints/step-{step:06d}", "sha256": sealed}


async def add_unused(store: Store) -> dict[str, str]:
    """A group that no step is trained on: two attempts that step 3 drops (with the reason, which is
    returned), one that failed, two that were cancelled."""
    await store.add_tasks([Task(id="lame"), Task(id="left")])
    same = [trajectory("lame", attempt, version=3) for attempt in range(2)]
    broken = trajectory(
        "lame", 2, version=3, status="failed", error="ValueError: broken after 3.5 s\nTraceback"
    )
    cut = trajectory(
        "lame",
        3,
        version=3,
        status="cancelled",
        error="cancelled: token of version 3, trainer at 7",
    )
    late = trajectory(
        "lame",
        4,
        version=3,
        status="cancelled",
        error="cancelled: token of version 4, trainer at 8",
    )
    await store.write_trajectories([*same, broken], split="train", step=3)

    row: dict[str, Any] = {"split": "train", "step": 3, "state": "failed", "written_at": 1.0}
    await store.put(trajectories=[StoredTrajectory(trajectory=t, **row) for t in (cut, late)])

    return dict.fromkeys([t.id for t in same], "no-spread")


async def evaluate(store: Store, step: int) -> None:
    """A greedy attempt at a held-out task."""
    await store.add_tasks([Task(id="eval-1", query="1?")], queue=False)
    name = f"eval-1/greedy@{step}"
    attempt = trajectory("eval-1", 0, version=step, id=f"{name}#0", group_id=name)
    await store.write_trajectories([attempt], split="eval", step=step)


async def fill(folder: Path) -> None:
    """Three steps of two groups of two; a group dropped, an attempt failed, one cancelled, a task
    in the queue and a poisoned one."""
    log = MetricsLog(folder / "metrics.jsonl")
    async with await open_store(
        f"sqlite:///{folder / 'store.sqlite'}", retries=RetryPolicy(max_failures=1)
    ) as store:
        for step in (1, 2, 3):
            log.log(step, {"reward": 0.5 * step})
            tasks = [Task(id=f"train-{step}-{group}") for group in range(GROUPS)]
            await store.add_tasks(tasks)
            trained = []
            for task in tasks:
                lease = await store.lease_task("worker-1", lease_s=30.0)
                assert lease is not None
                members = [
                    trajectory(task.id, attempt, version=step - 1) for attempt in range(MEMBERS)
                ]
                await store.write_trajectories(members, split="train", step=step, lease=lease)
                trained += members

            dropped = await add_unused(store) if step == 3 else {}
            await evaluate(store, step)
            write_numbers(folder, step, {})
            checkpoint = (
                write_checkpoint(folder, step)
                if step != 3
                else {"path": "checkpoints/step-000003", "sha256": "ab" * 32}
            )
            await commit(
                store,
                step,
                trained,
                checkpoint=checkpoint if step > 1 else None,
                log=log.digest,
                **{NUMBERS: file_digest(folder / name_of(step))},
                dropped=dropped,
            )

        log.close()
        last = await store.last_step()
        assert last is not None

        head = HeadFile(folder)
        head.write_file("config.yaml", "run: {}\n")
        head.write_file(SUMMARY, '{"steps": 3}')
        head.note_commit(End(3, last.record["chain"]))
        lease = await store.lease_task("worker-1", lease_s=30.0)
        assert lease is not None and lease.task.id == "lame"
        assert await store.retry_task(lease, "EngineUnavailableError: gone") == "poison"


def audited(folder: Path) -> Audit:
    async def work() -> Audit:
        async with await open_store(f"sqlite:///{folder / 'store.sqlite'}", create=False) as store:
            return await audit(store, folder)

    return asyncio.run(work())


def violations(folder: Path) -> list[str]:
    return [str(violation) for violation in audited(folder).violations]


def change(folder: Path, statement: str, *values: Any) -> None:
    database = sqlite3.connect(folder / "store.sqlite")
    with database:
        assert database.execute(statement, values).rowcount > 0
    database.close()


def change_turns(folder: Path, name: str, alter: Callable[[Turn], Turn]) -> None:
    """The second turn of a trajectory, in the database itself."""

    async def read() -> StoredTrajectory:
        async with await open_store(f"sqlite:///{folder / 'store.sqlite'}", create=False) as store:
            found = [one async for one in store.trajectories() if one.trajectory.id == name]
            return found[0]

    stored = asyncio.run(read())
    turns = [stored.trajectory.turns[0], alter(stored.trajectory.turns[1])]
    altered = msgspec.structs.replace(
        stored, trajectory=msgspec.structs.replace(stored.trajectory, turns=turns), digest=b""
    )
    statement = (
        "UPDATE tokens SET data = ? WHERE trajectory_seq = (SELECT seq FROM trajectories "
        "WHERE id = ?)"
    )
    change(folder, statement, encode_stored(altered).data, name)


def change_record(folder: Path, step: int, alter: Callable[[dict[str, Any]], None]) -> None:
    database = sqlite3.connect(folder / "store.sqlite")
    record = json.loads(
        database.execute("SELECT record FROM steps WHERE step = ?", (step,)).fetchone()[0]
    )
    database.close()
    alter(record)
    change(folder, "UPDATE steps SET record = ? WHERE step = ?", json.dumps(record), step)
