"""What a stage of a pipeline has, when it computes backward passes, and models that have no stages.
What stages come to together: test_mesh.py, test_saved_parts.py."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from agentevo.config import AlgorithmSection, ParallelSection, TrainerSection
from agentevo.errors import TrainingError
from agentevo.training import optimization
from agentevo.training.collectives import Ranks
from agentevo.training.distribute import check_spread
from agentevo.training.kernels.stages import Stage, stage_of
from agentevo.training.roles import reference as roles
from agentevo.training.sharding.layouts import layouts_by_name
from agentevo.training.sharding.pipeline import pipeline_parallel

sys.path.insert(0, str(Path(__file__).parent))
from mesh_runs import made


def stage(rank: int, size: int) -> Stage:
    """One of stages that nobody asks for anything."""
    return Stage(Ranks(None, rank, size), None, None)


@pytest.mark.parametrize("rank", range(4))
def test_a_stage_has_its_layers_under_the_names_and_in_the_order_of_all(rank):
    model = made("moe+deep")
    alone = dict(made("moe+deep").named_parameters())
    pipeline_parallel(model, stage(rank, 4))
    own = dict(model.named_parameters())
    assert list(own) == list(alone)

    expected = {f"model.layers.{rank}."}
    expected |= {"model.embed_tokens."} if rank == 0 else set()
    expected |= {"model.norm.", "lm_head."} if rank == 3 else set()
    layouts = layouts_by_name(model)
    for name, parameter in own.items():
        is_own = name.startswith(tuple(expected))
        assert parameter.requires_grad
        assert torch.equal(parameter, alone[name] if is_own else alone[name][:0]), name
        first = layouts[name].cut.first
        length = layouts[name].cut.length
        assert (first if is_own else min(first, length - first), length) == (0, len(alone[name]))

    assert stage_of(model).is_last == (rank == 3)


@pytest.mark.parametrize(("rank", "under_way"), [(0, 3), (1, 2), (2, 1)])
def test_a_backward_pass_waits_until_the_stages_behind_are_filled(rank, under_way, monkeypatch):
    """One forward and one backward pass in turn after that, the oldest micro-batch first."""
    monkeypatch.setattr(optimization, "stages", lambda: Ranks(None, rank, 3))
    weight = nn.Parameter(torch.ones(1))
    done = []
    trainer = optimization.Optimization([weight], TrainerSection())
    trainer.begin()
    for number in range(6):
        loss = weight.sum()
        loss.register_hook(lambda grad, number=number: done.append(number))
        trainer.backward(loss)
        assert done == list(range(number + 2 - under_way))

    trainer.finish()
    assert done == list(range(6))


def test_a_reference_of_a_stage_begins_with_its_part_of_another_model(monkeypatch):
    other = made("llama+deep")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)

    base = SimpleNamespace(model=other)
    monkeypatch.setattr(roles, "load_base", lambda folder, overrides, images: base)
    model = made("llama+deep")
    pipeline_parallel(model, stage(1, 2))
    reference = roles.Reference(model, AlgorithmSection(kl_coef=0.1, reference_model="other"))
    assert stage_of(reference.model) is stage_of(model)

    for (name, ours), theirs in zip(
        reference.model.named_parameters(), model.parameters(), strict=True
    ):
        assert torch.equal(ours, 2 * theirs), name


def scaled(name: str) -> nn.Module:
    """With a parameter that is a single number."""
    model = made(name)
    model.model.layers[0].scale = nn.Parameter(torch.tensor(1.0))
    return model


def with_another(name: str) -> nn.Module:
    """With weights that belong to no layer."""
    model = made(name)
    model.model.projection = nn.Linear(2, 2)
    return model


REFUSED = {
    "layers": (lambda: made("llama+deep"), 3, "=3 does not divide the model's 4 layers: choose"),
    "tied": (lambda: made("qwen3 tied"), 2, ": the model's embeddings are also its output layer"),
    "adapters": (
        lambda: get_peft_model(made("llama"), LoraConfig(target_modules=["q_proj"])),
        2,
        ": adapters (model.lora) are not cut into stages: set it to 1",
    ),
    "no plan": (
        lambda: GPT2LMHeadModel(
            GPT2Config(n_layer=2, n_embd=8, n_head=2, tie_word_embeddings=False)
        ),
        2,
        ": GPT2LMHeadModel is not known to consist of embeddings, layers that take",
    ),
    "another part": (lambda: with_another("llama"), 2, "(projection.weight is something else)"),
    "a number": (lambda: scaled("llama"), 2, "(model.layers.0.scale is something else)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_stages_is_refused_and_left_as_it_was(name):
    make, size, words = REFUSED[name]
    model = make()
    before = {n: (id(p), p.shape) for n, p in model.named_parameters()}

    for refused in (
        lambda: check_spread(model, ParallelSection(pipeline=size)),
        lambda: pipeline_parallel(model, stage(0, size)),
    ):
        with pytest.raises(TrainingError) as raised:
            refused()
        assert str(raised.value).startswith("trainer.parallel.pipeline")
        assert words in str(raised.value)

    assert before == {n: (id(p), p.shape) for n, p in model.named_parameters()}
    assert stage_of(model) is None
