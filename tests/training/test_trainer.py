"""One update: what changes it and what does not."""

from __future__ import annotations

import copy
import math
import random

import msgspec
import pytest
import torch

from agentevo.config import AlgorithmSection, TrainerSection
from agentevo.errors import TrainingError
from agentevo.training.batching.packing import pack
from agentevo.training.batching.partition import split_by_tokens
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.training.optimization import learning_rate
from agentevo.training.trainer import Trainer

GRPO = AlgorithmSection()
WHOLE_GRADIENT = TrainerSection(max_grad_norm=1e9, warmup_steps=0)


def batch_of(samples_of, num_groups: int = 4, group_size: int = 4, seed: int = 0):
    """Groups that share a prompt each, with log-probs near those of a random model."""
    rng = random.Random(seed)
    sequences = []
    for _ in range(num_groups):
        prompt = [rng.randrange(2, 97) for _ in range(rng.randrange(5, 40))]
        sequences += [
            [*prompt, *(rng.randrange(2, 97) for _ in range(rng.randrange(2, 20)))]
            for _ in range(group_size)
        ]

    found = samples_of(sequences, seed=seed, group_size=group_size)
    return [
        msgspec.structs.replace(s, logprobs=[-4.5 if m else 0.0 for m in s.loss_mask])
        for s in found
    ]


@pytest.fixture
def model(random_model):
    return copy.deepcopy(random_model("llama").model)


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_tokens", [64, 100, 160])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_the_size_of_micro_batches_does_not_change_the_update(
    micro_batch_tokens, aggregation, model, samples_of, gradient
):
    samples = batch_of(samples_of)
    algorithm = GRPO.model_copy(update={"aggregation": aggregation})
    whole = copy.deepcopy(model)
    parts = copy.deepcopy(model)
    one = Trainer(whole, WHOLE_GRADIENT, algorithm).step(samples)
    other = Trainer(
        parts,
        WHOLE_GRADIENT.model_copy(update={"micro_batch_tokens": micro_batch_tokens}),
        algorithm,
    ).step(samples)
    assert float((gradient(whole) - gradient(parts)).norm() / gradient(whole).norm()) < 1e-5

    for key in (
        "actor/pg_loss",
        "actor/entropy",
        "actor/ppo_kl",
        "actor/grad_norm",
        "actor/pg_clipfrac",
        "trainer/trained_tokens",
    ):
        assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-6), key

    assert len(split_by_tokens([s.ids for s in samples], micro_batch_tokens)) > 1
    assert other["trainer/distinct_tokens"] >= one["trainer/distinct_tokens"]


@pytest.mark.slow
def test_the_order_of_samples_does_not_change_the_update(model, samples_of, gradient):
    samples = batch_of(samples_of)
    shuffled = list(samples)
    random.Random(1).shuffle(shuffled)

    one = copy.deepcopy(model)
    other = copy.deepcopy(model)
    metrics = [
        Trainer(m, WHOLE_GRADIENT.model_copy(update={"minibatches": 2}), GRPO).step(s)
        for m, s in ((one, samples), (other, shuffled))
    ]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5, abs=1e-6)
    assert float((gradient(one) - gradient(other)).norm() / gradient(one).norm()) < 1e-5


def test_the_names_of_groups_and_where_they_stand_do_not_matter(model, samples_of, gradient):
    samples = batch_of(samples_of)
    renamed = [
        msgspec.structs.replace(
            s, group_id={"g0": "z", "g1": "b", "g2": "c", "g3": "a"}[s.group_id]
        )
        for s in samples
    ]
    one = copy.deepcopy(model)
    other = copy.deepcopy(model)
    Trainer(one, WHOLE_GRADIENT, GRPO).step(samples)
    Trainer(other, WHOLE_GRADIENT, GRPO).step(renamed)
    assert float((gradient(one) - gradient(other)).norm() / gradient(one).norm()) < 1e-5


@pytest.mark.slow
def test_an_update_makes_good_tokens_likelier_and_bad_ones_less_likely(model, samples_of):
    samples = batch_of(samples_of, num_groups=1)
    samples = [
        msgspec.structs.replace(s, advantages=[1.0 if k % 2 else -1.0] * s.num_trained)
        for k, s in enumerate(samples)
    ]

    def sums() -> list[float]:
        with torch.no_grad():
            return [
                float(token_logprobs(model, pack([s], torch.device("cpu")))[0].sum())
                for s in samples
            ]

    before = sums()
    samples = [
        msgspec.structs.replace(
            s,
            logprobs=_fill(
                s.loss_mask, token_logprobs(model, pack([s], torch.device("cpu")))[0].tolist()
            ),
        )
        for s in samples
    ]
    Trainer(model, TrainerSection(learning_rate=1e-3, warmup_steps=0), GRPO).step(samples)
    assert [after > old for after, old in zip(sums(), before, strict=True)] == [
        False,
        True,
        False,
        True,
    ]


