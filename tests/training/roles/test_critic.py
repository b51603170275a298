"""The critic: what it values, what its update changes, and how it shares the policy's trunk."""

from __future__ import annotations

import copy
import random

import msgspec
import pytest
import torch

from agentevo.config import AlgorithmSection, CriticSection, TrainerSection
from agentevo.training.batching.packing import pack
from agentevo.training.batching.partition import split_by_tokens
from agentevo.training.roles.critic import Critic
from agentevo.training.trainer import Trainer
from agentevo.types import Trajectory, Turn

WHOLE_GRADIENT = TrainerSection(max_grad_norm=1e9, warmup_steps=0)
PPO = AlgorithmSection(name="ppo")
ARCHITECTURES = ["llama", "qwen2", "gemma2", "lfm2"]


def with_random_head(critic: Critic) -> torch.Tensor:
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(5))
    return critic.head.weight.detach()[0]


def valued(samples, seed: int = 0):
    rng = random.Random(seed)
    columns = ("values", "returns")
    return [
        msgspec.structs.replace(
            s, columns={name: [rng.gauss(0, 1) for m in s.loss_mask if m] for name in columns}
        )
        for s in samples
    ]


@pytest.fixture
def batch(samples_of):
    rng = random.Random(1)
    prompts = [[rng.randrange(2, 97) for _ in range(9)] for _ in range(3)]
    return valued(
        samples_of(
            [
                [*p, *(rng.randrange(2, 97) for _ in range(rng.randrange(2, 12)))]
                for p in prompts
                for _ in range(3)
            ]
        )
    )


