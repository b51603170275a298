"""Every algorithm through the trainer: the update does not depend on how the minibatch is split,
and the reference moves as it is told."""

from __future__ import annotations

import copy
import random

import msgspec
import pytest
import torch

from agentevo.algorithms.entries import FUNCTION
from agentevo.algorithms.losses import POLICY_LOSSES, required_aggregation
from agentevo.algorithms.presets import POLICY_PRESETS, resolve_preset
from agentevo.config import AlgorithmSection, TrainerSection
from agentevo.models.compute.attention import prepare
from agentevo.training.batching.packing import pack
from agentevo.training.policy_loss import MinibatchLoss
from agentevo.training.trainer import Trainer

WHOLE_GRADIENT = TrainerSection(max_grad_norm=1e9, warmup_steps=0)
MUST_BE_GIVEN = {"dro": {"beta": 0.5}}
LOSSES = [name for name in POLICY_LOSSES if name != FUNCTION]
HALF = slice(8)
REST = slice(8, None)


@pytest.fixture
def model(random_model):
    return copy.deepcopy(random_model("llama").model)


@pytest.fixture
def batch(samples_of):
    """Four groups of four; advantages of their own, the rollout's log-probs are others than the
    recomputed ones."""
    rng = random.Random(3)
    prompts = [[rng.randrange(2, 97) for _ in range(rng.randrange(5, 30))] for _ in range(4)]
    sequences = [
        [*prompt, *(rng.randrange(2, 97) for _ in range(rng.randrange(2, 20)))]
        for prompt in prompts
        for _ in range(4)
    ]

    return [
        msgspec.structs.replace(
            s,
            logprobs=[rng.uniform(-6, -3) if m else 0.0 for m in s.loss_mask],
            columns={"old_logp": [rng.uniform(-6, -3) for m in s.loss_mask if m]},
        )
        for s in samples_of(sequences, seed=3, group_size=4)
    ]


def section_for(loss: str) -> AlgorithmSection:
    hyper = MUST_BE_GIVEN.get(loss, {})
    defaults = {one.name: one.default for one in POLICY_LOSSES[loss].hyper} | hyper
    return AlgorithmSection(
        policy_loss=loss, aggregation=required_aggregation(loss, defaults) or "token-mean", **hyper
    )


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_the_size_of_micro_batches_does_not_change_the_update(loss, model, batch, gradient):
    """Also for losses that choose tokens by statistics of the whole minibatch."""
    whole = copy.deepcopy(model)
    parts = copy.deepcopy(model)
    one = Trainer(whole, WHOLE_GRADIENT, section_for(loss)).step(batch)
    other = Trainer(
        parts, WHOLE_GRADIENT.model_copy(update={"micro_batch_tokens": 64}), section_for(loss)
    ).step(batch)

    assert float(gradient(whole).norm()) > 0
    assert float((gradient(whole) - gradient(parts)).norm() / gradient(whole).norm()) < 1e-4
    assert one["actor/pg_loss"] == pytest.approx(other["actor/pg_loss"], rel=1e-4, abs=1e-6)
    assert other["trainer/distinct_tokens"] > one["trainer/distinct_tokens"], (
        "several micro-batches were made"
    )


@pytest.mark.slow
def test_losses_differ(model, batch, gradient):
    """No two of them are the same thing under two names, but for GPG, which is REINFORCE's."""
    found = {}
    for loss in LOSSES:
        policy = copy.deepcopy(model)
        Trainer(policy, WHOLE_GRADIENT, section_for(loss)).step(batch)
        found[loss] = gradient(policy)

    same = {
        (a, b)
        for a in LOSSES
        for b in LOSSES
        if a < b and torch.allclose(found[a], found[b], rtol=1e-4, atol=1e-7)
    }
    assert same == {("gpg", "reinforce")}


