"""Which meshes of several devices a recipe's training fits, from the model's shape alone: no weight
is read, and none is made.

Counted for each process: its part of the float32 weights, gradients and moments; what FSDP gathers
at once (the group of embedding and output layer, and two decoder layers); the activations of one
micro-batch, as `memory_estimate.py` has them, cut by the tensor and the context group; twins
(reference, critic). The first process serves with a whole model besides. Stages of a pipeline
differ: the first one has embeddings and keeps the activations of as many micro-batches as there are
stages, the last one has the output layer. Not counted: what allocators and collectives keep.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedModel

from agentevo.config import ParallelSection, RunConfig
from agentevo.config.parallel import parallel_contradictions
from agentevo.devices import find
from agentevo.devices import memory as device_bytes
from agentevo.doctor.checks import GIB, Check
from agentevo.doctor.memory_estimate import (
    FLOAT,
    Load,
    Shape,
    Trained,
    layer_bytes,
    optimizer_bytes,
    output_bytes,
    shape_of,
    total,
    trained_of,
)
from agentevo.errors import ConfigError, ModelError, TrainingError
from agentevo.models.attention import prepare
from agentevo.models.load import hollow_model
from agentevo.models.positions import context_length
from agentevo.models.resolve import fetch
from agentevo.orchestration.checks import check_processes
from agentevo.orchestration.components import load_policy
from agentevo.training.spread import check_spread

ROOM = 0.9
"""The share of a device's memory that may be planned with."""
SHOWN = 6
"""Meshes that are listed."""
MOST_DEVICES = 65_536
OF_A_NODE = 8
"""Devices of one machine, where more than that are asked for: tensor groups stay within one."""


@dataclass(frozen=True)
class Sizes:
    """Of a model whose weights need not be there."""

    model: PreTrainedModel
    shape: Shape
    trained: Trained
    numbers: int
    """All of them."""
    layer: int
    """Of one decoder layer."""
    root: int
    """Of no layer: embedding, output layer, last norm."""
    experts: int
    """Of experts, in all layers."""
    num_experts: int
    num_heads: int
    context_length: int

    @property
    def trains_all(self) -> bool:
        """Whether there is no base under adapters."""
        return self.trained.total == self.numbers


@dataclass(frozen=True)
class Fit:
    """One mesh, and the bytes that it takes."""

    parallel: ParallelSection
    world: int
    parts: dict[str, float]
    """On each process; of stages, on the one that takes most."""
    first: dict[str, float]
    """Besides, on the first one."""
    spared: float = 0.0
    """What the first one has less of `parts`."""

    @property
    def on_first(self) -> float:
        return total(self.parts) - self.spared + total(self.first)

    @property
    def most(self) -> float:
        return max(total(self.parts), self.on_first)

    def keys(self, asked: ParallelSection) -> list[str]:
        """The keys that choose it in a recipe that asks for `asked`."""
        before = asked.model_dump()
        return [
            f"trainer.parallel.{key}={size}"
            for key, size in self.parallel.model_dump().items()
            if size > 1 or before[key] > 1
        ]

    def __str__(self) -> str:
        return self.parallel.shared_by(self.world) or "one"


def sizes_of(config: RunConfig) -> Sizes:
    """Raises ModelError for a model that is not there; of a local folder config.json is enough."""
    return sizes_of_model(_hollow(config))


def sizes_of_model(model: PreTrainedModel) -> Sizes:
    """Of a model, whether or not its weights are there."""
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
        in_layers // shape.num_layers,
        numbers - in_layers,
        sum(p.numel() for name, p in named.items() if ".experts." in name),
        int(getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0),
        text.num_key_value_heads,
        context_length(model.config),
    )


def _hollow(config: RunConfig) -> PreTrainedModel:
    name = config.model.name
    if name == "tiny" or config.model.lora.enabled:
        return load_policy(config).model

    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        folder = fetch(name)

    return prepare(hollow_model(config.model, folder))


def longest_pass(config: RunConfig, sizes: Sizes) -> int:
    """Tokens of the largest micro-batch: trainer.micro_batch_tokens, or one attempt that is longer
    (its completions alone: what prompts add is not known before it is played)."""
    turns = 1 if getattr(config.agent, "memory", None) == "turn" else config.agent.max_turns
    longest = min(turns * config.sampling.max_new_tokens, sizes.context_length)
    return max(config.trainer.micro_batch_tokens, longest)


