"""The recipe's keys for `agentevo sft`: the conversations and how to train on them, and the pairs
of answers that reward models learn from (`--reward-model`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic
from pydantic import Field

from agentevo.config.agents import EnvironmentAgentSection, brings_tasks
from agentevo.errors import ConfigError
from agentevo.runtime.section import Section, Texts, expand_home

if TYPE_CHECKING:
    from agentevo.config.recipe import RunConfig

Share = Annotated[float, Field(ge=0, lt=1)]
FileOrFolder = Annotated[Path | None, expand_home("give a file or folder, or null")]
SOURCES = ("train", "demonstrations", "best_of")


class ConversationKeys(pydantic.BaseModel):
    """Keys of the section `data` that `agentevo sft` reads. All given sources are combined."""

    model_config = pydantic.ConfigDict(use_attribute_docstrings=True)

    train: Texts = ()
    """Conversations for `agentevo sft`: files (.jsonl, .json, .csv, also .gz; .parquet), folders of
    them, saved datasets, or datasets of the Hugging Face hub written ORG/NAME or ORG/NAME:SPLIT.
    Rows are in messages, ShareGPT or Alpaca format. Paths are searched next to the recipe, then in
    the current folder."""
    eval: Texts = ()
    """Held-out conversations, likewise. Default: eval_share of the training conversations."""
    eval_share: Share = 0.05
    """Share of the conversations, chosen at random by run.seed, that is held out if `eval` is
    empty; 0 holds out none."""
    format: Literal["auto", "messages", "sharegpt", "alpaca"] = "auto"
    """Format of the rows. `auto` detects it from the first row in a known format of each source."""
    train_on: Literal["all", "last"] = "all"
    """Which assistant messages are trained on, in the conversations of `train`."""
    max_tokens: int | None = Field(default=None, ge=8)
    """Maximum length of a conversation, and of an answer of `pairs` with its prompt, in tokens.
    Default: the model's context, at most 131,072."""
    too_long: Literal["drop", "shorten"] = "drop"
    """What happens to longer conversations: they are left out, or trained on without their oldest
    turns. The run reports the number."""
    demonstrations: int = Field(default=0, ge=0)
    """Number of episodes by the environment's solver to train on."""
    random_action_rate: float = Field(default=0.0, ge=0, le=1)
    """Share of demonstrated actions that are random instead of the solver's. They are trained on,
    too."""
    best_of: FileOrFolder = None
    """Folder of a run whose best stored training attempts are trained on (rejection sampling), with
    exactly their sampled tokens."""
    min_reward: float | None = None
    """Minimum reward of such an attempt. Default: attempts that succeeded."""
    per_task: int = Field(default=1, ge=1)
    """Maximum number of such attempts per task, those with the highest reward first."""

    @property
    def taught(self) -> bool:
        """Whether there are conversations to train on."""
        return bool(self.train or self.demonstrations or self.best_of)


class GapStopSection(Section):
    """Where fine-tuning ends if reinforcement learning follows. RL turns pass@k into pass@1: it can
    raise only what some attempts reach. So the run measures both on training tasks as it goes, and
    its best checkpoint is the one whose pass@k - pass@1 is largest (docs/sft.md). This replaces
    `evaluation.stop_after` and the choice by held-out tasks. Off if `tasks` is 0."""

    tasks: int = Field(default=0, ge=0)
    """Number of training tasks to play: those that no conversation demonstrates, and others if
    there are too few of those."""
    attempts: int = Field(default=8, ge=2)
    """Attempts at each task, k, at sampling.temperature. A measurement costs tasks * attempts."""
    every: int | None = Field(default=None, ge=1)
    """Interval of measurements, in optimizer steps. The first one is before the first step, the
    last one after the last. Default: an eighth of all steps."""
    patience: int = Field(default=2, ge=0)
    """End the run, as finished, after this many measurements in a row without a larger gap. 0: all
    steps are made. Measurements before the first gap don't count."""


class SFTSection(Section):
    """How `agentevo sft` trains on the conversations of `data`; other commands don't read it."""

    epochs: int = Field(default=1, ge=1)
    """Passes over the conversations, each in a different order."""
    batch_conversations: int = Field(default=32, ge=1)
    """Conversations per optimizer step."""
    batch_tokens: int | None = Field(default=None, ge=64)
    """Maximum number of tokens per optimizer step. It replaces batch_conversations if set. A longer
    conversation is a batch by itself."""
    learning_rate: float = Field(default=2e-5, gt=0)
    """Peak learning rate of AdamW."""
    warmup_ratio: Share = 0.05
    """Share of the optimizer steps that warms up linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Learning rate after the warm-up, down to min_lr_ratio at the end."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate as a share of the peak, for linear and cosine."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay, applied to matrices only."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global L2 norm."""
    micro_batch_tokens: int = Field(default=16384, ge=64)
    """Maximum number of distinct tokens in one forward and backward pass. The result does not
    depend on it, except for the loss of `router_aux_loss_coef`."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """As trainer.router_aux_loss_coef."""
    prefix_merging: bool = True
    """Compute a common prefix of several conversations only once. The result does not depend on it,
    except for the loss of `router_aux_loss_coef`, because it changes the micro-batches. If false,
    every conversation is computed in full, as in most trainers; this is slower, and useful for
    comparison."""
    stop_at_gap: GapStopSection = GapStopSection()
    """Keep the weights from which reinforcement learning has most to gain."""


def check_sft(config: RunConfig) -> None:
    """Raises ConfigError for a recipe without training data, or with contradictory keys."""
    data = config.data
    if not data.taught:
        raise ConfigError(
            "data: there is no training data: give data.train (files or datasets), "
            "data.demonstrations (episodes of the environment's solver) or data.best_of (folder "
            "of a run)"
        )

    if data.demonstrations and config.environment is None:
        raise ConfigError(
            "data.demonstrations: needs an environment with a solver: add `environment: {type: "
            "...}`"
        )

    if data.best_of is None and data.min_reward is not None:
        raise ConfigError(
            "data.min_reward: chooses among the attempts of data.best_of, which is not given: "
            "remove it"
        )

    holds_out = data.eval or data.eval_share > 0 or config.environment is not None
    if config.evaluation.stop_after and not holds_out:
        raise ConfigError(
            "evaluation.stop_after: there is no held-out data to decide when to stop: give "
            "data.eval or data.eval_share above 0, or remove it"
        )

    if config.sft.stop_at_gap.tasks and not _has_tasks(config):
        raise ConfigError(
            "sft.stop_at_gap.tasks: there are no training tasks to play: give an environment, or "
            "tasks.train and an agent that attempts them, or set it to 0"
        )

    if (
        config.model.name == "tiny"
        and config.environment is None
        and config.model.tiny.tokenizer == "word"
    ):
        raise ConfigError(
            "model.tiny.tokenizer: `word` takes its words from an environment, and there is "
            "none: set it to byte"
        )


def _has_tasks(config: RunConfig) -> bool:
    """Whether there are tasks, and an agent that attempts them."""
    if config.environment is not None:
        return True
    kind = config.agent.type
    has_tasks = config.tasks.given or kind == "function" or brings_tasks(kind)
    return has_tasks and not isinstance(config.agent, EnvironmentAgentSection)


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
