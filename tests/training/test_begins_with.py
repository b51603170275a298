"""What a run may begin with beside its weights: another run's optimizer, another reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentevo.config import AlgorithmSection, TinyModel, TrainerSection
from agentevo.errors import CheckpointError, ModelError
from agentevo.models.files.save import save_model
from agentevo.models.tiny import make_tiny
from agentevo.training.optimization import Optimization
from agentevo.training.roles.reference import Reference

SHAPE = TinyModel(hidden_size=16, num_layers=1, num_heads=2, tokenizer="byte")


def tiny(seed: int, shape: TinyModel = SHAPE):
    return make_tiny(shape, (), seed)


def stepped(optimization: Optimization) -> Optimization:
    for parameter in optimization.parameters:
        parameter.grad = torch.full_like(parameter, 0.5)
    optimization.optimizer.step()
    return optimization


def test_carried_moments_are_the_others_and_everything_else_is_ones_own():
    first = stepped(Optimization(tiny(0)[0].parameters(), TrainerSection(learning_rate=0.1)))
    first.steps = 7
    own = Optimization(tiny(1)[0].parameters(), TrainerSection(learning_rate=0.3))
    own.carry_on(first.state_dict())
    before = [first.optimizer.state[parameter]["exp_avg"] for parameter in first.parameters]
    after = [own.optimizer.state[parameter]["exp_avg"] for parameter in own.parameters]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert own.steps == 0
    assert {group["lr"] for group in own.optimizer.param_groups} == {0.3}


@pytest.mark.parametrize("shape", [{"hidden_size": 32}, {"num_layers": 2}])
def test_moments_of_another_model_are_refused(shape: dict[str, int]):
    state = stepped(Optimization(tiny(0)[0].parameters(), TrainerSection())).state_dict()
    other = tiny(0, SHAPE.model_copy(update=shape))[0]
    with pytest.raises(CheckpointError, match="another model"):
        Optimization(other.parameters(), TrainerSection()).carry_on(state)


@pytest.mark.slow
def test_a_reference_begins_as_the_model_that_is_named(tmp_path: Path):
    policy, _ = tiny(0)
    other, tokenizer = tiny(1)
    save_model(other, tokenizer, tmp_path / "other")
    section = AlgorithmSection(kl_coef=0.1, reference_model=str(tmp_path / "other"))
    weights = Reference(policy, section).weights
    theirs = dict(other.named_parameters())

    assert weights
    assert all(torch.equal(weights[name], theirs[name]) for name in weights)
    assert not any(weight.requires_grad for weight in weights.values())

    frozen = policy.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    before = frozen.detach().clone()
    reference = Reference(policy, section)
    assert all(
        torch.equal(weight, theirs[name]) for name, weight in reference.model.named_parameters()
    )
    assert torch.equal(frozen, before) and not frozen.requires_grad

    larger = tiny(0, SHAPE.model_copy(update={"hidden_size": 32}))[0]
    with pytest.raises(ModelError, match="architecture and size"):
        Reference(larger, section)
