"""Small models of several architectures, computed by several processes together and by each alone.
As a program, one process of several: PROCESS COUNT MEETING_FILE OUT_FILE."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentevo.models.compute.attention import prepare
from agentevo.training.batching.packing import PackedBatch, pack
from agentevo.training.collectives import Ranks
from agentevo.training.kernels.output_layer import token_logprobs, token_logprobs_and_squares
from agentevo.training.sharding.context_parallel import context_parallel
from agentevo.training.sharding.expert_parallel import expert_parallel
from agentevo.training.sharding.layouts import (
    add_parts,
    gradient_norm,
    layouts_of,
    whole_tensors,
)
from agentevo.training.sharding.tensor_parallel import tensor_parallel
from agentevo.types import Sample
from agentevo.types.penalties import Penalties, TokenPenalties

CPU = torch.device("cpu")
VOCABULARY = 197
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SINKS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
CHUNKS = {
    "attention_chunk_size": 5,
    "intermediate_size_mlp": 48,
    "no_rope_layers": [1, 0],
    "floor_scale": 4,
    "num_local_experts": 2,
}
WINDOW = {"pad_token_id": 0, "query_pre_attn_scalar": 8, "sliding_window": 6}
MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": lambda **more: LlamaForCausalLM(LlamaConfig(**SHAPE | more)),
    "qwen2": lambda **more: Qwen2ForCausalLM(Qwen2Config(**SHAPE | more)),
    "qwen3 tied": lambda **more: Qwen3ForCausalLM(
        Qwen3Config(**SHAPE | more, tie_word_embeddings=True)
    ),
    "gemma2": lambda **more: Gemma2ForCausalLM(Gemma2Config(**SHAPE | WINDOW | more)),
    "sinks": lambda **more: GraniteSWAForCausalLM(GraniteSWAConfig(**SHAPE | SINKS | more)),
    "moe": lambda **more: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE | EXPERTS | more)),
}
CONTEXT_MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "chunks": lambda **more: Llama4ForCausalLM(Llama4TextConfig(**SHAPE | CHUNKS | more)),
    "lora": MODELS["llama"],
}
"""Models that context parallelism alone divides."""


def model_of(name: str, **more: Any) -> PreTrainedModel:
    """Prepared, with the weights that every process has. `more`: of its configuration."""
    torch.manual_seed(7)
    model = (MODELS | CONTEXT_MODELS)[name](**more).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and norms are made as constants
                parameter.add_(0.1 * torch.randn_like(parameter))
    model = prepare(model)
    if name != "lora":
        return model

    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config).eval()


def samples_of(seed: int, count: int = 6) -> list[Sample]:
    """Answers to one prompt, of 20 to 45 tokens."""
    rng = random.Random(seed)
    prompt = [rng.randrange(1, VOCABULARY) for _ in range(17)]
    found = []
    for number in range(count):
        ids = [*prompt, *(rng.randrange(1, VOCABULARY) for _ in range(rng.randrange(3, 28)))]
        mask = [False] * 17 + [True] * (len(ids) - 17)
        found.append(
            Sample(
                trajectory_id=f"t{number}",
                group_id="g",
                ids=ids,
                loss_mask=mask,
                logprobs=[-3.0 if m else 0.0 for m in mask],
                versions=[0 if m else -1 for m in mask],
                advantages=[rng.gauss(0, 1) for m in mask if m],
            )
        )

    return found


def plain(seed: int = 0) -> PackedBatch:
    return pack(samples_of(seed), CPU)


def constrained() -> PackedBatch:
    """Every row under a mask, penalties on all of them, and a temperature."""
    kind = Penalties(
        presence=0.4, frequency=0.2, repetition=1.3, logit_bias=((3, 0.5), (VOCABULARY - 1, -1.0))
    )
    samples = [
        msgspec.structs.replace(
            s,
            temperature=0.7,
            penalties=TokenPenalties.join([(17, None), (len(s.ids) - 17, kind)]),
        )
        for s in samples_of(3)
    ]
    batch = pack(samples, CPU)
    allowed = np.random.default_rng(0).random((len(batch.logit_nodes), 224)) < 0.5
    allowed[batch.rows.numpy(), batch.targets.numpy()] = True
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    batch.masks = torch.from_numpy(words.copy())
    return batch


def computed(model: PreTrainedModel, batch: PackedBatch, share: float = 1.0) -> dict[str, Any]:
    """Log-probs, entropies, sums of squares, and the gradient of a loss of the first two."""
    logp, entropy = token_logprobs(model, batch)
    numbers = torch.Generator().manual_seed(1)
    loss = (logp * torch.randn(logp.shape, generator=numbers)).sum()
    loss = loss + (entropy * torch.randn(entropy.shape, generator=numbers)).sum()
    model.zero_grad()
    (share * loss).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    with torch.no_grad():
        again, squares = token_logprobs_and_squares(model, batch)

    return {
        "logp": logp.detach(),
        "entropy": entropy.detach(),
        "without gradient": again,
        "squares": squares,
        "grads": grads,
    }


def difference(one: Any, other: Any) -> float:
    return float((one - other).abs().max()) if one.shape == other.shape else float("inf")


def compared(model: PreTrainedModel, found: dict[str, Any], alone: dict[str, Any]) -> dict:
    """The largest differences; gradients as a share of the largest one."""
    grads = whole_tensors(model, found["grads"])
    highest = max(float(g.abs().max()) for g in alone["grads"].values())
    assert grads.keys() == alone["grads"].keys()

    result = {key: difference(found[key], alone[key]) for key in alone if key != "grads"}
    result["grads"] = max(difference(grads[n], g) for n, g in alone["grads"].items()) / highest
    exact = torch.cat([g.flatten() for g in alone["grads"].values()]).norm()
    parameters = {id(p): p for p in model.parameters()}.values()
    result["norm"] = float(gradient_norm(parameters, layouts_of(model)) / exact - 1)
    return result


def of_tensor(name: str, ranks: Ranks, batch: PackedBatch) -> dict[str, float]:
    model = model_of(name)
    alone = computed(model, batch)
    kept = {n: p.detach().clone() for n, p in model.named_parameters()}
    tensor_parallel(model, ranks)
    found = computed(model, batch)
    add_parts(layouts_of(model))

    weights = whole_tensors(model, dict(model.named_parameters()))
    result = compared(model, found, alone)
    result["weights"] = max(difference(weights[n], w) for n, w in kept.items())
    result["held"] = sum(p.numel() for p in model.parameters()) / sum(
        w.numel() for w in kept.values()
    )
    copied = computed(copy.deepcopy(model), batch)
    result["copy"] = difference(copied["logp"], found["logp"])

    with torch.no_grad():
        logits = model(**batch.inputs).logits

    result["logits"] = float(logits.shape[-1] - VOCABULARY)
    return result


def of_context(name: str, mesh: Any, batch: PackedBatch) -> dict[str, float]:
    """With a dimension "tensor" in the mesh, under both."""
    model = model_of(name)
    alone = computed(model, batch)
    if "tensor" in mesh.mesh_dim_names:
        tensor_parallel(model, Ranks.of(mesh, "tensor"))

    ranks = Ranks.of(mesh, "context")
    context_parallel(model, ranks)
    found = computed(model, batch, 1 / ranks.size)
    add_parts(layouts_of(model))

    for grad in found["grads"].values():
        distributed.all_reduce(grad, group=ranks.group)

    return compared(model, found, alone)


def of_experts(mesh: Any) -> dict[str, float]:
    """Every process has data of its own; the losses add up."""
    model = model_of("moe")
    ranks = Ranks.of(mesh, "expert")
    singles = [computed(model, plain(seed)) for seed in range(ranks.size)]
    grads = {n: sum(single["grads"][n] for single in singles) for n in singles[0]["grads"]}
    expert_parallel(model, ranks)
    found = computed(model, plain(ranks.rank))

    layouts = layouts_of(model)
    for parameter in model.parameters():
        if parameter not in layouts:
            distributed.all_reduce(parameter.grad, group=ranks.group)

    return compared(model, found, {**singles[ranks.rank], "grads": grads})


def of_fsdp(name: str, mesh: Any) -> dict[str, float]:
    """Two data-parallel ranks of two processes each, whose slices FSDP shards again."""
    dp = Ranks.of(mesh, "dp")
    model = model_of(name)
    singles = [computed(model, plain(seed)) for seed in range(dp.size)]
    grads = {n: sum(single["grads"][n] for single in singles) for n in singles[0]["grads"]}
    tensor_parallel(model, Ranks.of(mesh, "tensor"))

    for module in (*model.base_model.layers, model):
        fully_shard(module, mesh=mesh["dp"])
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)

    found = computed(model, plain(dp.rank))
    model.reshard()
    add_parts(layouts_of(model))
    return compared(model, found, {**singles[dp.rank], "grads": grads})


def fsdp_checks() -> dict[str, dict[str, float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tensor"))
    return {f"fsdp {name}": of_fsdp(name, mesh) for name in ("llama", "qwen3 tied", "moe")}


def checks(count: int) -> dict[str, dict[str, float]]:
    """What is compared among `count` processes, by name."""
    tensor = init_device_mesh("cpu", (count,), mesh_dim_names=("tensor",))
    ranks = Ranks.of(tensor, "tensor")
    found = {f"tensor {name}": of_tensor(name, ranks, plain()) for name in MODELS}
    found["tensor constrained"] = of_tensor("llama", ranks, constrained())
    context = init_device_mesh("cpu", (count,), mesh_dim_names=("context",))
    found |= {
        f"context {name}": of_context(name, context, plain()) for name in MODELS | CONTEXT_MODELS
    }
    expert = init_device_mesh("cpu", (count,), mesh_dim_names=("expert",))
    found["experts"] = of_experts(expert)
    if count == 4:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tensor"))
        found |= {f"both {name}": of_context(name, both, plain()) for name in MODELS}
        found |= fsdp_checks()

    return found


if __name__ == "__main__":
    process, count, meeting, out = sys.argv[1:]
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=int(process),
        world_size=int(count),
        timeout=timedelta(seconds=300),
    )
    torch.save(checks(int(count)), out)
    distributed.destroy_process_group()
