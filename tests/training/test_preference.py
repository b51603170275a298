"""An update by comparing answers against the papers' formulas, one whole sequence and one pair at a
time."""

from __future__ import annotations

import copy
import io
import math
import random

import msgspec
import pytest
import torch
from slow import slow, soak

from agentevo.config import AlgorithmSection, TrainerSection
from agentevo.errors import TrainingError
from agentevo.training.pairs import CandidateAnswer, Pair
from agentevo.training.preference import PreferenceTrainer, mismatch_answers
from agentevo.types import Trajectory, Turn

WHOLE = TrainerSection(max_grad_norm=1e9, warmup_steps=0)
SECTIONS = {
    "dpo": AlgorithmSection(name="dpo", beta=0.3, label_smoothing=0.1),
    "ipo": AlgorithmSection(name="ipo", beta=0.4),
    "kto": AlgorithmSection(name="kto", beta=0.3, desirable_weight=1.3, undesirable_weight=0.7),
    "orpo": AlgorithmSection(name="orpo", coef=0.4),
    "spin": AlgorithmSection(name="spin", beta=0.2, pairs="best_worst"),
    "sppo": AlgorithmSection(name="sppo", beta=0.1),
    "rft": AlgorithmSection(name="rft"),
}
NAMES = ["kto", *soak(*(name for name in SECTIONS if name != "kto"))]


@pytest.fixture
def model(random_model):
    return copy.deepcopy(random_model("llama").model)


@pytest.fixture
def other(model):
    """A policy near the model: what it has become since the reference was taken."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return moved


def pairs_for(name: str, samples_of, num_groups: int = 3, seed: int = 0) -> list[Pair]:
    """Two pairs a group, answers of one or two rows over a common prompt; single answers where the
    loss takes them."""
    rng = random.Random(seed)
    found = []
    for group in range(num_groups):
        prompt = [rng.randrange(2, 97) for _ in range(rng.randrange(4, 20))]
        answers = []
        for number in range(4):
            sequences = [
                [*prompt, *(rng.randrange(2, 97) for _ in range(rng.randrange(2, 12)))]
                for _ in range(1 + number % 2)
            ]
            rows = samples_of(sequences, seed=seed + number, group_size=9)
            answers.append(
                CandidateAnswer(
                    f"{group}-{number}",
                    tuple(msgspec.structs.replace(row, group_id=f"g{group}") for row in rows),
                )
            )

        for chosen, rejected, chances in (
            (answers[0], answers[1], (0.8, 0.1)),
            (answers[2], answers[3], (0.7, 0.4)),
        ):
            if name in ("kto", "rft"):
                found += [
                    Pair(f"g{group}", chosen=chosen),
                    *([Pair(f"g{group}", rejected=rejected)] if name == "kto" else []),
                ]
            else:
                found.append(Pair(f"g{group}", chosen, rejected, chances))

    return found


def slow_logp(model, answer: CandidateAnswer) -> torch.Tensor:
    total = torch.zeros(())
    for row in answer.rows:
        logp = torch.log_softmax(
            model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0], -1
        )
        for place, trained in enumerate(row.loss_mask):
            if trained:
                total = total + logp[place - 1, row.ids[place]]

    return total


def slow_loss(name: str, model, reference, pairs: list[Pair]) -> torch.Tensor:
    """The mean of the papers' formulas over the pairs."""
    hyper = SECTIONS[name].preference().hyper
    with torch.no_grad():
        groups = mismatch_answers([a for pair in pairs for a in pair.answers], 10**6)
        ratios = [
            slow_logp(model, CandidateAnswer("", tuple(rows)))
            - slow_logp(reference, CandidateAnswer("", tuple(rows)))
            for rows in groups
        ]

    z = max(float(sum(ratios)) / len(ratios), 0.0)
    losses = []
    for pair in pairs:
        gains = [
            slow_logp(model, answer) - slow_logp(reference, answer).detach()
            for answer in pair.answers
        ]
        if name == "rft":
            losses.append(-slow_logp(model, pair.chosen) / pair.chosen.num_tokens)
        elif name == "kto":
            sign, weight = (
                (1, hyper["desirable_weight"])
                if pair.chosen is not None
                else (-1, hyper["undesirable_weight"])
            )
            losses.append(weight * (1 - torch.sigmoid(sign * hyper["beta"] * (gains[0] - z))))
        elif name == "orpo":
            p = [torch.exp(slow_logp(model, answer) / answer.num_tokens) for answer in pair.answers]
            odds = [one / (1 - one) for one in p]
            losses.append(
                -torch.log(p[0])
                - hyper["coef"] * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))
            )
        elif name == "sppo":
            wanted = [(chance - 0.5) / hyper["beta"] for chance in pair.win_probs]
            losses.append((gains[0] - wanted[0]) ** 2 + (gains[1] - wanted[1]) ** 2)
        else:
            h = gains[0] - gains[1]
            if name == "ipo":
                losses.append((h - 1 / (2 * hyper["beta"])) ** 2)
            else:
                smooth = hyper.get("label_smoothing", 0.0)
                good = torch.log(torch.sigmoid(hyper["beta"] * h))
                bad = torch.log(torch.sigmoid(-hyper["beta"] * h))
                losses.append(-(1 - smooth) * good - smooth * bad)

    return torch.stack(losses).mean()


