"""`agentevo store` on a URL and on the folder of a run."""

import asyncio
from pathlib import Path

import pytest

from agentevo.store import open_store
from agentevo.types import Task, Trajectory, Turn


def fill(url: str) -> None:
    async def work() -> None:
        turn = Turn(
            index=0,
            prompt_ids=[1],
            completion_ids=[2],
            logprobs=[-0.5],
            versions=[0],
            finish_reason="stop",
        )
        async with await open_store(url) as store:
            await store.add_tasks([Task(id="x")])
            many = [Trajectory(id=name, task_id=name, group_id="g", turns=[turn]) for name in "abc"]
            await store.write_trajectories(many, split="train", step=1)
            await store.drop(["c"], "stale")
            await store.commit_step(1, {})

    asyncio.run(work())


@pytest.mark.slow
def test_a_store_is_counted_moved_and_tidied_up(agentevo):
    fill("sqlite:///one.sqlite")
    counted = agentevo("store", "sqlite:///one.sqlite", "stats")
    assert counted.code == 0
    assert [line.split() for line in counted.out.splitlines()][:-1] == [
        ["tasks/queued", "1"],
        ["trajectories/train/ready", "2"],
        ["trajectories/train/dropped", "1"],
        ["turns", "3"],
        ["steps", "1"],
        ["calls", "0"],
        ["images", "0"],
    ]
    assert counted.out.splitlines()[-1].startswith("size") and counted.out.endswith(" MB\n")
    assert (
        agentevo("store", "sqlite:///one.sqlite", "export", "all.jsonl.gz").out
        == "5 rows written to all.jsonl.gz\n"
    )
    assert (
        agentevo("store", "sqlite:///two.sqlite", "import", "all.jsonl.gz").out
        == "5 new rows in sqlite:///two.sqlite\n"
    )

    agentevo("store", "sqlite:///two.sqlite", "export", "again.jsonl.gz")
    assert Path("again.jsonl.gz").read_bytes() == Path("all.jsonl.gz").read_bytes()
    assert agentevo("store", "sqlite:///two.sqlite", "retry").out == "0 tasks queued again\n"

    tidied = agentevo("store", "sqlite:///two.sqlite", "gc", "--dropped")
    assert tidied.code == 0 and "dropped trajectories emptied  1\n" in tidied.out


def test_the_folder_of_a_run_stands_for_its_store(agentevo):
    Path("run").mkdir()
    Path("run/config.yaml").write_text("environment: {type: coins}\n")
    fill("sqlite:///run/store.sqlite")
    assert "trajectories/train/ready" in agentevo("store", "run", "stats").out


def test_wrong_words_are_refused(agentevo):
    assert "no store at" in agentevo("store", "sqlite:///missing.sqlite", "stats").err
    assert "did you mean 'postgresql'" in agentevo("store", "postgres://x/y", "stats").err
    assert "is not the folder of a run" in agentevo("store", "missing", "gc").err
    missing = agentevo("store", "sqlite:///new.sqlite", "import", "missing.jsonl")
    assert (missing.code, Path("new.sqlite").exists()) == (
        2,
        False,
    ) and "no such file" in missing.err


@pytest.mark.parametrize("wait", ["1e35", "nan", "inf", "-1", "soon"])
def test_nobody_waits_longer_than_a_day(agentevo, wait):
    code, _, err = agentevo("store", "http://127.0.0.1:1", "stats", f"--wait={wait}")
    assert code == 2
    assert f"'{wait}': give seconds, from 0 to 86,400" in err


@pytest.mark.parametrize("content", ["garbage", '{"id": "a"}', '{"kind": "thing"}', "\x00"])
def test_importing_what_is_no_export_makes_no_store(agentevo, content):
    Path("in.jsonl").write_text(content + "\n")
    refused = agentevo("store", "sqlite:///new.sqlite", "import", "in.jsonl")
    assert refused.code == 2 and "line 1 is not a line of a store's export" in refused.err
    assert not Path("new.sqlite").exists()