def fit(config: RunConfig, sizes: Sizes, parallel: ParallelSection, world: int) -> Fit:
    """What a mesh of `world` processes takes. Raises ValueError for sizes that don't divide it."""
    parallel.replicas(world)
    stages = sorted({0, parallel.pipeline - 1})
    ends = [stage_parts(config, sizes, parallel, stage) for stage in stages]
    parts = max(ends, key=total)

    first = {}
    if parallel.is_spread:
        first["whole model"] = float(sizes.shape.element * sizes.numbers)
    if not config.rollout.samplers:
        first["key-value cache"] = config.engine.kv_cache_gb * GIB

    return Fit(parallel, world, parts, first, total(parts) - total(ends[0]))


def stage_parts(
    config: RunConfig, sizes: Sizes, parallel: ParallelSection, stage: int
) -> dict[str, float]:
    """Bytes that a process of this stage takes, of 0 to pipeline - 1; without stages, each."""
    sizes = _stage_sizes(sizes, parallel, stage)
    shard = parallel.shard
    tensor = parallel.tensor
    spread = max(parallel.expert, shard)
    element = sizes.shape.element

    def held(numbers: float, experts: float) -> float:
        """Of so many numbers, those that a process keeps."""
        return ((numbers - experts) / shard + experts / spread) / tensor

    frozen = held(sizes.numbers - sizes.trained.total, sizes.experts * (not sizes.trains_all))
    trained = held(sizes.trained.total, sizes.experts * sizes.trains_all)
    moments = total(optimizer_bytes(replace(sizes.trained, masters=False), config.memory))
    moments *= trained / max(sizes.trained.total, 1)

    if shard > 1:  # float32 shards are the masters; a group's weights are gathered to compute
        gathered = (sizes.root + 2 * sizes.layer) / tensor
        weights = FLOAT * trained + element * (frozen + gathered)
        gradients = FLOAT * (trained + (sizes.root + sizes.layer) / tensor * sizes.trains_all)
    else:
        weights = element * (frozen + trained) + FLOAT * trained * sizes.trained.masters
        gradients = FLOAT * trained

    parts = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": moments * (not config.memory.offload_optimizer),
        "activations": _activations(config, sizes, parallel, stage),
    }
    of_copy = element * frozen + (FLOAT if shard > 1 else element) * trained
    parts |= _twins(config, of_copy, of_copy + gradients + moments)
    return {name: size for name, size in parts.items() if size}


def _stage_sizes(sizes: Sizes, parallel: ParallelSection, stage: int) -> Sizes:
    """Of the layers of one stage, with the embeddings if it is the first and with norm and output
    layer if it is the last."""
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
    """Of one micro-batch, as its backward pass begins or, if that is more, in the last layer's; of
    a stage, with those of the micro-batches that are under way behind it."""
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
    kept = per_token * tokens
    passing = 2.0 * shape.intermediate * tokens * shape.element
    in_layer = layer_bytes(shape, sizes.trained, "none") * tokens - kept + passing

    own = 0.0  # the gradient of one vocabulary matrix before it is added to that of earlier passes
    if parallel.shard == 1:  # with shards it is among the gathered gradients
        own = float(FLOAT * shape.vocabulary * shape.hidden)

    ahead = parallel.pipeline - 1 - stage
    if ahead:  # nothing is known of a loss here; what was sent on is kept as long
        sent = float(shape.hidden * tokens * shape.element)
        under_way = kept * shape.num_layers + sent
        return under_way * ahead + max(under_way + in_layer, own * sizes.trained.embedding)

    in_output = output_bytes(shape, sizes.trained, load) + own * sizes.trained.output
    pending = own * (shape.tied and sizes.trained.output)
    return kept * shape.num_layers + max(in_output, in_layer + pending)


def _twins(config: RunConfig, copy: float, trained: float) -> dict[str, float]:
    """Bytes of the models beside the policy: `copy` of one that is only read, `trained` of one that
    learns."""
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
    """All meshes of `world` processes that this recipe can train in, those that cost least
    communication first. Raises ConfigError, with the last refusal, where there is none."""
    found = []
    refusal = ""
    for parallel in _meshes(world, sizes):
        trainer = config.trainer.model_copy(update={"parallel": parallel})
        changed = config.model_copy(update={"trainer": trainer})
        try:
            for problem in parallel_contradictions(changed):
                raise ConfigError(problem)
            check_processes(changed, world=world)
            check_spread(sizes.model, parallel)
            found.append(fit(changed, sizes, parallel, world))
        except (ConfigError, ModelError, TrainingError, ValueError) as error:
            refusal = str(error)

    if not found:
        raise ConfigError(refusal or f"--devices {world}: no mesh of so many processes")

    return sorted(found, key=_cost)


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


