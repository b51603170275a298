"""An audit finds what was changed behind the ledger's back, and follows single tokens."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from audited_run import (
    GROUPS,
    MEMBERS,
    audited,
    change,
    change_record,
    change_turns,
    commit,
    trajectory,
    violations,
    write_checkpoint,
)

from agentevo.cli.main import main
from agentevo.models import checkpoint_manifest as manifest
from agentevo.runs.audit.audit import audit
from agentevo.runs.audit.findings import Audit
from agentevo.runs.folder.chain import End, HeadFile
from agentevo.store import open_store
from agentevo.store.store import Store
from agentevo.types import QUEUED_FOR_STEP, Task

VICTIM = "train-2-1/train@2#1"


@pytest.mark.slow
def test_a_whole_run_has_no_violation_and_is_accounted_for(whole):
    found = audited(whole)
    assert found.ok
    assert (found.steps, found.trained, found.ages, found.masked_tokens) == (3, 12, {0: 12 * 6}, 0)
    assert (found.checkpoints, found.gone) == ([2], [3])
    assert found.reasons["dropped"] == {"no-spread": ["lame/train@4#0", "lame/train@4#1"]}
    assert found.reasons["failed"] == {
        "ValueError: broken after 3.5 s\nTraceback": ["lame/train@4#2"]
    }
    assert found.tasks["completed"] == 7
    assert (found.poison, found.unfinished) == ({"lame": "EngineUnavailableError: gone"}, ["left"])

    lines = found.lines()
    assert ("failed", "1 ValueError: broken after N s") in lines
    assert ("cancelled", "2 cancelled: token of version N, trainer at N") in lines
    assert ("lame/train@4#0", "dropped: no-spread") in found.lines(dropped=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("completion_ids", [7, 8, 10]),
        ("logprobs", [-0.5, -0.25001, 0.0]),
        ("prompt_ids", [1, 2, 5]),
        ("reward", 1.0),
        ("parent", None),
    ],
)
def test_a_changed_token_is_found_and_its_trajectory_named(run, field, value):
    change_turns(run, VICTIM, lambda turn: msgspec.structs.replace(turn, **{field: value}))
    (found,) = violations(run)
    assert found.startswith(f"step 2: trajectory {VICTIM}: it is not what was trained on")


def test_a_changed_version_is_found_twice(run):
    """By the digest, and by the age that it claims."""
    change_turns(run, VICTIM, lambda turn: msgspec.structs.replace(turn, versions=[1, 0, 2]))
    found = violations(run)
    assert len(found) == 4
    assert (
        f"step 2: trajectory {VICTIM}: 1 of its tokens are of version 2, which exists only "
        "after step 2" in found
    )
    assert any(
        "1 tokens were older than 0 versions, its plan says that 0" in line for line in found
    )
    assert any("rollout.policy=wait rules out" in line for line in found)


def test_a_changed_reward_is_found(run):
    change(run, "UPDATE trajectories SET reward = 5.0 WHERE id = ?", VICTIM)
    (found,) = violations(run)
    assert VICTIM in found and "is not what was trained on" in found


def test_a_trajectory_moved_to_another_step_is_missed_there_and_found_here(run):
    change(run, "UPDATE trajectories SET trained_step = 3 WHERE id = ?", VICTIM)
    found = violations(run)
    assert (
        f"step 2: trajectory {VICTIM}: its plan names it, but it is not in the store as "
        "committed to this step" in found
    )
    assert (
        f"step 3: trajectory {VICTIM}: it is in the store as committed to this step, whose plan "
        "does not name it" in found
    )
    assert len(found) == 2


def test_a_deleted_trajectory_is_missed(run):
    change(
        run,
        "DELETE FROM tokens WHERE trajectory_seq = (SELECT seq FROM trajectories WHERE id = ?)",
        VICTIM,
    )
    change(run, "DELETE FROM trajectories WHERE id = ?", VICTIM)
    assert violations(run) == [
        f"step 2: trajectory {VICTIM}: its plan names it, but it is not in the store as "
        "committed to this step"
    ]


def test_deleted_tokens_are_missed(run):
    change(
        run,
        "DELETE FROM tokens WHERE trajectory_seq = (SELECT seq FROM trajectories WHERE id = ?)",
        VICTIM,
    )
    assert f"step 2: trajectory {VICTIM}: its tokens were deleted" in violations(run)


def test_a_copy_under_another_id_is_found(run):
    columns = (
        "task_id, group_id, attempt, split, step, status, state, trained_step, "
        "drop_reason, reward, success, error, truncated, "
    )
    columns += (
        "metrics, num_turns, num_completion_tokens, started_at, duration_s, written_at, digest"
    )
    change(
        run,
        f"INSERT INTO trajectories (id, {columns}) SELECT 'copy', {columns} FROM trajectories "
        "WHERE id = ?",
        VICTIM,
    )
    change(run, "UPDATE trajectories SET trained_step = 3 WHERE id = 'copy'")
    assert (
        f"step 3: trajectory copy: it is the same attempt as {VICTIM}, under another id"
        in violations(run)
    )


@pytest.mark.parametrize(
    ("change_to", "message"),
    [
        ("state = 'reserved'", "it is reserved for this step, which is committed"),
        ("split = 'eval'", "it is of the split eval, which is not trained on"),
        ("status = 'failed'", "it was trained on though it failed"),
    ],
)
def test_what_must_not_be_trained_on_is_found(run, change_to, message):
    change(run, f"UPDATE trajectories SET {change_to} WHERE id = ?", VICTIM)
    assert f"step 2: trajectory {VICTIM}: {message}" in violations(run)


def test_a_changed_order_is_found(run):
    def swap(record: dict[str, Any]) -> None:
        plan = record["plan"]
        for name in ("ids", "digests"):
            plan[name][0], plan[name][1] = plan[name][1], plan[name][0]

    change_record(run, 2, swap)
    chain, found = violations(run)
    assert "the chain of steps breaks here" in chain
    assert "they or their order were changed" in found


def test_a_trajectory_in_two_plans_is_found(run):
    change_record(run, 3, lambda record: record["plan"]["ids"].append(VICTIM))
    assert (
        f"step 3: trajectory {VICTIM}: step 2 names it as well: it was trained on twice"
        in violations(run)
    )


def test_a_record_without_a_plan_is_a_violation_that_says_so(run):
    change_record(run, 2, lambda record: record.pop("plan"))
    _, found, *rest = violations(run)
    assert not rest and found.startswith("step 2: the record of step 2 has no plan")


def test_a_missing_step_is_found_with_what_was_committed_to_it(run):
    change(run, "DELETE FROM steps WHERE step = 2")
    found = violations(run)
    assert "step 3: step 2 before it: there is no record" in found
    assert f"trajectory {VICTIM}: it is committed to step 2, which has no record" in found
    assert len(found) == 1 + GROUPS * MEMBERS


def test_a_torn_checkpoint_is_found_and_its_file_named(run):
    (run / "checkpoints" / "step-000002" / "model.safetensors").write_bytes(b"weights" * 999)
    (found,) = violations(run)
    assert "step-000002/model.safetensors has the sha256" in found
    (run / "checkpoints" / "step-000002" / "model.safetensors").unlink()
    (found,) = violations(run)
    assert "step-000002/model.safetensors can.t be read" in found.replace("'", ".")


@pytest.mark.slow
def test_another_checkpoint_in_its_place_is_a_violation_unless_head_json_has_it(run):
    """A resume that found it torn does the step again and saves it anew: whole, with other times in
    it."""
    assert audited(run).checkpoints == [2]

    (run / "checkpoints" / "step-000002").rename(run / "old")
    saved = write_checkpoint(run, 2, weights=b"others")
    (found,) = violations(run)
    assert "is complete, but neither its record nor head.json" in found

    HeadFile(run).note_checkpoint(2, saved["sha256"])
    found = audited(run)
    assert (found.ok, found.checkpoints, found.remade) == (True, [], [2])
    assert "1 whole, saved after their step's commit" in dict(found.lines())["checkpoints"]


def test_a_checkpoint_that_contradicts_itself_is_found(run):
    file = run / "checkpoints" / "step-000002" / "checkpoint.json"
    file.write_text(file.read_text().replace('"value":null', '"value":1.0'))
    (found,) = violations(run)
    assert "its own checksum differs" in found


class Going:
    """A store whose run commits a step while it is audited."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def steps(self, *, after: int | None = None) -> Any:
        found = await self._store.steps(after=after)
        if after is None:
            later = trajectory("later", 0, version=3)
            await self._store.write_trajectories([later], split="train", step=4)
            await commit(self._store, 4, [later])
        return found


