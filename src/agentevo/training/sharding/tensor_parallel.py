"""Tensor parallelism: every process has a slice of each large matrix and computes its share of
every token (arXiv 1909.08053), the vocabulary of both embeddings included.

Which matrices are cut by their outputs and which by their inputs is the architecture's own
`base_model_tp_plan` in transformers. Every process computes alike the modules that the plan does
not name (norms, routers). Experts that are stacked in one parameter are cut between experts, and
attention sinks between heads.

A model is rejected, before anything is changed, if that would not be exact: adapters, a plan with
steps that are not known here, heads or widths that the number of processes doesn't divide.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from agentevo.errors import TrainingError
from agentevo.training.collectives import Ranks, add_over_group, copy_to_group
from agentevo.training.kernels.output_layer import PROBES
from agentevo.training.kernels.vocabulary import VocabularyLinear, VocabularySlice
from agentevo.training.sharding.expert_parallel import is_stack, spread_over_tensor
from agentevo.training.sharding.layouts import ShardLayout, lay_out

COLUMN = "colwise"
ROW = "rowwise"
HEAD_NORM = "replicated_with_grad_allreduce"
KEYS = ("k_proj", "v_proj")
SINKS = "sinks"
"""The name of attention modules' parameter with a number for each head."""


def tensor_parallel(model: PreTrainedModel, ranks: Ranks, *, experts: bool = True) -> None:
    """Cuts the model, in place, into this process's part; all processes of the group call it with
    the same weights. `experts=False` keeps stacked experts whole, for `expert_parallel`. Raises
    TrainingError, with the model as it was, for one that can't be cut."""
    parts = check_tensor(model, ranks)
    for name, style in parts.items():
        module: Any = model.get_submodule(name)
        parent, _, own_name = name.rpartition(".")
        if style == HEAD_NORM:
            lay_out(module, "weight", ShardLayout(ranks, None))
        elif own_name in KEYS and _num_keys(model) % ranks.size:
            _share_keys(model, name, ranks)
        else:
            _cut_linear(model.get_submodule(parent), own_name, style, ranks)

    for name, sinks in _sinks(model).items():
        number = len(sinks) // ranks.size
        cut = ShardLayout(ranks, 0, (number,) * ranks.size)
        lay_out(model.get_submodule(name.rpartition(".")[0]), SINKS, cut)

    for name in {name.rpartition(".")[0] for name, style in parts.items() if style == COLUMN}:
        model.get_submodule(name).register_forward_pre_hook(_CopiedInput(ranks), with_kwargs=True)

    for module in list(model.modules()):
        if experts and is_stack(module):
            spread_over_tensor(module, ranks)

    _cut_vocabulary(model, ranks)


def check_tensor(model: PreTrainedModel, ranks: Ranks) -> dict[str, str]:
    """Name of a module -> how it is cut. Raises TrainingError for a model that can't be cut between
    so many processes."""
    if hasattr(model, "peft_config") or not isinstance(model, PreTrainedModel):
        raise _refusal("adapters (model.lora)", "train them with trainer.parallel.shard alone")
    parts = dict(_parts(model))
    _check(model, parts, ranks)
    return parts


class RowLinear(nn.Linear):
    """A linear layer over a slice of its inputs, whose outputs are added over processes."""

    ranks: Ranks

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = add_over_group(nn.functional.linear(input, self.weight), self.ranks)
        return out if self.bias is None else out + self.bias


class KeyLinear(nn.Linear):
    """A layer with fewer key or value heads than processes: each process computes the one head that
    its queries need, from weights that all have."""

    outputs: slice

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias[self.outputs]
        return nn.functional.linear(input, self.weight[self.outputs], bias)


class _CopiedInput:
    """Before a block whose first layers have slices of their outputs: the gradient of the input is
    the sum over processes."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (copy_to_group(args[0], self.ranks), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": copy_to_group(kwargs["hidden_states"], self.ranks)}


class _OwnTokens:
    """Before and after an embedding that has a slice of the vocabulary."""

    def __init__(self, vocabulary_slice: VocabularySlice) -> None:
        self.vocabulary_slice = vocabulary_slice

    def _outside(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids < self.vocabulary_slice.first) | (ids >= self.vocabulary_slice.end)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids: torch.Tensor = args[0]
        self._beyond = self._outside(ids)
        return ((ids - self.vocabulary_slice.first).masked_fill(self._beyond, 0), *args[1:])

    def after(self, module: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
        return add_over_group(
            out.masked_fill(self._beyond.unsqueeze(-1), 0), self.vocabulary_slice.ranks
        )


def _parts(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Name of a module -> how the architecture's plan cuts it; without stacked experts."""
    base = model.base_model
    for name, module in base.named_modules():
        style = _style(base, name)
        if style and not is_stack(module) and not isinstance(module, nn.Embedding):
            yield _prefix(model) + name, style


