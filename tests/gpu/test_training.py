"""Training steps on a GPU against the same on the CPU, and every way to save memory there."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from agentevo.config import AlgorithmSection, CriticSection, MemorySection, TrainerSection
from agentevo.models.compute.activations import keep_activations
from agentevo.models.compute.compiled import compile_layers
from agentevo.training.kernels.linear_logprobs import linear_logprobs
from agentevo.training.trainer import Trainer
from agentevo.types import Sample

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "mixtral"]
SAVING = {
    "selective": MemorySection(checkpointing="selective"),
    "full": MemorySection(checkpointing="full"),
    "offload-activations": MemorySection(offload_activations=True),
    "full-offload": MemorySection(checkpointing="full", offload_activations=True),
    "offload-optimizer": MemorySection(offload_optimizer=True),
}


def samples(seed=0, groups=3, size=4):
    rng = random.Random(seed)
    found = []
    for group in range(groups):
        prompt = [rng.randrange(2, 97) for _ in range(40)]
        for member in range(size):
            ids = prompt + [rng.randrange(2, 97) for _ in range(rng.randrange(5, 60))]
            mask = [False] * 40 + [True] * (len(ids) - 40)
            advantage = rng.gauss(0, 1)
            found.append(
                Sample(
                    trajectory_id=f"{group}-{member}",
                    group_id=f"g{group}",
                    ids=ids,
                    loss_mask=mask,
                    logprobs=[rng.uniform(-6, -3) if m else 0.0 for m in mask],
                    versions=[0 if m else -1 for m in mask],
                    advantages=[advantage for m in mask if m],
                )
            )

    return found


def trained(model, steps=4, memory=None, **sections):
    section = TrainerSection(learning_rate=1e-3, warmup_steps=0, micro_batch_tokens=300)
    trainer = Trainer(model, section, AlgorithmSection(), memory=memory, **sections)
    norms = [trainer.step(samples(seed))["actor/grad_norm"] for seed in range(steps)]
    weights = torch.cat([p.detach().float().flatten().cpu() for p in model.parameters()])
    return weights, norms


def distance(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gpu_trains_as_the_cpu_does(name, random_model, on_gpu):
    wanted, norms = trained(copy.deepcopy(random_model(name).model))
    found, on_device = trained(on_gpu(name))
    assert on_device == pytest.approx(norms, rel=1e-4)
    assert distance(found, wanted) < 1e-4


@pytest.mark.parametrize("way", SAVING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_saving_memory_changes_nothing(way, dtype, on_gpu):
    wanted, norms = trained(on_gpu("qwen3", dtype))
    model = keep_activations(on_gpu("qwen3", dtype), SAVING[way])
    found, others = trained(model, memory=SAVING[way])
    assert others == pytest.approx(norms, rel=1e-4 if dtype == torch.float32 else 2e-2)
    assert distance(found, wanted) < (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "llama"])
def test_compiled_layers_train_as_the_others(name, on_gpu):
    wanted, norms = trained(on_gpu(name))
    found, compiled = trained(compile_layers(on_gpu(name)))
    assert compiled == pytest.approx(norms, rel=1e-4)
    assert distance(found, wanted) < 1e-4


def test_log_probs_of_an_output_layer(gpu):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(700, 64, generator=generator)
    weight = torch.randn(5000, 64, generator=generator) * 0.3
    rows = torch.randint(0, 700, (900,), generator=generator)
    targets = torch.randint(0, 5000, (900,), generator=generator)

    def run(device):
        h, w = (x.to(device).requires_grad_() for x in (hidden, weight))
        logp, entropy = linear_logprobs(h, w, None, rows.to(device), targets.to(device), 0.7)
        (logp.mean() + 0.1 * entropy.mean()).backward()
        return [x.detach().cpu() for x in (logp, entropy, h.grad, w.grad)]

    for found, wanted in zip(run(gpu), run(torch.device("cpu")), strict=True):
        assert distance(found, wanted) < 1e-5


def test_a_critic(on_gpu):
    section = CriticSection(learning_rate=1e-3)
    model = on_gpu("llama")
    trainer = Trainer(
        model,
        TrainerSection(learning_rate=1e-3, warmup_steps=0),
        AlgorithmSection(name="ppo"),
        critic=section,
    )
    trainer.begin()

    assert trainer.roles.critic is not None
    assert next(trainer.roles.critic.model.parameters()).device.type == "cuda"
