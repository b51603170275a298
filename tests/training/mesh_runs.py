"""Trainings of small models by processes that share them in every way, and by one. As a program,
one process of several: CASES PROCESS MEETING_FILE ALONE_FILE OUT_FILE, with what one process comes
to in ALONE_FILE."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from sharding_runs import SHAPE, VOCABULARY, difference, model_of, plain, samples_of
from tensor_memory import TensorMemory
from torch import distributed
from transformers import LlamaConfig, LlamaForTokenClassification, PreTrainedModel

from agentevo.config import (
    AlgorithmSection,
    CriticSection,
    MemorySection,
    ParallelSection,
    ProcessRewardSection,
    RewardModelSection,
    SFTSection,
    TrainerSection,
)
from agentevo.models.compute.activations import keep_activations
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.routers import enable_routing, routers_of
from agentevo.models.compute.sharded import make_plain, note_change
from agentevo.training.batching.passes import micro_batches, token_tables
from agentevo.training.distribute import spread
from agentevo.training.kernels import output_layer
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.training.mesh import make_meshes
from agentevo.training.optimization import Optimization
from agentevo.training.pairs import CandidateAnswer, Pair
from agentevo.training.preference import PreferenceTrainer
from agentevo.training.roles.process_reward import ImplicitProcessReward
from agentevo.training.roles.token_rewards import TokenRewardModel
from agentevo.training.sharding.layouts import layouts_of, local, whole_tensors
from agentevo.training.supervised import SupervisedTrainer, held_out_metrics
from agentevo.training.trainer import Trainer
from agentevo.types import Sample
from agentevo.types.routed_experts import RoutedExperts

STEPS = 2
RATE = 3e-4
EPSILON = 1e-5
"""AdamW's. With its own of 1e-8 it makes whole steps of gradients that are near 0, and these show
in which order the gradients were added up."""
SECTION = TrainerSection(learning_rate=RATE, warmup_steps=0, micro_batch_tokens=64, minibatches=2)
CPU = torch.device("cpu")
ALL_LOGITS = output_layer.all_logits


def of_groups(sizes: tuple[int, ...] = (3, 2, 1, 2)) -> list[Sample]:
    """Groups of unequal sizes, with what a critic would have said."""
    found = []
    for group, size in enumerate(sizes):
        for s in samples_of(group, size):
            count = s.num_trained
            columns = {"values": [0.1] * count, "returns": [0.2 * (i % 5) for i in range(count)]}
            names = {"group_id": f"g{group}", "trajectory_id": f"{group}-{s.trajectory_id}"}
            found.append(msgspec.structs.replace(s, columns=columns, **names))

    return found


Trained = tuple[dict[str, torch.nn.Module], list[dict[str, float]], list[Optimization]]


def steady(optimization: Optimization) -> None:
    for group in optimization.optimizer.param_groups:
        group["eps"] = EPSILON


def grpo(model: PreTrainedModel, memory: MemorySection) -> Trained:
    """With a reference that follows."""
    section = AlgorithmSection(kl_coef=0.2, kl_in="loss", reference="ema", reference_decay=0.5)
    trainer = Trainer(model, SECTION, section, memory=memory)
    trainer.begin()
    steady(trainer.optimization)
    reference = trainer.roles.reference
    metrics = []
    assert reference is not None

    for _ in range(STEPS):
        samples = of_groups()
        compute = lambda batch: {"ref_logp": reference.logprobs(batch)}  # noqa: E731
        rows = token_tables(samples, 64, CPU, compute)["ref_logp"]
        samples = [
            msgspec.structs.replace(s, columns={"ref_logp": row[: s.num_trained].tolist()})
            for s, row in zip(samples, rows, strict=True)
        ]
        metrics.append(trainer.step(samples))

    return {"": model, "reference": reference.model}, metrics, [trainer.optimization]


def ppo(model: PreTrainedModel, memory: MemorySection) -> Trained:
    """With a critic of its own, which is alone in the first update."""
    critic = CriticSection(learning_rate=RATE, pretrain_steps=1)
    section = AlgorithmSection(name="ppo")
    trainer = Trainer(model, SECTION, section, critic=critic, memory=memory)
    trainer.begin()
    value = trainer.roles.critic
    assert value is not None

    steady(trainer.optimization)
    steady(value.optimization)
    metrics = [trainer.step(of_groups()) for _ in range(STEPS)]
    return {"": model, "critic": value.model}, metrics, [trainer.optimization, value.optimization]


def dpo(model: PreTrainedModel, memory: MemorySection) -> Trained:
    section = AlgorithmSection(name="dpo")
    trainer = PreferenceTrainer(model, SECTION, section, memory=memory)
    trainer.begin()
    steady(trainer.optimization)

    answers = [CandidateAnswer(s.trajectory_id, (s,)) for s in of_groups((4, 2, 2))]
    groups = [a.rows[0].group_id for a in answers[::2]]
    pairs = [
        Pair(group, chosen, rejected)
        for group, chosen, rejected in zip(groups, answers[::2], answers[1::2], strict=True)
    ]
    metrics = [trainer.step(pairs) for _ in range(STEPS)]
    assert trainer.reference is not None
    return {"": model, "reference": trainer.reference.model}, metrics, [trainer.optimization]


def sft(model: PreTrainedModel, memory: MemorySection) -> Trained:
    section = SFTSection(learning_rate=RATE, micro_batch_tokens=64)
    trainer = SupervisedTrainer(model, section, STEPS, memory=memory)
    steady(trainer.optimization)
    metrics = [trainer.step(of_groups()) for _ in range(STEPS)]
    with patch.object(output_layer, "all_logits", ALL_LOGITS):  # for the likeliest token
        held_out = held_out_metrics(model, of_groups((3,)), 64)
    assert held_out is not None
    return {"": model}, [*metrics, held_out], [trainer.optimization]


def prime(model: PreTrainedModel, memory: MemorySection) -> Trained:
    """The process reward alone, which learns by whole answers."""
    section = ProcessRewardSection(learning_rate=RATE)
    reward = ImplicitProcessReward(model, section, SECTION, memory)
    steady(reward.optimization)

    samples = of_groups()
    width = max(s.num_trained for s in samples)
    table = torch.full((len(samples), width), -0.2)
    owners = list(range(len(samples)))
    metrics = [
        reward.update(samples, owners, table, [i % 2 == 0 for i in owners]) for _ in range(STEPS)
    ]
    return {"process reward": reward.model}, metrics, [reward.optimization]


def replay(model: PreTrainedModel, memory: MemorySection) -> Trained:
    """By advantages, over experts that no router has chosen."""
    routers = routers_of(model)
    assert routers is not None

    replayed = SECTION.model_copy(update={"routing_replay": "rollout"})
    trainer = Trainer(model, replayed, AlgorithmSection(), memory=memory)
    trainer.begin()
    steady(trainer.optimization)

    draws = np.random.default_rng(5)
    samples = []
    for sample in of_groups():
        shape = len(sample.ids) - 1, routers.layers, routers.num_experts
        rows = draws.random(shape).argsort(-1)[..., : routers.top_k]
        rows = RoutedExperts.of(rows, routers.num_experts)
        samples.append(msgspec.structs.replace(sample, routed_experts=rows))

    metrics = [trainer.step(samples)]
    return {"": model}, metrics, [trainer.optimization]


KINDS: dict[str, Callable[[PreTrainedModel, MemorySection], Trained]] = {
    "grpo": grpo, "ppo": ppo, "dpo": dpo, "sft": sft, "prime": prime, "replay": replay,
}  # fmt: skip


def made(name: str) -> PreTrainedModel:
    """A model of sharding_runs, with adapters, routers that replay or more layers where its name
    says so."""
    base, _, extra = name.partition("+")
    model = model_of(base, **(DEEP if extra == "deep" else {}))
    if extra == "lora":
        torch.manual_seed(3)
        config = LoraConfig(
            task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False
        )
        model = get_peft_model(model, config).eval()

    if extra == "routed":
        model = enable_routing(model)
    if extra == "bfloat16":
        model = model.to(torch.bfloat16)

    return model


MEMORY = {
    "": MemorySection(),
    "full": MemorySection(checkpointing="full"),
    "selective": MemorySection(checkpointing="selective"),
    "offload": MemorySection(offload_optimizer=True),
    "8bit": MemorySection(optimizer="adamw_8bit"),
}
DEEP = {"num_hidden_layers": 4, "tie_word_embeddings": False}
"""For stages of a pipeline."""
Case = tuple[str, str, str, dict[str, int]]
"""Model, kind of training, key of MEMORY, sizes."""
CASES: dict[str, list[Case]] = {
    "2 processes": [
        ("llama", "grpo", "", {"shard": 2}),
        ("moe", "sft", "offload", {"expert": 2}),
        ("gemma2", "dpo", "full", {"tensor": 2}),
        ("llama", "prime", "selective", {"context": 2}),
        ("moe+routed", "replay", "full", {"context": 2}),
        ("llama+deep", "grpo", "", {"pipeline": 2}),
    ],
    "4 processes": [
        ("llama", "ppo", "", {"shard": 2, "tensor": 2}),
        ("moe+routed", "replay", "selective", {"tensor": 2, "expert": 2}),
        ("llama+deep", "dpo", "selective", {"pipeline": 2}),
    ],
    "2 processes, more": [
        ("llama+lora", "sft", "", {"shard": 2}),
        ("qwen3 tied", "ppo", "", {}),
        ("moe+routed", "replay", "", {"shard": 2}),
        ("gemma2+deep", "sft", "full", {"pipeline": 2}),
        ("moe+deep", "sft", "offload", {"pipeline": 2}),
    ],
    "4 processes, more": [
        ("llama", "grpo", "", {"tensor": 4}),
        ("moe", "ppo", "selective", {"context": 2, "expert": 2}),
        ("llama+lora", "dpo", "", {"shard": 2, "context": 2}),
        ("qwen3 tied", "ppo", "full", {"shard": 4}),
        ("moe", "grpo", "full", {"shard": 4, "expert": 2}),
        ("gemma2", "sft", "full", {"shard": 2, "context": 2}),
        ("llama", "dpo", "", {"tensor": 2, "context": 2}),
        ("moe+deep", "grpo", "full", {"pipeline": 4}),
        ("gemma2", "grpo", "", {"shard": 4}),
        ("moe", "dpo", "", {"shard": 2}),
        ("llama", "sft", "offload", {"shard": 4}),
        ("moe", "prime", "", {"shard": 2, "expert": 2}),
        ("gemma2", "dpo", "", {"context": 4}),
        ("moe", "grpo", "", {"tensor": 2, "expert": 2}),
        ("moe", "sft", "", {"expert": 4}),
        ("qwen3 tied", "prime", "", {"tensor": 2}),
        ("llama+deep", "sft", "", {"pipeline": 4}),
        ("gemma2+deep", "grpo", "", {"pipeline": 4}),
        ("moe+deep", "grpo", "", {"pipeline": 2}),
    ],
}
"""How many processes -> model, way to train, way to save memory, sizes of the mesh."""
CASES_OF_SOAK = [name for name in CASES if name.endswith("more")]
CASES_OF_CI = [name for name in CASES if name not in CASES_OF_SOAK]


def num_processes(cases: str) -> int:
    """Of a key of CASES."""
    return int(cases.split()[0])


def single(case: Case) -> tuple[str, str, str, bool]:
    """What decides what one process comes to."""
    return *case[:3], "shard" in case[3]


def trained(case: Case, meshes: Any | None) -> dict[str, Any]:
    """Whole weights by model and name, metrics, and how many numbers this process keeps."""
    name, kind, memory, sizes = case
    section = MEMORY[memory]

    model = made(name)
    if "shard" in sizes:
        make_plain(model)  # as a sharded one is

    keep_activations(model, section)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    if meshes is not None:
        model = spread(model, meshes)

    models, metrics, optimizations = KINDS[kind](model, section)
    weights = {
        f"{role} {n}": whole.clone()
        for role, one in models.items()
        for n, whole in whole_tensors(one, dict(one.named_parameters())).items()
    }
    moved = (
        max(
            difference(p.detach(), before[n])
            for one in models.values()
            for n, p in one.named_parameters()
            if n in before and p.shape == before[n].shape
        )
        if meshes is None
        else 0.0
    )

    for one in models.values():
        note_change(one)  # what has been gathered is given back

    return {
        "weights": weights,
        "moved": moved,
        "metrics": metrics,
        "held": sum(local(p).numel() for one in models.values() for p in one.parameters()),
        "moments": sum(
            local(m).numel()
            for optimization in optimizations
            for of_parameter in optimization.optimizer.state.values()
            for m in of_parameter.values()
        ),
    }


def rewards_apart(section: ParallelSection) -> float:
    """How far the rewards of a shared token classifier are from those of a whole one, as a share of
    the largest."""
    found = []
    for share in (False, True):
        torch.manual_seed(11)
        shape = {**SHAPE, "num_labels": 1}
        model = prepare(LlamaForTokenClassification(LlamaConfig(**shape)).eval())
        if share:
            model = spread(model, make_meshes(section, "cpu"))
        rewards = TokenRewardModel(model, RewardModelSection(coef=2.0)).rewards(plain())
        found.append(rewards)

    return difference(*found) / float(found[0].abs().max())


def long_samples(count: int) -> list[Sample]:
    """So many, of 256 tokens each and no common beginning."""
    draws = np.random.default_rng(0)
    mask = [place > 0 for place in range(256)]
    rows = [draws.integers(1, VOCABULARY, 256).tolist() for _ in range(count)]
    return [Sample.given(f"t{n}", f"g{n}", row, mask) for n, row in enumerate(rows)]


def peaks_of_stages(count: int) -> list[int]:
    """The most bytes of tensors that this stage makes in a step of as many micro-batches as there
    are stages, and in one of three times as many."""
    model = made("llama+deep")
    spread(model, make_meshes(ParallelSection(pipeline=count), "cpu"))

    optimization = Optimization(model.parameters(), SECTION, layouts=layouts_of(model))
    found = []
    for times in (1, 1, 3):
        batches = micro_batches(long_samples(times * count), 256, CPU)
        optimization.begin()
        with TensorMemory() as memory:
            while batches:  # each is let go with the masks that it keeps
                optimization.backward(-token_logprobs(model, batches.pop()[1])[0].sum())
            optimization.finish()
        found.append(memory.peak)

    return found[1:]  # the first step has made moments


def compared(found: dict[str, Any], alone: dict[str, Any]) -> dict[str, float]:
    """Largest differences to one process, and shares of what it keeps."""
    assert found["weights"].keys() == alone["weights"].keys()

    shown = ("actor/grad_norm", "critic/grad_norm", "actor/pg_loss", "sft/loss", "sft/eval/loss")
    pairs = [
        (one[key], other[key])
        for one, other in zip(found["metrics"], alone["metrics"], strict=True)
        for key in {*shown, "preference/loss", "process_reward/loss", "sft/eval/token_accuracy"}
        & other.keys()
    ]
    assert pairs
    return {
        "weights": max(difference(found["weights"][n], w) for n, w in alone["weights"].items()),
        "metrics": max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs),
        "moved": alone["moved"],
        "held": found["held"] / alone["held"],
        "moments": found["moments"] / alone["moments"],
    }


def without_logits() -> None:
    """From here on a pass may not make the logits of the whole vocabulary."""

    def refused(model: PreTrainedModel, batch: Any) -> torch.Tensor:
        raise AssertionError("whole logits are made for log-probs")

    output_layer.all_logits = refused


if __name__ == "__main__":
    name, process, meeting, expected, out = sys.argv[1:]
    count = num_processes(name)
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=int(process),
        world_size=count,
        timeout=timedelta(seconds=300),
    )
    cases = CASES[name]
    alone = torch.load(expected)
    without_logits()
    found = []
    for case in cases:
        meshes = make_meshes(ParallelSection(**case[3]), "cpu")
        found.append(compared(trained(case, meshes), alone[single(case)]))
    rewards = {}
    peaks = []
    if name in CASES_OF_SOAK or count == 2:
        for key in ("shard", "tensor", "context"):
            rewards[key] = rewards_apart(ParallelSection(**{key: count}))
        peaks = peaks_of_stages(count)
    torch.save((found, rewards, peaks), out)
    distributed.destroy_process_group()
