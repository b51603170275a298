"""Updates of a small model in every way that it is trained. As a program, one process of several:
MESH PROCESS MEETING_FILE OUT_FILE, where MESH is 2 (each process a rank) or 2x2 (two processes per
rank: a mesh of the dimensions dp and other)."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
from preset_gradients import NAMES, find_gradient
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from agentevo.config import AlgorithmSection, CriticSection, SFTSection, TrainerSection
from agentevo.errors import CheckpointError
from agentevo.models.compute.attention import prepare
from agentevo.training import parallel
from agentevo.training.batching.passes import backward_through_sums, micro_batches, token_tables
from agentevo.training.batching.staleness import mask_stale
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.optimization import Optimization
from agentevo.training.supervised import SupervisedTrainer, held_out_metrics
from agentevo.training.trainer import Trainer
from agentevo.types import Sample

CPU = torch.device("cpu")
SECTION = TrainerSection(
    learning_rate=1e-3, warmup_steps=0, micro_batch_tokens=64, minibatches=2, epochs=2
)


def model_of(seed: int, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97, **shape, initializer_range=0.2, bos_token_id=None, eos_token_id=None
        )
    )
    prepare(model.eval())

    return model


def samples_of(num_groups: int, size: int = 4) -> list[Sample]:
    """Groups that share a prompt, about 20 tokens each."""
    rng = random.Random(num_groups)
    found = []
    for group in range(num_groups):
        prompt = [rng.randrange(97) for _ in range(12)]
        for member in range(size):
            ids = [*prompt, *(rng.randrange(97) for _ in range(rng.randrange(3, 14)))]
            mask = [False] * 12 + [True] * (len(ids) - 12)
            numbers = {name: [rng.gauss(0, 1) for m in mask if m] for name in ("values", "returns")}
            found.append(
                Sample(
                    trajectory_id=f"t{group}-{member}",
                    group_id=f"g{group}",
                    ids=ids,
                    loss_mask=mask,
                    logprobs=[rng.uniform(-5, -3) if m else 0.0 for m in mask],
                    versions=[0 if m else -1 for m in mask],
                    advantages=[rng.gauss(0, 1) for m in mask if m],
                    columns=numbers,
                )
            )

    return found


def reinforced(
    algorithm: AlgorithmSection,
    num_groups: int = 4,
    size: int = 4,
    critic: CriticSection | None = None,
    bound: int | None = None,
):
    """bound: tokens are of versions 0 to 4, the trainer is at 4."""
    model = model_of(1)
    samples = samples_of(num_groups, size)
    if bound is not None:
        aged = [
            msgspec.structs.replace(
                s, versions=[place % 5 if m else -1 for place, m in enumerate(s.loss_mask)]
            )
            for s in samples
        ]
        samples, _ = mask_stale(aged, trainer_version=4, bound=bound)

    trainer = Trainer(model, SECTION, algorithm, critic=critic)
    trainer.begin()
    reference = trainer.roles.reference
    if reference is not None:
        tables = token_tables(
            samples, 64, CPU, lambda batch: {"ref_logp": reference.logprobs(batch)}
        )
        samples = [
            msgspec.structs.replace(
                s, columns={**s.columns, "ref_logp": row[: sum(s.loss_mask)].tolist()}
            )
            for s, row in zip(samples, tables["ref_logp"], strict=True)
        ]

    metrics = [trainer.step(samples)]
    roles = [] if trainer.roles.critic is None else list(trainer.roles.critic.weights.values())
    return [*model.parameters(), *roles], metrics


def supervised():
    model = model_of(2)
    samples = samples_of(3)
    trainer = SupervisedTrainer(
        model, SFTSection(learning_rate=1e-3, micro_batch_tokens=64), total_steps=2
    )
    return list(model.parameters()), [
        trainer.step(samples),
        trainer.step(samples),
        held_out_metrics(model, samples[:5], 64),
    ]


def compared():
    """A loss of whole answers, as preferences and process rewards have."""
    model = model_of(3)
    samples = samples_of(3)
    optimization = Optimization(model.parameters(), SECTION)
    optimization.begin()

    owners = [index // 2 for index in range(len(samples))]
    loss, sums = backward_through_sums(
        model,
        micro_batches(samples, 64, CPU),
        owners,
        lambda sums: (0.1 * sums).logsumexp(0),
        optimization.backward,
    )
    norm = optimization.finish()
    return list(model.parameters()), [
        {"loss": float(loss), "norm": norm, **{str(i): float(x) for i, x in enumerate(sums)}}
    ]


RUNS = {
    "grpo": lambda: reinforced(AlgorithmSection(kl_coef=0.2, entropy_coef=0.01)),
    "ppo": lambda: reinforced(
        AlgorithmSection(name="ppo"), critic=CriticSection(learning_rate=1e-3)
    ),
    "ppo-shared": lambda: reinforced(
        AlgorithmSection(name="ppo"), critic=CriticSection(trunk="shared", learning_rate=1e-3)
    ),
    "stale tokens": lambda: reinforced(AlgorithmSection(), bound=2),
    "clip-cov": lambda: reinforced(AlgorithmSection(policy_loss="clip_cov")),
    "more ranks than samples": lambda: reinforced(AlgorithmSection(), num_groups=1, size=1),
    "sft": supervised,
    "whole answers": compared,
}


def parts() -> list[list[int]]:
    """This rank's micro-batches of 16 samples."""
    return [indices for indices, _ in micro_batches(samples_of(4), 64, CPU)]


