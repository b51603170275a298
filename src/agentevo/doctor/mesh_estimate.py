"""Which meshes of several devices a recipe's training fits, from the model's shape alone: no weight
is read, and none is made.

Counted for each process: its part of the float32 weights, gradients and moments; what FSDP gathers
at once (the group of embedding and output layer, and two decoder layers); the activations of one
micro-batch, as `memory_estimate.py` has them, cut by the tensor and the context group; twins
(reference, critic). The first process serves with a whole model besides. Not counted: what
allocators and collectives keep.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentevo.config import ParallelSection, RunConfig
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
from agentevo.models.config_overrides import model_config
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
    replicas: int
    parts: dict[str, float]
    """On each process."""
    first: dict[str, float]
    """Besides, on the first one."""

    @property
    def most(self) -> float:
        return total(self.parts) + total(self.first)

    @property
    def keys(self) -> list[str]:
        """The recipe's keys that choose it."""
        sizes = self.parallel.model_dump()
        return [f"trainer.parallel.{key}={size}" for key, size in sizes.items() if size > 1]

    def __str__(self) -> str:
        sizes = {**self.parallel.model_dump(), "replicas": self.replicas}
        return " x ".join(f"{key}={size}" for key, size in sizes.items() if size > 1) or "one"


def sizes_of(config: RunConfig) -> Sizes:
    """Raises ModelError for a model that is not there; of a local folder config.json is enough."""
    return sizes_of_model(_hollow(config))


def sizes_of_model(model: PreTrainedModel) -> Sizes:
    """Of a model, whether or not its weights are there."""
    shape, trained = shape_of(model), trained_of(model)
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
    shape = model_config(folder, config.model.config_overrides)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            shape, dtype=getattr(torch, config.model.dtype)
        )
    return prepare(model.eval())


def longest_pass(config: RunConfig, sizes: Sizes) -> int:
    """Tokens of the largest micro-batch: trainer.micro_batch_tokens, or one attempt that is longer
    (its completions alone: what prompts add is not known before it is played)."""
    turns = 1 if getattr(config.agent, "memory", None) == "turn" else config.agent.max_turns
    longest = min(turns * config.sampling.max_new_tokens, sizes.context_length)
    return max(config.trainer.micro_batch_tokens, longest)


def fit(config: RunConfig, sizes: Sizes, parallel: ParallelSection, world: int) -> Fit:
    """What a mesh of `world` processes takes. Raises ValueError for sizes that don't divide it."""
    replicas = parallel.replicas(world)
    shard, tensor = parallel.shard, parallel.tensor
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
        "activations": _activations(config, sizes, parallel),
    }
    of_copy = element * frozen + (FLOAT if shard > 1 else element) * trained
    parts |= _twins(config, of_copy, of_copy + gradients + moments)
    first = {}
    if shard * tensor * parallel.expert > 1:
        first["whole model"] = float(element * sizes.numbers)
    if not config.rollout.samplers:
        first["key-value cache"] = config.engine.kv_cache_gb * GIB
    return Fit(parallel, replicas, {name: size for name, size in parts.items() if size}, first)


def _activations(config: RunConfig, sizes: Sizes, parallel: ParallelSection) -> float:
    """Of one micro-batch, as its backward pass begins or, if that is more, in the last layer's."""
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
    kept = per_token * tokens * shape.num_layers
    remade = layer_bytes(shape, sizes.trained, "none") * tokens if mode != "none" else 0.0
    passing = 2.0 * shape.intermediate * tokens * shape.element
    return kept + max(output_bytes(shape, sizes.trained, load), remade + passing)


def _twins(config: RunConfig, copy: float, trained: float) -> dict[str, float]:
    """Bytes of the models beside the policy: `copy` of one that is only read, `trained` of one that
    learns."""
    needs, preference = config.algorithm.needs, config.algorithm.preference()
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
    found, refusal = [], ""
    for parallel in _meshes(world, sizes):
        trainer = config.trainer.model_copy(update={"parallel": parallel})
        changed = config.model_copy(update={"trainer": trainer})
        try:
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
    for shard, tensor, context, expert in itertools.product(divisors, within, of_heads, of_experts):
        if world % (shard * tensor * context) == 0:
            yield ParallelSection(shard=shard, tensor=tensor, context=context, expert=expert)


def _cost(one: Fit) -> tuple[int, int, int, int]:
    """Tensor groups exchange twice a layer, context groups once, experts once where they are, FSDP
    weights that are asked for in advance."""
    sizes = one.parallel
    return sizes.tensor, sizes.context, sizes.expert, sizes.shard


def judge_meshes(
    found: list[Fit], devices: int, memory: float, command: str, tokens: int
) -> list[Check]:
    """`memory`: bytes of each device. `command`: recipe and overrides as they were given. `tokens`:
    of the largest micro-batch."""
    good = [one for one in found if one.most <= ROOM * memory]
    listed = good or sorted(found, key=lambda one: one.most)
    checks = []
    for one in listed[:SHOWN]:
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in one.parts.items())
        more = ", ".join(f"{name} {size / GIB:.2f}" for name, size in one.first.items())
        finding = f"{one}: {total(one.parts) / GIB:.2f} GiB on each device ({parts})"
        if more:
            finding += f"; on the first one {one.most / GIB:.2f} (and {more})"
        checks.append(Check("mesh", "good" if good else "wrong", finding))
    left = len(listed) - len(checks)
    also = f", and {left} more" if left else ""
    about = f"{devices} devices of {memory / GIB:.1f} GiB, micro-batches of {tokens:,} tokens"
    if not good:
        advice = (
            "more devices (--devices), memory.checkpointing=full, a smaller "
            "trainer.micro_batch_tokens or engine.kv_cache_gb, samplers of their own "
            "(rollout.samplers), or a smaller model"
        )
        return [*checks, Check("meshes", "wrong", f"none fits {about}", advice)]
    advice = "start it with: " + _ready(good[0], devices, command)
    finding = f"{len(good)} of {len(found)} fit {about}{also}; the cheapest is {good[0]}"
    return [*checks, Check("meshes", "good", finding, advice)]


def _ready(one: Fit, devices: int, command: str) -> str:
    words = " ".join([command, *one.keys])
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
    return judge_meshes(fits(config, sizes, devices), devices, memory, command, tokens)
