"""The recipe's keys for reward models (`agentevo sft --reward-model`): the pairs of answers, and
how to train on them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from agentevo.config.sft import Share
from agentevo.errors import ConfigError
from agentevo.runtime.section import Section, expand_home

if TYPE_CHECKING:
    from agentevo.config.recipe import RunConfig


PairsFile = Annotated[Path | None, expand_home("give a file, or null")]


class RMSection(Section):
    """How `agentevo sft --reward-model` trains on pairs of answers. No other command reads it."""

    pairs: PairsFile = None
    """A JSONL file, each line {"prompt": [messages], "chosen": ..., "rejected": ...}. An answer is
    a text or a list of messages. A line can have its own `margin`. The file is searched next to the
    recipe, then in the current folder."""
    eval: PairsFile = None
    """Held-out pairs, likewise. Default: eval_share of `pairs`."""
    eval_share: Share = 0.1
    """Share of the pairs, chosen at random by run.seed, that is held out if `eval` is null."""
    margin: float = Field(default=0.0, ge=0)
    """The minimum difference between the rewards of the chosen and the rejected answer, for lines
    without a margin."""
    center: float = Field(default=0.0, ge=0)
    """Weight of the squared sum of the two rewards, a loss term that keeps rewards around 0."""
    max_tokens: int | None = Field(default=None, ge=8)
    """Maximum length of a conversation, in tokens; a longer one keeps its end. Default: the model's
    context."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the pairs, each in a different order."""
    batch_pairs: int = Field(default=32, ge=1)
    """Pairs per optimizer step."""
    micro_batch_pairs: int = Field(default=8, ge=1)
    """Pairs in one forward and backward pass; the result does not depend on it."""
    learning_rate: float = Field(default=9e-6, gt=0)
    """Peak learning rate of AdamW."""
    warmup_ratio: Share = 0.03
    """Share of the optimizer steps that warms up linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Learning rate after the warm-up, down to min_lr_ratio at the end."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate as a share of the peak, for linear and cosine."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay, applied to matrices only."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global L2 norm."""


def check_rm(config: RunConfig) -> Path:
    """The file of pairs. Raises ConfigError for a recipe without one, or with values that don't
    apply to a reward model."""
    if config.rm.pairs is None:
        raise ConfigError(
            "rm.pairs: there is no training data: give a JSONL file whose lines have prompt, "
            "chosen and rejected (docs/sft.md)"
        )

    if config.model.lora.enabled:
        raise ConfigError(
            "model.lora: a reward model does not support adapters: remove model.lora, or start "
            "from a smaller model"
        )

    return config.rm.pairs
