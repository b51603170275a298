"""A whole run whose attempts vLLM draws. `make test-vllm` runs this where vLLM is installed."""

from __future__ import annotations

import importlib.util

import pytest

from agentevo.api.run import train
from agentevo.config import load_config
from agentevo.observability import read_metrics
from agentevo.runs.folder.run_folder import read_store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed: `make test-vllm` does that (minutes)",
    ),
]
OVERRIDES = (
    "engine.type=vllm",
    "engine.kv_cache_gb=0.5",
    "engine.max_running=64",
    "engine.timeout_s=86400",
    "agent.timeout_s=86400",
    "model.name=tiny",
    "model.tiny={hidden_size: 64, num_layers: 2, num_heads: 2, context_length: 512}",
    "sampling.max_new_tokens=8",
    "cold_start.episodes=40",
    "trainer.learning_rate=1e-3",
    "trainer.steps=12",
    "evaluation.every=0",
    "tracking.tensorboard=false",
    "tracking.report=false",
    "run.threads=1",
)


def test_a_run_with_vllm_learns_and_its_audit_is_clean(tmp_path, quiet_view):
    config = load_config("coins", [*OVERRIDES, f"run.dir={tmp_path / 'run'}"])
    run = train(config, view=quiet_view())

    async def versions(store):
        return {
            version
            async for trajectory in store.trajectories()
            for turn in trajectory.trajectory.turns
            for version in turn.versions
        }

    assert run.audit().violations == []
    assert set(range(12)) <= read_store(run.config.run_dir, versions) <= set(range(13))

    rows = [row for row in read_metrics(run.dir / "metrics.jsonl") if "critic/score/mean" in row]
    rewards = [row["critic/score/mean"] for row in rows]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
