"""The load-balancing loss of a mixture's routers (Switch Transformers, arXiv 2101.03961, equations
4 to 6), computed by transformers' own function of the model's family:

    E * sum over experts e of f_e * P_e

f_e: the mean number of a token's top_k most probable experts that are e. P_e: the mean of e's
probability; only P has a gradient. Both are means over the layers and over all tokens of the
micro-batch's samples, trained or not. A token that samples share counts once for each of them, and
padding does not count: the same micro-batch has the same loss merged or not, on the tree and on
rows. A minibatch's loss is the mean over its micro-batches of all ranks, each with its share of the
minibatch's tokens. The loss is not linear in the tokens, so it depends on which samples share a
micro-batch. Routers that choose by a bias are refused: f would count other experts than theirs.

The logits are those of the pass that computes the log-probs. Layers that the backward pass computes
again are not recorded, so nothing counts twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from agentevo.errors import ConfigError, TrainingError
from agentevo.models.compute.rows import row_settings, shares_states
from agentevo.models.token_rows import causal_model
from agentevo.training.batching.packing import PackedBatch
from agentevo.types import Sample

ARGUMENTS = ("gate_logits", "num_experts", "top_k", "attention_mask")
"""Those of transformers' `load_balancing_loss_func` that this module calls."""


class RouterBalance:
    """Adds the loss of a model's routers to the losses of micro-batches."""

    def __init__(self, model: PreTrainedModel, coef: float, key: str) -> None:
        """`key` is the recipe's name of `coef`. Raises ConfigError for a model without the loss."""
        self._coef = coef
        self._model = model
        self._routers = _routers_of(model, key)
        self._function = _loss_function(model, key)
        self._top_k = _top_k(model, key)
        self._tokens = 0

    @classmethod
    def of(cls, model: PreTrainedModel, coef: float, key: str) -> RouterBalance | None:
        """None if the recipe asks for no such loss."""
        return cls(model, coef, key) if coef > 0 else None

    def begin(self, samples: Sequence[Sample]) -> None:
        """`samples`: those of the next minibatch, on all ranks."""
        self._tokens = sum(len(sample.ids) for sample in samples)

    def listen(self, batch: PackedBatch) -> RouterListener:
        """Records the routers in one pass over a micro-batch of the minibatch, which has
        `all_rows`."""
        share = batch.num_logical / self._tokens
        weights = _token_weights(self._model, batch)
        return RouterListener(
            self._routers, self._coef, lambda logits: share * self._loss(logits, weights)
        )

    def _loss(self, logits: tuple[torch.Tensor, ...], weights: torch.Tensor) -> torch.Tensor:
        if any(len(of_layer) != len(weights) for of_layer in logits):
            raise TrainingError(
                f"the routers choose for {sorted({len(x) for x in logits})} tokens in a pass over "
                f"{len(weights)}: this is a defect of AgentEvo; set router_aux_loss_coef to 0"
            )
        return self._function(logits, logits[0].shape[-1], self._top_k, weights)


def listening(
    balance: RouterBalance | None, batch: PackedBatch
) -> AbstractContextManager[RouterListener | None]:
    """`balance.listen(batch)`, or None."""
    return nullcontext() if balance is None else balance.listen(batch)


class RouterListener:
    """While it is open, records the logits of the routers."""

    def __init__(
        self,
        routers: dict[nn.Module, int],
        coef: float,
        loss_of: Callable[[tuple[torch.Tensor, ...]], torch.Tensor],
    ) -> None:
        self.coef = coef
        self._routers = routers
        self._loss_of = loss_of
        self._logits: dict[nn.Module, list[torch.Tensor]] = {router: [] for router in routers}

    def __enter__(self) -> RouterListener:
        self._hooks = [router.register_forward_hook(self._record) for router in self._routers]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record(self, router: nn.Module, inputs: Any, output: Any) -> None:
        logits = output[self._routers[router]] if isinstance(output, tuple) else output
        self._logits[router].append(logits.flatten(0, -2))

    def loss(self) -> torch.Tensor:
        """The micro-batch's part of the minibatch's loss, differentiable, without coefficient."""
        return self._loss_of(tuple(torch.cat(parts) for parts in self._logits.values() if parts))


