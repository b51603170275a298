"""Routing replay in training: with a trainer whose routers choose otherwise than the engine's, its
log-probs are the engine's, and with one that chooses alike nothing changes to the last bit."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from adapted_models import adapted
from near_ties import ROUTER_WEIGHTS, two_ways
from slow import soak

from agentevo.config import (
    AlgorithmSection,
    CriticSection,
    EngineSection,
    LoraSection,
    MemorySection,
    TrainerSection,
)
from agentevo.errors import TrainingError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.compute.activations import keep_activations
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.linear import drop_packed
from agentevo.models.compute.routers import OWN, RouterReplay, Routers, enable_routing
from agentevo.models.files.load import LoadedModel
from agentevo.runs.audit.resampling import resample, version_rows
from agentevo.training.batching.packing import pack
from agentevo.training.batching.passes import token_tables
from agentevo.training.batching.samples import trajectory_rows
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.training.roles.reference import Reference
from agentevo.training.trainer import Trainer
from agentevo.types import Sample, SamplingParams, Trajectory, Turn
from agentevo.types.routed_experts import RoutedExperts, join_experts

CPU = torch.device("cpu")
EVERYTHING = TrainerSection(routing_replay="rollout", learning_rate=1e-3, warmup_steps=0)


Between = Callable[[TorchEngine], Awaitable[None]]


def drawn(model, group: str, seed: int, between: Between | None = None) -> Trajectory:
    """A root turn with two branches, the first of which goes on at the end, so that its context is
    computed again; recorded as by a conversation. `between` happens before each turn."""
    engine = TorchEngine(model, config=EngineSection(routed_experts=True, prefill_tokens=16))
    turns: list[Turn] = []

    async def ask(parent: int | None, prompt: list[int]) -> None:
        before: list[int] = []
        if parent is not None:
            one = Trajectory(id="t", task_id="t", group_id=group, turns=turns)
            before = [*one.context_ids(parent), *turns[parent].completion_ids]

        if between is not None:
            await between(engine)

        found = await engine.generate(
            [*before, *prompt],
            SamplingParams(
                max_new_tokens=12,
                seed=seed + 10 * len(turns),
                routed_from=max(len(before) - 1, 0),
            ),
            session=f"{group} {seed}",
            deadline_s=60,
        )
        fields = {name: getattr(found, name) for name in ("logprobs", "versions", "finish_reason")}
        turn = Turn(
            index=len(turns),
            parent=parent,
            seed=seed + 10 * len(turns),
            prompt_ids=prompt,
            completion_ids=found.ids,
            routed_experts=found.routed_experts,
            **fields,
        )
        turns.append(turn)

    async def play() -> None:
        await ask(None, list(range(5, 29)))
        await ask(0, [3, 4])
        await ask(0, [6])
        await ask(1, [7, 8, 9])

    asyncio.run(play())
    return Trajectory(
        id=f"{group}-{seed}", task_id=group, group_id=group, turns=turns, reward=float(seed % 2)
    )


@pytest.fixture(scope="module", params=["qwen3-moe", *soak("mixtral")])
def ways(request, random_model):
    """The engine's model, the trainer's, and four attempts that the former drew."""
    engine, trainer = two_ways(random_model(request.param).model)
    return engine, trainer, [drawn(engine, f"g{n // 2}", n) for n in range(4)]


def samples_of(trajectories) -> list[Sample]:
    return [row.sample for t in trajectories for row in trajectory_rows(t, routed=True)]


def gap(model, samples, *, replay: bool, tokens: int = 16384, merge: bool = True) -> float:
    """Largest distance of the model's log-probs from those that the tokens were drawn with."""

    def compute(batch) -> dict[str, torch.Tensor]:
        routed_batch = batch.with_routing(RouterReplay(batch.routed_experts)) if replay else batch
        return {"gap": token_logprobs(model, routed_batch)[0] - _of(batch)}

    def _of(batch) -> torch.Tensor:
        return batch.rollout_logprobs[batch.samples, batch.places]

    return float(token_tables(samples, tokens, CPU, compute, merge=merge)["gap"].abs().max())