@pytest.mark.parametrize("trunk", ["own", "shared"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_value_is_read_from_the_state_before_the_token(name, trunk, random_model, batch):
    """Against transformers' own hidden states, one sequence at a time."""
    one = copy.deepcopy(random_model(name))
    critic = Critic(one.model, CriticSection(trunk=trunk), WHOLE_GRADIENT)
    packed = pack(batch, torch.device("cpu"))
    assert not critic.values(packed).any(), "nothing is learnt yet"

    weight = with_random_head(critic)
    expected = []
    for sample in batch:
        with torch.no_grad():
            hidden = one.alone.model(
                input_ids=torch.tensor([sample.ids]), use_cache=False
            ).last_hidden_state[0]
        expected += [
            float(hidden[place - 1] @ weight) for place, m in enumerate(sample.loss_mask) if m
        ]

    torch.testing.assert_close(
        critic.values(packed).detach(), torch.tensor(expected), rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_an_update_of_the_critic_leaves_the_policy_alone_and_nears_the_returns(
    trunk, random_model, batch
):
    policy = copy.deepcopy(random_model("llama").model)
    before = [p.detach().clone() for p in policy.parameters()]
    critic = Critic(
        policy,
        CriticSection(trunk=trunk, learning_rate=1e-2, clip=None),
        TrainerSection(warmup_steps=0),
    )
    packed = [pack(batch, torch.device("cpu"))]
    losses = [critic.update(packed)["critic/vf_loss"] for _ in range(30)]
    assert losses[-1] < (0.5 if trunk == "own" else 0.9) * losses[0]
    assert all(torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))


@pytest.mark.slow
def test_a_shared_trunk_gets_both_gradients(random_model, batch, gradient, slow_loss):
    one = copy.deepcopy(random_model("llama"))
    section = CriticSection(trunk="shared", coef=0.7, clip=0.2)
    trainer = Trainer(one.model, WHOLE_GRADIENT, PPO, critic=section)
    trainer.begin()
    weight = with_random_head(trainer.roles.critic).clone()
    loss = slow_loss(one.alone, batch, PPO)

    values = []
    wanted = []
    old = []
    for sample in batch:
        hidden = one.alone.model(
            input_ids=torch.tensor([sample.ids]), use_cache=False
        ).last_hidden_state[0]
        values += [hidden[place - 1] @ weight for place, m in enumerate(sample.loss_mask) if m]
        wanted += sample.columns["returns"].tolist()
        old += sample.columns["values"].tolist()

    found = torch.stack(values)
    target = torch.tensor(wanted)
    before = torch.tensor(old)
    clipped = before + (found - before).clamp(-0.2, 0.2)
    value_loss = 0.5 * torch.maximum((found - target) ** 2, (clipped - target) ** 2).mean()
    (loss + 0.7 * value_loss).backward()

    metrics = trainer.step(batch)
    expected = gradient(one.alone)
    assert float((gradient(one.model) - expected).norm() / expected.norm()) < 1e-4
    assert metrics["critic/vf_loss"] == pytest.approx(float(value_loss.detach()), rel=1e-4)


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_the_size_of_micro_batches_does_not_matter(trunk, random_model, batch, gradient):
    policies = [copy.deepcopy(random_model("llama").model) for _ in range(2)]
    found = []
    for policy, tokens in zip(policies, (16384, 64), strict=True):
        section = WHOLE_GRADIENT.model_copy(update={"micro_batch_tokens": tokens})
        trainer = Trainer(policy, section, PPO, critic=CriticSection(trunk=trunk))
        trainer.begin()
        with_random_head(trainer.roles.critic)
        metrics = trainer.step(batch)
        found.append((torch.cat([gradient(policy), gradient(trainer.roles.critic.head)]), metrics))

    (one, whole), (other, parts) = found
    assert float((one - other).norm() / one.norm()) < 1e-4
    assert len(split_by_tokens([s.ids for s in batch], 64)) > 1

    for key in ("critic/vf_loss", "critic/vf_clipfrac", "critic/value_mean", "critic/grad_norm"):
        assert parts[key] == pytest.approx(whole[key], rel=1e-4, abs=1e-6), key


def attempts() -> list[Trajectory]:
    """Two groups of two attempts of two turns each, some rewarded."""
    rng = random.Random(2)
    found = []
    for number in range(4):
        turns = [
            Turn(
                index=index,
                parent=index - 1 if index else None,
                prompt_ids=[rng.randrange(2, 97) for _ in range(3)],
                completion_ids=[rng.randrange(2, 97) for _ in range(3)],
                logprobs=[-4.5] * 3,
                versions=[0] * 3,
                finish_reason="stop",
                reward=float(number % 2) if index else 0.0,
            )
            for index in range(2)
        ]
        found.append(
            Trajectory(
                id=f"t{number}",
                task_id=f"q{number // 2}",
                group_id=f"g{number // 2}",
                reward=float(number % 2),
                turns=turns,
            )
        )

    return found


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_pretraining_teaches_the_critic_alone_and_from_plain_returns(trunk, random_model):
    policy = copy.deepcopy(random_model("llama").model)
    section = TrainerSection(learning_rate=1e-3, warmup_steps=0)
    trainer = Trainer(
        policy,
        section,
        AlgorithmSection(name="ppo", lam=0.0, gamma=0.5),
        critic=CriticSection(trunk=trunk, pretrain_steps=2, learning_rate=1e-2),
    )
    trainer.begin()
    with_random_head(trainer.roles.critic)

    before = [p.detach().clone() for p in policy.parameters()]
    for step in range(3):
        samples = trainer.prepare(attempts()).samples
        returns = samples[1].columns["returns"]
        plain = [0.5**k for k in range(5, -1, -1)]
        if step < 2:
            assert returns == pytest.approx(plain)
        else:
            assert returns != pytest.approx(plain, abs=1e-3), "lambda 0 trusts the critic again"

        metrics = trainer.step(samples)
        changed = any(
            not torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True)
        )
        assert changed == (step == 2)
        assert ("actor/pg_loss" in metrics) == (step == 2)
        assert metrics["critic/vf_loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_a_trainer_with_a_critic_goes_on_bit_for_bit(trunk, random_model, tmp_path):
    policy = copy.deepcopy(random_model("llama").model)
    section = TrainerSection(learning_rate=1e-3, warmup_steps=0)
    critic = CriticSection(trunk=trunk, learning_rate=1e-2)
    trainer = Trainer(policy, section, PPO, critic=critic)
    trainer.begin()

    def step(one: Trainer) -> dict[str, float]:
        prepared = one.prepare(attempts())
        return prepared.metrics | one.step(prepared.samples)

    step(trainer)
    torch.save(
        {"model": policy.state_dict(), "trainer": trainer.state_dict()}, tmp_path / "saved.pt"
    )

    expected = [step(trainer) for _ in range(2)]
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    other = copy.deepcopy(random_model("llama").model)
    other.load_state_dict(saved["model"])
    again = Trainer(other, section, PPO, critic=critic)
    again.load_state_dict(saved["trainer"])
    assert [step(again) for _ in range(2)] == expected
