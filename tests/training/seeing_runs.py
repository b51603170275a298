"""Fine-tuning of tiny models that see, sharded over processes. As a program, one process of
several: PROCESS WORLD MEETING_FILE OUT_FILE FOLDER DTYPE [FOLDER DTYPE ...]."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from mesh_runs import steady
from torch import distributed

from agentevo.config import ParallelSection, SFTSection
from agentevo.models.compute.sharded import make_plain
from agentevo.training.distribute import check_spread, spread
from agentevo.training.mesh import Meshes, make_meshes
from agentevo.training.sharding.layouts import whole_tensors
from agentevo.training.supervised import SupervisedTrainer

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from seeing import Seeing
from seeing_samples import BY_DIGEST, branches

STEPS = 2
SECTION = SFTSection(learning_rate=3e-4, micro_batch_tokens=64)
"""A pass has one or two of the samples, so that some passes of a process show no image."""


def train(folder: Path, dtype: str, meshes: Meshes | None) -> dict[str, Any]:
    """Whole weights by name, metrics, and the number of float32 masters this process keeps."""
    seeing = Seeing.read(folder, "auto", dtype=dtype)
    model = seeing.loaded.model
    samples, _ = branches(seeing)
    if meshes is None:
        make_plain(model)  # as a sharded one is
    else:
        check_spread(model, meshes.section)
        spread(model, meshes)

    trainer = SupervisedTrainer(model, SECTION, STEPS)
    steady(trainer.optimization)
    assert trainer.images is not None
    trainer.images.hold(BY_DIGEST)
    metrics = [trainer.step(samples) for _ in range(STEPS)]

    weights = whole_tensors(model, dict(model.named_parameters()))
    return {
        "weights": {name: tensor.float().clone() for name, tensor in weights.items()},
        "metrics": metrics,
        "masters": sum(
            p.numel() for g in trainer.optimization.optimizer.param_groups for p in g["params"]
        ),
    }


if __name__ == "__main__":
    process, world, meeting, out, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=int(process),
        world_size=int(world),
        timeout=timedelta(seconds=300),
    )
    meshes = make_meshes(ParallelSection(shard=int(world)), "cpu")
    pairs = zip(cases[::2], cases[1::2], strict=True)
    torch.save([train(Path(folder), dtype, meshes) for folder, dtype in pairs], out)
    distributed.destroy_process_group()
