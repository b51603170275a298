"""Which meshes of several devices fit a recipe's training, from the model's shape alone: no weight
is read or created.

Counted for each process: its part of the float32 weights, gradients and moments; what FSDP gathers
at once (the group of embedding and output layer, and two decoder layers); the activations of one
micro-batch, as `memory_estimate.py` computes them, divided among the tensor and the context group;
the other models (reference, critic). Without engines in other processes, the first process also has
a whole model and its engine's cache. Stages of a pipeline differ: the first has the embeddings and
keeps the activations of as many micro-batches as there are stages, the last has the output layer.
Not counted: what allocators and collectives keep.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from torch import nn
from transformers import PreTrainedModel

from agentevo.config import ParallelSection, RunConfig
from agentevo.config.parallel import parallel_contradictions
from agentevo.devices import find, is_accelerator
from agentevo.devices import memory as device_bytes
from agentevo.doctor.checks import GIB, Check, rank_measures
from agentevo.doctor.group_checks import engine_weights
from agentevo.doctor.memory_estimate import (
    FLOAT,
    Load,
    Shape,
    TrainedParameters,
    layer_bytes,
    optimizer_bytes,
    output_bytes,
    passing_bytes,
    shape_of,
    total,
    trained_of,
)
from agentevo.doctor.memory_measures import list_measures, remember_by_model, weigh_measures
from agentevo.doctor.unloaded_policy import unloaded_policy
from agentevo.errors import ConfigError, ModelError, TrainingError
from agentevo.inference.vllm_options import read_options
from agentevo.models.positions import context_length
from agentevo.orchestration.checks import check_processes, serves_elsewhere
from agentevo.training.spread import check_spread

ROOM = 0.9
"""The share of a device's memory that a plan can use."""
SHOWN = 6
"""The maximum number of meshes in the list."""
MOST_DEVICES = 65_536
OF_A_NODE = 8
"""The number of devices per machine, if there are several machines. A tensor group stays within one
machine."""


@dataclass(frozen=True)
class Sizes:
    """The shape of a model, which needs no weights."""

    model: PreTrainedModel
    shape: Shape
    trained: TrainedParameters
    numbers: int
    """The number of all parameters."""
    frozen_element: float
    """Bytes per parameter that is not trained: under adapters, of the base in its own type, or the
    average over the base if a part of it has 8 or 4 bits."""
    trained_element: float
    """Bytes per trained parameter."""
    largest_packed: int
    """The number of parameters in the largest matrix of 8 or 4 bits, which is unpacked to
    compute."""
    layer: int
    """The number of parameters in one decoder layer."""
    root: int
    """The number of parameters outside the decoder layers: embedding, output layer, last norm."""
    experts: int
    """The number of parameters in experts, in all layers."""
    num_experts: int
    num_heads: int
    context_length: int

    @property
    def trains_all(self) -> bool:
        """Whether there is no base under adapters."""
        return self.trained.total == self.numbers

    @property
    def whole_bytes(self) -> float:
        """Bytes of all weights, as they are loaded."""
        frozen = self.numbers - self.trained.total
        return self.frozen_element * frozen + self.trained_element * self.trained.total


@dataclass(frozen=True)
class Fit:
    """One mesh, and the bytes that it needs."""

    parallel: ParallelSection
    world: int
    parts: dict[str, float]
    """Bytes on each process. With stages, on the process that needs most."""
    first: dict[str, float]
    """Additional bytes on the first process."""
    spared: float = 0.0
    """The bytes of `parts` that the first process does not have."""
    engine_share: float = 0.0
    """The share of the first device's memory that vLLM reserves."""

    @property
    def on_first(self) -> float:
        """Bytes on the first process, without `engine_share`."""
        return total(self.parts) - self.spared + total(self.first)

    @property
    def most(self) -> float:
        """Bytes on the device that needs most, without `engine_share`."""
        return max(total(self.parts), self.on_first)

    def needs(self, memory: float) -> float:
        """Bytes on the device that needs most, if each has `memory` bytes."""
        return max(total(self.parts), self.on_first + self.engine_share * memory)

    def fits_in(self, memory: float) -> bool:
        return self.needs(memory) <= ROOM * memory

    def keys(self, recipe_mesh: ParallelSection) -> list[str]:
        """The keys that choose this mesh in a recipe with `recipe_mesh`."""
        before = recipe_mesh.model_dump()
        return [
            f"trainer.parallel.{key}={size}"
            for key, size in self.parallel.model_dump().items()
            if size > 1 or before[key] > 1
        ]

    def __str__(self) -> str:
        return self.parallel.shared_by(self.world) or "one"


