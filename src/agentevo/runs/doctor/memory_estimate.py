"""The memory that training takes on each process: the large terms, from the model's shape alone. No
weight is read or created. docs/training.md says what is left out, and compares it with measured
peaks.

    term           bytes                                           divided by
    weights        as loaded, and float32 masters                  shard, tensor, pipeline
    gradients      4 per trained number                            shard, tensor, pipeline
    optimizer      2 moments per trained number                    shard, tensor, pipeline
    activations    of the longest micro-batch, in all layers       tensor, context, pipeline
    logits         blocks of rows x vocabulary                     tensor
    other models   reference, critic, process reward               as the policy
    engine         its cache and weights, on the first process     nothing

Experts are divided by `expert` or `shard`, and by `tensor`; tower and projector by nothing. FSDP
gathers the embeddings and two layers at once. The first of N pipeline stages keeps the activations
of N micro-batches. For decoders of Llama's kind; attention keeps no scores. Freed memory that
allocators keep is not counted, nor is what a vision tower keeps.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from agentevo.config import LoraSection, MemorySection, RunConfig
from agentevo.inference.vllm.options import read_options
from agentevo.inference.weights.transports import local_transport
from agentevo.models.compute.adapters import add_adapter, peft, read_adapter_config
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.compiled import is_compiled
from agentevo.models.compute.positions import context_length
from agentevo.models.config_overrides import model_config
from agentevo.models.files.load import make_hollow
from agentevo.models.files.resolve import fetch_config
from agentevo.models.token_rows import causal_model
from agentevo.models.vision.parts import freeze_parts, vision_parameters
from agentevo.runs.doctor.checks import GIB
from agentevo.runs.orchestration.checks import needs_no_whole_model
from agentevo.runs.orchestration.components import load_policy
from agentevo.training.kernels.cells import CELL_BYTES, OTHER_CELL_BYTES
from agentevo.training.kernels.linear_logprobs import KEPT_BYTES

FLOAT = 4
TERMS = ("weights", "gradients", "optimizer", "activations", "logits", "other models", "engine")
PACKED_BYTES = {"8bit": 1.0, "4bit": 1 / 2 + 1 / 64 + 4 / (64 * 256)}
"""Bytes per weight in bitsandbytes. 4-bit weights also have a one-byte scale per 64 weights and a
float32 scale per 256 of these scales (arXiv 2305.14314, section 3)."""
Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, in numbers per token."""

    num_layers: int
    hidden: int
    query: int
    """Heads times their width."""
    key: int
    """Key-value heads times their width."""
    num_heads: int
    intermediate: int
    vocabulary: int
    head_norms: bool
    """Norms of queries and keys (Qwen 3)."""
    tied: bool
    """Input and output embeddings are one matrix."""
    element: int
    """Bytes of one number of weights and activations."""
    compiled: bool = False
    """Whether PyTorch's compiler made the layers' kernels (models/compute/compiled.py)."""


@dataclass(frozen=True)
class TrainedParameters:
    """Counts of the numbers that are trained."""

    total: int
    output: bool
    embedding: bool
    norms: bool
    attention_in: bool
    """Whether a layer that reads the first norm's output is trained, or has an adapter;
    likewise:"""
    mlp_in: bool
    down_in: bool
    masters: bool
    """Whether weights are less exact than float32."""
    adapter_inputs: float = 0.0
    """Numbers that the adapters of one decoder layer read for a token, each for itself: of a model
    less exact than float32 they are copied, as adapters compute in float32."""
    adapter_outputs: float = 0.0
    """Numbers that they add to."""


class Load(NamedTuple):
    """The largest micro-batch."""

    tokens: int
    """Distinct ones."""
    rows: int
    """Nodes whose prediction is trained."""
    on_cpu: bool
    single: bool = False
    """Whether an optimizer step has no other."""


@dataclass(frozen=True)
class Sizes:
    """The shape of a model, with numbers of its parameters."""

    model: PreTrainedModel
    shape: Shape
    trained: TrainedParameters
    numbers: int
    frozen_bytes: float
    trained_bytes: float
    layer: int
    """Numbers in one decoder layer."""
    root: int
    """Numbers outside the decoder layers: embedding, output layer, last norm."""
    experts: int
    """Numbers in the experts of all layers."""
    whole: int
    """Numbers in tower and projector, which each process has whole."""


