"""Pipeline parallelism: every process has a stretch of the layers, a stage, and micro-batches pass
through one stage after the other.

    first stage   embeddings, its layers
    others        their layers
    last stage    its layers, norm, output layer: log-probs and losses are made here

Every stage has all modules, under the same names. A module of another stage passes hidden states
through, and its weights are slices of length 0 (layouts.py). So optimizers number parameters the
same on every stage, and code that saves or gathers tensors needs no special case.

For a stage's passes see kernels/stages.py. An optimization delays backward passes until as many
micro-batches are in progress as stages follow this one: one forward and one backward pass in turn,
1F1B (PipeDream-Flush, arXiv 2006.09503), so a stage keeps the activations of at most as many
micro-batches as there are stages. Only the last stage has valid outputs (`parallel.gathered`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from agentevo.errors import TrainingError
from agentevo.training.collectives import Ranks
from agentevo.training.kernels.stages import Stage, receive_hidden, set_stage
from agentevo.training.sharding.layouts import ShardLayout, lay_out

PLAN = {"embed_tokens", "layers", "norm"}
"""The content of transformers' `base_model_pp_plan` for decoders whose layers exchange only hidden
states."""


class Passing:
    """Replaces the `forward` of a layer of another stage."""

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


class Receiving(Passing):
    """The same for the last layer of the stage before."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return receive_hidden(hidden_states, self.stage)


class NoEmbeddings:
    """The same for the first stage's embeddings, on another stage: zeros, which take no memory."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.width = width
        self.dtype = dtype

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), dtype=self.dtype, device=ids.device).expand(*ids.shape, self.width)


def check_pipeline(model: PreTrainedModel, size: int) -> None:
    """Raises TrainingError if a model can't be cut into so many stages."""
    if hasattr(model, "peft_config"):
        raise _refusal("adapters (model.lora) are not cut into stages", "set it to 1")

    if model.config.get_text_config().tie_word_embeddings:
        raise _refusal(
            "the model's embeddings are also its output layer (tie_word_embeddings), so the "
            "first and the last stage would both have them",
            "set it to 1, and use trainer.parallel.shard",
        )

    decoder: Any = model.base_model
    plan = getattr(decoder.config.get_text_config(), "base_model_pp_plan", None) or {}
    unsupported = [name for name in _outside(model) if name.partition(".")[0] not in PLAN]
    # A scalar has no slice of length 0.
    unsupported += [name for name, p in model.named_parameters() if not p.dim()]
    if set(plan) != PLAN or unsupported or model.get_output_embeddings() is None:
        what = f" ({unsupported[0]} is something else)" if unsupported else ""
        raise _refusal(
            f"{type(model).__name__} is not known to consist of embeddings, layers that take "
            f"hidden states alone, a norm and an output layer{what}",
            "set it to 1, and use trainer.parallel.shard",
        )

    if len(decoder.layers) % size:
        raise TrainingError(
            f"trainer.parallel.pipeline={size} does not divide the model's {len(decoder.layers)} "
            "layers: choose a divisor"
        )


def _outside(model: PreTrainedModel) -> Iterator[str]:
    """Names of the decoder's parameters, and of the model's parameters that belong neither to the
    decoder nor to the output layer."""
    decoder: Any = model.base_model
    output = model.get_output_embeddings()
    known_ids = {id(p) for part in (decoder, output) if part is not None for p in part.parameters()}
    yield from (name for name, _ in decoder.named_parameters())
    yield from (name for name, p in model.named_parameters() if id(p) not in known_ids)


def _refusal(why: str, remedy: str) -> TrainingError:
    return TrainingError(f"trainer.parallel.pipeline: {why}: {remedy}")


def pipeline_parallel(model: PreTrainedModel, stage: Stage) -> None:
    """Reduces the model, in place, to this process's stage; names stay. All processes of the
    pipeline call it with the same weights. Raises TrainingError, see `check_pipeline`."""
    ranks = stage.ranks
    check_pipeline(model, ranks.size)
    decoder: Any = model.base_model
    layers = decoder.layers
    output = model.get_output_embeddings()
    share = len(layers) // ranks.size
    last = ranks.size - 1

    for place, layer in enumerate(layers):
        owner = place // share
        if owner != ranks.rank:
            is_before = place == ranks.rank * share - 1
            layer.forward = Receiving(stage) if is_before else Passing()
        _give(layer, owner, ranks)

    if ranks.rank:
        weight = decoder.embed_tokens.weight
        decoder.embed_tokens.forward = NoEmbeddings(weight.shape[1], weight.dtype)

    if not stage.is_last:
        decoder.norm.forward = Passing()

    _give(decoder.embed_tokens, 0, ranks)
    _give(decoder.norm, last, ranks)
    assert isinstance(output, nn.Module), "see check_pipeline"

    _give(output, last, ranks)
    set_stage(model, stage)


def _give(part: nn.Module, owner: int, ranks: Ranks) -> None:
    """Leaves the parameters to the owner: every other stage keeps a slice of length 0."""
    for module in part.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                sizes = tuple(len(parameter) * (rank == owner) for rank in range(ranks.size))
                lay_out(module, name, ShardLayout(ranks, 0, sizes))