def sizes_of(config: RunConfig) -> Sizes:
    """The sizes of the recipe's model, which needs only its config.json. Raises ModelError if the
    model is not there."""
    return sizes_of_model(unloaded_policy(config))


def sizes_of_model(model: PreTrainedModel) -> Sizes:
    """The sizes of a model, with or without its weights."""
    shape = shape_of(model)
    trained = trained_of(model)
    named = dict(model.named_parameters())
    in_layers = sum(p.numel() for name, p in named.items() if ".layers." in name)
    numbers = sum(p.numel() for p in named.values())
    text = model.config.get_text_config()

    return Sizes(
        model,
        shape,
        trained,
        numbers,
        _bytes_of_a_number([p for p in named.values() if not p.requires_grad]),
        _bytes_of_a_number([p for p in named.values() if p.requires_grad]),
        _largest_packed(model),
        in_layers // shape.num_layers,
        numbers - in_layers,
        sum(p.numel() for name, p in named.items() if ".experts." in name),
        int(getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0),
        text.num_key_value_heads,
        context_length(model.config),
    )


def _bytes_of_a_number(parameters: list[nn.Parameter]) -> float:
    """The average over the parameters."""
    return sum(p.nbytes for p in parameters) / max(1, sum(p.numel() for p in parameters))


def _largest_packed(model: PreTrainedModel) -> int:
    return max(
        (
            module.in_features * module.out_features
            for module in model.modules()
            if isinstance(module, nn.Linear) and not module.weight.is_floating_point()
        ),
        default=0,
    )


def longest_pass(config: RunConfig, sizes: Sizes) -> int:
    """Tokens of the largest micro-batch: trainer.micro_batch_tokens, or the longest attempt if that
    is longer. Only its completions count, because the lengths of prompts are unknown before
    rollout. For recipes that train on conversations: sft.micro_batch_tokens."""
    if config.data.taught:
        return config.sft.micro_batch_tokens

    turns = 1 if getattr(config.agent, "memory", None) == "turn" else config.agent.max_turns
    longest = min(turns * config.sampling.max_new_tokens, sizes.context_length)
    return max(config.trainer.micro_batch_tokens, longest)


def fit(config: RunConfig, sizes: Sizes, parallel: ParallelSection, world: int) -> Fit:
    """The memory that a mesh of `world` processes needs. Raises ValueError for sizes that don't
    divide it."""
    parallel.replicas(world)
    stages = sorted({0, parallel.pipeline - 1})
    ends = [stage_parts(config, sizes, parallel, stage) for stage in stages]
    parts = max(ends, key=total)

    first, share = _served_bytes(config, sizes, parallel)
    return Fit(parallel, world, parts, first, total(parts) - total(ends[0]), share)


def _served_bytes(
    config: RunConfig, sizes: Sizes, parallel: ParallelSection
) -> tuple[dict[str, float], float]:
    """The memory of an engine in the first process: bytes, and a share of the device's memory. Both
    are 0 if engines in other processes serve, which need their own devices."""
    has_samplers = config.rollout.samplers > 0
    if serves_elsewhere(_in_mesh(config, parallel), is_disaggregated=has_samplers):
        return {}, 0.0

    served = engine_weights(config, sizes.trained_element * sizes.trained.total, 0.0)
    if parallel.is_spread:
        served["whole model"] = sizes.whole_bytes

    cache = config.engine.kv_cache_gb * GIB
    if config.engine.kv_cache_tokens is not None:
        a_token = 2.0 * sizes.shape.key * sizes.shape.num_layers * sizes.shape.element
        cache = config.engine.kv_cache_tokens * a_token

    plays = config.environment is not None or not config.data.taught
    if config.engine.type not in ("torch", "vllm") or not plays:
        return served, 0.0
    if config.engine.type == "torch":
        return served | {"key-value cache": cache}, 0.0

    options = read_options(config.engine)
    if options.gpu_memory_utilization is not None:
        return served, options.gpu_memory_utilization

    weights = sizes.whole_bytes / options.tensor_parallel_size
    return served | {"vLLM's weights": weights, "key-value cache": cache}, 0.0


