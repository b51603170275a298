"""The recipe's keys for supervised fine-tuning (`agentevo sft`): which conversations, and how they
are trained on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic
from pydantic import Field

from agentevo.config.section import Section, Texts, expand_home
from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.config.recipe import RunConfig

Share = Annotated[float, Field(ge=0, lt=1)]
FileOrFolder = Annotated[Path | None, expand_home("give a file or folder, or null")]
SOURCES = ("train", "demonstrations", "best_of")


class ConversationKeys(pydantic.BaseModel):
    """Keys of the section `data` that `agentevo sft` reads. Its sources add up."""

    model_config = pydantic.ConfigDict(use_attribute_docstrings=True)

    train: Texts = ()
    """Conversations for `agentevo sft`: files (.jsonl, .json, .csv, also .gz; .parquet), folders of
    them, saved datasets, or datasets of the Hugging Face hub written ORG/NAME or ORG/NAME:SPLIT.
    Rows have messages, ShareGPT's or Alpaca's form. Paths are looked for beside the recipe, then in
    the current folder."""
    eval: Texts = ()
    """Held-out conversations, likewise. Default: eval_share of those that are trained on."""
    eval_share: Share = 0.05
    """Share of the conversations, drawn by run.seed, that is held out where `eval` is empty; 0
    holds out none."""
    format: Literal["auto", "messages", "sharegpt", "alpaca"] = "auto"
    """The rows' form; `auto` goes by the first row of each source that has one."""
    train_on: Literal["all", "last"] = "all"
    """Which of the assistant's messages are trained in the conversations of `train`."""
    max_tokens: int | None = Field(default=None, ge=8)
    """Longest conversation, in tokens, and longest answer of `pairs` with its prompt. Default: the
    model's context, but 131,072 at most."""
    too_long: Literal["drop", "shorten"] = "drop"
    """A longer one is left out, or trained on without its oldest turns. Either is reported."""
    demonstrations: int = Field(default=0, ge=0)
    """Episodes of the environment's own solver to learn from."""
    random_action_rate: float = Field(default=0.0, ge=0, le=1)
    """Share of the demonstrated actions that is drawn at random (taught all the same)."""
    best_of: FileOrFolder = None
    """Folder of a run whose best stored training attempts are learnt (rejection sampling), token by
    token as they were sampled."""
    min_reward: float | None = None
    """Least reward of such an attempt. Default: those that succeeded."""
    per_task: int = Field(default=1, ge=1)
    """Most such attempts at one task, those with the highest reward first."""

    @property
    def taught(self) -> bool:
        """Whether there are conversations to learn from."""
        return bool(self.train or self.demonstrations or self.best_of)


class SFTSection(Section):
    """How `agentevo sft` trains on the conversations of `data`; other commands don't read it."""

    epochs: int = Field(default=1, ge=1)
    """Passes over the conversations, each in an order of its own."""
    batch_conversations: int = Field(default=32, ge=1)
    """Conversations per optimizer step."""
    batch_tokens: int | None = Field(default=None, ge=64)
    """Most tokens per optimizer step; when set, it counts instead of batch_conversations. A longer
    conversation is a batch of its own."""
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
    """Most distinct tokens in one forward and backward pass; the result does not depend on it."""
    prefix_merging: bool = True
    """Compute what several conversations begin with once for all of them; the result does not
    depend on it. Off, every conversation is computed whole, as most trainers do: slower, for
    comparison."""


def check_sft(config: RunConfig) -> None:
    """Raises ConfigError for a recipe that gives nothing to train on, or contradicts itself."""
    data = config.data
    if not data.taught:
        raise ConfigError(
            "data: says nothing to train on: give data.train (files or datasets), "
            "data.demonstrations (episodes of the environment's "
            "solver) or data.best_of (folder of a run)"
        )

    if data.demonstrations and config.environment is None:
        raise ConfigError(
            "data.demonstrations: needs an environment whose solver plays: add `environment: "
            "{type: ...}`"
        )

    if data.best_of is None and data.min_reward is not None:
        raise ConfigError(
            "data.min_reward: chooses among the attempts of data.best_of, which is not given: "
            "remove it"
        )

    holds_out = data.eval or data.eval_share > 0 or config.environment is not None
    if config.evaluation.stop_after and not holds_out:
        raise ConfigError(
            "evaluation.stop_after: nothing is held out to say when to stop: give data.eval or "
            "data.eval_share above 0, or leave it out"
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
