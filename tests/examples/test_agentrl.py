"""The recipe that stands for AgentRL's script trains, with a manager and models on loopback."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
from mcp_manager import Manager
from remote_server import RemoteServer, chat, gives

from agentevo.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "agentrl"
SMALL = (
    "model.name=tiny",
    "model.dtype=float32",
    "store.url=null",
    "trainer.steps=1",
    "trainer.groups_per_step=2",
    "trainer.group_size=2",
    "trainer.warmup_steps=0",
    "sampling.max_new_tokens=8",
    "agent.max_turns=2",
    "agent.context.max_tokens=3000",
    "evaluation.tasks=1",
    "checkpoint.every=0",
    "model.tiny.context_length=4096",
)


@pytest.mark.soak
def test_the_example_trains(tmp_path, monkeypatch):
    shutil.copytree(EXAMPLE, tmp_path / "agentrl")
    monkeypatch.chdir(tmp_path / "agentrl")
    for name in ("READER_API_KEY", "READER_2_API_KEY", "JUDGE_API_KEY", "STORE_PASSWORD"):
        monkeypatch.setenv(name, f"key-of-{name}")

    numbers = itertools.count()

    def judges(request, handler):
        gives(chat(f"<score>{next(numbers) % 2}</score>"))(request, handler)

    with Manager() as manager, RemoteServer(judges) as models:
        recipe = Path("recipe.yaml").read_text().replace("http://127.0.0.1:8014", manager.url)
        text = re.sub(r"http\S+:3888\d", models.url, recipe)
        # The tiny policy can't write <answer>: whatever it says is judged.
        Path("recipe.yaml").write_text(text.replace("place: answer", "place: whole"))
        rows = [row for row in Path("tasks.jsonl").read_text().splitlines() if "schema" not in row]
        Path("tasks.jsonl").write_text("\n".join(rows))
        assert main(["train", "recipe.yaml", *SMALL, f"run.dir={tmp_path}/run"]) == 0

    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1])
    assert metrics["group/reward_std/mean"] > 0 and metrics["actor/grad_norm"] > 0
    for file in (tmp_path / "run").rglob("*"):
        assert file.is_dir() or b"key-of-" not in file.read_bytes()
