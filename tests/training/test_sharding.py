"""Processes that compute a model together give what each of them gives alone."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from slow import soak
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
)

from agentevo.errors import TrainingError
from agentevo.training.collectives import Ranks
from agentevo.training.sharding.context_parallel import context_parallel
from agentevo.training.sharding.expert_parallel import expert_parallel
from agentevo.training.sharding.tensor_parallel import tensor_parallel

PROGRAM = Path(__file__).with_name("sharding_runs.py")
specification = importlib.util.spec_from_file_location("sharding_runs", PROGRAM)
assert specification is not None and specification.loader is not None
runs = importlib.util.module_from_spec(specification)
specification.loader.exec_module(runs)
SHARE = {2: 0.6, 4: 0.45}
"""The most of a small model's numbers that one of so many processes has; norms, and the key heads
that are fewer than processes, all of them have."""


def spawned(folder: Path, count: int):
    outs = [folder / f"{process}.pt" for process in range(count)]
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAM, str(process), str(count), folder / "meeting", out],
            stderr=subprocess.PIPE,
            text=True,
        )
        for process, out in enumerate(outs)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=400)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()

    return [torch.load(out) for out in outs]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, *soak(4)])
def test_tensor_context_and_expert_parallel_equal_one_process(count, tmp_path):
    for of_process in spawned(tmp_path, count):
        for name, found in of_process.items():
            for what in ("logp", "entropy", "without gradient", "squares", "grads"):
                assert found[what] < 1e-5, (name, what, found)
            assert abs(found["norm"]) < 1e-5, (name, found)
            if name.startswith("tensor"):
                assert found["weights"] == found["copy"] == found["logits"] == 0, (name, found)
                assert found["held"] < SHARE[count], (name, found)


def ranks_of(size: int) -> Ranks:
    """The second of `size` processes, for what is refused before any of them is asked."""
    return Ranks(None, 1, size)


REFUSED = {
    "heads": (lambda: runs.model_of("llama"), 3, "4 attention heads: choose a divisor"),
    "norms over heads": (
        lambda: Olmo2ForCausalLM(Olmo2Config(**runs.SHAPE)),
        2,
        "q_proj needs the unknown rule 'colwise_gather_output'",
    ),
    "no plan": (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2)), 2, "no plan"),
    "vocabulary": (
        lambda: LlamaForCausalLM(LlamaConfig(**{**runs.SHAPE, "vocab_size": 33})),
        2,
        "a vocabulary of 33 tokens: choose fewer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_and_left_as_it_was(name):
    make, size, words = REFUSED[name]
    model = make()
    before = {n: (id(p), p.shape) for n, p in model.named_parameters()}
    with pytest.raises(TrainingError, match=f"trainer.parallel.tensor .*{re.escape(words)}"):
        tensor_parallel(model, ranks_of(size))
    assert before == {n: (id(p), p.shape) for n, p in model.named_parameters()}


def test_experts_and_heads_that_cannot_be_divided_are_refused():
    with pytest.raises(TrainingError, match="expert=2: LlamaForCausalLM has no"):
        expert_parallel(runs.model_of("llama"), ranks_of(2))
    with pytest.raises(TrainingError, match="expert=3 does not divide the 8 experts"):
        expert_parallel(runs.model_of("moe"), ranks_of(3))
    with pytest.raises(TrainingError, match="context=3 does not divide the model's 4 attention"):
        context_parallel(runs.model_of("llama"), ranks_of(3))


def test_adapters_are_refused_under_tensor_parallelism():
    model = get_peft_model(runs.model_of("llama"), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(TrainingError, match=r"adapters \(model.lora\): train them with"):
        tensor_parallel(model, ranks_of(2))
