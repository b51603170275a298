"""Updates of a sharded model. As a program, one process of several: SHARD PROCESS WORLD
MEETING_FILE OUT_FILE; a shard of 1 is one process by itself."""

from __future__ import annotations

import sys
from copy import deepcopy
from datetime import timedelta
from typing import Any

import msgspec
import torch
from data_parallel_runs import SECTION, model_of, samples_of
from torch import distributed

from agentevo.config import AlgorithmSection, ParallelSection
from agentevo.models.sharded import gather_into, make_plain, shard, whole
from agentevo.training.batching.passes import token_tables
from agentevo.training.mesh import make_meshes
from agentevo.training.trainer import Trainer

STEPS = 3


def trained(mesh: Any, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """GRPO with a reference that follows; what is left
    after STEPS, then after one more from that state."""
    algorithm = AlgorithmSection(kl_coef=0.2, kl_in="loss", reference="ema", reference_decay=0.5)
    model = model_of(1)
    make_plain(model)  # as a sharded one is
    if state is not None:
        model.load_state_dict(state["weights"])
    if mesh is not None:
        shard(model, mesh)
    trainer = Trainer(model, SECTION, algorithm)
    if state is None:
        trainer.begin()
        metrics = [trainer.step(with_reference(trainer)) for _ in range(STEPS)]
    else:
        trainer.load_state_dict(state["trainer"])
        metrics = []
    held = sum(p.to_local().numel() if mesh is not None else p.numel() for p in model.parameters())
    kept = {"weights": weights_of(model, mesh), "trainer": deepcopy(whole(trainer.state_dict()))}
    metrics.append(trainer.step(with_reference(trainer)))
    return {**kept, "after": weights_of(model, mesh), "metrics": metrics, "held": held}


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
    target = model_of(5)
    if mesh is None:
        return {name: p.detach().clone() for name, p in model.state_dict().items()}
    gather_into(model, target)
    return dict(target.state_dict())


if __name__ == "__main__":
    size, process, world, meeting, out = sys.argv[1:]
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=int(process),
        world_size=int(world),
        timeout=timedelta(seconds=120),
    )
    mesh = make_meshes(ParallelSection(shard=int(size)), "cpu").data
    found = trained(mesh)
    # From one process's state, as after a resume on another number of processes.
    torch.manual_seed(0)
    found["resumed"] = trained(mesh, torch.load(f"{meeting}.state"))["after"]
    torch.save(found, out)
    distributed.destroy_process_group()