@pytest.mark.slow
def test_log_probs_are_the_engines_only_with_replay(ways):
    """Over branches, merged and side by side, in micro-batches of any size."""
    _, trainer, trajectories = ways
    samples = samples_of(trajectories)
    assert gap(trainer, samples, replay=False) > 0.1
    for merge in (True, False):
        for tokens in (64, 16384):
            assert gap(trainer, samples, replay=True, tokens=tokens, merge=merge) < 1e-4


@pytest.mark.slow
def test_log_probs_where_the_engine_computed_every_context_again(random_model):
    """Each time with the near ties the other way, as another batch may sum them."""
    models = two_ways(random_model("qwen3-moe").model)
    engine, other = (dict(model.named_parameters()) for model in models)
    ties = [name for name in engine if name.endswith(ROUTER_WEIGHTS)]

    async def forget(of: TorchEngine) -> None:
        await of.forget_cache()
        with torch.no_grad():
            for name in ties:
                kept = engine[name].clone()
                engine[name].copy_(other[name])
                other[name].copy_(kept)
        drop_packed(of.model)

    samples = samples_of([drawn(models[0], f"g{n // 2}", n, forget) for n in range(4)])
    assert gap(models[1], samples, replay=False) > 0.1
    assert gap(models[1], samples, replay=True) < 1e-4


@pytest.mark.slow
def test_log_probs_of_an_engine_in_half_precision(random_model):
    """Its router's input is rounded: far more choices differ than with replay log-probs do."""
    engine = enable_routing(prepare(copy.deepcopy(random_model("qwen3-moe").alone).bfloat16()))
    trainer = enable_routing(copy.deepcopy(random_model("qwen3-moe").model))
    samples = samples_of([drawn(engine, "g", n) for n in range(4)])
    far = [gap(trainer, samples, replay=replay) for replay in (False, True)]
    assert far[0] > 2 * far[1], far


def weights_after(model, trajectories, section, **changes: Any):
    """Of one step, with its metrics."""
    algorithm = AlgorithmSection(**{"clip_high": 0.28, "entropy_coef": 0.01, **changes})
    trainer = Trainer(model, section, algorithm)
    trainer.begin()
    prepared = trainer.prepare(trajectories)
    metrics = prepared.metrics | trainer.step(prepared.samples)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, metrics


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"old_logprobs": "recomputed", "kl_coef": 0.1}, *soak({})])
@pytest.mark.parametrize("name", ["qwen3-moe", *soak("mixtral")])
def test_an_update_where_routing_agrees_is_the_plain_one_bit_for_bit(name, changes, random_model):
    """Weights after an optimizer step; without near ties the engine chooses as the trainer does."""
    model = enable_routing(copy.deepcopy(random_model(name).model))
    trajectories = [drawn(model, f"g{n // 2}", n) for n in range(4)]
    modes = ["none", "rollout", *(["update"] if changes else [])]
    found = {}
    for mode in modes:
        section = EVERYTHING.model_copy(update={"routing_replay": mode})
        found[mode] = weights_after(copy.deepcopy(model), trajectories, section, **changes)

    plain = found["none"][0]
    before = dict(model.named_parameters())
    assert all(not torch.equal(plain[name], before[name]) for name in plain if "gate.w" in name)

    for weights, metrics in found.values():
        assert metrics["actor/router_mismatch"] == metrics["actor/router_mismatch_tokens"] == 0
        assert all(torch.equal(plain[name], weights[name]) for name in plain)


@pytest.mark.slow
def test_metrics_tell_how_many_choices_differ(ways):
    """With replay and, where the engine records, without; old log-probs are the engine's then."""
    _, trainer, trajectories = ways
    found = {}
    for mode in ("none", "rollout"):
        section = EVERYTHING.model_copy(update={"routing_replay": mode})
        found[mode] = weights_after(
            copy.deepcopy(trainer), trajectories, section, old_logprobs="recomputed"
        )[1]
        assert 0.05 < found[mode]["actor/router_mismatch"] < 0.9
        tokens = found[mode]["actor/router_mismatch_tokens"]
        assert found[mode]["actor/router_mismatch"] <= tokens <= 1

    assert found["rollout"]["rollout/logprob_gap_max"] < 1e-4
    assert found["none"]["rollout/logprob_gap_max"] > 0.1

    bare = [without_records(t) for t in trajectories]
    section = EVERYTHING.model_copy(update={"routing_replay": "none"})
    assert "actor/router_mismatch" not in weights_after(copy.deepcopy(trainer), bare, section)[1]