def _fill(mask: list[bool], values: list[float]) -> list[float]:
    left = iter(values)
    return [next(left) if m else 0.0 for m in mask]


@pytest.mark.slow
def test_minibatches_and_epochs_are_optimizer_steps_over_whole_groups(
    model, samples_of, monkeypatch
):
    samples = batch_of(samples_of, num_groups=5)
    trainer = Trainer(
        model, TrainerSection(minibatches=2, epochs=3, groups_per_step=5, warmup_steps=0), GRPO
    )
    seen = []
    update = Trainer._update

    def spy(self, part, passed):
        seen.append(sorted({s.group_id for s in part}))
        assert len(part) == 4 * len(seen[-1]), "groups come whole"
        return update(self, part, passed)

    monkeypatch.setattr(Trainer, "_update", spy)
    metrics = trainer.step(samples)
    assert seen == [["g0", "g2", "g4"], ["g1", "g3"]] * 3
    assert trainer.optimization.steps == 6
    assert metrics["trainer/trained_tokens"] == 3 * sum(sum(s.loss_mask) for s in samples)


def test_more_minibatches_than_groups_left_is_one_per_group(model, samples_of):
    trainer = Trainer(model, TrainerSection(minibatches=4, warmup_steps=0), GRPO)
    trainer.step(batch_of(samples_of, num_groups=2))
    assert trainer.optimization.steps == 2


def test_gradients_are_scaled_down_to_the_limit(model, samples_of, gradient):
    samples = batch_of(samples_of)
    free = copy.deepcopy(model)
    bound = copy.deepcopy(model)
    norm = Trainer(free, WHOLE_GRADIENT, GRPO).step(samples)["actor/grad_norm"]
    limited = Trainer(
        bound, WHOLE_GRADIENT.model_copy(update={"max_grad_norm": norm / 10}), GRPO
    ).step(samples)
    assert limited["actor/grad_norm"] == pytest.approx(norm, rel=1e-5), (
        "the metric is the norm before the limit"
    )
    assert float(gradient(bound).norm()) == pytest.approx(norm / 10, rel=1e-3)


@pytest.mark.parametrize(
    ("field", "value"), [("advantages", math.nan), ("advantages", math.inf), ("logprobs", math.nan)]
)
def test_what_is_not_finite_never_reaches_the_weights(field, value, model, samples_of):
    samples = batch_of(samples_of)
    bad = getattr(samples[5], field).copy()
    bad[samples[5].loss_mask if field == "logprobs" else ...] = value
    samples[5] = msgspec.structs.replace(samples[5], **{field: bad})
    before = weights(model).clone()

    trainer = Trainer(model, WHOLE_GRADIENT, GRPO)
    with pytest.raises(TrainingError, match="the weights were not changed"):
        trainer.step(samples)

    assert torch.equal(weights(model), before)
    assert trainer.optimization.steps == 0


def test_weights_that_are_not_finite_are_noticed(model, samples_of):
    with torch.no_grad():
        model.model.norm.weight[0] = math.inf
    with pytest.raises(TrainingError, match="not finite"):
        Trainer(model, WHOLE_GRADIENT, GRPO).step(batch_of(samples_of))


@pytest.mark.slow
def test_the_kl_to_the_start_is_0_at_first_and_holds_the_policy_back(model, samples_of, referred):
    samples = batch_of(samples_of)
    distances = {}
    for coefficient in (1e-9, 5.0):
        trainer = Trainer(
            copy.deepcopy(model),
            TrainerSection(learning_rate=3e-3, warmup_steps=0),
            GRPO.model_copy(update={"kl_coef": coefficient}),
        )
        trainer.begin()
        found = [trainer.step(referred(trainer, samples))["actor/kl_loss"] for _ in range(8)]
        assert found[0] == pytest.approx(0.0, abs=1e-6)
        distances[coefficient] = found[-1]

    assert distances[5.0] < 0.5 * distances[1e-9]


def test_no_reference_is_kept_without_a_kl(model):
    trainer = Trainer(model, TrainerSection(), GRPO)
    trainer.begin()
    assert trainer.roles.reference is None