def shape_of(model: PreTrainedModel) -> Shape:
    """Of a model, adapters or not."""
    config: Any = causal_model(model).config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    experts = getattr(config, "num_experts_per_tok", None)
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}

    return Shape(
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        query=config.num_attention_heads * width,
        key=config.num_key_value_heads * width,
        num_heads=config.num_attention_heads,
        intermediate=experts * getattr(config, "moe_intermediate_size", config.intermediate_size)
        if experts
        else config.intermediate_size,
        vocabulary=config.vocab_size,
        head_norms="q_norm" in names,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        element=next(model.parameters()).element_size(),
        compiled=is_compiled(model),
    )


def trained_of(model: PreTrainedModel) -> TrainedParameters:
    """Of a model, adapters or not."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    inner = causal_model(model)

    def has(*parts: str) -> bool:
        return any(part in name for name in trained for part in parts)

    def sum_widths(factor: str, dim: int) -> int:
        return sum(p.shape[dim] for name, p in trained.items() if f".{factor}." in name)

    num_layers = inner.config.get_text_config().num_hidden_layers
    return TrainedParameters(
        total=sum(p.numel() for p in trained.values()),
        output=any(p.requires_grad for p in inner.get_output_embeddings().parameters()),
        embedding=any(p.requires_grad for p in inner.get_input_embeddings().parameters()),
        norms=has("layernorm"),
        attention_in=has("q_proj", "k_proj", "v_proj"),
        mlp_in=has("gate_proj", "up_proj", "experts"),
        down_in=has("down_proj", "experts"),
        masters=any(p.element_size() < FLOAT for p in trained.values()),
        adapter_inputs=sum_widths("lora_A", 1) / num_layers,
        adapter_outputs=sum_widths("lora_B", 0) / num_layers,
    )


def sizes_of(model: PreTrainedModel) -> Sizes:
    """The sizes of a model, with or without its weights."""
    shape = shape_of(model)
    named = dict(model.named_parameters())
    numbers = sum(p.numel() for p in named.values())
    in_layers = sum(p.numel() for name, p in named.items() if ".layers." in name)
    frozen_bytes = sum(p.nbytes for p in named.values() if not p.requires_grad)
    return Sizes(
        model,
        shape,
        trained_of(model),
        numbers,
        frozen_bytes,
        weight_bytes(model) - frozen_bytes,
        in_layers // shape.num_layers,
        numbers - in_layers,
        sum(p.numel() for name, p in named.items() if ".experts." in name),
        sum(p.numel() for _, p in vision_parameters(model)),
    )


def layer_bytes(shape: Shape, trained: TrainedParameters, checkpointing: Checkpointing) -> float:
    """Per token, what one decoder layer keeps until its backward pass."""
    hidden = shape.hidden
    element = shape.element
    attention = (
        2 * shape.query + 2 * shape.key
    ) * element + shape.num_heads * FLOAT  # q, k, v, output; log-sum-exp

    if checkpointing == "full":
        return hidden * element

    # input; products: q, k, v, o, gate, up, down; attention
    products = shape.query + 2 * shape.key + 2 * hidden + 2 * shape.intermediate
    selective = (hidden + products + shape.query) * element + shape.num_heads * FLOAT
    if shape.compiled:  # and the inputs of products
        turned = (shape.query + shape.key) * shape.head_norms
        return selective + (2 * hidden + shape.intermediate + turned) * element

    copied = FLOAT * trained.adapter_inputs * (element < FLOAT)
    if checkpointing == "selective":
        return selective + FLOAT * trained.adapter_outputs

    norm = hidden * (
        FLOAT + element * trained.norms
    )  # its input in float32; what its weight multiplies
    inputs = hidden * (trained.attention_in + trained.mlp_in)
    inputs += shape.intermediate * trained.down_in
    kept_bytes = 2 * norm + attention + (copied or inputs * element)
    if shape.head_norms:
        kept_bytes += (shape.query + shape.key) * (FLOAT + element * trained.norms)

    return kept_bytes + 3 * shape.intermediate * element


def passing_bytes(shape: Shape, trained: TrainedParameters, tokens: int) -> float:
    """Gradients of a layer's inner activations, while its backward pass is under way; of adapters
    over a model less exact than float32 also their product, its multiple and the sum."""
    per_unit = 2 * shape.element
    if trained.adapter_inputs and shape.element < FLOAT:
        per_unit = 3 * FLOAT

    return float(per_unit * shape.intermediate * tokens)


def output_bytes(shape: Shape, trained: TrainedParameters, load: Load) -> float:
    """The last norm, and the output layer without logits as a whole (linear_logprobs.py)."""
    cells = 3 * (CELL_BYTES["cpu"] if load.on_cpu else OTHER_CELL_BYTES)
    scores = load.rows * shape.vocabulary
    kept_bytes = min(scores * shape.element, KEPT_BYTES)
    if not trained.output and scores * shape.element > KEPT_BYTES:
        kept_bytes = load.rows * shape.hidden * FLOAT

    norm = (
        load.tokens * shape.hidden * (FLOAT + shape.element * trained.norms)
        + 2 * load.rows * shape.hidden * shape.element
    )
    return norm + kept_bytes + min(cells, 3 * scores * FLOAT)


def optimizer_bytes(trained: TrainedParameters, memory: MemorySection) -> dict[str, float]:
    """On the training device, or on the CPU with memory.offload_optimizer: moments and masters."""
    moment = FLOAT if memory.optimizer == "adamw" else 1 + FLOAT / 256
    masters = FLOAT * trained.total if trained.masters or memory.offload_optimizer else 0
    sizes = {"optimizer": 2.0 * moment * trained.total, "float32 weights": float(masters)}
    return {name: size for name, size in sizes.items() if size}


def longest_pass(config: RunConfig, sizes: Sizes) -> int:
    """Tokens of the largest micro-batch: trainer.micro_batch_tokens, or the longest attempt if that
    is longer. Only its completions count, because the lengths of prompts are unknown before
    rollout. For recipes that train on conversations: sft.micro_batch_tokens."""
    if config.data.taught:
        return config.sft.micro_batch_tokens

    turns = 1 if getattr(config.agent, "memory", None) == "turn" else config.agent.max_turns
    longest = min(turns * config.sampling.max_new_tokens, context_length(sizes.model.config))
    return max(config.trainer.micro_batch_tokens, longest)


def process_terms(
    config: RunConfig, sizes: Sizes, stage: int = 0, load: Load | None = None
) -> dict[str, float]:
    """Bytes of each term on a process of this pipeline stage, 0 to pipeline - 1, without engine.
    `load`: by default a micro-batch of `longest_pass` that trains all its tokens."""
    mesh = config.trainer.parallel
    root = sizes.root
    if mesh.pipeline > 1:  # the embedding is in the first stage, the output layer in the last
        embedding = sizes.shape.vocabulary * sizes.shape.hidden
        has_output = stage == mesh.pipeline - 1
        root = embedding * (stage == 0) + (sizes.root - embedding) * has_output

    experts = sizes.experts / mesh.pipeline
    dense = sizes.layer * sizes.shape.num_layers / mesh.pipeline + root - experts
    held = (dense - sizes.whole) / mesh.shard + sizes.whole
    held += experts / max(mesh.expert, mesh.shard)
    share = held / mesh.tensor / sizes.numbers  # of the whole model
    trained = share * sizes.trained.total

    is_on_device = not config.memory.offload_optimizer
    moments = optimizer_bytes(sizes.trained, config.memory).get("optimizer", 0.0)
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

    if load is None:
        tokens = longest_pass(config, sizes)
        load = Load(tokens, tokens, config.model.device == "cpu")

    activations, logits = _pass_bytes(config, sizes, stage, load)
    others = other_models(config, copy, copy + gradients + optimizer)
    if load.single:  # gradients appear as activations are freed
        gradients = max(0.0, gradients - activations - logits)

    parts = (weights, gradients, optimizer, activations, logits, others, 0.0)
    return dict(zip(TERMS, parts, strict=True))


def _pass_bytes(config: RunConfig, sizes: Sizes, stage: int, load: Load) -> tuple[float, float]:
    """Bytes of activations and of logits, at the start of a backward pass or in that of the last
    layer, whichever is more."""
    mesh = config.trainer.parallel
    cut = {
        name: math.ceil(getattr(sizes.shape, name) / mesh.tensor)
        for name in ("query", "key", "num_heads", "intermediate", "vocabulary")
    }
    shape = replace(sizes.shape, **cut)
    tokens = math.ceil(load.tokens / mesh.context)
    per_layer = layer_bytes(shape, sizes.trained, config.memory.checkpointing) * tokens
    per_layer *= not config.memory.offload_activations
    kept = per_layer * shape.num_layers / mesh.pipeline
    in_layer = layer_bytes(shape, sizes.trained, "none") * tokens - per_layer
    in_layer += passing_bytes(shape, sizes.trained, tokens)

    # The gradient of a vocabulary matrix, before it is added to earlier ones; FSDP's is gathered.
    matrix = float(FLOAT * shape.vocabulary * shape.hidden) * (mesh.shard == 1)
    num_later = mesh.pipeline - 1 - stage  # stages, which work on as many further micro-batches
    if num_later:  # no loss is computed here; sent hidden states are kept
        kept += float(shape.hidden * tokens * shape.element)
        return kept * num_later + max(kept + in_layer, matrix * sizes.trained.embedding), 0.0

    load = load._replace(tokens=tokens, rows=math.ceil(load.rows / mesh.context))
    logits = output_bytes(shape, sizes.trained, load) + matrix * sizes.trained.output
    in_layer += matrix * (shape.tied and sizes.trained.output)
    return kept + max(0.0, in_layer - logits), logits


def engine_bytes(config: RunConfig, sizes: Sizes, memory: float) -> float:
    """Bytes of the engine in the first process, whose device has `memory` bytes; 0 if engines in
    other processes serve, which need devices of their own."""
    if needs_no_whole_model(config, is_disaggregated=config.rollout.samplers > 0):
        return 0.0

    whole = sizes.frozen_bytes + sizes.trained_bytes
    weights = engine_weights(config, sizes.trained_bytes)
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
    return weights + whole / options.num_devices + cache


def other_models(config: RunConfig, copy: float, trained: float) -> float:
    """Bytes of the models other than the policy: `copy` for a frozen one, `trained` for one that
    learns."""
    if config.data.taught:
        return 0.0

    needs = config.algorithm.needs
    preference = config.algorithm.preference()
    has_reference = (
        config.algorithm.kl_coef > 0
        or "process_rewards" in needs
        or (preference is not None and preference.needs_reference)
    )
    has_critic = "values" in needs and config.critic.trunk == "own"
    return copy * has_reference + trained * (has_critic + ("process_rewards" in needs))


def engine_weights(config: RunConfig, copy: float) -> float:
    """Bytes of the weights that an engine in this process has in addition to the trainer's. `copy`:
    a second copy of the trained weights."""
    rollout = config.rollout
    if rollout.samplers or not rollout.staleness:
        return 0.0

    own = local_transport(config, is_separate=False) == "copy"
    return copy * (own + rollout.staleness * (rollout.policy == "wait"))


def weight_bytes(model: PreTrainedModel) -> float:
    return float(sum(p.nbytes for p in model.parameters()))


def total(parts: Mapping[str, float]) -> float:
    return sum(parts.values())


def unloaded_policy(config: RunConfig) -> PreTrainedModel:
    """The policy of a recipe without its weights: every parameter has the shape, the type and the
    size that it has in training, on the device `meta`. Reads only config.json. A tiny model is
    created here, with its weights. Raises ModelError for a missing model, and MissingExtraError if
    the recipe has adapters and PEFT is not installed."""
    if config.model.name == "tiny":
        return load_policy(config).model

    with tempfile.TemporaryDirectory(prefix="agentevo-config-") as temporary_path:
        folder = fetch_config(config.model.name, Path(temporary_path))
        return shape_policy(config, model_config(folder, config.model.config_overrides))


def shape_policy(config: RunConfig, shape: PretrainedConfig) -> PreTrainedModel:
    """The policy of a recipe whose model has the configuration `shape`. Raises MissingExtraError if
    the recipe has adapters and PEFT is not installed."""
    lora = config.model.lora
    model = make_hollow(config.model, shape)
    if not lora.enabled:
        freeze_parts(model, config.model.vision.frozen)
        return prepare(model, compute=config.trainer.compute)

    with torch.device("meta"):
        packed = [] if lora.quantize == "none" else _packed_layers(model)
        adapted = _adapt(model.requires_grad_(False), lora)
        for layer in packed:
            num_bytes = round(layer.weight.numel() * PACKED_BYTES[lora.quantize])
            layer.weight = nn.Parameter(torch.empty(num_bytes, dtype=torch.uint8), False)

    return prepare(adapted, compute=config.trainer.compute)


def _packed_layers(model: PreTrainedModel) -> list[nn.Linear]:
    """The layers whose weights transformers stores in 8 or 4 bits: all linear layers except the
    output layer."""
    output = model.get_output_embeddings()
    return [m for m in model.modules() if isinstance(m, nn.Linear) and m is not output]


def _adapt(model: PreTrainedModel, section: LoraSection) -> PreTrainedModel:
    if section.adapter is None:
        return add_adapter(model, section.model_copy(update={"init": "default"}), seed=0)

    saved = read_adapter_config(section.adapter)
    saved.inference_mode = False
    return peft().get_peft_model(model, saved).eval()
