"""The bound on the age of tokens: nothing older reaches the loss, and everything else is as it
would be without the bound."""

from __future__ import annotations

import copy
import pickle
from collections import Counter

import msgspec
import pytest
import torch
from aged_attempts import NOW, STILL, attempts, places
from hypothesis import given
from hypothesis import strategies as st

from agentevo.config import AlgorithmSection, CriticSection
from agentevo.errors import TrainingError
from agentevo.runs.orchestration.rank_commands import PrepareAttempts
from agentevo.training.batching.staleness import (
    leave_out_stale,
    mask_stale,
)
from agentevo.training.preference import PreferenceTrainer
from agentevo.training.trainer import Trainer
from agentevo.types import Sample, Trajectory, Turn


def of_places(sample: Sample) -> dict[int, tuple]:
    """Of each trained place its token and all that goes with it, columns included but for the
    age."""
    columns = {name: values for name, values in sample.columns.items() if name != "age"}
    return {
        place: (
            sample.ids[place],
            sample.logprobs[place],
            sample.versions[place],
            sample.advantages[count],
            tuple((name, values[count]) for name, values in sorted(columns.items())),
        )
        for count, place in enumerate(places(sample))
    }


@st.composite
def aged_samples(draw) -> list[Sample]:
    found = []
    for number in range(draw(st.integers(1, 5))):
        mask = [False, *draw(st.lists(st.booleans(), min_size=1, max_size=8))]
        numbers = [draw(st.floats(-9, -0.1)) if m else 0.0 for m in mask]
        found.append(
            Sample(
                trajectory_id=f"t{draw(st.integers(0, number))}",
                group_id="g",
                ids=list(range(len(mask))),
                loss_mask=mask,
                logprobs=numbers,
                versions=[draw(st.integers(0, NOW)) if m else -1 for m in mask],
                advantages=[-x for x, m in zip(numbers, mask, strict=True) if m],
                columns={"values": [float(k) for k in range(sum(mask))]},
            )
        )

    return found


@given(aged_samples(), st.none() | st.integers(0, NOW))
def test_what_is_too_old_goes_and_nothing_else(samples, bound):
    kept, metrics = mask_stale(samples, trainer_version=NOW, bound=bound)
    oldest = 0 if bound is None else NOW - bound
    expected = []
    for sample in samples:
        left = {
            place: content for place, content in of_places(sample).items() if content[2] >= oldest
        }
        if left:
            expected.append((sample.trajectory_id, sample.ids.tolist(), left))

    assert [(one.trajectory_id, one.ids.tolist(), of_places(one)) for one in kept] == expected
    for one in kept:
        assert one.columns["age"].tolist() == [NOW - one.versions[place] for place in places(one)]
        for name, blank in (("logprobs", 0.0), ("versions", -1)):
            assert {x for x, m in zip(getattr(one, name), one.loss_mask, strict=True) if not m} <= {
                blank
            }, name

    versions = [
        v for sample in samples for v, m in zip(sample.versions, sample.loss_mask, strict=True) if m
    ]
    if not versions:
        assert metrics == {}
        return

    ages = [NOW - v for v in versions]
    trained = [age for age in ages if bound is None or age <= bound]
    shares = Counter(trained)
    last = max(trained) if bound is None else bound
    assert {key: value for key, value in metrics.items() if "/age_" in key} == pytest.approx(
        {f"staleness/age_{age}": shares[age] / len(ages) for age in range(last + 1)}
    )
    assert metrics["staleness/masked"] == pytest.approx(1 - len(trained) / len(ages))
    assert metrics["staleness/masked_tokens"] == len(ages) - len(trained)
    assert ("staleness/max" in metrics) == bool(trained)

    if trained:
        assert metrics["staleness/max"] == max(trained)
        assert metrics["staleness/mean"] == pytest.approx(sum(trained) / len(trained))

    of_trajectory: dict[str, list[int]] = {}
    for sample in samples:
        of_trajectory.setdefault(sample.trajectory_id, []).extend(
            v for v in sample.versions if v >= 0
        )

    with_tokens = [found for found in of_trajectory.values() if found]
    assert metrics["staleness/trajectory_spread"] == pytest.approx(
        sum(max(v) - min(v) for v in with_tokens) / len(with_tokens)
    )
    assert metrics["staleness/masked_trajectories"] == sum(max(v) < oldest for v in with_tokens)


def test_samples_are_left_as_they_were(samples_of):
    samples = samples_of([[1, 2, 3, 4, 5], [1, 2, 3]])
    before = pickle.dumps(samples)
    mask_stale(samples, trainer_version=3, bound=2)
    assert pickle.dumps(samples) == before