def all_runs(
    names: Iterable[str] = tuple(RUNS),
) -> dict[str, tuple[torch.Tensor, list[dict[str, float]]]]:
    """Name -> all weights as one vector, metrics."""
    found = {}
    for name in names:
        weights, metrics = RUNS[name]()
        found[name] = torch.cat([w.detach().flatten() for w in weights]), metrics
    return found


def writes(process: int, meeting: str) -> list[object]:
    """What every process gets of what the first of all does alone, and of what that fails with."""
    checkpoints = Checkpoints(Path(f"{meeting}.checkpoints"), 1)
    model = model_of(4 + process)  # of which only the first process's is written
    found: list[object] = []
    for step, value in ((1, 0.5), (2, 0.25)):
        path, sha256 = checkpoints.save(step, model, Silent(), {}, {"by": process}, value)
        found.append((path.name, sha256, checkpoints.best_step, checkpoints.best_value))

    try:
        checkpoints.save(3, model, Silent(full=True), {}, {}, None)
    except CheckpointError as error:
        found.append(str(error))

    return found


class Silent:
    """A tokenizer without files, or without room for them."""

    def __init__(self, full: bool = False) -> None:
        self._full = full

    def save_pretrained(self, folder: Path) -> None:
        if self._full:
            raise OSError("no room")


if __name__ == "__main__":
    shape, process, meeting, out = sys.argv[1:]
    sizes = tuple(map(int, shape.split("x")))
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=int(process),
        world_size=math.prod(sizes),
        timeout=timedelta(seconds=300),
    )
    if len(sizes) == 1:
        gradients = {name: find_gradient(model_of(5), name, 64) for name in NAMES}
        torch.save((parts(), all_runs(), gradients), out)
    else:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "other"))
        parallel.use_mesh(mesh)
        of_process = {
            "ranks": (parallel.rank(), parallel.num_ranks(), parallel.num_processes()),
            "parts": parts(),
            "gathered": parallel.gather(int(process)),
            "summed": parallel.sum_over_ranks({"tokens": 10.0 + parallel.rank(), process: 1.0}),
            "runs": all_runs(("grpo", "whole answers")),
            "writes": writes(int(process), meeting),
        }
        torch.save(of_process, out)
    distributed.destroy_process_group()
