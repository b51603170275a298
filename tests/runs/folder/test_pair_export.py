"""Better and worse attempts at a task as pairs: which, from where, and what is left out."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from pictures import file_of, picture

from agentevo.errors import ConfigError
from agentevo.runs.folder.annotation_export import export_pairs
from agentevo.runs.folder.sft_export import answer_reader
from agentevo.store import open_store
from agentevo.training.pair_file import read_pair_file
from agentevo.types import Message, TextPart, Trajectory, Turn
from agentevo.types.images import image_file


def attempt(task: str, number: int, said: str, reward: float, status: str = "completed"):
    turn = Turn(
        index=0,
        messages=[Message("user", f"{task}?"), Message("assistant", said)],
        finish_reason="stop",
        prompt_ids=[1],
        completion_ids=[2],
        logprobs=[0.0],
        versions=[0],
    )
    return Trajectory(
        id=f"{task}-{number}",
        task_id=task,
        group_id=f"{task}/train@1",
        attempt=number,
        reward=reward,
        success=reward >= 1,
        status=status,  # type: ignore[arg-type]
        turns=[turn],
    )


def exported(attempts: list[Trajectory], out: Path, **options: float | int):
    async def work():
        async with await open_store(f"sqlite:///{out.with_name('s.sqlite')}") as store:
            await store.write_trajectories(attempts, split="train", step=1)
            return await export_pairs(store, out, answer_reader(None), **options)  # type: ignore[arg-type]

    return asyncio.run(work())


def test_the_best_of_a_group_stands_against_the_worst_and_others_are_accounted_for(tmp_path: Path):
    rewards = {"a": (0.0, 1.0, 0.5, 0.2), "b": (1.0, 1.0), "c": (0.3,)}
    attempts = [
        attempt(task, number, f"{task}{number}", reward)
        for task, of_task in rewards.items()
        for number, reward in enumerate(of_task)
    ]
    attempts.append(attempt("a", 9, "broken", 5.0, status="failed"))
    report = exported(attempts, tmp_path / "pairs.jsonl", per_group=2)
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert [(row["better"], row["worse"]) for row in rows] == [("a-1", "a-0"), ("a-2", "a-3")]
    assert rows[0]["chosen"] == [{"role": "assistant", "content": "a1"}]
    assert (report.rows, report.used, report.counts()) == (3, 2, {"alike": 1})
    assert len(read_pair_file(tmp_path / "pairs.jsonl", "bradley_terry")) == 2


def test_pairs_have_their_images(tmp_path: Path) -> None:
    image = image_file(file_of(picture()), "image/png")
    question = Message("user", (image.part, TextPart("?")))
    attempts = []
    for number, reward in enumerate((0.0, 1.0)):
        made = attempt("a", number, f"a{number}", reward)
        turn = msgspec.structs.replace(
            made.turns[0], messages=[question, Message("assistant", f"a{number}")]
        )
        attempts.append(msgspec.structs.replace(made, turns=[turn]))

    async def work() -> None:
        async with await open_store(f"sqlite:///{tmp_path / 's.sqlite'}") as store:
            await store.put_images([image])
            await store.write_trajectories(attempts, split="train", step=1)
            await export_pairs(store, tmp_path / "pairs.jsonl", answer_reader(None))

    asyncio.run(work())
    (line,) = read_pair_file(tmp_path / "pairs.jsonl", "dpo")
    assert line.images == {image.part.sha256: image}


def test_without_a_pair_nothing_is_written(tmp_path: Path):
    same = [attempt("a", 0, "x", 1.0), attempt("a", 1, "x", 0.0)]
    with pytest.raises(ConfigError, match="are the same"):
        exported(same, tmp_path / "pairs.jsonl")
    assert not (tmp_path / "pairs.jsonl").exists()
