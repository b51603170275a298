"""How much memory training takes in addition to the weights, from shapes alone. docs/training.md
compares it with measured peaks.

The estimate sums what is alive at each moment that can be the peak, and takes the largest: the
start of the backward pass (all activations, the output layer), the backward pass of each decoder
layer (the remaining activations, the layer's own recomputed, gradients so far), its end (all
gradients), and the optimizer's step. For decoders of Llama's kind, dense; attention keeps no
scores.

Freed memory that allocators keep is not counted: glibc keeps blocks below 32 MiB
(docs/training.md), CUDA's allocator some per cent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from agentevo.config import MemorySection
from agentevo.models.compute.compiled import is_compiled
from agentevo.models.compute.linear import available
from agentevo.models.token_rows import causal_model
from agentevo.training.kernels.cells import CELL_BYTES, OTHER_CELL_BYTES
from agentevo.training.kernels.linear_logprobs import KEPT_BYTES

FLOAT = 4
LIBRARIES = 28 * 2**20
"""On a CPU: the memory of oneDNN and small allocations, measured from the first pass on."""
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
    layers: int
    """The trained numbers in decoder layers."""
    largest: int
    """Count of the numbers in the largest parameter."""
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


@dataclass(frozen=True)
class Load:
    """The largest micro-batch."""

    tokens: int
    """Distinct ones."""
    rows: int
    """Nodes whose prediction is trained."""
    single: bool
    """Whether an optimizer step has no other."""
    on_cpu: bool


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
    ends = {
        id(p)
        for end in (inner.get_input_embeddings(), inner.get_output_embeddings())
        for p in end.parameters()
    }

    def has(*parts: str) -> bool:
        return any(part in name for name in trained for part in parts)

    def sum_widths(factor: str, dim: int) -> int:
        return sum(p.shape[dim] for name, p in trained.items() if f".{factor}." in name)

    num_layers = inner.config.get_text_config().num_hidden_layers
    return TrainedParameters(
        total=sum(p.numel() for p in trained.values()),
        layers=sum(
            p.numel() for name, p in trained.items() if ".layers." in name and id(p) not in ends
        ),
        largest=max((p.numel() for p in trained.values()), default=0),
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


def pass_bytes(
    shape: Shape, trained: TrainedParameters, load: Load, memory: MemorySection
) -> dict[str, float]:
    """Memory at the peak of a forward and backward pass, or of the optimizer's step: name ->
    bytes."""
    mode = memory.checkpointing
    kept_per_layer = (
        0.0 if memory.offload_activations else layer_bytes(shape, trained, mode) * load.tokens
    )
    full_per_layer = layer_bytes(shape, trained, "none") * load.tokens
    remade = (
        full_per_layer - kept_per_layer if mode != "none" or memory.offload_activations else 0.0
    )
    passing = passing_bytes(shape, trained, load.tokens)

    matrix = float(shape.vocabulary * shape.hidden)
    of_output = matrix * FLOAT * trained.output
    of_embedding = matrix * FLOAT * trained.embedding
    all_gradients = FLOAT * float(trained.total)
    per_layer = FLOAT * trained.layers / shape.num_layers
    pending = (
        of_output if shape.tied else 0.0
    )  # waits for the embedding's share before it is added to the gradient

    def moment(gradients: float, activations: float, output: float = 0.0) -> dict[str, float]:
        return {"gradients": gradients, "activations": activations, "output layer": output}

    before = 0.0 if load.single else all_gradients
    moments = [
        moment(
            before + of_output,
            kept_per_layer * shape.num_layers,
            output_bytes(shape, trained, load),
        )
    ]
    for layers_left in range(shape.num_layers, 0, -1):
        so_far = (
            of_output + per_layer * (shape.num_layers - layers_left)
            if load.single
            else all_gradients + pending
        )
        moments.append(moment(so_far, kept_per_layer * layers_left + remade + passing))

    moments.append(
        moment(
            (all_gradients if not (load.single and shape.tied) else all_gradients - of_output)
            + pending
            + of_embedding,
            0.0,
        )
    )
    stepping = 6.0 * FLOAT * trained.largest if memory.optimizer == "adamw_8bit" else 0.0
    moments.append(moment(all_gradients, 0.0) | {"optimizer's step": stepping})
    largest = max(moments, key=lambda parts: sum(parts.values()))
    return {name: size for name, size in largest.items() if size}


def training_bytes(model: PreTrainedModel, load: Load, memory: MemorySection) -> dict[str, float]:
    """Memory that training takes on the model's device in addition to the weights and other
    models, at its peak: name -> bytes."""
    shape = shape_of(model)
    trained = trained_of(model)
    optimizer_state = (
        {} if memory.offload_optimizer and not load.on_cpu else optimizer_bytes(trained, memory)
    )
    return (
        optimizer_state
        | pass_bytes(shape, trained, load, memory)
        | ({"libraries": float(LIBRARIES)} if load.on_cpu else {})
    )


def weight_bytes(model: PreTrainedModel) -> float:
    return float(sum(p.nbytes for p in model.parameters()))


def packed_bytes(model: PreTrainedModel, device: torch.device) -> float:
    """Copies of the decoder layers' matrices that float32 passes without gradient have on a CPU
    (models/compute/linear.py)."""
    first = next(model.parameters())
    if device.type != "cpu" or first.dtype != torch.float32 or not available():
        return 0.0

    matrices = (
        p
        for name, p in model.named_parameters()
        if ".layers." in name and p.dim() == 2 and "lora_" not in name
    )
    return float(sum(p.numel() for p in matrices) * FLOAT)


def total(parts: Mapping[str, float]) -> float:
    return sum(parts.values())