@pytest.mark.slow
def test_a_run_that_goes_on_meanwhile_breaks_nothing(run):
    async def work() -> Audit:
        async with await open_store(f"sqlite:///{run / 'store.sqlite'}", create=False) as store:
            return await audit(Going(store), run)  # type: ignore[arg-type]

    found = asyncio.run(work())
    assert (found.violations, found.steps) == ([], 3)

    change(run, "UPDATE trajectories SET trained_step = 9 WHERE id = 'later/train@4#0'")
    assert (
        "trajectory later/train@4#0: it is committed to step 9, which has no record"
        in violations(run)
    )


def test_a_checkpoint_that_is_pruned_while_it_is_read_is_no_torn_one(run, monkeypatch):
    verify = manifest.verify

    def pruned(path: Path) -> manifest.CheckpointManifest:
        (path / "model.safetensors").unlink()
        try:
            return verify(path)
        finally:
            shutil.rmtree(path)

    monkeypatch.setattr(manifest, "verify", pruned)
    found = audited(run)
    assert (found.violations, found.gone) == ([], [2, 3])


@pytest.mark.slow
def test_a_task_that_failed_is_listed_with_its_error(run):
    async def fail() -> None:
        async with await open_store(f"sqlite:///{run / 'store.sqlite'}", create=False) as store:
            (lease,) = await store.lease_tasks("worker-1", lease_s=30.0, limit=1)
            await store.fail_task(lease, "StoreError: the trajectories were refused")

    asyncio.run(fail())
    found = audited(run)
    assert (found.ok, found.failed, found.unfinished) == (
        True,
        {"left": "StoreError: the trajectories were refused"},
        [],
    )
    assert ("task left", "failed: StoreError: the trajectories were refused") in found.lines()

    change(run, "UPDATE tasks SET error = NULL WHERE id = 'left'")
    assert violations(run) == ["task left failed, and no error is recorded"]


