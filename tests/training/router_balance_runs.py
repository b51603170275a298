"""transformers' load-balancing loss of a few samples, and a step of two processes with it. As a
program, one of the processes: SHARD PROCESS MEETING_FILE OUT_FILE."""

from __future__ import annotations

import sys
from datetime import timedelta
from unittest.mock import patch

import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import (
    DbrxConfig,
    DbrxForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from agentevo.config import ParallelSection, SFTSection
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.rows import shares_prefixes
from agentevo.training.batching.passes import micro_batches
from agentevo.training.distribute import spread
from agentevo.training.mesh import make_meshes
from agentevo.training.supervised import SupervisedTrainer
from agentevo.types import Sample

COEF = 0.5
PREFIX = list(range(5, 35))
IDS = [[*PREFIX, 40, 41, 42], [*PREFIX, *range(50, 60)], list(range(3, 47)), [9, 8, 7, 6, 5]]
SAMPLES = [
    Sample.given(str(n), "g", ids, [False, False] + [True] * (len(ids) - 2))
    for n, ids in enumerate(IDS)
]


def padded(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and mask [S, T], padded on the right."""
    width = max(len(sample.ids) for sample in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = torch.as_tensor(sample.ids)
        mask[row, : len(sample.ids)] = 1
    return ids, mask


def of_transformers(
    model: PreTrainedModel, parts: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' auxiliary loss of each part, each with its share of the tokens; and the loss of
    a step with it."""
    num_tokens = sum(len(sample.ids) for sample in SAMPLES)
    num_trained = sum(sample.num_trained for sample in SAMPLES)
    balance = loss = torch.zeros(())
    for part in parts:
        samples = [SAMPLES[index] for index in part]
        ids, mask = padded(samples)
        output = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
        balance = balance + output.aux_loss * mask.sum() / num_tokens
        logp = output.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = loss - (logp * mask[:, 1:])[:, 1:].sum() / num_trained
    return balance, loss + COEF * balance


def parts_of(model: PreTrainedModel, micro_batch_tokens: int, merge: bool = True):
    merge = shares_prefixes(model, merge)
    batches = micro_batches(SAMPLES, micro_batch_tokens, torch.device("cpu"), merge=merge)
    return [indices for indices, _ in batches]


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def mixture() -> PreTrainedModel:
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    return MixtralForCausalLM(MixtralConfig(vocab_size=97, **shape, **heads, **experts)).eval()


def dbrx() -> PreTrainedModel:
    """A mixture whose config.json has no num_experts_per_tok."""
    torch.manual_seed(3)
    config = DbrxConfig(
        d_model=32,
        n_heads=4,
        n_layers=2,
        vocab_size=97,
        initializer_range=0.2,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    )
    return DbrxForCausalLM(config).eval()


def whole_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in gradients(model).items()
    }


if __name__ == "__main__":
    size, process, meeting, out = sys.argv[1:]
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=int(process),
        world_size=2,
        timeout=timedelta(seconds=300),
    )
    meshes = make_meshes(ParallelSection(shard=int(size)), "cpu")
    model = spread(prepare(mixture()), meshes)
    section = SFTSection(router_aux_loss_coef=COEF, max_grad_norm=1e9, micro_batch_tokens=64)
    trainer = SupervisedTrainer(model, section, 10)
    with patch.object(trainer.optimization, "_step"):
        metrics = trainer.step(SAMPLES)
    torch.save((metrics, whole_gradients(model), parts_of(model, 64)), out)
    distributed.destroy_process_group()