def without_records(trajectory: Trajectory) -> Trajectory:
    turns = [msgspec.structs.replace(turn, routed_experts=None) for turn in trajectory.turns]
    return msgspec.structs.replace(trajectory, turns=turns)


@pytest.mark.slow
def test_updates_replay_what_the_pass_before_them_chose(ways):
    """verl's R2: after a large first minibatch the routers choose otherwise, the replay does not;
    nothing of the engine's record is read."""
    _, trainer, trajectories = ways
    section = TrainerSection(
        routing_replay="update", learning_rate=0.05, warmup_steps=0, epochs=3, minibatches=2
    )
    one = Trainer(copy.deepcopy(trainer), section, AlgorithmSection(old_logprobs="recomputed"))
    one.begin()
    prepared = one.prepare([without_records(t) for t in trajectories])
    assert all(s.routed_experts.num_tokens == len(s.ids) - 1 for s in prepared.samples)

    metrics = one.step(prepared.samples)
    assert abs(metrics["actor/ppo_kl_first"]) < 1e-6
    assert metrics["actor/router_mismatch"] > 0

    with pytest.raises(
        TrainingError, match=r"=update records .*: set algorithm.old_logprobs=recomputed"
    ):
        Trainer(copy.deepcopy(trainer), section, AlgorithmSection())


def test_samples_that_were_routed_apart_share_nothing_from_there_on(ways):
    """The same tokens, and one expert of one layer at one token another one: each sample's
    log-probs are those that it has alone."""
    _, trainer, trajectories = ways
    one = samples_of(trajectories[:1])[0]
    rows = one.routed_experts.array().copy()
    place = 20
    rows[place, 0] = [e for e in range(4) if e not in rows[place, 0]]
    other = msgspec.structs.replace(
        one, trajectory_id="other", routed_experts=RoutedExperts.of(rows, 4)
    )

    def logprobs(samples) -> torch.Tensor:
        batch = pack(samples, CPU)
        with torch.no_grad():
            found, _ = token_logprobs(
                trainer, batch.with_routing(RouterReplay(batch.routed_experts))
            )
        return batch.table(found)

    together = logprobs([one, other])
    batch = pack([one, other, one], CPU)
    # The last token has no row, and is one node of equal samples as well.
    assert batch.num_distinct == 2 * len(one.ids) - place

    for row, sample in zip(together, (one, other), strict=True):
        torch.testing.assert_close(row, logprobs([sample])[0], atol=1e-5, rtol=0)

    assert (together[0] - together[1]).abs().max() > 1e-3


@pytest.mark.slow
def test_reference_and_own_critic_choose_for_themselves(ways):
    _, trainer, trajectories = ways
    samples = samples_of(trajectories)
    batch = pack(samples, CPU)
    reference = Reference(trainer, AlgorithmSection(kl_coef=0.1))

    with torch.no_grad():
        own, _ = token_logprobs(trainer, batch)
    assert torch.equal(reference.logprobs(batch), own)
    for trunk in ("own", "shared"):
        one = Trainer(
            copy.deepcopy(trainer), EVERYTHING, AlgorithmSection(name="ppo"),
            critic=CriticSection(trunk=trunk),
        )  # fmt: skip
        one.begin()
        torch.nn.init.normal_(one.roles.critic.head.weight, generator=torch.Generator())
        prepared = one.prepare(trajectories)
        values = torch.cat([torch.from_numpy(s.columns["values"]) for s in prepared.samples])
        whole = pack(prepared.samples, CPU)
        passed = (
            whole.with_routing(RouterReplay(whole.routed_experts)) if trunk == "shared" else whole
        )
        with torch.no_grad():
            wanted = one.roles.critic.values(passed)

        torch.testing.assert_close(values, wanted, atol=1e-5, rtol=0)
        one.step(prepared.samples)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["full", *soak("none", "selective")])