def with_versions(versions: list[int]) -> Sample:
    mask = [False, *[True] * len(versions)]
    blank = [0.0] * len(mask)
    return Sample(
        trajectory_id="t",
        group_id="g",
        ids=[2] * len(mask),
        loss_mask=mask,
        logprobs=blank,
        versions=[-1, *versions],
        advantages=[0.0] * len(versions),
    )


def test_what_is_newer_than_the_trainer_is_refused():
    with pytest.raises(
        TrainingError,
        match="trajectory t has a token of version 9, and the trainer is at 7: these weights "
        "were never",
    ):
        mask_stale([with_versions([7, 9])], trainer_version=7, bound=2)


def test_a_token_without_a_version_is_refused():
    with pytest.raises(TrainingError, match="without a version"):
        mask_stale([with_versions([3, -1])], trainer_version=3)


@pytest.mark.parametrize("given_", [{"trainer_version": -1}, {"trainer_version": 3, "bound": -1}])
def test_numbers_that_make_no_sense(given_):
    with pytest.raises(ValueError, match="give"):
        mask_stale([], **given_)


PRESETS = {
    "grpo": {"name": "grpo"},
    "gae": {"name": "ppo"},
    "reward kl": {"name": "reinforce_pp", "kl_coef": 0.3, "kl_in": "reward"},
    "recomputed": {"name": "grpo", "old_logprobs": "recomputed", "importance": "token_tis"},
}


@pytest.mark.parametrize("preset", PRESETS)
def test_advantages_are_those_of_all_tokens(preset, random_model):
    model = random_model("llama").model
    found = []
    for arguments in ({}, {"version": NOW, "bound": 1}):
        torch.manual_seed(0)
        trainer = Trainer(
            copy.deepcopy(model),
            STILL,
            AlgorithmSection(**PRESETS[preset]),
            critic=CriticSection(pretrain_steps=0),
        )
        trainer.begin()
        found.append(trainer.prepare(attempts(), **arguments))

    everything, fresh = found
    of_trajectory = {sample.trajectory_id: of_places(sample) for sample in everything.samples}
    expected = {
        name: {p: c for p, c in content.items() if c[2] >= NOW - 1}
        for name, content in of_trajectory.items()
    }
    assert {sample.trajectory_id: of_places(sample) for sample in fresh.samples} == {
        k: v for k, v in expected.items() if v
    }
    assert sum(map(len, expected.values())) < sum(map(len, of_trajectory.values())), (
        "else nothing was masked"
    )
    assert fresh.dropped == {}, "what is wholly stale is in its group's baseline"
    assert {
        key: value for key, value in fresh.metrics.items() if not key.startswith("staleness/")
    } == everything.metrics


def hand_built_loss(
    model, trajectories, advantages, oldest: int, weight, aggregation: str
) -> torch.Tensor:
    """-A w log pi over those tokens alone whose version is at least `oldest`, one conversation at a
    time through transformers' own attention; at a ratio of 1 it has the gradient of every clipped
    loss. weight: log pi, log mu -> w."""
    losses = []
    for trajectory in trajectories:
        ids = [*trajectory.context_ids(1), *trajectory.turns[1].completion_ids]
        rows = torch.log_softmax(
            model(input_ids=torch.tensor([ids]), use_cache=False).logits[0], -1
        )
        place = 0
        own = []
        for turn in trajectory.turns:
            place += len(turn.prompt_ids)
            for token, behaviour, version in zip(
                turn.completion_ids, turn.logprobs, turn.versions, strict=True
            ):
                if version >= oldest:
                    logp = rows[place - 1, token]
                    own.append(
                        -advantages[trajectory.id] * weight(float(logp.detach()), behaviour) * logp
                    )
                place += 1

        if own:
            losses.append(torch.stack(own))

    if aggregation == "token-mean":
        return torch.cat(losses).mean()

    return torch.stack([loss.mean() for loss in losses]).mean()