def check_balance(model: PreTrainedModel, key: str) -> None:
    """Raises ConfigError for a model whose family has no load-balancing loss in transformers, or
    whose routers choose by a bias."""
    RouterBalance(model, 0.0, key)


def _routers_of(model: PreTrainedModel, key: str) -> dict[nn.Module, int]:
    """The modules whose output has the router's logits, in the order of the layers, and the place
    in the output, as transformers records them. Raises ConfigError unless a token's experts are
    those with the largest logits."""
    routers: dict[nn.Module, int] = {}
    for owner in causal_model(model).modules():
        if not isinstance(owner, PreTrainedModel):
            continue

        recorder = (owner._can_record_outputs or {}).get("router_logits")
        if recorder is not None and not isinstance(recorder, OutputRecorder):
            raise _refusal(model, key, "transformers counts more than the routers of experts")
        if recorder is not None:
            routers |= {
                module: recorder.index
                for name, module in owner.named_modules()
                if isinstance(module, recorder.target_class)
                and f".{recorder.layer_name or name}." in f".{name}."
            }

    if not routers:
        raise _refusal(model, key, "it has no routers whose logits transformers records")

    inner = causal_model(model)
    names = [name for name, _ in [*inner.named_parameters(), *inner.named_buffers()]]
    if any(name.endswith(".e_score_correction_bias") for name in names):
        raise _refusal(model, key, "a bias decides its choices, which the loss does not count")
    return routers


def _loss_function(model: PreTrainedModel, key: str) -> Callable[..., torch.Tensor]:
    """`load_balancing_loss_func` of the model's family."""
    kinds = type(causal_model(model)).__mro__  # sharding puts a class of its own in front
    modules = [sys.modules[kind.__module__] for kind in kinds]
    functions = (getattr(module, "load_balancing_loss_func", None) for module in modules)
    function = next((function for function in functions if function is not None), None)
    if function is None or function.__code__.co_varnames[: len(ARGUMENTS)] != ARGUMENTS:
        raise _refusal(model, key, "transformers has no load-balancing loss for it")
    return function


def _top_k(model: PreTrainedModel, key: str) -> int:
    """The number of experts that a token is routed to."""
    config = model.config.get_text_config()
    of_experts = getattr(config, "ffn_config", None)  # of DBRX
    for owner, name in ((config, "num_experts_per_tok"), (of_experts, "moe_top_k")):
        top_k = getattr(owner, name, None)
        if isinstance(top_k, int):
            return top_k

    raise _refusal(model, key, "its config.json has no num_experts_per_tok")


def _refusal(model: PreTrainedModel, key: str, why: str) -> ConfigError:
    return ConfigError(
        f"{key}: {type(causal_model(model)).__name__} can't be balanced: {why}: set it to 0, or "
        "choose a mixture such as Mixtral, Qwen3-MoE or GPT-OSS"
    )


def _token_weights(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    """[T] float32: for each token of the passes over the batch, the number of samples for which it
    counts; 0 for padding. A node that several rows compute counts in equal parts in them."""
    tree = batch.plan.tree
    samples_of_node = np.bincount(np.concatenate(tree.paths), minlength=tree.num_nodes)
    settings = row_settings(model)
    if settings is None:
        return torch.from_numpy(samples_of_node).float()

    passes = batch.row_passes(settings.pads, shares=shares_states(model))
    nodes = np.concatenate([nodes.ravel() for nodes in passes.nodes])
    rows_of_node = np.bincount(nodes[nodes >= 0], minlength=tree.num_nodes)
    weights = np.where(nodes >= 0, (samples_of_node / rows_of_node)[nodes], 0)
    return torch.from_numpy(weights).float()