def stage_parts(
    config: RunConfig, sizes: Sizes, parallel: ParallelSection, stage: int
) -> dict[str, float]:
    """Bytes of a process of this stage, 0 to pipeline - 1; without stages, of each process."""
    sizes = _stage_sizes(sizes, parallel, stage)
    shard = parallel.shard
    tensor = parallel.tensor
    spread = max(parallel.expert, shard)
    element = sizes.shape.element

    def per_process(numbers: float, experts: float) -> float:
        """The count of these numbers that one process keeps."""
        return ((numbers - experts) / shard + experts / spread) / tensor

    frozen = per_process(
        sizes.numbers - sizes.trained.total, sizes.experts * (not sizes.trains_all)
    )
    trained = per_process(sizes.trained.total, sizes.experts * sizes.trains_all)
    on_device = not config.memory.offload_optimizer
    moments = on_device * optimizer_bytes(sizes.trained, config.memory).get("optimizer", 0.0)
    moments *= trained / max(sizes.trained.total, 1)

    if shard > 1:  # float32 shards are the masters; a group's weights are gathered to compute
        gathered = (sizes.root + 2 * sizes.layer) / tensor
        weights = FLOAT * trained + sizes.frozen_element * frozen + element * gathered
        gradients = FLOAT * (trained + (sizes.root + sizes.layer) / tensor * sizes.trains_all)
        of_copy = sizes.frozen_element * frozen + FLOAT * trained
    else:  # copies share the frozen base under adapters
        of_copy = sizes.trained_element * trained
        weights = sizes.frozen_element * frozen + of_copy
        weights += FLOAT * trained * sizes.trained.masters * on_device
        gradients = FLOAT * trained

    parts = {
        "weights": weights,
        "unpacked matrix": float(element * sizes.largest_packed),
        "gradients": gradients,
        "optimizer": moments,
        "activations": _activations(config, sizes, parallel, stage),
    }
    parts |= _twins(config, of_copy, of_copy + gradients + moments)
    return {name: size for name, size in parts.items() if size}


