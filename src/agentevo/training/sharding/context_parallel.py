"""Context parallelism: every process has a stretch of a pass's nodes, and around attention they
exchange heads for nodes (DeepSpeed-Ulysses, arXiv 2309.14509).

Nodes are cut into equal stretches, the last one padded. Everything that a layer does to one token
is done for the stretch alone. Before attention an all-to-all turns [stretch, all heads] into [all
nodes, some heads], the unchanged plan of the pass computes, and another turns its output back.
After the decoder the stretches are put together, so a reader of hidden states sees all nodes.

The losses of a context group are parts of one sum: each process counts its loss `1 / size` times,
gradients are summed over the group, and every exchange here has its true adjoint.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from agentevo.errors import TrainingError
from agentevo.models.compute.attention import AttentionPlan
from agentevo.models.compute.trial import LAYER_TYPES
from agentevo.models.compute.windows import Window
from agentevo.models.token_rows import decoder_of
from agentevo.training.collectives import (
    Ranks,
    exchange_heads,
    exchange_nodes,
    gather_stretches,
)


def context_parallel(model: PreTrainedModel, ranks: Ranks) -> None:
    """Has the model's decoder compute this process's stretch of every pass, in place. Raises
    TrainingError if its heads can't be divided."""
    check_context(model, ranks.size)
    hook = _ContextStretch(ranks)
    decoder: nn.Module = decoder_of(model)
    decoder.register_forward_pre_hook(hook.before, with_kwargs=True)
    decoder.register_forward_hook(hook.after, with_kwargs=True)


def check_context(model: PreTrainedModel, size: int, tensor: int = 1) -> None:
    """Raises TrainingError if so many processes can't divide the model's passes, or if
    `tensor` further processes can't divide the heads of each."""
    config: Any = model.config.get_text_config()
    heads = config.num_attention_heads
    if heads % (size * tensor):
        product = f"{size} x trainer.parallel.tensor={tensor}" if tensor > 1 else size
        raise TrainingError(
            f"trainer.parallel.context={product} does not divide the model's {heads} attention "
            "heads: choose a divisor"
        )

    if hasattr(config, "layer_types") and config.layer_types is not None:
        unknown = set(config.layer_types) - LAYER_TYPES
        if unknown:
            raise TrainingError(
                f"trainer.parallel.context is not possible with layers of {sorted(unknown)}, "
                "which mix tokens outside of attention: set it to 1"
            )


class HeadExchange:
    """The plan of a pass for one process: nodes in, its stretch out."""

    def __init__(self, plan: AttentionPlan, num_nodes: int, ranks: Ranks) -> None:
        self.plan = plan
        self.num_nodes = num_nodes
        self.ranks = ranks
        self.routing: Any = getattr(plan, "routing", None)
        """The routing of the process's stretch (models/compute/routers.py)."""

        if self.routing is not None:
            length = -(-num_nodes // ranks.size)
            self.routing = self.routing.stretch(ranks.rank * length, length)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
        window: Window,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionPlan.attend: q [n, H, D], k and v [n, G, D] of the stretch, sinks [H] ->
        [n, H, D]."""
        heads = q.shape[1]
        size = self.ranks.size
        if heads % size:
            raise TrainingError(
                f"{heads} heads of this process can't be exchanged between {size}: choose "
                "trainer.parallel.context and tensor whose product divides the heads"
            )

        if k.shape[1] % size:
            times = _repeats(k.shape[1], heads, size)
            k = k.repeat_interleave(times, 1)
            v = v.repeat_interleave(times, 1)

        q, k, v = (exchange_heads(x, self.ranks)[: self.num_nodes] for x in (q, k, v))
        if sinks is not None:
            sinks = sinks.tensor_split(size)[self.ranks.rank]
        out = self.plan.attend(q, k, v, scaling, window, softcap, sinks)
        padding = -self.num_nodes % size
        return exchange_nodes(F.pad(out, (0, 0, 0, 0, 0, padding)), self.ranks)


class _ContextStretch:
    """Before and after the decoder of one model."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        plan = kwargs.get("plan")
        if plan is None or kwargs.get("use_cache"):
            raise TrainingError(
                "a model under trainer.parallel.context computes whole passes of training only: "
                "call it with plan=... and without a cache"
            )

        num_nodes = kwargs["position_ids"].shape[1]
        local_kwargs = dict(kwargs)
        for name in ("input_ids", "position_ids", "inputs_embeds"):
            if local_kwargs.get(name) is not None:
                local_kwargs[name] = self._own(local_kwargs[name])

        if args:  # token classifiers give their ids by position
            args = (self._own(args[0]), *args[1:])

        return args, {**local_kwargs, "plan": HeadExchange(plan, num_nodes, self.ranks)}

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        """This process's stretch of [1, N, ...], padded with zeros to that of the others."""
        length = -(-x.shape[1] // self.ranks.size)
        first = self.ranks.rank * length
        stretch = x[:, first : first + length]
        after = (0, 0) * (x.dim() - 2)
        return F.pad(stretch, (*after, 0, length - stretch.shape[1]))

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        gathered = gather_stretches(out.last_hidden_state[0], self.ranks)
        out.last_hidden_state = gathered[: kwargs["plan"].num_nodes].unsqueeze(0)
        return out


def _repeats(keys: int, heads: int, size: int) -> int:
    """The number of repetitions of each key head: the least that gives all processes equally many;
    it divides the number of queries that share one."""
    shared = heads // keys
    return next(t for t in range(1, shared + 1) if shared % t == 0 and keys * t % size == 0)
