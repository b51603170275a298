"""The memory that training takes on each process of a mesh: the large terms, from the model's shape
alone. No weight is read or created; docs/training.md says what is left out.

    term           bytes                                           divided by
    weights        as loaded, and float32 masters                  shard, tensor, pipeline
    gradients      4 per trained number                            shard, tensor, pipeline
    optimizer      2 moments per trained number                    shard, tensor, pipeline
    activations    of the longest micro-batch, in all layers       tensor, context, pipeline
    logits         blocks of rows x vocabulary                     tensor
    other models   reference, critic, process reward               as the policy
    engine         its cache and weights, on the first process     nothing

Experts are divided by `expert` or `shard`, and by `tensor`. FSDP gathers the embeddings and two
layers at once. The first of N pipeline stages keeps the activations of N micro-batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from agentevo.config import ParallelSection, RunConfig
from agentevo.config.parallel import parallel_contradictions
from agentevo.errors import ConfigError, ModelError, TrainingError
from agentevo.inference.vllm.options import read_options
from agentevo.models.compute.positions import context_length
from agentevo.runs.doctor import memory_estimate as estimate
from agentevo.runs.doctor.checks import GIB, Check
from agentevo.runs.doctor.group_checks import engine_weights, other_models
from agentevo.runs.doctor.memory_estimate import FLOAT, layer_bytes, total
from agentevo.runs.doctor.unloaded_policy import unloaded_policy
from agentevo.runs.orchestration.checks import check_processes, needs_no_whole_model
from agentevo.runtime.devices import find
from agentevo.runtime.devices import memory as device_bytes
from agentevo.training.distribute import check_spread

ROOM = 0.9
"""The share of a device's memory that a plan can use."""
SHOWN = 6
"""The maximum number of meshes in the table."""
MOST_DEVICES = 65_536
OF_A_NODE = 8
"""The number of devices per machine, if there are several machines. A tensor group stays within one
machine."""
TERMS = ("weights", "gradients", "optimizer", "activations", "logits", "other models", "engine")


@dataclass(frozen=True)
class Sizes:
    """The shape of a model, with numbers of its parameters."""

    model: PreTrainedModel
    shape: estimate.Shape
    trained: estimate.TrainedParameters
    numbers: int
    frozen_bytes: float
    trained_bytes: float
    layer: int
    """Numbers in one decoder layer."""
    root: int
    """Numbers outside the decoder layers: embedding, output layer, last norm."""
    experts: int
    """Numbers in the experts of all layers."""


def sizes_of(model: PreTrainedModel) -> Sizes:
    """The sizes of a model, with or without its weights."""
    shape = estimate.shape_of(model)
    named = dict(model.named_parameters())
    numbers = sum(p.numel() for p in named.values())
    in_layers = sum(p.numel() for name, p in named.items() if ".layers." in name)
    frozen_bytes = sum(p.nbytes for p in named.values() if not p.requires_grad)
    return Sizes(
        model,
        shape,
        estimate.trained_of(model),
        numbers,
        frozen_bytes,
        estimate.weight_bytes(model) - frozen_bytes,
        in_layers // shape.num_layers,
        numbers - in_layers,
        sum(p.numel() for name, p in named.items() if ".experts." in name),
    )


def longest_pass(config: RunConfig, sizes: Sizes) -> int:
    """Tokens of the largest micro-batch: trainer.micro_batch_tokens, or the longest attempt if that
    is longer. Only its completions count, because the lengths of prompts are unknown before
    rollout. For recipes that train on conversations: sft.micro_batch_tokens."""
    if config.data.taught:
        return config.sft.micro_batch_tokens

    turns = 1 if getattr(config.agent, "memory", None) == "turn" else config.agent.max_turns
    longest = min(turns * config.sampling.max_new_tokens, context_length(sizes.model.config))
    return max(config.trainer.micro_batch_tokens, longest)