def grpo_advantages(trajectories) -> dict[str, float]:
    """Of all attempts of a group, stale ones included."""
    found = {}
    for trajectory in trajectories:
        rewards = torch.tensor(
            [t.reward for t in trajectories if t.group_id == trajectory.group_id],
            dtype=torch.float64,
        )
        found[trajectory.id] = float((trajectory.reward - rewards.mean()) / (rewards.std() + 1e-6))

    return found


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("policy", ["mask", "correct"])
@pytest.mark.parametrize(("seed", "bound"), [(4, 0), (6, 2)])
def test_the_gradient_is_that_of_the_remaining_tokens(
    seed, bound, policy, aggregation, random_model, gradient
):
    one = random_model("llama")
    trajectories = attempts(seed)

    section = AlgorithmSection(old_logprobs="recomputed", aggregation=aggregation)
    cap = 1.2
    if policy == "correct":
        section = section.model_copy(update={"importance": "token_tis", "importance_cap": cap})

    alone = copy.deepcopy(one.alone)
    weights = []

    def weight(logp: float, behaviour: float) -> float:
        weights.append(
            min(torch.tensor(logp - behaviour).exp().item(), cap) if policy == "correct" else 1.0
        )
        return weights[-1]

    hand_built_loss(
        alone, trajectories, grpo_advantages(trajectories), NOW - bound, weight, aggregation
    ).backward()
    if policy == "correct" and bound == 3:
        assert 0 < sum(w == cap for w in weights) < len(weights), (
            "the cap binds for some and not for others"
        )

    expected = gradient(alone)
    for micro_batch_tokens in (16384, 64):
        trainer = Trainer(
            copy.deepcopy(one.model),
            STILL.model_copy(update={"micro_batch_tokens": micro_batch_tokens}),
            section,
        )
        trainer.begin()
        metrics = trainer.step(trainer.prepare(trajectories, version=NOW, bound=bound).samples)
        assert metrics["trainer/trained_tokens"] == len(weights)
        assert float((gradient(trainer.model) - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.slow
def test_other_tokens_of_old_versions_could_be_anything(random_model, gradient):
    """Log-probs of tokens that are too old have no influence; those of one that is not do."""
    found = []
    for changed in (0, 1, 2):
        trajectories = attempts()
        stale = [v < NOW - 1 for t in trajectories for turn in t.turns for v in turn.versions]
        assert any(stale) and not all(stale)

        for number, trajectory in enumerate(trajectories):
            turns = [
                msgspec.structs.replace(
                    turn,
                    logprobs=[
                        x
                        - (changed == 1) * 2.0 * (v < NOW - 1)
                        - (changed == 2) * 2.0 * (v == NOW - 1)
                        for x, v in zip(turn.logprobs, turn.versions, strict=True)
                    ],
                )
                for turn in trajectory.turns
            ]
            trajectories[number] = msgspec.structs.replace(trajectory, turns=turns)

        trainer = Trainer(
            copy.deepcopy(random_model("llama").model),
            STILL,
            AlgorithmSection(clip_low=1.0, clip_high=1e9),
        )
        metrics = trainer.step(trainer.prepare(trajectories, version=NOW, bound=1).samples)
        found.append((gradient(trainer.model), metrics))

    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert not torch.allclose(found[0][0], found[2][0])


@pytest.mark.parametrize("preset", PRESETS)
def test_without_stale_tokens_nothing_changes(preset, random_model, gradient):
    fresh = attempts(newest=NOW, oldest=NOW)
    found = []
    for arguments in ({}, {"version": NOW, "bound": 0}):
        torch.manual_seed(0)
        trainer = Trainer(
            copy.deepcopy(random_model("llama").model),
            STILL,
            AlgorithmSection(**PRESETS[preset]),
            critic=CriticSection(pretrain_steps=0),
        )
        trainer.begin()
        made = trainer.prepare(fresh, **arguments)
        metrics = made.metrics | trainer.step(made.samples)
        extra = {
            key: metrics.pop(key)
            for key in list(metrics)
            if key.startswith(("staleness/", "actor/ess_age_"))
        }
        found.append((gradient(trainer.model), metrics, extra))

    (before, metrics, none), (after, same, extra) = found
    assert torch.equal(before, after)
    assert metrics == same
    assert none == {}
    assert (extra["staleness/age_0"], extra["staleness/masked"], extra["staleness/max"]) == (
        1.0,
        0.0,
        0.0,
    )
    assert set(extra) >= {"actor/ess_age_0"}


def test_a_step_of_which_nothing_is_left(random_model):
    trainer = Trainer(copy.deepcopy(random_model("llama").model), STILL, AlgorithmSection())
    made = trainer.prepare(attempts(), version=NOW + 9, bound=2)
    assert (made.samples, made.dropped) == ([], {})
    assert made.metrics["staleness/masked"] == 1.0
    assert made.metrics["staleness/masked_trajectories"] == 6
    assert made.metrics["staleness/age_2"] == 0.0
    assert "staleness/max" not in made.metrics

    with pytest.raises(ValueError, match="give version="):
        trainer.prepare(attempts(), bound=2)


def test_answers_are_compared_whole_or_not_at_all(random_model):
    """DPO: an attempt with one token that is too old is in no pair; the others' pairs are as if it
    had not been sampled."""
    section = AlgorithmSection(name="dpo")
    trajectories = attempts(oldest=NOW - 2)
    old = {"t1", "t5"}

    for number in (1, 5):
        first = trajectories[number].turns[0]
        first = msgspec.structs.replace(first, versions=[NOW - 3, *first.versions[1:]])
        trajectories[number] = msgspec.structs.replace(
            trajectories[number], turns=[first, *trajectories[number].turns[1:]]
        )

    trainer = PreferenceTrainer(copy.deepcopy(random_model("llama").model), STILL, section)
    trainer.begin()
    made = trainer.prepare(trajectories, version=NOW, bound=2)
    assert {name for name, reason in made.dropped.items() if reason == "stale"} == old

    without = trainer.prepare([t for t in trajectories if t.id not in old])

    def names(prepared):
        return [(pair.chosen.name, pair.rejected.name) for pair in prepared.samples]

    assert names(made) == names(without) != []
    assert made.metrics["staleness/masked_trajectories"] == len(old)
    assert made.metrics["staleness/max"] <= 2
    assert set(without.metrics) == {"preference/num_pairs"}

    with pytest.raises(ValueError, match="give version="):
        trainer.prepare(trajectories, bound=2)
    with pytest.raises(TrainingError, match="the trainer is at 3"):
        trainer.prepare(trajectories, version=3, bound=2)


def test_of_whole_answers_nothing_is_dropped_without_a_bound():
    kept, dropped, metrics = leave_out_stale(attempts(), trainer_version=NOW)
    assert (kept, dropped, metrics["staleness/masked"]) == (attempts(), {}, 0.0)


def replayed_group(alone) -> tuple[list[Trajectory], list[torch.Tensor]]:
    """A success of version 1 whose log-probs were 0.1 lower than now, and two failures of now; and
    the log-probs of now of each, with a gradient."""
    trajectories = []
    logprobs = []
    for number in range(3):
        prompt, said = [5, 20, 21], [30 + number, 40, 50 + number]
        rows = torch.log_softmax(
            alone(input_ids=torch.tensor([[*prompt, *said]]), use_cache=False).logits[0], -1
        )
        now = torch.stack([rows[len(prompt) - 1 + k, token] for k, token in enumerate(said)])
        old = number == 0
        turn = Turn(
            index=0,
            prompt_ids=prompt,
            completion_ids=said,
            logprobs=(now.detach() - (0.1 if old else 0.0)).tolist(),
            versions=[1 if old else NOW] * 3,
            finish_reason="stop",
        )
        trajectories.append(
            Trajectory(
                id="old" if old else f"new{number}",
                task_id="q",
                group_id="g",
                turns=[turn],
                reward=float(old),
                success=old,
            )
        )
        logprobs.append(now)

    return trajectories, logprobs


def test_a_replayed_attempt_is_weighed_against_the_policy_that_sampled_it(random_model):
    """Its tokens are not masked, though they are older than the bound, and their ratio is to the
    stored log-probs of version 1: e^0.1."""
    model = copy.deepcopy(random_model("llama").model)
    alone = copy.deepcopy(random_model("llama").alone)
    trajectories, logprobs = replayed_group(alone)
    section = AlgorithmSection(scale_by_std=False, aggregation="token-mean")
    trainer = Trainer(model, STILL, section)

    made = trainer.prepare(trajectories, version=NOW, bound=0, replayed=["old"])
    assert [sample.num_trained for sample in made.samples] == [3, 3, 3]
    assert made.samples[0].columns["age"].tolist() == [NOW - 1] * 3
    # what the step sampled is as fresh as ever
    assert made.metrics["staleness/max"] == made.metrics["staleness/masked_tokens"] == 0

    loss = torch.zeros(())
    for now, ratio, advantage in zip(logprobs, (0.1, 0.0, 0.0), (2, -1, -1), strict=True):
        old = now.detach() - ratio
        loss = loss - (torch.exp(now - old) * advantage / 3).sum() / 9
    expected = torch.autograd.grad(loss, list(alone.parameters()), allow_unused=True)

    trainer.step(made.samples)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)

    # as another process of the trainer gets it
    command = PrepareAttempts("policy", trajectories, {}, NOW, 0, {}, frozenset({"old"}))
    of_rank = pickle.loads(pickle.dumps(command)).apply(trainer)
    assert [of_places(sample) for sample in of_rank.samples] == [
        of_places(sample) for sample in made.samples
    ]

    masked = trainer.prepare(trajectories, version=NOW, bound=0)
    assert [sample.trajectory_id for sample in masked.samples] == ["new1", "new2"]
