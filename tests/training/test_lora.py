"""Training adapters: the same loss and gradient as one sequence at a time, nothing else trained,
twins that share the base."""

from __future__ import annotations

import copy
import io
import random

import pytest
import torch
from adapted_models import adapted
from slow import soak

from agentevo.config import (
    AlgorithmSection,
    CriticSection,
    LoraSection,
    ProcessRewardSection,
    TrainerSection,
)
from agentevo.models.compute.attention import prepare
from agentevo.models.files.model_copy import copy_policy
from agentevo.training.trainer import Trainer
from agentevo.types import Trajectory, Turn

WHOLE_GRADIENT = TrainerSection(max_grad_norm=1e9, warmup_steps=0)
GRPO = AlgorithmSection(entropy_coef=0.01)
SECTIONS = {
    "lora": LoraSection(rank=4),
    "dora": LoraSection(rank=4, dora=True),
    "rslora-bias": LoraSection(rank=4, rslora=True, bias="all"),
    "whole": LoraSection(rank=2, targets=("q_proj", "v_proj"), modules_to_save=("down_proj",)),
}


def tree(samples_of, seed: int = 0):
    """Groups whose members share prompts and parts of answers."""
    rng = random.Random(seed)
    sequences = []
    for _ in range(3):
        prompt, common = ([rng.randrange(2, 97) for _ in range(n)] for n in (9, 4))
        sequences += [
            [
                *prompt,
                *common[: rng.randrange(5)],
                *(rng.randrange(2, 97) for _ in range(rng.randrange(2, 8))),
            ]
            for _ in range(4)
        ]

    return samples_of(sequences, group_size=4)


def attempts(num: int = 6) -> list[Trajectory]:
    rng = random.Random(3)
    found = []
    for index in range(num):
        prompt = [rng.randrange(2, 97) for _ in range(5)]
        done = [rng.randrange(2, 97) for _ in range(rng.randrange(2, 6))]
        turn = Turn(
            index=0,
            prompt_ids=prompt,
            completion_ids=done,
            logprobs=[-4.0] * len(done),
            versions=[0] * len(done),
            finish_reason="stop",
        )
        group = f"g{index // 3}"
        reward = float(index % 2)
        found.append(
            Trajectory(
                id=f"t{index}",
                task_id=group,
                group_id=group,
                turns=[turn],
                reward=reward,
                success=reward > 0,
            )
        )

    return found


def trained(model) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SECTIONS)
@pytest.mark.parametrize("name", ["llama", *soak("gemma2", "qwen2")])
def test_loss_and_gradient_are_those_of_one_sequence_at_a_time(
    name, kind, random_model, samples_of, slow_loss, gradient
):
    alone = adapted(random_model(name).alone, SECTIONS[kind], by=0.1)
    model = prepare(copy.deepcopy(alone))
    samples = tree(samples_of)
    found = []
    for tokens in (16384, 64):
        trainer = Trainer(
            copy.deepcopy(model),
            WHOLE_GRADIENT.model_copy(update={"micro_batch_tokens": tokens}),
            GRPO,
        )
        metrics = trainer.step(samples)
        assert metrics["trainer/distinct_tokens"] < metrics["trainer/logical_tokens"]
        found.append((metrics, gradient(trainer.model)))

    loss = slow_loss(alone, samples, GRPO)
    loss.backward()
    expected = gradient(alone)
    assert expected.norm() > 0.01

    for metrics, one in found:
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)
        assert metrics["actor/pg_loss"] - GRPO.entropy_coef * metrics[
            "actor/entropy"
        ] == pytest.approx(float(loss.detach()), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SECTIONS)
def test_an_update_changes_adapters_and_nothing_else(kind, random_model, samples_of):
    model = prepare(adapted(random_model("qwen2").alone, SECTIONS[kind], by=0.1))
    names = set(trained(model))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = Trainer(model, TrainerSection(learning_rate=1e-2, warmup_steps=0), GRPO)
    trainer.step(tree(samples_of))
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == names
    assert sum(
        p.numel() for group in trainer.optimization.optimizer.param_groups for p in group["params"]
    ) == sum(p.numel() for p in trained(model).values())