def _stage_sizes(sizes: Sizes, parallel: ParallelSection, stage: int) -> Sizes:
    """The layers of one stage, with the embeddings in the first and the norm and output layer in
    the last."""
    if parallel.pipeline == 1:
        return sizes

    shape = replace(sizes.shape, num_layers=sizes.shape.num_layers // parallel.pipeline)
    embedding = shape.vocabulary * shape.hidden
    root = embedding * (stage == 0)
    root += (sizes.root - embedding) * (stage == parallel.pipeline - 1)
    numbers = shape.num_layers * sizes.layer + root
    trained = replace(sizes.trained, total=numbers)
    experts = sizes.experts // parallel.pipeline
    return replace(sizes, shape=shape, trained=trained, numbers=numbers, root=root, experts=experts)


def _activations(config: RunConfig, sizes: Sizes, parallel: ParallelSection, stage: int) -> float:
    """Bytes of activations of one micro-batch: at the start of its backward pass, or in the
    backward pass of the last layer, whichever is more. A pipeline stage also has those of the
    micro-batches that the later stages have in progress."""
    tensor = parallel.tensor
    shape = replace(
        sizes.shape,
        query=sizes.shape.query // tensor,
        key=math.ceil(sizes.shape.key / tensor),
        num_heads=math.ceil(sizes.shape.num_heads / tensor),
        intermediate=sizes.shape.intermediate // tensor,
        vocabulary=math.ceil(sizes.shape.vocabulary / tensor),
    )
    tokens = math.ceil(longest_pass(config, sizes) / parallel.context)
    load = Load(tokens, tokens, single=False, on_cpu=config.model.device == "cpu")
    mode = config.memory.checkpointing
    per_token = layer_bytes(shape, sizes.trained, mode) * (not config.memory.offload_activations)
    kept_per_layer = per_token * tokens
    passing = passing_bytes(shape, sizes.trained, tokens)
    in_layer = layer_bytes(shape, sizes.trained, "none") * tokens - kept_per_layer + passing

    # The gradient of one vocabulary matrix, before it is added to that of earlier passes.
    vocabulary_gradient = 0.0
    if parallel.shard == 1:  # with shards it is among the gathered gradients
        vocabulary_gradient = float(FLOAT * shape.vocabulary * shape.hidden)

    ahead = parallel.pipeline - 1 - stage
    if ahead:  # this stage computes no loss; it keeps sent hidden states as long
        sent = float(shape.hidden * tokens * shape.element)
        under_way = kept_per_layer * shape.num_layers + sent
        return under_way * ahead + max(
            under_way + in_layer, vocabulary_gradient * sizes.trained.embedding
        )

    in_output = (
        output_bytes(shape, sizes.trained, load) + vocabulary_gradient * sizes.trained.output
    )
    pending = vocabulary_gradient * (shape.tied and sizes.trained.output)
    return kept_per_layer * shape.num_layers + max(in_output, in_layer + pending)


def _twins(config: RunConfig, copy: float, trained: float) -> dict[str, float]:
    """Bytes of the models other than the policy: `copy` for a frozen one, `trained` for one that
    learns."""
    if config.data.taught:
        return {}

    needs = config.algorithm.needs
    preference = config.algorithm.preference()
    twins = {}
    if (
        config.algorithm.kl_coef > 0
        or "process_rewards" in needs
        or (preference is not None and preference.needs_reference)
    ):
        twins["reference copy"] = copy

    if "values" in needs and config.critic.trunk == "own":
        twins["critic"] = trained
    if "process_rewards" in needs:
        twins["process reward"] = trained

    return twins


def fits(config: RunConfig, sizes: Sizes, world: int) -> list[Fit]:
    """All meshes of `world` processes in which this recipe can train, in order of communication
    cost. If there is none, raises ConfigError with the reason of the last refusal."""
    candidates = []
    refusal = ""
    for parallel in _meshes(world, sizes):
        changed = _in_mesh(config, parallel)
        try:
            for problem in parallel_contradictions(changed):
                raise ConfigError(problem)
            check_processes(changed, world=world)
            check_spread(sizes.model, parallel)
            candidates.append(fit(changed, sizes, parallel, world))
        except (ConfigError, ModelError, TrainingError, ValueError) as error:
            refusal = str(error)

    if not candidates:
        raise ConfigError(refusal or f"--devices {world}: no mesh has this number of processes")

    return sorted(candidates, key=_cost)


def _meshes(world: int, sizes: Sizes) -> Iterator[ParallelSection]:
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    of_heads = [n for n in divisors if sizes.num_heads % n == 0]
    within = [n for n in of_heads if n <= OF_A_NODE and sizes.shape.intermediate % n == 0]
    of_experts = [n for n in divisors if sizes.num_experts and sizes.num_experts % n == 0] or [1]

    for pipeline in (n for n in divisors if n > 1 and sizes.shape.num_layers % n == 0):
        yield ParallelSection(pipeline=pipeline)

    for shard, tensor, context, expert in itertools.product(divisors, within, of_heads, of_experts):
        if world % (shard * tensor * context) == 0:
            yield ParallelSection(shard=shard, tensor=tensor, context=context, expert=expert)


def _cost(candidate: Fit) -> tuple[int, int, int, int, int]:
    """The communication cost. Stages of a pipeline wait for the first and the last micro-batch of
    each step, tensor groups exchange twice a layer, context groups once, experts once if there are
    any, FSDP prefetches weights."""
    sizes = candidate.parallel
    return sizes.pipeline, sizes.tensor, sizes.context, sizes.expert, sizes.shard


def judge_meshes(
    candidates: list[Fit],
    devices: int,
    memory: float,
    command: str,
    tokens: int,
    recipe_mesh: ParallelSection,
    turned: Mapping[str, float] = MappingProxyType({}),
    *,
    program: str = "train",
    together: tuple[str, float] | None = None,
) -> list[Check]:
    """`memory`: bytes of each device. `command`: the recipe and the overrides of the command line,
    for `agentevo train` or another `program`. `tokens`: of the largest micro-batch. `recipe_mesh`:
    the recipe's own mesh. If it has more than one process, its check comes first. `turned`: a
    change of the recipe -> the bytes that the smallest mesh then needs. `together`: the same for
    several changes together, if no single one is enough."""
    good = [candidate for candidate in candidates if candidate.fits_in(memory)]
    listed = good or sorted(candidates, key=lambda candidate: candidate.needs(memory))

    checks = []
    if recipe_mesh.is_spread:
        recipe_fit = next(
            (candidate for candidate in candidates if candidate.parallel == recipe_mesh), None
        )
        checks.append(_own_mesh(recipe_fit, recipe_mesh, devices, memory))

    for candidate in listed[:SHOWN]:
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in candidate.parts.items())
        first_parts = ", ".join(
            f"{name} {size / GIB:.2f}" for name, size in candidate.first.items()
        )
        each = "each device" if candidate.parallel.pipeline == 1 else "the stage that needs most"
        finding = f"{candidate}: {total(candidate.parts) / GIB:.2f} GiB on {each} ({parts})"
        if candidate.engine_share:
            share = f"vLLM's share {candidate.engine_share * memory / GIB:.2f}"
            first_parts = ", ".join(filter(None, (first_parts, share)))
        if first_parts:
            on_first = candidate.on_first + candidate.engine_share * memory
            finding += f"; on the first one {on_first / GIB:.2f} (and {first_parts})"
        checks.append(Check("mesh", "good" if good else "wrong", finding))

    about = f"{devices} devices of {memory / GIB:.1f} GiB with micro-batches of {tokens:,} tokens"
    above = f" (the first {SHOWN} of them are above)" if len(listed) > SHOWN else ""
    if not good:
        advice = _advise(listed[0].needs(memory), ROOM * memory, turned, together)
        finding = f"none of {len(candidates)} meshes fits {about}{above}"
        return [*checks, Check("meshes", "wrong", finding, advice)]

    advice = "start it with: " + _ready(good[0], devices, program, command, recipe_mesh)
    finding = (
        f"the cheapest is {good[0]}; {len(good)} of {len(candidates)} meshes fit {about}{above}"
    )
    return [*checks, Check("meshes", "good", finding, advice)]