@pytest.mark.parametrize("name", POLICY_PRESETS)
def test_every_preset_makes_an_update(name, model, batch):
    before = [p.detach().clone() for p in model.parameters()]
    metrics = Trainer(
        model, TrainerSection(learning_rate=1e-3, warmup_steps=0), AlgorithmSection(name=name)
    ).step(batch)
    assert any(
        not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)
    )
    assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
    assert resolve_preset(name, {}).policy_loss in LOSSES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "expected"), [("frozen", [0, 0, 0, 0]), ("synced", [0, 2, 2, 4]), ("ema", None)]
)
def test_the_reference_moves_as_it_is_told(mode, expected, model, batch, referred):
    section = AlgorithmSection(
        kl_coef=0.01, reference=mode, reference_every=2, reference_decay=0.75
    )
    trainer = Trainer(model, TrainerSection(learning_rate=1e-2, warmup_steps=0), section)
    trainer.begin()
    weight = model.model.layers[0].mlp.up_proj.weight
    seen = [weight.detach().clone()]
    average = weight.detach().clone()
    for step in range(4):
        trainer.step(referred(trainer, batch))
        seen.append(weight.detach().clone())
        average = 0.75 * average + 0.25 * weight.detach()
        wanted = average if expected is None else seen[expected[step]]
        torch.testing.assert_close(
            trainer.roles.reference.model.model.layers[0].mlp.up_proj.weight,
            wanted,
            rtol=1e-5,
            atol=1e-6,
        )


@pytest.mark.slow
def test_the_weight_of_the_kl_steers_towards_its_target_and_survives_a_restart(
    model, batch, referred
):
    section = AlgorithmSection(kl_coef=0.01, kl_target=1e-6, kl_horizon=len(batch))
    trainer = Trainer(model, TrainerSection(learning_rate=1e-2, warmup_steps=0), section)
    trainer.begin()
    used = [trainer.step(referred(trainer, batch))["actor/kl_coef"] for _ in range(3)]
    assert used == pytest.approx([0.01, 0.01 * 0.8, 0.01 * 0.8 * 1.2]), (
        "no KL at first, then more than the target"
    )

    again = Trainer(
        copy.deepcopy(model), TrainerSection(learning_rate=1e-2, warmup_steps=0), section
    )
    again.load_state_dict(trainer.state_dict())
    found = [one.step(referred(one, batch))["actor/kl_coef"] for one in (again, trainer)]
    assert found == pytest.approx([used[-1] * 1.2] * 2)


@pytest.mark.slow
def test_importance_weights_decay_with_the_age_of_a_token(model, batch):
    """Tokens of age a count for 1 / (1 + a)^2, fresh ones and those without an age fully."""
    keys = {"name": "grpo", "importance": "token_tis", "old_logprobs": "recomputed"}
    plain = MinibatchLoss(AlgorithmSection(**keys))
    decaying = MinibatchLoss(AlgorithmSection(**keys, importance_age_power=2.0))
    prepared = prepare(model)

    def loss(of, samples, weights):
        packed = pack(samples, torch.device("cpu"))
        return of.loss(prepared, packed, weights, kl_coef=0.0, entropy_coef=0.0, statistics={})

    def aged(age):
        return [
            msgspec.structs.replace(s, columns={**s.columns, "age": [age] * s.num_trained})
            for s in batch
        ]

    weights = plain.row_weights(batch)
    whole, measured = loss(plain, batch, weights)
    assert abs(float(whole.detach())) > 1e-4

    for age, share in ((0, 1.0), (1, 1 / 4), (3, 1 / 16)):
        found, metrics = loss(decaying, aged(age), weights)
        torch.testing.assert_close(found, whole * share)
        assert metrics["actor/rollout_is_mean"] == pytest.approx(
            measured["actor/rollout_is_mean"] * share
        )

    torch.testing.assert_close(loss(decaying, batch, weights)[0], whole)
    mixed, _ = loss(decaying, [*aged(0)[:8], *aged(1)[8:]], weights)
    first, second = (loss(plain, batch[part], weights[part])[0] for part in (HALF, REST))
    torch.testing.assert_close(mixed, first + second / 4)
