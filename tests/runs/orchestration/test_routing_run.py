"""Whole runs of a tiny mixture with routing replay: killed and resumed they are the run that nobody
killed, and engines of other processes record as the embedded one does."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys

import pytest
import torch
from near_ties import nudged
from run_fixtures import SMALL
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentevo.api.run import train
from agentevo.config import RunConfig, TinyModel, build_config, to_yaml
from agentevo.errors import ModelError
from agentevo.models.tiny_tokenizer import tiny_tokenizer
from agentevo.observability import read_metrics
from agentevo.runs.folder.run_folder import read_store
from agentevo.types.routed_experts import why_misaligned

pytestmark = pytest.mark.slow

KILLED = """
import os, signal, sys
from agentevo.config import load_config
from agentevo.observability import LiveView
from agentevo.api.run import train

class View(LiveView):
    def phase(self, name, detail=""):
        if f"{name} {detail}" == "training step 2":
            os.kill(os.getpid(), signal.SIGKILL)

view = View("killed", plain=True, stream=open(os.devnull, "w"))
train(load_config(sys.argv[1]), view=view)
"""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A folder with a Qwen3-MoE of two layers whose routers have near ties, over bytes."""
    folder = tmp_path_factory.mktemp("mixture")
    tokenizer = tiny_tokenizer(TinyModel(tokenizer="byte"), ())
    tokenizer.save_pretrained(folder)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Qwen3MoeForCausalLM(config)

    nudged(model, 1.0).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def moe_config(mixture):
    def make(folder, *overrides: str) -> RunConfig:
        tree = copy.deepcopy(SMALL) | {"model": {"name": mixture, "device": "cpu"}}
        tree["cold_start"] = {"episodes": 0}
        tree["evaluation"] = {"tasks": 1, "samples": 0}
        # What begins with a byte beyond ASCII: half of what a fresh policy says.
        tree["rewards"] = [{"name": "format", "pattern": r"(?s)[^\x00-\x7f].*"}]
        tree["trainer"] |= {"steps": 2, "routing_replay": "rollout", "groups_per_step": 2}
        keys = ["evaluation.every=0", "checkpoint.every=1", "memory.checkpointing=full"]
        return build_config(tree, [f"run.dir={folder}", *keys, *overrides])

    return make


def records(config: RunConfig) -> dict:
    """Id of each training attempt -> the rows of its turns."""

    async def stored(store):
        return {
            trajectory.trajectory.id: [turn.routed_experts for turn in trajectory.trajectory.turns]
            async for trajectory in store.trajectories(split="train")
            if not any(why_misaligned(turn) for turn in trajectory.trajectory.turns)
        }

    return read_store(config.run_dir, stored)


ONE_BY_ONE = ("engine.max_running=1", "engine.prefix_sharing=false")
"""The engine computes each request by itself: in a batch, the log-probs of a mixture depend on the
other requests, up to rounding, and the batches depend on the load of the machine."""


def test_killed_and_resumed_bit_for_bit(moe_config, tmp_path, quiet_view, outcome_of, assert_same):
    whole = moe_config(tmp_path / "whole", "algorithm.old_logprobs=recomputed", *ONE_BY_ONE)
    assert train(whole, view=quiet_view()).audit().ok
    rows = [row for row in read_metrics(whole.run_dir / "metrics.jsonl") if "actor/lr" in row]
    assert len(rows) == 2
    assert all(row["rollout/logprob_gap_max"] < 1e-4 for row in rows)
    assert all("actor/router_mismatch" in row for row in rows)

    recorded = records(whole)
    assert len(recorded) == 2 * 2 * 4
    assert {(r.layers, r.top_k, r.num_experts) for t in recorded.values() for r in t} == {(2, 2, 4)}

    config = moe_config(tmp_path / "run", "algorithm.old_logprobs=recomputed", *ONE_BY_ONE)
    recipe = tmp_path / "run.yaml"
    recipe.write_text(to_yaml(config))
    path = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(recipe)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr

    train(config, resume=True, view=quiet_view())
    assert_same(outcome_of(config.run_dir), outcome_of(whole.run_dir))
    assert records(config) == recorded


@pytest.mark.soak
def test_engines_and_samplers_of_their_own(moe_config, tmp_path, quiet_view):
    config = moe_config(
        tmp_path / "run",
        "rollout.samplers=1",
        "rollout.staleness=1",
        "rollout.policy=mask",
        "algorithm.old_logprobs=recomputed",
    )
    train(config, view=quiet_view())
    recorded = records(config)
    assert recorded and all(rows is not None for turns in recorded.values() for rows in turns)

    rows = [row for row in read_metrics(config.run_dir / "metrics.jsonl") if "actor/lr" in row]
    assert len(rows) == 2 and all("actor/router_mismatch" in row for row in rows)


def test_a_model_that_cant_replay_is_refused_before_anything_is_created(tmp_path, small_config):
    config = small_config(tmp_path / "run", "trainer.routing_replay=rollout")
    with pytest.raises(
        ModelError, match=r"^trainer.routing_replay: the routing of LlamaForCausalLM"
    ):
        train(config)
    assert not config.run_dir.exists()
