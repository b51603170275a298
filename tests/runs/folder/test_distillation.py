"""A teacher behind an API answers at the gateway; what it said in good attempts is exported, and a
small model learns to say it."""

from __future__ import annotations

import json

import openai
import pytest
from remote_server import RemoteServer, chat, gives

import agentevo
from agentevo.cli.main import main

TINY = {"name": "tiny", "tiny": {"tokenizer": "byte", "hidden_size": 64, "num_layers": 1}}
TASKS = [{"id": str(n), "query": f"Word {n}?", "answer": f"word-{n % 4}"} for n in range(24)]
QUIET = {"tracking": {"report": False, "tensorboard": False}}


def rollout(task):
    """Two turns of the teacher's; the second one is right."""
    client = openai.OpenAI()
    messages = [{"role": "user", "content": task.query}]
    for _ in range(2):
        answer = client.chat.completions.create(model="teacher", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "Sure?"}]
    return float(answer.choices[0].message.content == task.answer)


def teach(request, handler):
    """Odd words are answered wrongly."""
    number = int(request["messages"][0]["content"].split()[1].rstrip("?"))
    text = f"word-{number % 4}" if number % 2 == 0 else "no idea"
    gives(chat(text if len(request["messages"]) > 1 else "Well."))(request, handler)


@pytest.mark.slow
def test_what_a_teacher_said_at_the_gateway_lowers_a_students_held_out_loss(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name, tasks in (("few", [{**TASKS[0], "id": "x"}]), ("questions", TASKS)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(t) + "\n" for t in tasks))

    with RemoteServer(teach) as server:
        agentevo.train(
            rollout,
            {"train": "few.jsonl", "eval": "questions.jsonl"},
            run={"dir": "teacher"},
            model=TINY,
            remote_models={"teacher": {"base_url": server.base_url, "model": "m"}},
            trainer={"steps": 0},
            evaluation={"tasks": len(TASKS), "samples": 0},
            **QUIET,
        )
        assert len(server.received) == 2 * len(TASKS)

    words = ["trajectories", "export", "teacher", "taught.jsonl", "--sft", "--split", "eval"]
    assert main(words) == 0
    assert "12 of 24 rows are used" in capsys.readouterr().err

    with open("taught.jsonl", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert all(
        [message["content"] for message in row["messages"]]
        == [f"Word {row['task_id']}?", "Well.", "Sure?", f"word-{int(row['task_id']) % 4}"]
        for row in rows
    )

    run = agentevo.sft(
        {"data": {"train": "taught.jsonl", "eval_share": 0.25}},
        run={"dir": "student"},
        model=TINY,
        sft={"epochs": 6, "batch_conversations": 3, "learning_rate": 3e-3},
        **QUIET,
    )
    held_out = run.summary["held_out"]
    assert held_out["conversations"] == 3
    assert held_out["after"]["loss"] < 0.7 * held_out["before"]["loss"]
