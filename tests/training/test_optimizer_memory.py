"""Master weights, optimizers in 8 bits or on the CPU, and gradients that add up over
micro-batches."""

from __future__ import annotations

import copy
import io
import random

import msgspec
import pytest
import torch
from slow import soak

from agentevo.config import (
    AlgorithmSection,
    CriticSection,
    MemorySection,
    SFTSection,
    TrainerSection,
)
from agentevo.errors import CheckpointError
from agentevo.training.optimization import Optimization
from agentevo.training.supervised import SupervisedTrainer
from agentevo.training.trainer import Trainer

GRPO = AlgorithmSection()
SECTION = TrainerSection(learning_rate=1e-3, warmup_steps=0, max_grad_norm=1e9)
EIGHT = MemorySection(optimizer="adamw_8bit")
OFFLOADED = MemorySection(offload_optimizer=True)


def batch_of(samples_of, num_groups: int = 4):
    rng = random.Random(0)
    sequences = []
    for _ in range(num_groups):
        prompt = [rng.randrange(2, 97) for _ in range(rng.randrange(5, 40))]
        sequences += [
            [*prompt, *(rng.randrange(2, 97) for _ in range(rng.randrange(2, 20)))]
            for _ in range(4)
        ]

    return [
        msgspec.structs.replace(s, logprobs=[-4.5 if m else 0.0 for m in s.loss_mask])
        for s in samples_of(sequences, group_size=4)
    ]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture
def model(random_model):
    return copy.deepcopy(random_model("llama").model)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [64, 130])
def test_micro_batches_add_up_to_the_large_batch(tokens, model, samples_of, gradient):
    samples = batch_of(samples_of)
    found = {}
    for size in (tokens, 16384):
        rl = copy.deepcopy(model)
        supervised = copy.deepcopy(model)
        Trainer(rl, SECTION.model_copy(update={"micro_batch_tokens": size}), GRPO).step(samples)
        SupervisedTrainer(
            supervised, SFTSection(max_grad_norm=1e9, micro_batch_tokens=size), 1
        ).step(samples)
        found[size] = gradient(rl), gradient(supervised)

    for parts, whole in zip(found[tokens], found[16384], strict=True):
        assert relative(parts, whole) < 1e-6


def updates(parameter: torch.nn.Parameter, num: int, lr: float) -> torch.Tensor:
    """That many steps against a constant gradient by this package's optimizer; the weights that
    come of it."""
    optimization = Optimization([parameter], SECTION.model_copy(update={"learning_rate": lr}))
    for _ in range(num):
        optimization.begin(lr)
        optimization.backward((parameter.float() * 3.0).sum())
        optimization.finish()
    return parameter.detach()


@pytest.mark.slow
def test_small_updates_vanish_without_masters_and_not_with_them():
    """AdamW moves a weight of 1 by lr = 1e-4 a step; bfloat16's neighbours of 1 are 0.0039 below
    and 0.0078 above."""
    start = torch.ones(8, 8)
    lr = 1e-4
    num = 100
    alone = torch.nn.Parameter(start.bfloat16())
    plain = torch.optim.AdamW([alone], lr=lr, weight_decay=0.0, betas=SECTION.betas)
    for _ in range(num):
        plain.zero_grad()
        (alone.float() * 3.0).sum().backward()
        plain.step()

    assert torch.equal(alone.detach(), start.bfloat16()), (
        "a hundred steps, and nothing has happened"
    )

    exact = updates(torch.nn.Parameter(start.clone()), num, lr)
    assert float(exact[0, 0]) == pytest.approx(1.0 - num * lr, rel=1e-4)
    assert torch.equal(updates(torch.nn.Parameter(start.bfloat16()), num, lr), exact.bfloat16())


def test_gradients_add_up_in_float32():
    """1024 + 1 + 1 + ... stays 1024 in bfloat16."""
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimization = Optimization([weight], SECTION)
    optimization.begin()
    for slope in (1024.0, *[1.0] * 16):
        optimization.backward((weight * slope).sum())

    assert weight.grad is not None
    assert weight.grad.tolist() == [1040.0] * 4
    assert optimization.finish() == pytest.approx(2 * 1040.0)


def test_weights_that_change_before_training_begins_are_the_ones_that_are_trained():
    """A cold start trains the same model after RL's optimizer was put together."""
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimization = Optimization([weight], SECTION)
    with torch.no_grad():
        weight.fill_(2.0)

    optimization.begin(1e-3)
    optimization.backward(weight.float().sum())
    optimization.finish()
    assert weight.tolist() == pytest.approx([2.0] * 4, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [MemorySection(), OFFLOADED, EIGHT])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *soak(torch.float32)])
