"""The inputs and the entry of every policy loss.

Invariant: wherever `mask` is False every tensor of `LossInputs` is 0, so NaN or garbage there
reaches neither a loss nor a gradient. Only `logp` carries a gradient.

Symbols in the formulas of entries: l is the log-prob now, which carries the gradient. o, p and q
are the log-probs under the policy before the update, under the proximal policy, and as the engine
sampled. A is the advantage, r = exp(l - o), and sg is stop-gradient. A formula is the loss of one
token, or of one sequence if its text says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from agentevo.algorithms.blocks import row_blocks
from agentevo.algorithms.entries import AlgorithmEntry
from agentevo.algorithms.lazy_torch import torch

Terms: TypeAlias = "tuple[torch.Tensor, dict[str, torch.Tensor]]"
"""The result of a loss: token losses, and measurements per token whose mean over trained tokens is
the metric of that name."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are bounded to +- MAX_LOG_RATIO before exp, so that no ratio overflows (e^20 = 4.9e8).
A log-ratio beyond the bound has no gradient."""


@dataclass(frozen=True)
class LossInputs:
    """The tensors that a policy loss uses: [S, T], one sequence per row, 0 for untrained tokens."""

    logp: torch.Tensor
    """Log-prob of each token now; the only tensor with a gradient."""
    old_logp: torch.Tensor
    """Log-prob of each token before the update."""
    advantages: torch.Tensor
    mask: torch.Tensor
    """bool, True where a token is trained."""
    rollout_logp: torch.Tensor | None = None
    """Log-prob under the policy that sampled."""
    proximal_logp: torch.Tensor | None = None
    """Log-prob under the policy that the update must stay close to."""
    statistics: Mapping[str, float] = field(default_factory=dict)
    """The statistics of the whole minibatch that the loss needs; empty for most losses."""

    @cached_property
    def log_ratio(self) -> torch.Tensor:
        """logp - old_logp. [S, T]"""
        return self.logp - self.old_logp

    def require(self, name: str, user: str) -> torch.Tensor:
        """An optional tensor that `user` requires. Raises ValueError."""
        tensor: torch.Tensor | None = getattr(self, name)
        if tensor is None:
            raise ValueError(f"{user} needs {name}: pass it with the shape [S, T] of logp")
        return tensor


@dataclass(frozen=True)
class LossTables:
    """The caller's tensors [S, T], with any values for untrained tokens. Raises ValueError if their
    shapes or devices differ."""

    logp: torch.Tensor
    old_logp: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    """bool or 0/1."""
    rollout_logp: torch.Tensor | None = None
    proximal_logp: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.logp.dim() != 2 or not self.logp.is_floating_point():
            raise ValueError(
                f"logp is {self.logp.dtype} {list(self.logp.shape)}: give floats of shape "
                "[sequences, tokens]"
            )
        for name, tensor in self._tensors().items():
            _check_shape_and_device(name, tensor, self.logp)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def clean_inputs(self, statistics: Mapping[str, float] | None = None) -> LossInputs:
        """The inputs of a loss. Values of untrained tokens become 0, every tensor except `logp` is
        detached, and dtypes narrower than float32 become float32."""
        dtype = torch.promote_types(self.logp.dtype, torch.float32)
        trained = self.mask if self.mask.dtype == torch.bool else self.mask != 0
        clean = {
            name: torch.where(
                trained, (tensor if name == "logp" else tensor.detach()).to(dtype), 0.0
            )
            for name, tensor in self._tensors().items()
            if name != "mask"
        }
        return LossInputs(mask=trained, statistics=dict(statistics or {}), **clean)

    def cleaned_blocks(self) -> Iterator[LossInputs]:
        """The inputs of a loss without gradients, a block of rows at a time, in order."""
        tensors = {name: tensor.detach() for name, tensor in self._tensors().items()}
        return (
            LossTables(**dict(zip(tensors, parts, strict=True))).clean_inputs()
            for parts in row_blocks(*tensors.values())
        )


StatisticsFunction: TypeAlias = Callable[[LossTables], dict[str, float]]
"""Statistics of a whole minibatch, from its tables."""


@dataclass(frozen=True, kw_only=True)
class PolicyLossEntry(AlgorithmEntry):
    """A policy loss, (inputs, **hyper) -> Terms."""

    statistics: Callable[[Mapping[str, Any]], StatisticsFunction | None] | None = None
    """Maps the hyper-parameters to a function that computes statistics of the whole minibatch,
    which the loss needs in every part."""
    aggregation: Callable[[Mapping[str, Any]], str] | None = None
    """Maps the hyper-parameters to the only aggregation with which the loss matches its paper.
    None: every aggregation matches. Raises ValueError for hyper-parameters that contradict each
    other."""
    aggregation_reason: str = ""
    """Why other aggregations are refused."""

    @property
    def has_importance_weights(self) -> bool:
        """Whether the loss has importance weights of its own."""
        return "rollout_logp" in self.needs


def _check_shape_and_device(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    if tensor.shape != like.shape:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}, the log-probs {list(like.shape)}: give "
            "both the same shape [S, T]"
        )

    if tensor.device != like.device:
        raise ValueError(
            f"{name} is on {tensor.device}, the log-probs on {like.device}: move both to one device"
        )


def bounded_gap(log_ratio: torch.Tensor) -> torch.Tensor:
    """A log-ratio bounded to +- MAX_LOG_RATIO."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of a log-ratio that is first bounded to +- MAX_LOG_RATIO."""
    return torch.exp(bounded_gap(log_ratio))


def row_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over a row's trained tokens, [S, 1]; 0 for an empty row. `values` must be 0 where mask
    is False."""
    return values.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