@pytest.mark.slow
def test_stale_tokens_are_masked_or_a_violation(tmp_path):
    """Ages 3, 2, 1 at step 4 with a bound of 2: the plan must say that one token was left out."""

    async def fill_one(masked: int, policy: str) -> Path:
        folder = tmp_path / f"{policy}-{masked}"
        async with await open_store(f"sqlite:///{folder / 'store.sqlite'}") as store:
            for step in (1, 2, 3):
                await commit(store, step, [])

            mixed = trajectory("t", 0, version=0)
            mixed = msgspec.structs.replace(
                mixed, turns=[msgspec.structs.replace(mixed.turns[0], versions=[0, 1, 2])]
            )
            await store.write_trajectories([mixed], split="train", step=4)
            await commit(store, 4, [mixed], staleness=2, policy=policy, masked_tokens=masked)
            last = await store.last_step()

        HeadFile(folder).note_commit(End(4, last.record["chain"]))
        return folder

    found = audited(asyncio.run(fill_one(1, "mask")))
    assert (found.violations, found.ages, found.masked_tokens) == ([], {2: 1, 1: 1}, 1)
    assert violations(asyncio.run(fill_one(0, "mask"))) == [
        "step 4: 1 tokens were older than 2 versions, its plan says that 0 were left out"
    ]
    assert violations(asyncio.run(fill_one(1, "cancel"))) == [
        "step 4: 1 tokens were older than 2 versions, which rollout.policy=cancel rules out"
    ]


@pytest.mark.slow
def test_the_command_prints_what_it_found_and_fails_on_a_violation(run, capsys):
    assert main(["audit", str(run)]) == 0

    out = capsys.readouterr().out
    assert (
        "3 committed, from 12 trajectories" in out and "everything agrees with the records" in out
    )
    assert main(["audit", str(run), "--dropped"]) == 0
    assert "lame/train@4#1" in capsys.readouterr().out

    change(run, "UPDATE trajectories SET trained_step = 3 WHERE id = ?", VICTIM)
    assert main(["audit", str(run)]) == 1

    shown = capsys.readouterr()
    assert shown.err.count("violation: ") == 2 and "2 violations" in shown.out
    assert main(["audit", str(run), "--json"]) == 1

    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False and len(found["violations"]) == 2 and found["ages"] == {"0": 66}