def _sinks(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Name -> attention sinks [H] that the architecture's plan cuts between heads."""
    base = model.base_model
    return {
        _prefix(model) + name: parameter
        for name, parameter in base.named_parameters()
        if name.endswith(f".{SINKS}") and _style(base, name) == COLUMN
    }


def _style(base: Any, name: str) -> str | None:
    """How the architecture's plan cuts a module or parameter of the decoder."""
    plan: dict[str, str] = getattr(base.config, "base_model_tp_plan", None) or {}
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def _prefix(model: PreTrainedModel) -> str:
    return f"{model.base_model_prefix}." if model.base_model is not model else ""


def _check(model: PreTrainedModel, parts: dict[str, str], ranks: Ranks) -> None:
    kind = type(model).__name__
    if not any(style == COLUMN for style in parts.values()):
        raise _refusal(f"{kind}: transformers has no plan for it", "use shard or context")

    sinks = _sinks(model)
    for name, style in parts.items():
        module = model.get_submodule(name)
        is_supported = style == HEAD_NORM or (
            style in (COLUMN, ROW) and type(module).__name__.endswith("Linear")
        )
        if not is_supported or (style == HEAD_NORM and not hasattr(module, "weight")):
            raise _refusal(f"{kind}, whose {name} needs the unknown rule {style!r}", "use shard")

        parent_name = name.rpartition(".")[0]
        for parameter_name, _ in model.get_submodule(parent_name).named_parameters():
            full_name = f"{parent_name}.{parameter_name}"
            if full_name.rpartition(".")[0] not in parts and full_name not in sinks:
                raise _refusal(f"{kind}, whose {full_name} is in no plan", "use shard")

    config: Any = model.config.get_text_config()
    if config.num_attention_heads % ranks.size:
        raise _refusal(f"{config.num_attention_heads} attention heads", "choose a divisor")

    keys = _num_keys(model)
    if keys % ranks.size and ranks.size % keys:
        raise _refusal(f"{keys} key heads", "choose a divisor or a multiple of them")

    key_layers: list[Any] = [model.get_submodule(n) for n in parts if n.endswith(f".{KEYS[0]}")]
    if keys % ranks.size and len({layer.out_features for layer in key_layers}) > 1:
        raise _refusal("layers of different numbers of key heads", f"choose a divisor of {keys}")

    for name, style in parts.items():
        linear: Any = model.get_submodule(name)
        width = {COLUMN: "out_features", ROW: "in_features"}.get(style)
        keyed = name.rpartition(".")[2] in KEYS
        if width and not keyed and getattr(linear, width) % ranks.size:
            raise _refusal(f"{name} of width {getattr(linear, width)}", "choose a divisor")

    rows = len(cast(Any, model.get_input_embeddings()).weight)
    if min(VocabularySlice.of(ranks, rows).sizes) < len(PROBES):
        raise _refusal(f"a vocabulary of {rows} tokens", "choose fewer processes")


def _refusal(what: str, remedy: str) -> TrainingError:
    return TrainingError(f"trainer.parallel.tensor is not possible with {what}: {remedy}")


def _num_keys(model: PreTrainedModel) -> int:
    config: Any = model.config.get_text_config()
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _cut_linear(parent: nn.Module, name: str, style: str, ranks: Ranks) -> None:
    layer: Any = parent._modules[name]
    dim, width = (0, layer.out_features) if style == COLUMN else (1, layer.in_features)
    cut = ShardLayout(ranks, dim, (width // ranks.size,) * ranks.size)
    lay_out(layer, "weight", cut)

    if style == COLUMN:
        layer.out_features = width // ranks.size
        if layer.bias is not None:
            lay_out(layer, "bias", cut)
        return

    layer.in_features = width // ranks.size
    row = _as(RowLinear, layer)
    row.ranks = ranks
    parent._modules[name] = row


def _share_keys(model: PreTrainedModel, name: str, ranks: Ranks) -> None:
    parent, _, own_name = name.rpartition(".")
    layer: Any = model.get_submodule(name)
    width = layer.out_features // _num_keys(model)
    head = ranks.rank // (ranks.size // _num_keys(model))

    shared = _as(KeyLinear, layer)
    shared.outputs = slice(head * width, (head + 1) * width)
    for parameter in ("weight", "bias"):
        if getattr(shared, parameter) is not None:
            lay_out(shared, parameter, ShardLayout(ranks, None))

    model.get_submodule(parent)._modules[own_name] = shared


def _as(kind: type[nn.Linear], layer: nn.Linear) -> Any:
    """A layer of another class over the same parameters."""
    new_layer = kind.__new__(kind)
    nn.Module.__init__(new_layer)
    vars(new_layer).update({k: v for k, v in vars(layer).items() if k.startswith("_agentevo")})
    new_layer.in_features = layer.in_features
    new_layer.out_features = layer.out_features
    new_layer.weight = layer.weight
    new_layer.bias = layer.bias
    new_layer.training = layer.training
    return new_layer


def _cut_vocabulary(model: PreTrainedModel, ranks: Ranks) -> None:
    embedding: Any = model.get_input_embeddings()
    output: Any = model.get_output_embeddings()
    vocabulary_slice = VocabularySlice.of(ranks, len(embedding.weight))
    tied = output is not None and output.weight is embedding.weight
    cut = ShardLayout(ranks, 0, vocabulary_slice.sizes)
    lay_out(embedding, "weight", cut)

    embedding.num_embeddings = vocabulary_slice.sizes[ranks.rank]
    if embedding.padding_idx is not None:
        inside = vocabulary_slice.first <= embedding.padding_idx < vocabulary_slice.end
        embedding.padding_idx = embedding.padding_idx - vocabulary_slice.first if inside else None

    hook = _OwnTokens(vocabulary_slice)
    embedding.register_forward_pre_hook(hook.before)
    embedding.register_forward_hook(hook.after)

    if output is None:
        return

    if tied:
        output._parameters["weight"] = embedding.weight
        vars(output)["_agentevo_layouts"] = {"weight": cut}
    else:
        lay_out(output, "weight", cut)

    if output.bias is not None:
        lay_out(output, "bias", cut)

    model.set_output_embeddings(VocabularyLinear.sharing(output, vocabulary_slice))