def test_a_twin_shares_the_base_and_has_adapters_of_its_own(random_model):
    policy = prepare(adapted(random_model("llama").alone, SECTIONS["lora"], by=0.1))
    twin = copy_policy(policy)
    for (name, ours), (_, theirs) in zip(
        twin.named_parameters(), policy.named_parameters(), strict=True
    ):
        assert (ours is theirs) == (not theirs.requires_grad), name
        assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["synced", "ema"])
def test_a_reference_that_follows_keeps_no_second_base(kind, random_model, samples_of):
    policy = prepare(adapted(random_model("llama").alone, SECTIONS["lora"], by=0.1))
    section = AlgorithmSection(kl_coef=0.1, reference=kind, reference_every=2, reference_decay=0.75)
    trainer = Trainer(policy, TrainerSection(learning_rate=1e-2, warmup_steps=0), section)
    trainer.begin()
    expected = {name: p.detach().clone() for name, p in trained(policy).items()}
    for step in (1, 2, 3):
        trainer.step(trainer.prepare(attempts()).samples)
        now = {name: p.detach().clone() for name, p in trained(policy).items()}
        if kind == "ema":
            expected = {name: 0.75 * p + 0.25 * now[name] for name, p in expected.items()}
        elif step == 2:
            expected = now

        found = trainer.state_dict()["roles"]["reference"]
        assert found.keys() == expected.keys()
        for name, weights in found.items():
            torch.testing.assert_close(weights, expected[name])

    own = {id(p) for p in trainer.roles.reference.model.parameters()} - {
        id(p) for p in policy.parameters()
    }
    assert len(own) == len(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "role", "trunk"),
    [
        ("ppo", "critic", "shared"),
        pytest.param("ppo", "critic", "own", marks=pytest.mark.soak),
        pytest.param("prime", "process_reward", "own", marks=pytest.mark.soak),
    ],
)
def test_models_beside_the_policy_train_adapters_of_their_own(preset, role, trunk, random_model):
    policy = prepare(adapted(random_model("llama").alone, SECTIONS["lora"], by=0.1))
    base = {
        name: p.detach().clone() for name, p in policy.named_parameters() if not p.requires_grad
    }
    trainer = Trainer(
        policy,
        TrainerSection(learning_rate=1e-2, warmup_steps=0),
        AlgorithmSection(name=preset),
        critic=CriticSection(trunk=trunk, learning_rate=3e-2, clip=None),
        process_reward=ProcessRewardSection(beta=0.5, learning_rate=1e-2),
    )
    trainer.begin()
    beside = getattr(trainer.roles, role)
    metrics = [
        {**(made := trainer.prepare(attempts())).metrics, **trainer.step(made.samples)}
        for _ in range(12)
    ]

    key = "critic/vf_loss" if role == "critic" else "process_reward/loss"
    assert metrics[-1][key] < 0.7 * metrics[0][key]
    assert all(torch.equal(p, base[name]) for name, p in policy.named_parameters() if name in base)

    saved = trainer.state_dict()["roles"][role]["weights"]
    if trunk == "own":
        shared = {id(p) for p in beside.model.parameters()} & {id(p) for p in policy.parameters()}
        assert len(shared) >= len(base) - 1, (
            "the base is the policy's, but for the output layer that the critic has none of"
        )

    heads = {name for name in saved if "lora_" not in name}
    assert len(heads) == (2 if role == "critic" else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        *soak(GRPO, AlgorithmSection(kl_coef=0.1), AlgorithmSection(name="ppo")),
        AlgorithmSection(name="prime"),
    ],
)
def test_a_saved_trainer_goes_on_bit_for_bit(algorithm, random_model):
    def fresh() -> Trainer:
        trainer = Trainer(
            prepare(adapted(random_model("llama").alone, SECTIONS["lora"], by=0.1)),
            TrainerSection(learning_rate=1e-2),
            algorithm,
        )
        trainer.begin()
        return trainer

    def step(one: Trainer) -> None:
        one.step(one.prepare(attempts()).samples)

    whole = fresh()
    step(whole)

    file = io.BytesIO()
    torch.save(
        (whole.state_dict(), {name: p.detach() for name, p in trained(whole.model).items()}), file
    )
    step(whole)
    file.seek(0)
    state, weights = torch.load(file, weights_only=True)
    resumed = fresh()
    with torch.no_grad():
        for name, p in trained(resumed.model).items():
            p.copy_(weights[name])

    resumed.load_state_dict(state)
    step(resumed)
    for (name, one), (_, other) in zip(
        whole.model.named_parameters(), resumed.model.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