def process_terms(config: RunConfig, sizes: Sizes, stage: int = 0) -> dict[str, float]:
    """Bytes of each term on a process of this pipeline stage, 0 to pipeline - 1, without engine."""
    mesh = config.trainer.parallel
    root = sizes.root
    if mesh.pipeline > 1:  # the embedding is in the first stage, the output layer in the last
        embedding = sizes.shape.vocabulary * sizes.shape.hidden
        has_output = stage == mesh.pipeline - 1
        root = embedding * (stage == 0) + (sizes.root - embedding) * has_output

    experts = sizes.experts / mesh.pipeline
    dense = sizes.layer * sizes.shape.num_layers / mesh.pipeline + root - experts
    held = dense / mesh.shard + experts / max(mesh.expert, mesh.shard)
    share = held / mesh.tensor / sizes.numbers  # of the whole model
    trained = share * sizes.trained.total

    is_on_device = not config.memory.offload_optimizer
    moments = estimate.optimizer_bytes(sizes.trained, config.memory).get("optimizer", 0.0)
    optimizer = is_on_device * share * moments
    gradients = FLOAT * trained
    if mesh.shard > 1:  # float32 shards are the masters; groups are gathered to compute
        copy = share * sizes.frozen_bytes + FLOAT * trained
        weights = copy + sizes.shape.element * (root + 2 * sizes.layer) / mesh.tensor
        if not sizes.frozen_bytes:
            gradients += FLOAT * (root + sizes.layer) / mesh.tensor
    else:  # copies share the frozen base under adapters
        copy = share * sizes.trained_bytes
        masters = FLOAT * trained * sizes.trained.masters * is_on_device
        weights = share * sizes.frozen_bytes + copy + masters

    activations, logits = _pass_bytes(config, sizes, stage)
    others = total(other_models(config, copy, copy + gradients + optimizer))
    parts = (weights, gradients, optimizer, activations, logits, others, 0.0)
    return dict(zip(TERMS, parts, strict=True))


def _pass_bytes(config: RunConfig, sizes: Sizes, stage: int) -> tuple[float, float]:
    """Bytes of activations and of logits, at the start of a backward pass or in that of the last
    layer, whichever is more."""
    mesh = config.trainer.parallel
    cut = {
        name: math.ceil(getattr(sizes.shape, name) / mesh.tensor)
        for name in ("query", "key", "num_heads", "intermediate", "vocabulary")
    }
    shape = replace(sizes.shape, **cut)
    tokens = math.ceil(longest_pass(config, sizes) / mesh.context)
    per_layer = layer_bytes(shape, sizes.trained, config.memory.checkpointing) * tokens
    per_layer *= not config.memory.offload_activations
    kept = per_layer * shape.num_layers / mesh.pipeline
    in_layer = layer_bytes(shape, sizes.trained, "none") * tokens - per_layer
    in_layer += estimate.passing_bytes(shape, sizes.trained, tokens)

    # The gradient of a vocabulary matrix, before it is added to earlier ones; FSDP's is gathered.
    matrix = float(FLOAT * shape.vocabulary * shape.hidden) * (mesh.shard == 1)
    num_later = mesh.pipeline - 1 - stage  # stages, which work on as many further micro-batches
    if num_later:  # no loss is computed here; sent hidden states are kept
        kept += float(shape.hidden * tokens * shape.element)
        return kept * num_later + max(kept + in_layer, matrix * sizes.trained.embedding), 0.0

    load = estimate.Load(tokens, tokens, single=False, on_cpu=config.model.device == "cpu")
    logits = estimate.output_bytes(shape, sizes.trained, load) + matrix * sizes.trained.output
    in_layer += matrix * (shape.tied and sizes.trained.output)
    return kept + max(0.0, in_layer - logits), logits


def engine_bytes(config: RunConfig, sizes: Sizes, memory: float) -> float:
    """Bytes of the engine in the first process, whose device has `memory` bytes; 0 if engines in
    other processes serve, which need devices of their own."""
    if needs_no_whole_model(config, is_disaggregated=config.rollout.samplers > 0):
        return 0.0

    whole = sizes.frozen_bytes + sizes.trained_bytes
    weights = total(engine_weights(config, sizes.trained_bytes, 0.0))
    weights += whole * config.trainer.parallel.is_spread
    plays = config.environment is not None or not config.data.taught
    if config.engine.type not in ("torch", "vllm") or not plays:
        return weights

    cache = config.engine.kv_cache_gb * GIB
    if config.engine.kv_cache_tokens is not None:
        a_token = 2.0 * sizes.shape.key * sizes.shape.num_layers * sizes.shape.element
        cache = config.engine.kv_cache_tokens * a_token
    if config.engine.type == "torch":
        return weights + cache

    options = read_options(config.engine)
    if options.gpu_memory_utilization is not None:
        return weights + options.gpu_memory_utilization * memory
    return weights + whole / options.tensor_parallel_size + cache


def estimate_mesh(
    config: RunConfig, sizes: Sizes, mesh: ParallelSection, world: int, memory: float
) -> dict[str, float]:
    """Bytes of each term on the device that needs most, of `world` devices of `memory` bytes.
    Raises ConfigError, ModelError or TrainingError for a mesh that can't train the recipe."""
    trainer = config.trainer.model_copy(update={"parallel": mesh})
    config = config.model_copy(update={"trainer": trainer})
    check_processes(config, world=world)
    for problem in parallel_contradictions(config):
        raise ConfigError(problem)
    check_spread(sizes.model, mesh)

    first = process_terms(config, sizes) | {"engine": engine_bytes(config, sizes, memory)}
    return max(first, process_terms(config, sizes, mesh.pipeline - 1), key=total)