def moved_trainer(
    name: str, reference, policy, section: TrainerSection = WHOLE, **options
) -> PreferenceTrainer:
    """Whose reference is not the policy."""
    trainer = PreferenceTrainer(policy, section, SECTIONS[name], **options)
    trainer.begin()
    if trainer.reference is not None:
        trainer.reference.model.load_state_dict(reference.state_dict())
    return trainer


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("micro_batch_tokens", [*slow(64), *soak(16384)])
def test_loss_and_gradient_are_those_of_the_formula(
    name, micro_batch_tokens, random_model, model, other, samples_of, gradient
):
    pairs = pairs_for(name, samples_of)
    alone = copy.deepcopy(random_model("llama").alone)
    reference = copy.deepcopy(alone)
    alone.load_state_dict(other.state_dict())
    expected = slow_loss(name, alone, reference, pairs)
    expected.backward()

    section = WHOLE.model_copy(
        update={"micro_batch_tokens": micro_batch_tokens, "learning_rate": 1e-12}
    )
    metrics = moved_trainer(name, model, other, section).step(pairs)
    assert metrics["preference/loss"] == pytest.approx(float(expected.detach()), rel=2e-5)
    assert float((gradient(other) - gradient(alone)).norm() / gradient(alone).norm()) < 2e-5
    assert metrics["actor/grad_norm"] == pytest.approx(float(gradient(alone).norm()), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_pairs_and_the_size_of_micro_batches_do_not_matter(
    name, model, other, samples_of, gradient
):
    pairs = pairs_for(name, samples_of)
    shuffled = list(pairs)
    random.Random(5).shuffle(shuffled)
    one = copy.deepcopy(other)
    two = copy.deepcopy(other)
    whole = moved_trainer(name, model, one).step(pairs)
    parts = moved_trainer(
        name, model, two, WHOLE.model_copy(update={"micro_batch_tokens": 64})
    ).step(shuffled)

    assert float((gradient(one) - gradient(two)).norm() / gradient(one).norm()) < 1e-5
    assert parts.pop("trainer/distinct_tokens") >= whole.pop("trainer/distinct_tokens")
    assert whole == pytest.approx(parts, rel=1e-4, abs=1e-5)


def test_at_the_reference_all_rewards_are_0(model, samples_of):
    trainer = PreferenceTrainer(model, WHOLE, SECTIONS["dpo"])
    trainer.begin()
    metrics = trainer.step(pairs_for("dpo", samples_of))
    assert metrics["preference/loss"] == pytest.approx(math.log(2), abs=1e-5)
    for key in ("chosen", "rejected", "margins"):
        assert metrics[f"preference/rewards/{key}"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_chosen_answers_gain_on_rejected_ones(name, model, samples_of):
    pairs = pairs_for(name, samples_of)
    trainer = PreferenceTrainer(
        model, TrainerSection(learning_rate=1e-3, warmup_steps=0), SECTIONS[name]
    )
    trainer.begin()
    found = [trainer.step(pairs) for _ in range(12)]
    first = found[0]
    last = found[-1]
    assert last["preference/loss"] < first["preference/loss"]

    if name == "rft":
        assert last["preference/logps/chosen"] > first["preference/logps/chosen"] + 1
        assert "preference/logps/rejected" not in last
    else:
        assert last["preference/rewards/margins"] > first["preference/rewards/margins"]
        gaps = [
            one["preference/logps/chosen"] - one["preference/logps/rejected"]
            for one in (first, last)
        ]
        assert name == "orpo" or gaps[1] > gaps[0] + 1, (
            "orpo compares means per token, and imitates the chosen"
        )


def test_metrics_count_each_answer_once(model, samples_of):
    pairs = pairs_for("dpo", samples_of)
    shared = [*pairs, Pair("g0", pairs[0].chosen, pairs[1].rejected)]
    trainer = PreferenceTrainer(model, WHOLE, SECTIONS["dpo"])
    trainer.begin()
    metrics = trainer.step(shared)
    answers = {a.name: a for pair in pairs for a in pair.answers}.values()
    assert metrics["trainer/trained_tokens"] == sum(a.num_tokens for a in answers)
    assert metrics["trainer/logical_tokens"] == sum(len(row.ids) for a in answers for row in a.rows)
    assert metrics["trainer/distinct_tokens"] < metrics["trainer/logical_tokens"], (
        "answers of a group share their prompt"
    )


@pytest.mark.slow
def test_ktos_baseline_is_the_mean_log_ratio_of_mismatched_answers(
    random_model, model, other, samples_of
):
    pairs = pairs_for("kto", samples_of)
    trainer = moved_trainer("kto", model, other)
    alone = copy.deepcopy(random_model("llama").alone)
    reference = copy.deepcopy(alone)

    alone.load_state_dict(other.state_dict())
    with torch.no_grad():
        groups = mismatch_answers([a for pair in pairs for a in pair.answers], 10**6)
        ratios = [
            float(
                slow_logp(alone, CandidateAnswer("", tuple(r)))
                - slow_logp(reference, CandidateAnswer("", tuple(r)))
            )
            for r in groups
        ]

    assert trainer.step(pairs)["preference/kl"] == pytest.approx(
        sum(ratios) / len(ratios), abs=1e-4
    )

    one_task = [pair for pair in pairs if pair.group_id == "g0"]
    assert trainer.step(one_task)["preference/kl"] == 0.0


@pytest.mark.slow
def test_log_probs_are_those_at_the_temperature_of_sampling(model, samples_of):
    pairs = pairs_for("dpo", samples_of)
    (answer,) = {pairs[0].chosen}
    trainer = PreferenceTrainer(model, WHOLE, AlgorithmSection(name="rft"), temperature=0.5)
    found = trainer.step([Pair("g0", chosen=answer)])
    rows = [torch.log_softmax(model_logits / 0.5, -1) for model_logits in _logits(model, answer)]
    # the step has moved the weights by then: compare with a copy from before
    assert found["preference/logps/chosen"] != pytest.approx(sum(float(r.sum()) for r in rows))

    fresh = copy.deepcopy(model)
    again = PreferenceTrainer(
        fresh,
        WHOLE.model_copy(update={"learning_rate": 1e-12}),
        AlgorithmSection(name="rft"),
        temperature=0.5,
    )
    total = sum(
        float(torch.log_softmax(logits / 0.5, -1)[place - 1, row.ids[place]])
        for row, logits in zip(answer.rows, _logits(fresh, answer), strict=True)
        for place, trained in enumerate(row.loss_mask)
        if trained
    )
    assert again.step([Pair("g0", chosen=answer)])["preference/logps/chosen"] == pytest.approx(
        total, rel=1e-5
    )


def _logits(model, answer: CandidateAnswer) -> list[torch.Tensor]:
    alone = copy.deepcopy(model)
    alone.set_attn_implementation("eager")
    with torch.no_grad():
        return [
            alone(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0]
            for row in answer.rows
        ]


@pytest.mark.slow
def test_minibatches_and_epochs_keep_groups_whole_and_the_reference_for_the_step(model, samples_of):
    section = TrainerSection(
        minibatches=2, epochs=2, groups_per_step=4, warmup_steps=0, learning_rate=1e-3
    )
    algorithm = SECTIONS["spin"].model_copy(update={"reference_every": 2, "reference": "synced"})
    trainer = PreferenceTrainer(model, section, algorithm)
    trainer.begin()
    before = copy.deepcopy(trainer.reference.model.state_dict())

    def same() -> bool:
        return all(
            torch.equal(before[key], value)
            for key, value in trainer.reference.model.state_dict().items()
        )

    metrics = trainer.step(pairs_for("spin", samples_of, num_groups=4))
    assert trainer.optimization.steps == 4
    assert metrics["preference/rewards/margins"] > 0, (
        "later minibatches are compared with the reference from before"
    )
    assert same()

    trainer.step(pairs_for("spin", samples_of, num_groups=4))
    assert not same(), "the opponent follows every second step"

    ours = dict(model.named_parameters())
    assert all(
        torch.equal(ours[key], value) for key, value in trainer.reference.model.named_parameters()
    )


@pytest.mark.parametrize("name", ["orpo", "rft"])
def test_no_reference_is_kept_where_none_is_needed(name, model):
    trainer = PreferenceTrainer(model, WHOLE, SECTIONS[name])
    trainer.begin()
    assert trainer.reference is None


def test_what_is_not_finite_never_reaches_the_weights(model, samples_of):
    with torch.no_grad():
        model.model.norm.weight[0] = math.inf

    before = [p.detach().clone() for p in model.parameters()]
    for tokens in (16384, 64):
        trainer = PreferenceTrainer(
            model, WHOLE.model_copy(update={"micro_batch_tokens": tokens}), SECTIONS["orpo"]
        )
        with pytest.raises(TrainingError, match="the weights were not changed"):
            trainer.step(pairs_for("orpo", samples_of))

    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", [*slow("kto"), *soak("dpo", "spin", "rft")])
def test_a_trainer_that_was_saved_goes_on_bit_for_bit(name, model, samples_of):
    section = TrainerSection(learning_rate=1e-3)
    algorithm = SECTIONS[name]
    batches = [pairs_for(name, samples_of, seed=10 * seed) for seed in range(4)]
    trainer = PreferenceTrainer(model, section, algorithm)
    trainer.begin()
    for pairs in batches[:2]:
        trainer.step(pairs)

    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "trainer": trainer.state_dict()}, saved)

    expected = [trainer.step(pairs) for pairs in batches[2:]]
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    copied = copy.deepcopy(model)
    copied.load_state_dict(state["model"])
    again = PreferenceTrainer(copied, section, algorithm)
    again.load_state_dict(state["trainer"])
    assert [again.step(pairs) for pairs in batches[2:]] == expected


def test_prepare_says_who_made_no_pair(model):
    def attempt(number: int, reward: float) -> Trajectory:
        turn = Turn(
            index=0,
            prompt_ids=[1, 2],
            completion_ids=[5 + number],
            logprobs=[-1.0],
            versions=[0],
            finish_reason="stop",
        )
        return Trajectory(
            id=f"t{number}", task_id="x", group_id="x", attempt=number, reward=reward, turns=[turn]
        )

    made = PreferenceTrainer(model, WHOLE, SECTIONS["dpo"]).prepare(
        [attempt(n, float(n)) for n in range(4)]
    )
    assert made.dropped == {"t1": "no-pair", "t2": "no-pair"}
    assert made.metrics == {"preference/num_pairs": 1.0}
    assert [(pair.chosen.name, pair.rejected.name) for pair in made.samples] == [("t3", "t0")]

    with pytest.raises(ValueError, match=r"algorithm\.name=grpo has no preference loss"):
        PreferenceTrainer(model, WHOLE, AlgorithmSection())