def test_a_checkpoint_goes_on_bit_for_bit(dtype, memory, model, samples_of, tmp_path):
    """Also for the critic; through a file, as checkpoints go."""
    if memory is EIGHT:
        pytest.importorskip("torchao")

    with torch.no_grad():
        model.lm_head.weight.add_(0)

    model = copy.deepcopy(model).to(dtype)
    samples = [
        msgspec.structs.replace(s, columns={"returns": s.advantages, "values": s.advantages})
        for s in batch_of(samples_of, 2)
    ]

    def make(policy):
        algorithm = AlgorithmSection(name="ppo")
        return Trainer(policy, SECTION, algorithm, critic=CriticSection(), memory=memory)

    whole = make(copy.deepcopy(model))
    whole.begin()
    for _ in range(2):
        whole.step(samples)

    torch.save(
        {"trainer": whole.state_dict(), "model": whole.model.state_dict()}, tmp_path / "state.pt"
    )
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = make(copy.deepcopy(model))
    resumed.model.load_state_dict(saved["model"])

    resumed.load_state_dict(saved["trainer"])
    for trainer in (whole, resumed):
        trainer.step(samples)

    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == dtype

    assert whole.roles.critic is not None
    assert resumed.roles.critic is not None
    for name, one in whole.roles.critic.weights.items():
        assert torch.equal(one, resumed.roles.critic.weights[name]), name

    if dtype == torch.bfloat16:
        masters = whole.optimization.masters, resumed.optimization.masters
        assert masters[0] is not None
        assert masters[1] is not None

        for one, other in zip(masters[0].masters, masters[1].masters, strict=True):
            assert torch.equal(one, other)
            assert not torch.equal(one, one.bfloat16().float())

        moments = whole.optimization.optimizer.state[masters[0].masters[0]]
        assert moments["exp_avg"].dtype == torch.float32


@pytest.mark.slow
def test_stepping_on_the_cpu_changes_nothing(model, samples_of):
    samples = batch_of(samples_of)
    found = []
    for memory in (MemorySection(), OFFLOADED):
        trainer = Trainer(copy.deepcopy(model), SECTION, GRPO, memory=memory)
        metrics = [trainer.step(samples) for _ in range(3)]
        found.append(
            (metrics, torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
        )

    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_eight_bits_train_nearly_the_same_and_take_a_quarter(samples_of):
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    start = torch.randn(128, 256)
    target = torch.randn(128, 256)
    lr = 1e-2
    found = []
    sizes = []
    for memory in (MemorySection(), EIGHT):
        weight = torch.nn.Parameter(start.clone())
        optimization = Optimization([weight], SECTION, memory=memory)
        for _ in range(30):
            optimization.begin(lr)
            optimization.backward((weight - target).square().mean())
            optimization.finish()

        found.append(weight.detach() - start)
        file = io.BytesIO()
        torch.save(optimization.state_dict()["optimizer"], file)
        sizes.append(len(file.getvalue()))

    assert 0 < relative(found[1], found[0]) < 0.05
    assert sizes[1] < 0.3 * sizes[0]


def test_the_state_of_another_optimizer_is_refused():
    weight = torch.nn.Parameter(torch.zeros(4))
    state = Optimization([weight], SECTION).state_dict() | {"kind": "adamw_8bit"}
    with pytest.raises(CheckpointError, match=r"resume with memory\.optimizer=adamw_8bit"):
        Optimization([weight], SECTION).load_state_dict(state)


@pytest.mark.slow
def test_a_checkpoint_from_before_there_was_a_choice_of_optimizer_is_resumed(model, samples_of):
    before = Trainer(copy.deepcopy(model), SECTION, GRPO)
    after = Trainer(model, SECTION, GRPO)
    before.step(batch_of(samples_of))
    state = copy.deepcopy(before.state_dict())
    del state["optimization"]["kind"], state["optimization"]["masters"]
    model.load_state_dict(before.model.state_dict())

    after.load_state_dict(state)
    for trainer in (before, after):
        trainer.step(batch_of(samples_of))

    assert all(
        torch.equal(parameter, other)
        for parameter, other in zip(
            before.model.parameters(), after.model.parameters(), strict=True
        )
    )