def _cost(one: Fit) -> tuple[int, int, int, int, int]:
    """Stages of a pipeline wait for the first and the last micro-batch of each step, tensor groups
    exchange twice a layer, context groups once, experts once where they are, FSDP weights that are
    asked for in advance."""
    sizes = one.parallel
    return sizes.pipeline, sizes.tensor, sizes.context, sizes.expert, sizes.shard


def judge_meshes(
    found: list[Fit],
    devices: int,
    memory: float,
    command: str,
    tokens: int,
    config: RunConfig,
) -> list[Check]:
    """`memory`: bytes of each device. `command`: recipe and overrides as they were given. `tokens`:
    of the largest micro-batch. `config`: the recipe, whose own mesh is judged before the others
    where it is one."""
    asked = config.trainer.parallel
    good = [one for one in found if one.most <= ROOM * memory]
    listed = good or sorted(found, key=lambda one: one.most)

    checks = []
    if asked.is_spread:
        own = next((one for one in found if one.parallel == asked), None)
        checks.append(_own_mesh(own, asked, devices, memory))

    for one in listed[:SHOWN]:
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in one.parts.items())
        more = ", ".join(f"{name} {size / GIB:.2f}" for name, size in one.first.items())
        each = "each device" if one.parallel.pipeline == 1 else "the stage that takes most"
        finding = f"{one}: {total(one.parts) / GIB:.2f} GiB on {each} ({parts})"
        if more:
            finding += f"; on the first one {one.on_first / GIB:.2f} (and {more})"
        checks.append(Check("mesh", "good" if good else "wrong", finding))

    left = len(listed) - len(listed[:SHOWN])
    also = f", and {left} more" if left else ""

    about = f"{devices} devices of {memory / GIB:.1f} GiB, micro-batches of {tokens:,} tokens"
    if not good:
        is_apart = config.rollout.samplers > 0
        measures = [
            "more devices (--devices)",
            "" if config.memory.checkpointing == "full" else "memory.checkpointing=full",
            "a smaller trainer.micro_batch_tokens" + ("" if is_apart else " or engine.kv_cache_gb"),
            "" if is_apart else "samplers of their own (rollout.samplers)",
            "or a smaller model",
        ]
        advice = ", ".join(filter(None, measures))
        return [*checks, Check("meshes", "wrong", f"none fits {about}", advice)]

    advice = "start it with: " + _ready(good[0], devices, command, asked)
    finding = f"{len(good)} of {len(found)} fit {about}{also}; the cheapest is {good[0]}"
    return [*checks, Check("meshes", "good", finding, advice)]


def _own_mesh(own: Fit | None, asked: ParallelSection, devices: int, memory: float) -> Check:
    name = ", ".join(f"{key}={size}" for key, size in asked.above_one.items())
    if own is None:
        return Check(
            "the recipe's mesh",
            "wrong",
            f"trainer.parallel of the recipe ({name}) is none for this model on {devices} devices",
            "choose one of those below",
        )

    fits_in = own.most <= ROOM * memory
    return Check(
        "the recipe's mesh",
        "good" if fits_in else "wrong",
        f"{own}: {own.most / GIB:.2f} GiB on the device that takes most",
        "" if fits_in else "choose one of those below",
    )


def _ready(one: Fit, devices: int, command: str, asked: ParallelSection) -> str:
    words = " ".join([command, *one.keys(asked)])
    if devices == 1:
        return f"agentevo train {words}"
    if devices <= OF_A_NODE or devices % OF_A_NODE:
        return f"torchrun --standalone --nproc-per-node={devices} -m agentevo train {words}"

    nodes = devices // OF_A_NODE
    return (
        f"agentevo launch slurm {words} --set trainer_nodes={nodes} --set gpus={OF_A_NODE} --submit"
    )


def check_meshes(
    config: RunConfig, devices: int, device_memory: float | None, command: str
) -> list[Check]:
    """`device_memory`: GiB of each device, by default that of the recipe's first one here.
    `command`: recipe and overrides as they were given. Raises ConfigError for a recipe that no
    mesh of so many devices can train."""
    if not 1 <= devices <= MOST_DEVICES:
        raise ConfigError(f"--devices {devices}: from 1 to {MOST_DEVICES:,}")
    memory = device_memory * GIB if device_memory else device_bytes(find(config.model.device))[1]
    sizes = sizes_of(config)
    tokens = longest_pass(config, sizes)
    found = fits(config, sizes, devices)
    return judge_meshes(found, devices, memory, command, tokens, config)