def test_with_adapters_and_checkpointing(random_model, memory):
    bare = copy.deepcopy(random_model("qwen3-moe").alone)
    policy = enable_routing(
        prepare(adapted(bare, LoraSection(rank=4, targets=("q_proj", "v_proj"))))
    )
    kept = keep_activations(policy, MemorySection(checkpointing=memory))
    trajectories = [drawn(kept, "g", n) for n in range(2)]
    rows = join_experts([turn.routed_experts for t in trajectories for turn in t.turns])
    assert rows.num_tokens

    _, metrics = weights_after(kept, trajectories, EVERYTHING, old_logprobs="recomputed")
    assert metrics["rollout/logprob_gap_max"] < 1e-4
    assert metrics["actor/logprob_diff_max"] < 1e-5


@pytest.mark.slow
def test_an_audit_draws_again_under_the_recorded_experts(ways, tiny_policy):
    """Otherwise near ties would pass for changes of the record."""
    engine, trainer, trajectories = ways
    tokenizer = tiny_policy().tokenizer
    for one in trajectories:
        for model in (engine, trainer):
            loaded = LoadedModel(model, tokenizer, "m")
            assert resample(one, 0, loaded, SamplingParams()).differences == []

    loaded = LoadedModel(trainer, tokenizer, "m")
    bare = [
        resample(without_records(trajectory), 0, loaded, SamplingParams())
        for trajectory in trajectories
    ]
    assert any(found.differences for found in bare)


def test_what_another_version_computed_is_left_to_the_router(ways):
    """A turn that two versions drew: of the context of the second one's tokens, keys and values
    were computed again."""
    *_, trajectories = ways
    one = trajectories[0]
    turns = [msgspec.structs.replace(t, versions=[0] * 5 + [1] * 7) for t in one.turns[:2]]
    both = msgspec.structs.replace(one, turns=turns)
    recorded = join_experts([turn.routed_experts for turn in turns]).array()
    routers = Routers(*recorded.shape[1:], 4)
    found = [version_rows(both, turns[1], version, routers) for version in (0, 1)]
    own = [(rows == OWN).all((1, 2)) for rows in found]
    assert (own[0][:-1] != own[1][:-1]).all() and own[0][-1] and own[1][-1]
    assert own[1][: 24 + 4].all() and not own[1][24 + 4 : 24 + 11].any()

    for rows, left in zip(found, own, strict=True):
        assert (rows[:-1][~left[:-1]] == recorded[~left[:-1]]).all()

    assert version_rows(both, turns[1], 0, None) is None


def changed(trajectory: Trajectory, index: int, rows: RoutedExperts | None) -> Trajectory:
    turns = list(trajectory.turns)
    turns[index] = msgspec.structs.replace(turns[index], routed_experts=rows)
    return msgspec.structs.replace(trajectory, turns=turns)


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("wrong", ["missing", "short", "long", "other routers", "none at all"])
def test_a_record_that_is_missing_or_misaligned_is_refused(ways, index, wrong):
    _, trainer, trajectories = ways
    rows = trajectories[1].turns[index].routed_experts
    spoilt = {
        "missing": None,
        "short": rows.within(0, rows.num_tokens - 1),
        "long": join_experts([rows, rows.within(0, 1)]),
        "other routers": RoutedExperts.of(np.repeat(rows.array(), 2, axis=1), 4),
    }
    bad = (
        without_records(trajectories[1])
        if wrong == "none at all"
        else changed(trajectories[1], index, spoilt[wrong])
    )
    one = Trainer(copy.deepcopy(trainer), EVERYTHING, AlgorithmSection())
    one.begin()
    before = copy.deepcopy(one.model.state_dict())

    with pytest.raises(
        TrainingError, match=rf"routing_replay: trajectory {bad.id}: .*: begin a ne"
    ):
        one.prepare([trajectories[0], bad])

    samples = one.prepare(trajectories).samples
    cut = samples[0].routed_experts.within(0, len(samples[0].ids) - 2)
    for rows in (None, cut):
        with pytest.raises(TrainingError, match="routing_replay: trajectory"):
            one.step([msgspec.structs.replace(samples[0], routed_experts=rows), *samples[1:]])

    after = one.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_policy_that_cant_replay_is_refused(random_model):
    with pytest.raises(
        TrainingError, match=r"routing_replay=rollout: .* .*enable_routing\(model\)"
    ):
        Trainer(random_model("mixtral").model, EVERYTHING, AlgorithmSection())
