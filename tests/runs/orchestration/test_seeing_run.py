"""A whole run of a policy that sees: pictures of frozen lakes, from random weights. Slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentevo.api.run import train
from agentevo.config import build_config, load_config
from agentevo.models.files.load import load_model
from agentevo.observability import read_metrics
from agentevo.runs.audit.replay import replay
from agentevo.runtime.event_loop import run_coroutine
from agentevo.store import open_store
from agentevo.types import ImagePart, TextPart

pytestmark = pytest.mark.slow

LAKE = {
    "model": {
        "name": "tiny",
        "device": "cpu",
        "tiny": {"vision": True, "hidden_size": 48, "num_layers": 2, "num_heads": 2},
    },
    "environment": {
        "type": "frozen_lake",
        "observation": "image",
        "cell_pixels": 16,
        "max_actions": 3,
    },
    "agent": {"format": "plain", "max_turns": 3},
    # A fresh policy's answers are of all kinds, so attempts get different rewards.
    "rewards": [{"name": "format", "pattern": r"(?s)[a-zA-Z ].*"}],
    "sampling": {"max_new_tokens": 4},
    "trainer": {"steps": 2, "groups_per_step": 2, "group_size": 4, "learning_rate": 3e-3},
    "evaluation": {"tasks": 2, "samples": 0, "every": 0},
    "checkpoint": {"every": 1},
    "tracking": {"tensorboard": False, "report": False},
    "run": {"seed": 5, "threads": 1},
}


def test_pictures_are_trained_on_audited_and_replayed(tmp_path, quiet_view):
    config = build_config(LAKE, [f"run.dir={tmp_path / 'run'}"])
    assert train(config, view=quiet_view()).audit().ok

    more = build_config(LAKE, [f"run.dir={tmp_path / 'run'}", "trainer.steps=3"])
    assert train(more, resume=True, view=quiet_view()).audit().ok
    rows = read_metrics(more.run_dir / "metrics.jsonl")
    gaps = [row["actor/logprob_diff_max"] for row in rows if "actor/logprob_diff_max" in row]
    assert gaps and max(gaps) < 1e-4

    async def images() -> list[str]:
        async with await open_store(more.store_url, create=False) as store:
            return await store.image_digests()

    digests = run_coroutine(images())
    assert len(digests) > 1
    (replayed,) = run_coroutine(replay(more, sample=1))
    assert replayed.difference is None and replayed.tokens > 0

    folder = next(more.run_dir.rglob("preprocessor_config.json")).parent
    loaded = load_model(more.model.model_copy(update={"name": str(folder)}))
    assert type(loaded.model).__name__ == "Qwen2VLForConditionalGeneration"
    assert loaded.processor is not None


def test_a_run_of_two_processes_goes_on_in_one(tmp_path, quiet_view):
    """Sharded weights, moments and whole towers are written and read as those of one process."""
    recipe = tmp_path / "lake.yaml"
    recipe.write_text(json.dumps(LAKE))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [str(recipe), f"run.dir={tmp_path / 'run'}", "trainer.parallel.shard=2"]
    result = subprocess.run(
        [sys.executable, *launcher, "-m", "agentevo", "train", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout + result.stderr

    for folder in ("run", "alone"):
        words = [f"run.dir={tmp_path / folder}", "trainer.steps=3"]
        train(build_config(LAKE, words), resume=folder == "run", view=quiet_view())

    norms = [norms_of(tmp_path / folder) for folder in ("run", "alone")]
    assert len(norms[0]) == 3 and norms[0] == pytest.approx(norms[1], rel=1e-2)


def norms_of(folder: Path) -> list[float]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [norm for row in rows if (norm := row.get("actor/grad_norm")) is not None]


def test_the_recipe_of_pictures_shows_no_map_in_words(tmp_path, quiet_view):
    """Two steps of it. Every turn's prompt is the rules, which name nothing of the map, and one
    picture."""
    overrides = [
        "cold_start.epochs=1",
        "cold_start.episodes=8",
        "trainer.steps=2",
        "trainer.groups_per_step=2",
        "evaluation.tasks=2",
        "evaluation.samples=0",
        "tracking.tensorboard=false",
        "tracking.report=false",
        "run.threads=1",
        f"run.dir={tmp_path / 'run'}",
    ]
    run = train(load_config("frozen_lake_pictures", overrides), view=quiet_view())
    assert run.audit().ok
    turns = [turn for trajectory in run.trajectories() for turn in trajectory.turns]
    assert turns
    for turn in turns:
        message, _ = turn.messages
        text, picture = message.content
        assert text == TextPart("Walk to the goal.\n") and isinstance(picture, ImagePart)