def test_weight_decay_is_for_matrices_only(model):
    groups = Trainer(
        model, TrainerSection(weight_decay=0.1), GRPO
    ).optimization.optimizer.param_groups
    assert {group["weight_decay"]: {p.dim() for p in group["params"]} for group in groups} == {
        0.1: {2},
        0.0: {1},
    }
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        (
            "cosine",
            [
                0.5,
                1.0,
                1.0,
                0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)),
                0.6,
                0.2 + 0.4 * (1 + math.cos(0.75 * math.pi)),
                0.2,
            ],
        ),
    ],
)
def test_learning_rates(schedule, expected):
    section = TrainerSection(learning_rate=1.0, warmup_steps=2, schedule=schedule, min_lr_ratio=0.2)
    assert [learning_rate(section, step, 6) for step in range(7)] == pytest.approx(expected)
    assert learning_rate(section, 99, 6) == pytest.approx(expected[-1]), (
        "never below, should a run go on for longer"
    )


def test_the_learning_rate_reaches_the_optimizer(model, samples_of):
    trainer = Trainer(model, TrainerSection(learning_rate=1e-4, warmup_steps=4), GRPO)
    samples = batch_of(samples_of)
    assert [trainer.step(samples)["actor/lr"] for _ in range(3)] == pytest.approx(
        [2.5e-5, 5e-5, 7.5e-5]
    )


@pytest.mark.slow
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_trainer_that_was_saved_goes_on_bit_for_bit(
    kl_coef, model, samples_of, referred, tmp_path
):
    section = TrainerSection(learning_rate=1e-3, warmup_steps=3)
    algorithm = GRPO.model_copy(update={"kl_coef": kl_coef})
    batches = [batch_of(samples_of, seed=seed) for seed in range(4)]
    trainer = Trainer(model, section, algorithm)
    trainer.begin()

    def step(one: Trainer, samples):
        return one.step(referred(one, samples) if kl_coef else samples)

    for samples in batches[:2]:
        step(trainer, samples)

    torch.save(
        {"model": model.state_dict(), "trainer": trainer.state_dict()}, tmp_path / "saved.pt"
    )
    expected = [step(trainer, samples) for samples in batches[2:]]

    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    other = copy.deepcopy(model)
    other.load_state_dict(saved["model"])
    again = Trainer(other, section, algorithm)
    again.load_state_dict(saved["trainer"])

    assert [step(again, samples) for samples in batches[2:]] == expected
    assert torch.equal(weights(other), weights(model))


def test_metrics_of_a_step_count_what_was_trained(model, samples_of):
    samples = batch_of(samples_of)
    metrics = Trainer(model, TrainerSection(), GRPO).step(samples)
    assert metrics["trainer/trained_tokens"] == sum(sum(s.loss_mask) for s in samples)
    assert metrics["trainer/logical_tokens"] == sum(len(s.ids) for s in samples)
    assert metrics["trainer/distinct_tokens"] < metrics["trainer/logical_tokens"]
    assert 0 < metrics["actor/entropy"] < math.log(97)
    assert 0 <= metrics["actor/pg_clipfrac"] <= 1


@pytest.mark.slow
def test_the_entropy_bonus_fades_towards_its_target(model, samples_of):
    """No bonus before the entropy is known, then by how far it lies below the target, and none
    above it."""
    samples = batch_of(samples_of)
    section = GRPO.model_copy(update={"entropy_coef": 0.2, "entropy_target": 6.0})
    trainer = Trainer(model, WHOLE_GRADIENT, section)
    first = trainer.step(samples)
    second = trainer.step(samples)

    assert first["actor/entropy_coef"] == 0
    assert 0 < first["actor/entropy"] < 6.0, "else there would be nothing to see"
    assert second["actor/entropy_coef"] == pytest.approx(
        0.2 * (1 - first["actor/entropy"] / 6.0), rel=1e-5
    )

    resumed = Trainer(model, WHOLE_GRADIENT, section)
    resumed.load_state_dict(trainer.state_dict())
    assert resumed.step(samples)["actor/entropy_coef"] == pytest.approx(
        0.2 * (1 - second["actor/entropy"] / 6.0), rel=1e-5
    )

    low = Trainer(model, WHOLE_GRADIENT, section.model_copy(update={"entropy_target": 0.1}))
    low.step(samples)
    assert low.step(samples)["actor/entropy_coef"] == 0


def test_the_entropy_bonus_raises_the_entropy(model, samples_of):
    """Nothing but the bonus moves the weights here."""
    samples = [
        msgspec.structs.replace(s, advantages=[0.0] * len(s.advantages))
        for s in batch_of(samples_of)
    ]
    trainer = Trainer(
        model,
        WHOLE_GRADIENT.model_copy(update={"learning_rate": 1e-3}),
        GRPO.model_copy(update={"entropy_coef": 0.1}),
    )
    found = [trainer.step(samples) for _ in range(3)]
    assert found[0]["actor/entropy"] < found[1]["actor/entropy"] < found[2]["actor/entropy"]
    assert found[0]["actor/entropy_coef"] == 0.1
