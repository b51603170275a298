"""The stage kind `prompts`: texts are searched, weights are trained with them, texts are searched
again."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from agentevo.config.agents import agents
from agentevo.errors import ConfigError
from agentevo.observability.sweep_view import SweepView
from agentevo_evolve.pipeline import build_pipeline, run_pipeline

AGENT = """
import agentevo

@agentevo.agent("shouter")
async def shouter(task, policy):
    rules = policy.text("system", "You answer.")
    reply = await policy.generate([{"role": "system", "content": rules},
                                   {"role": "user", "content": task.query}])
    return float(len(reply.text) % 2)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Any:
    (tmp_path / "shouter.py").write_text(AGENT)
    lines = [json.dumps({"id": f"t{n}", "query": f"w{n}", "answer": "x"}) for n in range(16)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    config = {
        "import": [str(tmp_path / "shouter.py")],
        "agent": {"type": "shouter"},
        "tasks": {"train": [str(tmp_path / "tasks.jsonl")]},
        "model": {"name": "tiny", "tiny": {"tokenizer": "byte", "hidden_size": 32}},
        "sampling": {"max_new_tokens": 3},
        "trainer": {"steps": 1, "groups_per_step": 2, "group_size": 3},
        "evaluation": {"tasks": 3, "samples": 0},
        "tracking": {"tensorboard": False, "report": False},
        "optimize": {"tasks": 9, "attempts": 40, "rounds": 1, "beam_width": 1, "branches": 2},
    }
    texts = {"agent.texts": "${stages.first.file}"}
    yield {
        "dir": str(tmp_path / "run"),
        "held_out": None,
        "config": config,
        "stages": {
            "first": {"kind": "prompts"},
            "rl": {"config": texts},
            "again": {"kind": "prompts", "model": "${stages.rl.checkpoint}", "config": texts},
        },
    }
    agents._items.pop("shouter", None)


def test_texts_that_a_stage_will_write_are_no_file_yet_and_another_file_has_to_be_there(
    tree: Any,
) -> None:
    assert build_pipeline(tree)
    tree["stages"]["rl"] = {"config": {"agent.texts": "nowhere.yaml"}}
    with pytest.raises(ConfigError, match=r"agent\.texts: there is no file"):
        build_pipeline(tree)


@pytest.mark.slow
def test_prompts_and_weights_take_turns(tree: Any, tmp_path: Path) -> None:
    view = SweepView("p", stream=io.StringIO(), plain=True)
    run_pipeline(build_pipeline(tree), resume=False, choice=None, view=view)
    summaries = sorted(tmp_path.glob("run/**/first/summary.json"))
    assert len(summaries) == 1 and json.loads(summaries[0].read_text())["method"] == "phrases"

    (again,) = tmp_path.glob("run/**/again/optimize.json")
    settings = json.loads(again.read_text())
    assert "rl" in settings["model"] and settings["agent"]["texts"]["system"]

    (config,) = tmp_path.glob("run/**/rl/config.yaml")
    assert "system:" in config.read_text()
