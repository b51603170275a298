"""A resume checks what it will train on before it does: what was changed between a kill and a
resume is refused, or changes nothing."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from audited_run import trajectory
from store_changes import NO_PART, changed

from agentevo.api.run import train
from agentevo.errors import AgentEvoError, CheckpointError
from agentevo.runs.orchestration import run_record
from agentevo.runs.orchestration.resume import ResumeChecks, find_resume_point
from agentevo.store import open_store
from agentevo.store.tables import metadata
from agentevo.training.checkpoint import Checkpoints

OVERRIDES = ("trainer.steps=3", "checkpoint.every=0", "evaluation.every=0")


@pytest.fixture(scope="module")
def killed(
    tmp_path_factory: pytest.TempPathFactory,
    small_config: Callable[..., Any],
    quiet_view: Callable[..., Any],
) -> Path:
    """Two steps committed, the attempts of the third written and reserved, no checkpoint: as after
    a kill. A resume does both steps again and takes the attempts of the third."""
    folder = tmp_path_factory.mktemp("killed") / "run"

    async def power_cut(store: Any, end: Any, *others: Any) -> Any:
        if end.step == 2:
            raise RuntimeError("power cut")
        return await commit(store, end, *others)

    commit = run_record.commit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_record, "commit", power_cut)
        with pytest.raises(RuntimeError, match="power cut"):
            train(small_config(folder, *OVERRIDES), view=quiet_view())

    shutil.rmtree(folder / "checkpoints")
    for left in folder.glob("store.sqlite-*"):
        left.unlink()

    return folder


def resumable(folder: Path, small_config: Callable[..., Any]) -> bool:
    config = small_config(folder, *OVERRIDES)
    checkpoints = Checkpoints(folder / "checkpoints", 1)
    try:
        asyncio.run(find_resume_point(config, checkpoints, note=lambda text: None))
    except AgentEvoError:
        return False
    return True


def test_a_group_that_lost_a_member_while_it_waited_is_not_trained_on(
    tmp_path: Path, small_config: Callable[..., Any]
) -> None:
    """Its advantages would be others. Groups are written whole, so nobody else leaves one so."""
    config = small_config(tmp_path / "run", "rollout.staleness=1", "trainer.group_size=3")
    config.run_dir.mkdir()
    whole = [trajectory("waits", attempt, version=0) for attempt in range(3)]

    async def resume(members: list[Any]) -> None:
        async with await open_store(f"sqlite:///{tmp_path / f'{len(members)}.sqlite'}") as store:
            await store.write_trajectories(members, split="train", step=1)
            await ResumeChecks(config, store).trajectories([], 0)

    asyncio.run(resume(whole))
    with pytest.raises(CheckpointError, match=r"'waits/train@1' .* lacks attempts: it has 2"):
        asyncio.run(resume(whole[:2]))


def rows_of(store: Path) -> dict[str, list[str]]:
    """By table, conditions for one row of each kind that a resume reads."""
    database = sqlite3.connect(store)
    states = [
        name for (name,) in database.execute("SELECT DISTINCT state FROM trajectories").fetchall()
    ]
    ids = {
        state: database.execute(
            "SELECT seq FROM trajectories WHERE state = ? ORDER BY seq DESC LIMIT 1", (state,)
        ).fetchone()[0]
        for state in states
    }
    database.close()
    assert {"committed", "reserved", "dropped", "ready"} <= ids.keys()
    return {
        "tasks": ["seq = 1"],
        "trajectories": [f"seq = {seq}" for seq in ids.values()],
        "tokens": [f"trajectory_seq = {ids['committed']}", f"trajectory_seq = {ids['reserved']}"],
        "steps": ["step = 1", "step = 2"],
        "calls": ["seq = 1"],
    }


@pytest.mark.soak
def test_what_a_resume_does_not_refuse_changes_nothing(
    killed: Path,
    tmp_path: Path,
    small_config: Callable[..., Any],
    quiet_view: Callable[..., Any],
    outcome_of: Callable[[Path], dict[str, Any]],
    assert_same: Callable[[Any, Any], None],
) -> None:
    """Every column in every kind of row: refused before anything is trained, or among those that
    are then changed all at once, and the weights are the same to the last bit."""
    folder = Path(shutil.copytree(killed, tmp_path / "run"))
    store = folder / "store.sqlite"
    untouched = Path(shutil.copytree(killed, tmp_path / "untouched"))
    assert resumable(folder, small_config)

    harmless: list[tuple[str, str, str, Any]] = []
    refused = set()
    for table, conditions in rows_of(store).items():
        for where in conditions:
            for column in [*metadata.tables[table].c.keys()]:
                for copy, other in changed(folder, table, where, column):
                    if resumable(copy, small_config):
                        harmless.append((table, where, column, other))
                    else:
                        refused.add((table, column))

    for column in ("group_id", "task_id", "attempt", "success", "truncated", "metrics", "reward"):
        assert ("trajectories", column) in refused, column

    for table, columns in NO_PART.items():
        kept = {(table, column) for column in columns - {"history"}}  # "[]" and more is no JSON
        assert not kept & refused

    database = sqlite3.connect(store, isolation_level=None)
    keys: dict[tuple[str, str, str], Any] = {}
    for table, where, column, other in harmless:
        if column in ("seq", "trajectory_seq", "id", "step"):  # other rows are found by these
            continue
        keys.setdefault((table, where, column), other)

    for (table, where, column), other in keys.items():
        database.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (other,))

    database.close()
    train(small_config(folder, *OVERRIDES), resume=True, view=quiet_view())
    train(small_config(untouched, *OVERRIDES), resume=True, view=quiet_view())

    one = outcome_of(folder)
    other = outcome_of(untouched)
    for name in ("step", "weights", "trainer", "metrics"):
        assert_same(one[name], other[name])


def move_group_ids(folder: Path) -> None:
    """The change that moved the weights by 3e-3, and that nobody saw."""
    _execute(
        folder,
        "UPDATE trajectories SET group_id = group_id || 'x' WHERE trained_step = 1 AND attempt > 1",
    )


def change_config(folder: Path) -> None:
    file = folder / "config.yaml"
    file.write_text(file.read_text().replace("learning_rate: 0.003", "learning_rate: 0.3"))


def make_older(folder: Path) -> None:
    _execute(folder, "UPDATE steps SET record = json_remove(record, '$.chain')")
    (folder / "head.json").unlink()


def _execute(folder: Path, statement: str) -> None:
    database = sqlite3.connect(folder / "store.sqlite", isolation_level=None)
    database.execute(statement)
    database.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (move_group_ids, r"step 1 can't be repeated.*changed was 'train-"),
        (change_config, r"config.yaml differs from what this run wrote"),
        (make_older, "recorded by an older version of AgentEvo"),
    ],
)
def test_a_changed_run_is_refused_and_what_was_changed_is_named(
    killed: Path,
    tmp_path: Path,
    small_config: Callable[..., Any],
    change: Callable[[Path], None],
    words: str,
) -> None:
    folder = Path(shutil.copytree(killed, tmp_path / "run"))
    change(folder)
    config = small_config(folder, *OVERRIDES)
    with pytest.raises(CheckpointError, match=words):
        asyncio.run(find_resume_point(config, Checkpoints(folder / "checkpoints", 1), note=print))


@pytest.mark.slow
def test_a_metrics_file_changed_by_hand_is_refused_and_lost_rows_are_told_of(
    killed: Path, tmp_path: Path, small_config: Callable[..., Any]
) -> None:
    folder = Path(shutil.copytree(killed, tmp_path / "run"))
    config = small_config(folder, *OVERRIDES)
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    steps = [json.loads(line)["step"] for line in lines]
    first, second = steps.index(1), steps.index(2)

    def resume() -> Any:
        checkpoints = Checkpoints(folder / "checkpoints", 1)
        return asyncio.run(find_resume_point(config, checkpoints, note=lambda text: None))

    def edited(index: int) -> list[str]:
        row = json.loads(lines[index])
        row["time"] += 1
        return [*lines[:index], json.dumps(row) + "\n", *lines[index + 1 :]]

    for changed_lines in (
        edited(0),
        edited(first),
        edited(second),
        [*lines[:first], *lines[first + 1 :]],
        [*lines[: second + 1], lines[second], *lines[second + 1 :]],
        edited(first)[: first + 1],
        [*lines, json.dumps({"step": 4}) + "\n"],
    ):
        file.write_text("".join(changed_lines))
        with pytest.raises(CheckpointError, match=r"metrics.jsonl differs from what was logged"):
            resume()
        assert file.read_text() == "".join(changed_lines)

    for kept in (lines[: first + 1], []):
        file.write_text("".join(kept))
        (warning,) = resume().warnings
        assert f"lacked the rows of steps {2 if kept else 1} to 2" in warning

    file.write_text("".join(lines))
    assert not resume().warnings
