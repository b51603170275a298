"""Whole runs of a model that computes rows: killed and resumed they are the run that nobody killed,
and every trainer takes it. Slow."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys

import pytest
import torch
from run_fixtures import SMALL
from transformers import Lfm2Config, Lfm2ForCausalLM

from agentevo.api.run import train
from agentevo.config import RunConfig, TinyModel, build_config, to_yaml
from agentevo.models.tiny_tokenizer import tiny_tokenizer
from agentevo.observability import read_metrics

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
ONE_BY_ONE = ("engine.max_running=1", "engine.prefix_sharing=false")
"""In company, log-probs depend on the other requests, up to rounding."""


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory):
    """A folder with an LFM2 of a convolution and an attention layer, over bytes."""
    folder = tmp_path_factory.mktemp("lfm2")
    tokenizer = tiny_tokenizer(TinyModel(tokenizer="byte"), ())
    tokenizer.save_pretrained(folder)
    config = Lfm2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        Lfm2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def lfm2_config(lfm2):
    def make(folder, *overrides: str) -> RunConfig:
        tree = copy.deepcopy(SMALL) | {"model": {"name": lfm2, "device": "cpu"}}
        tree["cold_start"] = {"episodes": 0}
        # What begins with a byte beyond ASCII: half of what a fresh policy says.
        tree["rewards"] = [{"name": "format", "pattern": r"(?s)[^\x00-\x7f].*"}]
        tree["trainer"] |= {"steps": 2, "groups_per_step": 2}
        keys = ["evaluation.every=0", "checkpoint.every=1"]
        return build_config(tree, [f"run.dir={folder}", *keys, *overrides])

    return make


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def test_killed_and_resumed_bit_for_bit(lfm2_config, tmp_path, quiet_view, outcome_of, assert_same):
    whole = lfm2_config(tmp_path / "whole", *ONE_BY_ONE)
    train(whole, view=quiet_view())
    rows = [row for row in read_metrics(whole.run_dir / "metrics.jsonl") if "actor/lr" in row]
    assert len(rows) == 2
    assert all(row["actor/logprob_diff_max"] < 1e-4 for row in rows)

    config = lfm2_config(tmp_path / "run", *ONE_BY_ONE)
    recipe = tmp_path / "run.yaml"
    recipe.write_text(to_yaml(config))
    ended = run_python("-c", KILLED, str(recipe))
    assert ended.returncode == -signal.SIGKILL, ended.stderr

    train(config, resume=True, view=quiet_view())
    assert_same(outcome_of(config.run_dir), outcome_of(whole.run_dir))
    audited = run_python("-m", "agentevo", "audit", str(whole.run_dir))
    assert audited.returncode == 0, audited.stdout


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.name=ppo", "critic.trunk=shared"),
        ("algorithm.name=ppo", "critic.trunk=own", "model.lora.rank=2"),
        ("algorithm.name=dpo", "algorithm.pairs=best_worst"),
        ("memory.checkpointing=full", "algorithm.kl_coef=0.01"),
    ],
    ids=["shared critic", "own critic, LoRA", "DPO", "reference"],
)
def test_every_trainer_takes_it(overrides, lfm2_config, tmp_path, quiet_view):
    config = lfm2_config(tmp_path / "run", *overrides)
    train(config, view=quiet_view())
    rows = read_metrics(config.run_dir / "metrics.jsonl")
    assert sum("actor/lr" in row for row in rows) == 2