def _advise(
    least: float,
    room: float,
    turned: Mapping[str, float],
    together: tuple[str, float] | None,
) -> str:
    """The combination that is enough, then each single measure, with its saving from `least`, the
    bytes that a mesh needs."""
    measures = []
    if together is not None:
        changes, needed = together
        measures.append(f"set {changes}, with which it needs {needed / GIB:.2f} GiB and fits")

    measures += [
        f"{change} saves {saved / GIB:.2f} GiB" + " and fits" * (least - saved <= room)
        for saved, change in rank_measures(least, turned)
    ]
    return "; ".join([*measures, "or a smaller model"])


def _own_mesh(
    recipe_fit: Fit | None, recipe_mesh: ParallelSection, devices: int, memory: float
) -> Check:
    name = ", ".join(f"{key}={size}" for key, size in recipe_mesh.above_one.items())
    if recipe_fit is None:
        return Check(
            "the recipe's mesh",
            "wrong",
            f"trainer.parallel of the recipe ({name}) does not suit this model on {devices} "
            "devices",
            "choose one of those below",
        )

    fits = recipe_fit.fits_in(memory)
    return Check(
        "the recipe's mesh",
        "good" if fits else "wrong",
        f"{recipe_fit}: {recipe_fit.needs(memory) / GIB:.2f} GiB on the device that needs most",
        "" if fits else "choose one of those below",
    )


def _ready(
    chosen: Fit, devices: int, program: str, command: str, recipe_mesh: ParallelSection
) -> str:
    keys = chosen.keys(recipe_mesh)
    replaced = {key.partition("=")[0] for key in keys}
    kept_words = [word for word in shlex.split(command) if word.partition("=")[0] not in replaced]
    words = shlex.join([*kept_words, *keys])
    if devices == 1:
        return f"agentevo {program} {words}"
    if devices <= OF_A_NODE or devices % OF_A_NODE:
        return f"torchrun --standalone --nproc-per-node={devices} -m agentevo {program} {words}"

    nodes = devices // OF_A_NODE
    if program == "train":
        return (
            f"agentevo launch {words} --on slurm --set trainer_nodes={nodes} "
            f"--set gpus={OF_A_NODE} --submit"
        )
    return (
        f"torchrun --nnodes={nodes} --nproc-per-node={OF_A_NODE} --rdzv-backend=c10d "
        f"--rdzv-endpoint=FIRST_MACHINE:29500 -m agentevo {program} {words}, on each machine"
    )


