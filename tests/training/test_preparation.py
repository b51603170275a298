"""What is computed before an update: rewards of every kind, log-probs again, references; each
against numbers worked out beside it."""

from __future__ import annotations

import copy
import random
from itertools import repeat

import msgspec
import pytest
import torch
from aged_attempts import conversation
from by_name import advantage
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForTokenClassification

from agentevo.config import (
    AlgorithmSection,
    ProcessRewardSection,
    RewardModelSection,
    TrainerSection,
)
from agentevo.errors import TrainingError
from agentevo.models.compute.attention import prepare
from agentevo.training.batching import passes
from agentevo.training.batching.packing import pack
from agentevo.training.roles.token_rewards import TokenRewardModel
from agentevo.training.trainer import Trainer
from agentevo.types import Trajectory, Turn

STILL = TrainerSection(learning_rate=1e-12, warmup_steps=0)


def attempts(count: int = 6, group_size: int = 3, **fields) -> list[Trajectory]:
    """Conversations of two turns that share a prompt within their group; every second one
    succeeds."""
    rng = random.Random(4)
    prompts = [[rng.randrange(2, 97) for _ in range(8)] for _ in range(count)]
    trajectories = []
    for number in range(count):
        sizes = (rng.randrange(1, 5) for _ in range(2))
        turns = conversation(rng, prompts[number // group_size], sizes, repeat(0))
        reward = float(number % 2)
        group = f"{number // group_size}"
        trajectories.append(
            Trajectory(
                id=f"t{number}",
                task_id=f"q{group}",
                group_id=f"g{group}",
                reward=reward,
                success=reward > 0,
                turns=turns,
                **fields,
            )
        )

    return trajectories


def moved(model):
    """Another policy of the same shape."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    return other


def logprobs_of(one, trajectory: Trajectory) -> list[float]:
    """Of every token that was chosen, by transformers' own model."""
    ids = [*trajectory.context_ids(1), *trajectory.turns[1].completion_ids]
    first = len(trajectory.turns[0].prompt_ids)
    places = [first + k for k in range(len(trajectory.turns[0].completion_ids))]
    places += [
        len(ids) - len(trajectory.turns[1].completion_ids) + k
        for k in range(len(trajectory.turns[1].completion_ids))
    ]

    with torch.no_grad():
        rows = torch.log_softmax(one(input_ids=torch.tensor([ids]), use_cache=False).logits[0], -1)

    return [float(rows[place - 1, ids[place]]) for place in places]


def trained(sample) -> list[float]:
    return list(sample.advantages)


@pytest.mark.parametrize("estimate", ["k1", "k3"])
def test_a_kl_in_the_reward_is_paid_token_by_token(estimate, random_model):
    one = copy.deepcopy(random_model("llama"))
    section = AlgorithmSection(name="reinforce_pp", kl_coef=0.3, kl_in="reward", kl=estimate)
    trainer = Trainer(one.model, STILL, section)
    trainer.begin()
    made = trainer.prepare(attempts())

    rewards = torch.zeros(6, 8)
    mask = torch.zeros(6, 8)
    distances = []
    for row, trajectory in enumerate(attempts()):
        for place, (ours, theirs) in enumerate(
            zip(
                [x for turn in trajectory.turns for x in turn.logprobs],
                logprobs_of(one.alone, trajectory),
                strict=True,
            )
        ):
            d = ours - theirs
            distances.append(d if estimate == "k1" else torch.expm1(torch.tensor(-d)).item() + d)
            rewards[row, place] = -0.3 * distances[-1]
            mask[row, place] = 1

        rewards[row, int(mask[row].sum()) - 1] += trajectory.reward

    expected, _ = advantage(
        "reinforce_pp", token_rewards=rewards, mask=mask, group_ids=list("aaabbb")
    )
    for row, sample in enumerate(made.samples):
        assert trained(sample) == pytest.approx(
            expected[row, : int(mask[row].sum())].tolist(), abs=1e-4
        )

    assert made.metrics["actor/reward_kl"] == pytest.approx(
        sum(distances) / len(distances), rel=1e-4
    )
    assert made.metrics["actor/kl_coef"] == 0.3
    assert "actor/kl_loss" not in trainer.step(made.samples)

    earned = [trajectory.reward for trajectory in attempts()]
    net = (sum(earned) - 0.3 * sum(distances)) / len(earned)
    assert made.metrics["critic/rewards/mean"] == pytest.approx(net, rel=1e-4)

    in_loss = Trainer(one.model, STILL, section.model_copy(update={"kl_in": "loss"}))
    in_loss.begin()
    measured = in_loss.prepare(attempts()).metrics
    assert measured["critic/rewards/mean"] == pytest.approx(net, rel=1e-4)
    assert "actor/reward_kl" not in measured


def test_what_was_read_is_trained_at_the_trainers_own_log_probs(random_model):
    """The ratio of a token that nobody drew is 1 before the update, as that of all others."""
    one = copy.deepcopy(random_model("llama"))
    section = AlgorithmSection(old_logprobs="recomputed", train_observations=True)
    trainer = Trainer(one.model, STILL, section)
    trainer.begin()
    made = trainer.prepare(attempts())
    for sample, trajectory in zip(made.samples, attempts(), strict=True):
        read = sum(len(turn.prompt_ids) for turn in trajectory.turns[1:])
        drawn = sum(len(turn.completion_ids) for turn in trajectory.turns)
        assert sample.num_trained == read + drawn and read > 0
        wide = set(sample.advantages.tolist())
        assert len(wide) == 1 and wide != {0.0}
        gap = sample.columns["old_logp"] - sample.logprobs[sample.loss_mask]
        assert sum(gap == 0) >= read

    metrics = trainer.step(made.samples)
    assert metrics["actor/ppo_kl_first"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["trainer/trained_tokens"] == sum(s.num_trained for s in made.samples)


def test_log_probs_are_computed_again_and_weighed_against_the_rollouts(random_model):
    one = copy.deepcopy(random_model("llama"))
    section = AlgorithmSection(
        old_logprobs="recomputed", importance="token_tis", importance_cap=1.5
    )
    trainer = Trainer(one.model, STILL, section)
    trainer.begin()
    made = trainer.prepare(attempts())
    gaps = []
    for sample, trajectory in zip(made.samples, attempts(), strict=True):
        again = logprobs_of(one.alone, trajectory)
        assert sample.columns["old_logp"] == pytest.approx(again, abs=1e-4)
        gaps += [
            new - old
            for new, old in zip(
                again, [x for turn in trajectory.turns for x in turn.logprobs], strict=True
            )
        ]

    gap = torch.tensor(gaps)
    assert made.metrics["rollout/logprob_gap_mean"] == pytest.approx(float(gap.mean()), abs=1e-4)
    assert made.metrics["rollout/logprob_gap_max"] == pytest.approx(
        float(gap.abs().max()), abs=1e-4
    )

    metrics = trainer.step(made.samples)
    weights = gap.exp().clamp(max=1.5)
    assert metrics["actor/rollout_is_mean"] == pytest.approx(float(weights.mean()), rel=1e-4)
    assert metrics["actor/ess"] == pytest.approx(
        float(weights.sum() ** 2 / (weights**2).sum() / len(weights)), rel=1e-4
    )
    assert metrics["actor/ppo_kl_first"] == pytest.approx(0.0, abs=1e-5), (
        "the ratio is against what was recomputed"
    )


def test_the_proximal_policy_is_the_one_at_the_start_of_the_step(random_model):
    """Decoupled PPO on stale tokens: its ratio starts at 1, its weight is that of the newest policy
    over the one that sampled."""
    one = copy.deepcopy(random_model("llama"))
    trainer = Trainer(one.model, STILL, AlgorithmSection(name="decoupled_ppo", cap=100.0))
    trainer.begin()
    made = trainer.prepare(attempts())
    metrics = trainer.step(made.samples)
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-5)

    loss = 0.0
    count = 0
    for sample, trajectory in zip(made.samples, attempts(), strict=True):
        old = [x for turn in trajectory.turns for x in turn.logprobs]
        for a, new, before in zip(
            trained(sample), logprobs_of(one.alone, trajectory), old, strict=True
        ):
            loss -= a * min(torch.tensor(new - before).exp().item(), 100.0)
            count += 1

    assert metrics["actor/pg_loss"] == pytest.approx(loss / count, rel=1e-3)


def test_remax_compares_with_the_greedy_attempt(random_model):
    trainer = Trainer(
        copy.deepcopy(random_model("llama").model), STILL, AlgorithmSection(advantage="remax")
    )
    trainer.begin()
    samples = trainer.prepare(attempts(), {"q0": 0.25, "q1": 1.0}).samples
    assert [trained(sample)[0] for sample in samples] == pytest.approx(
        [-0.25, 0.75, -0.25, 0.0, -1.0, 0.0]
    )


def test_gdpo_normalises_each_part_of_the_reward(random_model):
    trainer = Trainer(
        copy.deepcopy(random_model("llama").model),
        STILL,
        AlgorithmSection(advantage="gdpo", whiten=False, reward_weights={"short": 0.5}),
    )
    trainer.begin()
    parted = [
        msgspec.structs.replace(
            t, reward_parts={"right": t.reward, "short": float(n)} if n % 2 else {"right": t.reward}
        )
        for n, t in enumerate(attempts())
    ]
    samples = trainer.prepare(parted).samples
    mask = torch.ones(6, 1)
    expected, _ = advantage(
        "gdpo",
        token_rewards=torch.zeros(6, 1),
        mask=mask,
        group_ids=list("aaabbb"),
        reward_parts={
            "right": torch.tensor([0.0, 1, 0, 1, 0, 1]),
            "short": torch.tensor([0.0, 1, 0, 3, 0, 5]),
        },
        reward_weights={"right": 1.0, "short": 0.5},
        whiten=False,
    )
    assert [trained(sample)[0] for sample in samples] == pytest.approx(
        expected[:, 0].tolist(), abs=1e-5
    )

    with pytest.raises(TrainingError, match="trajectory t0 has a reward without parts"):
        trainer.prepare(attempts())


def test_otb_gets_probabilities_and_their_squares(random_model):
    one = copy.deepcopy(random_model("llama"))
    trainer = Trainer(one.model, STILL, AlgorithmSection(advantage="otb"))
    trainer.begin()
    flat = [msgspec.structs.replace(t, turns=t.turns[:1]) for t in attempts()]
    samples = trainer.prepare(flat).samples
    width = max(len(t.turns[0].completion_ids) for t in flat)
    logp, squares, mask, rewards = (torch.zeros(6, width) for _ in range(4))
    for row, t in enumerate(flat):
        ids = [*t.turns[0].prompt_ids, *t.turns[0].completion_ids]
        first = len(t.turns[0].prompt_ids)
        with torch.no_grad():
            table = torch.log_softmax(
                one.alone(input_ids=torch.tensor([ids]), use_cache=False).logits[0], -1
            )

        for k, token in enumerate(t.turns[0].completion_ids):
            logp[row, k] = table[first + k - 1, token]
            squares[row, k] = (2 * table[first + k - 1]).exp().sum()
            mask[row, k] = 1

        rewards[row, len(t.turns[0].completion_ids) - 1] = t.reward

    expected, _ = advantage(
        "otb",
        token_rewards=rewards,
        mask=mask,
        group_ids=list("aaabbb"),
        logp=logp,
        sum_pi_squared=squares,
    )
    for row, sample in enumerate(samples):
        assert trained(sample) == pytest.approx(
            expected[row, : int(mask[row].sum())].tolist(), abs=1e-4
        )
        assert sample.columns == {}, "only what the update needs goes on"


@pytest.mark.parametrize("at", ["all", "last"])
def test_a_reward_model_scores_tokens_in_their_context(at, random_model):
    shape = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    alone = LlamaForTokenClassification(
        LlamaConfig(**shape, num_labels=1, initializer_range=0.5)
    ).eval()
    judge = TokenRewardModel(
        prepare(copy.deepcopy(alone)), RewardModelSection(name="judge", coef=0.5, at=at)
    )
    trainer = Trainer(
        copy.deepcopy(random_model("llama").model),
        STILL,
        AlgorithmSection(name="reinforce_pp"),
        reward_model=judge,
    )
    trainer.begin()
    made = trainer.prepare(attempts())

    rewards = torch.zeros(6, 8)
    mask = torch.zeros(6, 8)
    for row, trajectory in enumerate(attempts()):
        ids = [*trajectory.context_ids(1), *trajectory.turns[1].completion_ids]
        first, last = (len(turn.completion_ids) for turn in trajectory.turns)
        start = len(trajectory.turns[0].prompt_ids)
        places = [*range(start, start + first), *range(len(ids) - last, len(ids))]

        with torch.no_grad():
            scores = alone(input_ids=torch.tensor([ids])).logits[0, :, 0]

        for k, place in enumerate(places):
            mask[row, k] = 1
            rewards[row, k] = (
                0.5 * float(scores[place]) if at == "all" or k == len(places) - 1 else 0.0
            )

        rewards[row, len(places) - 1] += trajectory.reward

    expected, _ = advantage(
        "reinforce_pp", token_rewards=rewards, mask=mask, group_ids=list("aaabbb")
    )
    for row, sample in enumerate(made.samples):
        assert trained(sample) == pytest.approx(
            expected[row, : int(mask[row].sum())].tolist(), abs=1e-4
        )


def test_the_reference_of_a_policy_with_adapters_is_what_they_were_at_the_start(random_model):
    base = copy.deepcopy(random_model("llama"))
    policy = get_peft_model(base.model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trainer = Trainer(policy, STILL, AlgorithmSection(kl_coef=0.1))
    trainer.begin()

    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for name in trained:
            policy.get_parameter(name).add_(0.3)

    samples = trainer.prepare(attempts()).samples
    for sample, trajectory in zip(samples, attempts(), strict=True):
        assert sample.columns["ref_logp"] == pytest.approx(
            logprobs_of(base.alone, trajectory), abs=1e-4
        )

    assert trainer.step(samples)["actor/kl_loss"] > 1e-4, "the adapters do change the policy"

    copied = {
        name
        for name, p in trainer.roles.reference.model.named_parameters()
        if p is not policy.get_parameter(name)
    }
    assert copied == trained == set(trainer.state_dict()["roles"]["reference"]), (
        "the base is not copied"
    )


def test_the_base_under_the_adapters_can_be_the_reference(random_model):
    base = copy.deepcopy(random_model("llama"))
    policy = get_peft_model(
        base.model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    trainer = Trainer(policy, STILL, AlgorithmSection(kl_coef=0.1, reference="base"))
    trainer.begin()
    samples = trainer.prepare(attempts()).samples
    for sample, trajectory in zip(samples, attempts(), strict=True):
        assert sample.columns["ref_logp"] == pytest.approx(
            logprobs_of(base.alone, trajectory), abs=1e-4
        )

    assert trainer.step(samples)["actor/kl_loss"] > 1e-4, "the adapters do change the policy"
    assert trainer.roles.reference.model is policy, "no copy is kept"
    assert trainer.state_dict()["roles"]["reference"] == {}

    with pytest.raises(TrainingError, match="set reference=frozen"):
        Trainer(
            copy.deepcopy(random_model("llama").model),
            STILL,
            AlgorithmSection(kl_coef=0.1, reference="base"),
        ).begin()


@pytest.mark.slow
def test_process_rewards_are_learnt_from_outcomes(random_model):
    """First r = 0 everywhere; then phi tells success from failure, and its gradient is that of the
    cross-entropy."""
    one = copy.deepcopy(random_model("llama"))
    process = ProcessRewardSection(beta=0.5, learning_rate=1e-2)
    trainer = Trainer(one.model, STILL, AlgorithmSection(name="prime"), process_reward=process)
    trainer.begin()
    metrics = [trainer.prepare(attempts()).metrics for _ in range(12)]
    assert metrics[0]["process_reward/loss"] == pytest.approx(
        torch.log(torch.tensor(2.0)).item(), rel=1e-4
    )
    assert metrics[-1]["process_reward/loss"] < 0.3
    assert metrics[-1]["process_reward/accuracy"] == 1.0


@pytest.mark.slow
def test_the_gradient_of_the_process_reward_is_exact_in_any_split(random_model, gradient):
    one = copy.deepcopy(random_model("llama"))
    found = []
    for tokens in (16384, 64):
        trainer = Trainer(
            moved(one.model),
            TrainerSection(micro_batch_tokens=tokens, max_grad_norm=1e9, warmup_steps=0),
            AlgorithmSection(name="prime"),
            process_reward=ProcessRewardSection(beta=0.5, learning_rate=1e-12),
        )
        trainer.begin()
        trainer.roles.reference.model = one.model
        trainer.prepare(attempts())
        found.append(gradient(trainer.roles.process_reward.model))

    alone = moved(one.alone)
    loss = torch.zeros(())
    for trajectory in attempts():
        ids = torch.tensor([[*trajectory.context_ids(1), *trajectory.turns[1].completion_ids]])
        start = len(trajectory.turns[0].prompt_ids)
        (first, last) = (len(turn.completion_ids) for turn in trajectory.turns)
        places = torch.tensor(
            [*range(start, start + first), *range(ids.shape[1] - last, ids.shape[1])]
        )
        rows = torch.log_softmax(alone(input_ids=ids, use_cache=False).logits[0], -1)
        logit = 0.5 * (
            rows[places - 1, ids[0, places]].sum() - sum(logprobs_of(one.alone, trajectory))
        )
        loss = loss - torch.nn.functional.logsigmoid(logit if trajectory.success else -logit) / 6

    loss.backward()
    expected = gradient(alone)
    for got in found:
        assert float((got - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize(("bound", "is_packed_again"), [(None, False), (0, True)])
def test_a_step_is_packed_once_unless_tokens_are_left_out(
    bound, is_packed_again, random_model, monkeypatch
):
    """The update is that of samples which were packed for it alone."""
    num_packed = []

    def counted(samples, device, **how):
        num_packed.append(len(samples))
        return pack(samples, device, **how)

    monkeypatch.setattr(passes, "pack", counted)
    new = [msgspec.structs.replace(t, turns=_turns_of_version_1(t)) for t in attempts()]
    first = attempts()[0].turns[0]
    new[0] = msgspec.structs.replace(new[0], turns=[first, *new[0].turns[1:]])
    section = AlgorithmSection(old_logprobs="recomputed")
    metrics = []
    for is_cleared in (False, True):
        trainer = Trainer(copy.deepcopy(random_model("llama").model), STILL, section)
        trainer.begin()
        made = trainer.prepare(new, version=1, bound=bound)
        if is_cleared:
            trainer.packed.clear()
        num_packed.clear()
        metrics.append(trainer.step(made.samples))
        assert bool(num_packed) is (is_cleared or is_packed_again)

    assert metrics[0] == metrics[1]


def _turns_of_version_1(trajectory: Trajectory) -> list[Turn]:
    return [
        msgspec.structs.replace(turn, versions=[1] * len(turn.versions))
        for turn in trajectory.turns
    ]