def test_a_token_is_followed_to_its_gradient_step(run, capsys):
    assert main(["audit", str(run), "--token", f"{VICTIM}:1:0"]) == 0

    out = capsys.readouterr().out
    for part in (
        "train-2-1, completed",
        "seed 101",
        "8 at position 0, log-prob -0.5000 (60.65%)",
        "version 1",
        "in step 2, at version 1",
    ):
        assert part in out

    assert "age 0, the bound was 0" in out and "checkpoints/step-000002" in out
    assert main(["audit", str(run), "--json", "--token", f"{VICTIM}:1:0"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["age"], found["trained_step"], found["checkpoint_there"]) == (
        1,
        0,
        2,
        True,
    )


def test_a_token_that_was_never_trained_on_says_why(run, capsys):
    for name, reason in (
        ("lame/train@4#0", "was dropped (no-spread)"),
        ("lame/train@4#3", "cancelled (cancelled: token of version 3"),
    ):
        assert main(["audit", str(run), "--token", f"{name}:0:2"]) == 0
        out = capsys.readouterr().out
        assert f"not trained on: its trajectory {reason}" in out and "none so far" in out


@pytest.mark.parametrize(
    "token", ["nonsense", "a:b:c", f"{VICTIM}:2:0", f"{VICTIM}:0:3", "nobody:0:0"]
)
def test_a_token_that_is_not_there_is_refused(run, capsys, token):
    assert main(["audit", str(run), "--token", token]) in (1, 2)
    assert capsys.readouterr().err.startswith("error: ")


def wait_in(folder: Path, group: str) -> None:
    """Makes it a run with samplers, in which a group of two has been written and waits."""
    HeadFile(folder).write_file(
        "config.yaml", "rollout: {staleness: 1}\ntrainer: {group_size: 2}\n"
    )
    task = Task(id=group, metadata={QUEUED_FOR_STEP: 4})

    async def work() -> None:
        async with await open_store(f"sqlite:///{folder / 'store.sqlite'}") as store:
            await store.add_tasks([task], queue=False)
            members = [trajectory(group, attempt, version=3) for attempt in range(MEMBERS)]
            await store.write_trajectories(members, split="train", step=4)

    asyncio.run(work())


@pytest.mark.slow
def test_a_drop_that_no_step_has_decided_is_a_violation(run: Path) -> None:
    """Its reason is in the record of the step that decided it, and nowhere else before."""
    wait_in(run, "waits")
    assert violations(run) == []
    invented = "UPDATE trajectories SET state = 'dropped', drop_reason = 'stale' WHERE id = ?"
    change(run, invented, "waits/train@4#1")
    assert (
        "trajectory waits/train@4#1: it is dropped (stale), and no step's record says so"
        in violations(run)
    )


@pytest.mark.parametrize("member", [0, 1])
def test_a_member_of_a_waiting_group_can_t_be_deleted_unseen(run: Path, member: int) -> None:
    wait_in(run, "waits")
    name = f"waits/train@4#{member}"
    seq = "(SELECT seq FROM trajectories WHERE id = ?)"
    change(run, f"DELETE FROM tokens WHERE trajectory_seq = {seq}", name)
    change(run, "DELETE FROM trajectories WHERE id = ?", name)
    assert violations(run) == [
        f"the group waits/train@4 is incomplete: it has the attempts {1 - member}, and was written "
        "with at least 2, from 0 on"
    ]


def test_a_waiting_group_can_t_be_deleted_unseen(run: Path) -> None:
    wait_in(run, "waits")
    seqs = "(SELECT seq FROM trajectories WHERE task_id = 'waits')"
    change(run, f"DELETE FROM tokens WHERE trajectory_seq IN {seqs}")
    change(run, "DELETE FROM trajectories WHERE task_id = 'waits'")
    assert violations(run) == ["task waits is completed, and no attempt at it is in the store"]