def check_meshes(
    config: RunConfig, devices: int, device_memory: float | None, command: str
) -> list[Check]:
    """`device_memory`: GiB of each device, by default that of the recipe's first one here.
    `command`: the recipe and the overrides of the command line. Raises ConfigError for a recipe
    that no mesh of this many devices can train."""
    if not 1 <= devices <= MOST_DEVICES:
        raise ConfigError(f"--devices {devices}: give 1 to {MOST_DEVICES:,}")
    first_device = find(config.model.device)
    memory = device_memory * GIB if device_memory else device_bytes(first_device)[1]
    sizes = sizes_of(config)
    tokens = longest_pass(config, sizes)
    candidates = fits(config, sizes, devices)
    on_cpu = config.model.device == "cpu" or (
        device_memory is None and not is_accelerator(first_device)
    )
    turned, together = _weigh_measures(config, sizes, candidates, memory, on_cpu)
    if not any(candidate.fits_in(memory) for candidate in candidates):
        turned |= _more_devices(config, sizes, devices, memory)

    recipe_mesh = config.trainer.parallel
    program = "sft" if config.data.taught else "train"
    return judge_meshes(
        candidates,
        devices,
        memory,
        command,
        tokens,
        recipe_mesh,
        turned,
        program=program,
        together=together,
    )


def _weigh_measures(
    config: RunConfig, sizes: Sizes, candidates: list[Fit], memory: float, on_cpu: bool
) -> tuple[dict[str, float], tuple[str, float] | None]:
    """Calls `weigh_measures`. The bytes that a recipe needs are those of its smallest mesh on these
    devices."""
    devices = candidates[0].world
    meshes = [candidate.parallel for candidate in candidates]
    sizes_of_other = remember_by_model(sizes_of)

    def least(changed: RunConfig) -> float:
        if changed.model == config.model:
            fitting = [
                fit(changed, sizes, parallel, devices)
                for parallel in meshes
                if not parallel_contradictions(_in_mesh(changed, parallel))
            ]
        else:
            fitting = fits(changed, sizes_of_other(changed), devices)

        return min((candidate.needs(memory) for candidate in fitting), default=math.inf)

    list_for = partial(_list_with_samplers, on_cpu=on_cpu)
    turned, together = weigh_measures(config, list_for, least, ROOM * memory)
    return {change: needed for change, needed in turned.items() if needed < math.inf}, together


def _list_with_samplers(config: RunConfig, on_cpu: bool) -> dict[str, RunConfig]:
    """`list_measures`, and engines with devices of their own."""
    measures = list_measures(config, on_cpu, "sft" if config.data.taught else "trainer")
    if not config.rollout.samplers and not config.data.taught:
        sampler_settings = {"samplers": 1, "staleness": max(1, config.rollout.staleness)}
        keys = " ".join(f"rollout.{key}={value}" for key, value in sampler_settings.items())
        rollout = config.rollout.model_copy(update=sampler_settings)
        measures[keys] = config.model_copy(update={"rollout": rollout})

    return measures


def _more_devices(config: RunConfig, sizes: Sizes, devices: int, memory: float) -> dict[str, float]:
    """The option --devices with the smallest number of devices (a power of 2 times `devices`, at
    most 64 times) on which a mesh fits -> the bytes that it needs. If none fits, the same for twice
    the devices."""
    needed = dict[str, float]()
    num_devices = 2 * devices
    while num_devices <= min(MOST_DEVICES, 64 * devices):
        least = min(candidate.needs(memory) for candidate in fits(config, sizes, num_devices))
        if least <= ROOM * memory:
            return {f"--devices={num_devices}": least}

        needed[f"--devices={num_devices}"] = least
        num_devices *= 2

    return dict(list(needed.items())[:1])


def _in_mesh(config: RunConfig, parallel: ParallelSection) -> RunConfig:
    trainer = config.trainer.model_copy(update={"parallel": parallel})
    return config.model_copy(update={"trainer": trainer})
