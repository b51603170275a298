"""Updates of a sharded model. As a program, one process of several: SHARD PROCESS WORLD
MEETING_FILE OUT_FILE; a shard of 1 is one process by itself."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import data_parallel_runs
import msgspec
import torch
from data_parallel_runs import model_of, samples_of
from torch import distributed

from agentevo.config import AlgorithmSection, ParallelSection
from agentevo.models.compute.sharded import make_plain, shard
from agentevo.training.batching.passes import token_tables
from agentevo.training.mesh import make_meshes
from agentevo.training.trainer import Trainer

STEPS = 3
SECTION = data_parallel_runs.SECTION.model_copy(update={"learning_rate": 1e-4})
"""At a rate of 1e-3 what AdamW makes of gradients near 0 grows beyond 1e-5 within these steps."""


def trained(mesh: Any) -> dict[str, Any]:
    """GRPO with a reference that follows; what is left after STEPS and one more."""
    algorithm = AlgorithmSection(kl_coef=0.2, kl_in="loss", reference="ema", reference_decay=0.5)
    model = model_of(1)
    make_plain(model)  # as a sharded one is

    if mesh is not None:
        shard(model, mesh)

    trainer = Trainer(model, SECTION, algorithm)
    trainer.begin()
    metrics = [trainer.step(with_reference(trainer)) for _ in range(STEPS + 1)]
    held = sum(p.to_local().numel() if mesh is not None else p.numel() for p in model.parameters())
    return {"after": weights_of(model, mesh), "metrics": metrics, "held": held}


def with_reference(trainer: Trainer) -> list[Any]:
    samples = samples_of(3, 3)
    reference = trainer.roles.reference
    tables = token_tables(
        samples, 64, torch.device("cpu"), lambda batch: {"ref_logp": reference.logprobs(batch)}
    )
    return [
        msgspec.structs.replace(
            s, columns={**s.columns, "ref_logp": row[: sum(s.loss_mask)].tolist()}
        )
        for s, row in zip(samples, tables["ref_logp"], strict=True)
    ]


def weights_of(model: Any, mesh: Any) -> dict[str, torch.Tensor]:
    return {
        name: (p if mesh is None else p.full_tensor()).detach().clone()
        for name, p in model.state_dict().items()
    }


if __name__ == "__main__":
    size, process, world, meeting, out = sys.argv[1:]
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=int(process),
        world_size=int(world),
        timeout=timedelta(seconds=300),
    )
    mesh = make_meshes(ParallelSection(shard=int(size)), "cpu").data
    torch.save(trained(mesh), out)
    distributed.destroy_process_group()
