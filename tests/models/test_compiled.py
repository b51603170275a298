"""Compiled decoder layers: the same gradients, and which runs have them. Compiled here for the CPU,
whose plain linear layers stand for a GPU's."""

from __future__ import annotations

import copy
import functools
import random

import pytest
import torch
from slow import soak

from agentevo.config import (
    LoraSection,
    MemorySection,
    ModelSection,
    ParallelSection,
    RunConfig,
    TrainerSection,
)
from agentevo.models.compute import compiled
from agentevo.models.compute.activations import CheckpointedLayer, keep_activations
from agentevo.models.compute.compiled import CompiledLayer, compile_layers, is_compiled
from agentevo.models.files.model_copy import copy_policy
from agentevo.runs.orchestration import components
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.types import Sample

CPU = torch.device("cpu")


def plain(random_model, name):
    """A model as it would be on a GPU."""
    model = copy.deepcopy(random_model(name).alone)
    model.set_attn_implementation("agentevo")
    return model


def batch_of(seed):
    rng = random.Random(seed)
    samples = []
    for number in range(5):
        ids = [rng.randrange(2, 97) for _ in range(rng.randrange(3, 50))]
        trained = [place > 0 for place in range(len(ids))]
        zeros = [0.0] * len(ids)
        samples.append(
            Sample(
                trajectory_id=str(number),
                group_id="g",
                ids=ids,
                loss_mask=trained,
                logprobs=zeros,
                versions=[0] * len(ids),
                advantages=zeros[1:],
            )
        )

    return pack(samples, CPU)


def gradients(model, batch):
    model.zero_grad()
    token_logprobs(model, batch)[0].square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def forwards(model):
    return [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", *soak("aot_eager", "inductor")])
@pytest.mark.parametrize("checkpointing", ["full", *soak("none")])
@pytest.mark.parametrize("name", ["gemma2", *soak("qwen3")])
def test_gradients_are_those_of_the_layers_themselves(
    name, checkpointing, backend, random_model, monkeypatch
):
    """Forward passes as PyTorch captures them; in the soak their backward passes too, and kernels
    that are made of both, which takes a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    compile_forward = functools.cache(compiled._compile_forward.__wrapped__)
    monkeypatch.setattr(compiled, "_compile_forward", compile_forward)
    model = compile_layers(plain(random_model, name))
    model = keep_activations(model, MemorySection(checkpointing=checkpointing))
    torch._dynamo.utils.counters.clear()

    for seed in range(2):
        batch = batch_of(seed)
        found, wanted = (gradients(one, batch) for one in (model, plain(random_model, name)))
        assert (found - wanted).norm() < 1e-5 * wanted.norm()
        if not seed:
            made = torch._dynamo.utils.counters["stats"]["unique_graphs"]

    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == made, (
        "compiled once, for all layers and lengths"
    )


def test_layers_with_experts_stay_as_they_are(random_model):
    model = plain(random_model, "qwen3-moe")
    assert not is_compiled(compile_layers(model)) and forwards(model) == []


def test_selective_checkpointing_is_left_to_the_compiler(random_model):
    model = compile_layers(plain(random_model, "llama"))
    for mode, kind in (("selective", CompiledLayer), ("full", CheckpointedLayer)):
        model = keep_activations(model, MemorySection(checkpointing=mode))
        assert {type(forward) for forward in forwards(model)} == {kind}
        assert is_compiled(model)


def test_a_copy_computes_with_its_own_layers(random_model):
    model = compile_layers(plain(random_model, "llama"))
    twin = copy_policy(model)
    layers = {id(layer) for layer in twin.modules()}
    assert len(forwards(twin)) == 2
    assert all(id(forward.layer) in layers for forward in forwards(twin))


def test_the_engine_computes_with_the_layers_themselves(random_model, monkeypatch):
    model = compile_layers(plain(random_model, "llama"))
    monkeypatch.setattr(compiled, "_compile_forward", lambda kind: pytest.fail)
    with torch.inference_mode():
        token_logprobs(model, batch_of(0))


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, True),
        ({"trainer": TrainerSection(torch_compile=False)}, False),
        ({"trainer": TrainerSection(parallel=ParallelSection(shard=2))}, False),
        ({"model": ModelSection(name="smollm2-135m-instruct", lora=LoraSection(rank=4))}, False),
        ({"memory": MemorySection(offload_activations=True)}, False),
        ({"memory": MemorySection(offload_optimizer=True, checkpointing="full")}, True),
    ],
    ids=["default", "off", "sharded", "adapters", "offloaded", "checkpointed"],
)
def test_which_runs_have_them(sections, expected):
    config = RunConfig(**{"model": ModelSection(name="tiny"), **sections})
    assert components._compiles(config, torch.device("cuda")) is expected
    assert not components._compiles(config, CPU)