def estimate_meshes(
    config: RunConfig, sizes: Sizes, world: int, memory: float
) -> dict[ParallelSection, dict[str, float]]:
    """`estimate_mesh` of all meshes of `world` processes that can train the recipe, the cheapest
    communication first; of the recipe's mesh alone if it names one. If there is none, raises
    ConfigError with the reason of the last refusal."""
    mesh_in_recipe = config.trainer.parallel
    estimates = {}
    refusal = f"--devices {world}: no mesh has this number of processes"
    for mesh in [mesh_in_recipe] if mesh_in_recipe.is_spread else _list_meshes(world, sizes):
        try:
            estimates[mesh] = estimate_mesh(config, sizes, mesh, world, memory)
        except (ConfigError, ModelError, TrainingError) as error:
            refusal = str(error)

    if not estimates:
        raise ConfigError(refusal)
    return estimates


def _list_meshes(world: int, sizes: Sizes) -> Iterator[ParallelSection]:
    """In order of communication: FSDP prefetches weights, context groups exchange once a layer,
    tensor groups twice, stages of a pipeline wait. `expert` saves no memory beside `shard`."""
    num_heads = sizes.model.config.get_text_config().num_key_value_heads
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    of_heads = [n for n in divisors if num_heads % n == 0]
    within = [n for n in of_heads if n <= OF_A_NODE and sizes.shape.intermediate % n == 0]
    for tensor, context, shard in itertools.product(within, of_heads, divisors):
        if world % (shard * tensor * context) == 0:
            yield ParallelSection(shard=shard, tensor=tensor, context=context)

    for pipeline in (n for n in divisors if n > 1 and sizes.shape.num_layers % n == 0):
        yield ParallelSection(pipeline=pipeline)


def check_meshes(
    config: RunConfig, devices: int, device_memory: float | None, command: str
) -> Check:
    """`device_memory`: GiB of each device, by default that of the recipe's first one here.
    `command`: the recipe and the overrides of the command line. Raises ConfigError for a recipe
    that no mesh of this many devices can train."""
    if not 1 <= devices <= MOST_DEVICES:
        raise ConfigError(f"--devices {devices}: give 1 to {MOST_DEVICES:,}")

    memory = device_memory * GIB if device_memory else device_bytes(find(config.model.device))[1]
    sizes = sizes_of(unloaded_policy(config))
    estimates = estimate_meshes(config, sizes, devices, memory)
    fitting = [mesh for mesh, terms in estimates.items() if total(terms) <= ROOM * memory]
    shown = fitting or sorted(estimates, key=lambda mesh: total(estimates[mesh]))
    rows = {mesh.shared_by(devices) or "one process": estimates[mesh] for mesh in shown[:SHOWN]}
    finding = (
        f"{len(fitting)} of {len(estimates)} meshes fit {devices} devices of {memory / GIB:.1f} "
        f"GiB with micro-batches of {longest_pass(config, sizes):,} tokens; GiB on the device that "
        f"needs most:\n{_format_table(rows)}"
    )
    if not fitting:
        advice = "use more devices, adapters, or another key of docs/training.md, 'Limit memory'"
        return Check("meshes", "wrong", finding, advice)

    keys = [f"trainer.parallel.{key}={size}" for key, size in fitting[0].above_one.items()]
    program = "sft" if config.data.taught else "train"
    words = [program, command, *(key for key in keys if key not in command.split())]
    return Check("meshes", "good", finding, f"start the first one: {_launch(devices, words)}")


def _format_table(rows: Mapping[str, Mapping[str, float]]) -> str:
    table = [["mesh", *TERMS, "total"]]
    for mesh, terms in rows.items():
        sizes = [*(terms[name] for name in TERMS), total(terms)]
        table.append([mesh, *(f"{size / GIB:.2f}" for size in sizes)])

    first, *others = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join([" " * 7, mesh.ljust(first), *map(str.rjust, cells, others)])
        for mesh, *cells in table
    )


def _launch(world: int, words: list[str]) -> str:
    command = " ".join(["agentevo", *words])
    if world == 1:
        return command
    if world <= OF_A_NODE or world % OF_A_NODE:
        return f"torchrun --standalone --nproc-per-node={world} -m {command}"
    where = "--rdzv-backend=c10d --rdzv-endpoint=FIRST_MACHINE:29500"
    counts = f"--nnodes={world // OF_A_NODE} --nproc-per-node={OF_A_NODE}"
    return f"torchrun {counts} {where} -m {command}, on each machine (or by `agentevo launch`)"
