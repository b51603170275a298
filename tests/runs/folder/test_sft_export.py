"""Attempts as conversations for `agentevo sft`: what is taught, what is context, what is left out
and why."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from pictures import file_of, picture

from agentevo.cli.main import main
from agentevo.data import RowReport, read_conversations
from agentevo.data.message_images import ImageCollector
from agentevo.errors import ConfigError
from agentevo.models.tool_calls import find_parser
from agentevo.runs.folder.sft_export import (
    answer_reader,
    conversations_of,
    export_played,
    export_sft,
)
from agentevo.store import open_store
from agentevo.types import Message, RemoteTurn, TextPart, ToolCall, Trajectory, Turn
from agentevo.types.images import image_file

TOOLS = json.dumps([{"type": "function", "function": {"name": "add", "parameters": {}}}])
USER = Message("user", "1 + 2?")
SAID = Message("assistant", "3")
RAW = answer_reader(None)


def remote(index, *messages, parent=None, **more):
    return RemoteTurn(index=index, parent=parent, model="teacher", messages=[*messages], **more)


def policy_turn(index, *messages, parent=None, **more):
    ids = {"prompt_ids": [1], "completion_ids": [2], "logprobs": [0.0], "versions": [0]}
    fields = {"index": index, "parent": parent, "messages": [*messages], "finish_reason": "stop"}
    return Turn(**ids, **(fields | more))


def attempt(name="a", task="t", reward=1.0, **more):
    success = more.pop("success", reward >= 1.0)
    return Trajectory(
        id=name, task_id=task, group_id=f"{task}/g", reward=reward, success=success, **more
    )


def exported(attempts, out: Path, split="train", **options) -> tuple[list, RowReport]:
    async def work():
        async with await open_store(f"sqlite:///{out.with_name('s.sqlite')}") as store:
            await store.write_trajectories(attempts, split="train", step=1)
            return await export_sft(store, out, RAW, split=split, **options)

    report = asyncio.run(work())
    return [json.loads(line) for line in out.read_text().splitlines()], report


def test_a_teachers_conversation_is_one_row_that_sft_reads(tmp_path):
    call = Message("assistant", "", (ToolCall("add", '{"a": 1}', "x"),), reasoning="Hm.")
    result = Message("tool", "3", tool_call_id="x")
    turns = [remote(0, USER, call, tools=TOOLS), remote(1, result, SAID, parent=0)]
    own = [policy_turn(0, USER, Message("assistant", "7"))]
    rows, _ = exported([attempt(turns=own, remote_turns=turns)], tmp_path / "o.jsonl")
    (row,) = rows
    assert [message["role"] for message in row["messages"]] == [
        "user", "assistant", "tool", "assistant"
    ]  # fmt: skip
    assert row["messages"][1]["reasoning_content"] == "Hm."
    assert (row["model"], row["reward"], row["task_id"]) == ("teacher", 1.0, "t")

    report = RowReport("train")
    (read,) = read_conversations(str(tmp_path / "o.jsonl"), "auto", report)
    assert report.bad == []
    assert read.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert read.tools == json.loads(TOOLS)


def test_branches_are_rows_of_their_own_and_what_others_put_in_is_context():
    example = [Message("user", "1 + 1?"), Message("assistant", "2"), USER]
    turns = [
        remote(0, *example, SAID),
        remote(1, Message("user", "And?"), Message("assistant", "one"), parent=0),
        remote(2, Message("user", "So?"), Message("assistant", "cut o"), parent=0,
               finish_reason="length"),
    ]  # fmt: skip
    first, second = conversations_of(attempt(remote_turns=turns), RAW)
    assert [m.get("weight", 1) for m in first["messages"] if m["role"] == "assistant"] == [0, 1, 1]
    assert [m.get("weight", 1) for m in second["messages"] if m["role"] == "assistant"] == [0, 1, 0]


def test_the_policys_text_is_taken_apart_as_its_family_writes_it():
    text = '<think>\nHm.\n</think>\n\nI add.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
    said = Message("assistant", text.removeprefix("<think>\n") + "</tool_call>")
    chat = SimpleNamespace(
        parser=find_parser("<tool_call>{}</tool_call><think>"), opening_of=lambda ids: "<think>\n"
    )
    turns = [policy_turn(0, USER, said, tools=TOOLS)]
    (row,) = conversations_of(attempt(turns=turns), answer_reader(chat))
    message = row["messages"][1]
    assert message["reasoning_content"] == "Hm."
    assert message["content"].strip() == "I add."
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1}

    broken = policy_turn(0, USER, Message("assistant", "Hm.</think><tool_call>{no"), tools=TOOLS)
    (row,) = conversations_of(attempt(turns=[broken]), answer_reader(chat))
    assert row["messages"][1]["weight"] == 0


def test_attempts_are_chosen_by_reward_and_the_rest_is_accounted_for(tmp_path):
    def said(name, text, reward, **more):
        turns = [remote(0, USER, Message("assistant", text))] if text is not None else []
        return attempt(name, reward=reward, remote_turns=turns, **more)

    attempts = [
        said("good", "3", 1.0),
        said("better", "three", 2.0),
        said("same", "3", 1.0),
        said("poor", "4", 0.5),
        said("broken", "3", 1.0, status="failed", error="it broke"),
        said("empty", "", 1.0, task="u"),
        said("silent", None, 1.0, task="v"),
    ]
    rows, report = exported(attempts, tmp_path / "o.jsonl")
    assert [row["messages"][1]["content"] for row in rows] == ["3", "three"]

    reasons = {row.where: row.reason for row in report.bad}
    assert reasons == {
        "same": "duplicate", "poor": "low_reward", "broken": "attempt_failed",
        "empty": "empty", "silent": "empty",
    }  # fmt: skip

    rows, report = exported(attempts, tmp_path / "o.jsonl", min_reward=0.5, per_task=1)
    assert [row["messages"][1]["content"] for row in rows] == ["three"]
    assert report.counts()["beyond_per_task"] == 3


def test_of_a_task_the_best_that_can_be_taught_are_taken(tmp_path):
    def said(name, text, reward):
        return attempt(
            name, reward=reward, remote_turns=[remote(0, USER, Message("assistant", text))]
        )

    cut = remote(0, USER, Message("assistant", "4 and"), finish_reason="length")
    attempts = [
        attempt("cut", reward=3.0, remote_turns=[cut]),
        said("best", "four", 2.5),
        said("same", "four", 2.0),
        said("other", "4", 1.5),
        said("beyond", "IV", 1.0),
    ]
    rows, report = exported(attempts, tmp_path / "o.jsonl", per_task=2)
    assert [row["messages"][1]["content"] for row in rows] == ["four", "4"]
    assert {row.where: row.reason for row in report.bad} == {
        "cut": "cut_off", "same": "duplicate", "beyond": "beyond_per_task"
    }  # fmt: skip


def test_nothing_to_export_says_why_and_leaves_the_file(tmp_path):
    out = tmp_path / "o.jsonl"
    out.write_text("old")
    poor = attempt(reward=0.0, remote_turns=[remote(0, USER, SAID)])
    with pytest.raises(ConfigError, match="attempt without success"):
        exported([poor], out)
    with pytest.raises(ConfigError, match="1 of the split train: choose one with --split"):
        exported([poor], out, split="eval")

    assert out.read_text() == "old"


def test_the_command_writes_rows_and_the_account_beside_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("model: {name: none}\nremote_models: {teacher: {model: m}}\n")

    async def fill():
        async with await open_store(f"sqlite:///{run}/store.sqlite") as store:
            good = attempt(remote_turns=[remote(0, USER, SAID)])
            await store.write_trajectories([good, attempt("b", reward=0.0)], split="eval", step=1)

    asyncio.run(fill())
    words = ["trajectories", "export", "run", "out.jsonl", "--sft"]
    assert main([*words, "--split", "eval", "--model", "teacher"]) == 0

    shown = capsys.readouterr()
    assert "1 conversations written to out.jsonl" in shown.out
    assert "1 left out, attempt without success" in shown.err
    assert json.loads(Path("out.jsonl.bad_rows.jsonl").read_text())["where"] == "b"

    for wrong, said in (
        (["--split", "eval", "--model", "techer"], "the run has policy, teacher"),
        (["--split", "test"], "there are train, eval"),
        ([], "2 of the split eval"),
    ):
        assert main([*words, "--overwrite", *wrong]) == 2
        assert said in capsys.readouterr().err

    assert main(["trajectories", "export", "run", "o.jsonl", "--min-reward", "1"]) == 2
    assert "--min-reward is for another content: add --sft" in capsys.readouterr().err


def test_an_evaluation_of_several_models_is_refused_whose_words_are_wanted_is_not_known(
    tmp_path, capsys
):
    played = {"played_models": {"ours": "/a", "theirs": "/b"}}
    (tmp_path / "eval.json").write_text(json.dumps(played))
    words = ["trajectories", "export", str(tmp_path), str(tmp_path / "rows.jsonl"), "--sft"]
    assert main(words) == 2
    assert "it has attempts of 2 models (ours, theirs)" in capsys.readouterr().err
    assert not (tmp_path / "rows.jsonl").exists()


def test_images_are_in_the_rows(tmp_path):
    """Two attempts that differ in their image alone are no duplicates."""
    images = [image_file(file_of(picture(8 + n)), "image/png") for n in range(2)]
    attempts = [
        attempt(str(n), turns=[policy_turn(0, Message("user", (image.part, TextPart("?"))), SAID)])
        for n, image in enumerate(images)
    ]

    async def work():
        async with await open_store(f"sqlite:///{tmp_path / 's.sqlite'}") as store:
            await store.put_images(images)
            await store.write_trajectories(attempts, split="train", step=1)
            await export_sft(store, tmp_path / "rows.jsonl", RAW, per_task=2)

    asyncio.run(work())
    collector = ImageCollector()
    report = RowReport("train")
    rows = list(read_conversations(str(tmp_path / "rows.jsonl"), "auto", report, collector))
    assert len(rows) == 2 and report.bad == []
    assert collector.files == {image.part.sha256: image for image in images}
    assert [row.messages[0]["content"][1]["text"] for row in rows] == ["?", "?"]

    played = export_played(attempts, tmp_path / "played.jsonl", RAW)
    with pytest.raises(ConfigError, match=r"only their digests: play them in a run"):
        asyncio.run(played)
    assert not (tmp_path / "played.jsonl").exists()
