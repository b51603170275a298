"""Reward models: a sequence classifier of one output that puts chosen answers above rejected ones.

    loss = -log sigmoid(r_chosen - r_rejected - margin) + center (r_chosen + r_rejected)^2

Its trunk begins as the policy's, its head at random. It reads a conversation as the reward
`reward_model` does later (rewards/reward_model.py). The loss is a mean over the pairs of an
optimizer step; micro-batches affect only memory.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from agentevo.algorithms.preference import bradley_terry
from agentevo.config import MemorySection, TrainerSection
from agentevo.config.sft import RMSection, SFTSection
from agentevo.errors import ConfigError, ModelError
from agentevo.rewards.reward_model import MEAN, STD, conversation_ids, outputs
from agentevo.training.optimization import Optimization
from agentevo.training.pair_file import PairLine
from agentevo.training.sharding.layouts import layouts_of
from agentevo.training.supervised import scheduled_rate


class RewardPair(NamedTuple):
    """Two conversations with one beginning, as the model reads them."""

    chosen: list[int]
    rejected: list[int]
    margin: float


def classifier_of(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """A sequence classifier of one output with the policy's trunk, on its device and in its dtype.
    Raises ModelError for an architecture that has no such model."""
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    pad = tokenizer.pad_token_id
    config.pad_token_id = tokenizer.eos_token_id if pad is None else pad
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = AutoModelForSequenceClassification.from_config(config)
        except ValueError as error:
            raise ModelError(
                f"transformers has no sequence classifier of the architecture {config.model_type}: "
                "choose a model of another architecture"
            ) from error

    trunk = policy.base_model.state_dict()
    missing, unexpected = model.base_model.load_state_dict(trunk, strict=False)
    if missing or unexpected:
        raise ModelError(
            f"the classifier of the architecture {config.model_type} differs from the model in "
            f"its trunk (first: {[*missing, *unexpected][0]}): choose a model of another "
            f"architecture"
        )

    parameter = next(policy.parameters())
    model.to(device=parameter.device, dtype=parameter.dtype).train()
    return model


def encode_pairs(
    lines: Sequence[PairLine], tokenizer: PreTrainedTokenizerBase, margin: float, max_tokens: int
) -> list[RewardPair]:
    """Raises ConfigError for a line that can't be encoded, or whose two answers are the same after
    truncation."""
    pairs = []
    for line in lines:
        if line.chosen is None or line.rejected is None:
            raise ConfigError(f"{line.where}: needs both chosen and rejected")

        try:
            chosen, rejected = (
                conversation_ids(tokenizer, [*line.prompt, *answer], max_tokens)
                for answer in (line.chosen, line.rejected)
            )
        except ModelError as error:
            raise ConfigError(f"{line.where}: {error}") from error

        if chosen == rejected:
            raise ConfigError(
                f"{line.where}: chosen and rejected are the same in the last {max_tokens} tokens: "
                "raise rm.max_tokens, or remove the line"
            )

        pairs.append(RewardPair(chosen, rejected, margin if line.margin is None else line.margin))

    return pairs


class RewardTrainer:
    """`step` by step over `total_steps`."""

    def __init__(
        self,
        model: PreTrainedModel,
        section: RMSection,
        total_steps: int,
        memory: MemorySection | None = None,
    ) -> None:
        self.model = model
        self.section = section
        self.total_steps = total_steps
        self._schedule = SFTSection(
            learning_rate=section.learning_rate,
            warmup_ratio=section.warmup_ratio,
            schedule=section.schedule,
            min_lr_ratio=section.min_lr_ratio,
        )
        trainer = TrainerSection(
            learning_rate=section.learning_rate,
            weight_decay=section.weight_decay,
            max_grad_norm=section.max_grad_norm,
        )
        self.optimization = Optimization(
            model.parameters(), trainer, memory=memory, key="rm", layouts=layouts_of(model)
        )

    def step(self, pairs: Sequence[RewardPair]) -> dict[str, float]:
        """One optimizer step. Raises TrainingError, and changes no weight, if a number is not
        finite."""
        section = self.section
        steps = self.optimization.steps
        lr = self.optimization.begin(scheduled_rate(self._schedule, steps, self.total_steps))

        sums = {"rm/loss": 0.0, "rm/accuracy": 0.0, "rm/reward_margin": 0.0}
        for begin in range(0, len(pairs), section.micro_batch_pairs):
            part = pairs[begin : begin + section.micro_batch_pairs]
            chosen, rejected = rewards_of(self.model, part)
            margins = torch.tensor([pair.margin for pair in part], device=chosen.device)
            losses, measured = bradley_terry(
                chosen=chosen, rejected=rejected, margin=margins, center=section.center
            )
            loss = losses.sum() / len(pairs)
            self.optimization.backward(loss)

            sums["rm/loss"] += float(loss.detach())
            for key in ("accuracy", "reward_margin"):
                sums[f"rm/{key}"] += float(measured[key].detach().sum()) / len(pairs)

        return sums | {"rm/grad_norm": self.optimization.finish(), "rm/lr": lr}


def rewards_of(
    model: PreTrainedModel, pairs: Sequence[RewardPair]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards of the chosen and of the rejected conversations, float32 [P] each."""
    rows = [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
    values: torch.Tensor = outputs(model, rows).squeeze(-1).float()
    return values[: len(pairs)], values[len(pairs) :]


@torch.no_grad()
def held_out(
    model: PreTrainedModel, pairs: Sequence[RewardPair], micro_batch_pairs: int
) -> dict[str, float]:
    """Share of pairs whose chosen answer has the higher reward, mean distance, and mean and
    standard deviation of all rewards."""
    model.eval()
    chosen = []
    rejected = []
    for begin in range(0, len(pairs), micro_batch_pairs):
        better, worse = rewards_of(model, pairs[begin : begin + micro_batch_pairs])
        chosen.append(better.cpu())
        rejected.append(worse.cpu())

    model.train()
    better = torch.cat(chosen).double()
    worse = torch.cat(rejected).double()
    everything = torch.cat([better, worse])

    return {
        "rm/eval/accuracy": float((better > worse).double().mean()),
        "rm/eval/reward_margin": float((better - worse).mean()),
        "rm/eval/reward_mean": float(everything.mean()),
        "rm/eval/reward_std": float(everything.std(unbiased=False)),
    }


def train_reward_model(
    model: PreTrainedModel,
    pairs: Sequence[RewardPair],
    section: RMSection,
    *,
    memory: MemorySection | None = None,
    seed: int,
    progress: Callable[[int, int, dict[str, float]], None],
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """`section.epochs` passes over the pairs, each in an order of its own. `progress(step, total,
    metrics)` is called after each step. False if `stop()` ended it before the last one."""
    size = section.batch_pairs
    order = list(range(len(pairs)))
    rng = random.Random(seed)
    total = section.epochs * -(-len(pairs) // size)
    trainer = RewardTrainer(model, section, total, memory)
    for _ in range(section.epochs):
        rng.shuffle(order)
        for begin in range(0, len(order), size):
            if stop():
                return False
            metrics = trainer.step([pairs[index] for index in order[begin : begin + size]])
            progress(trainer.optimization.steps, total, metrics)

    return True


def keep_scale(model: PreTrainedModel, metrics: dict[str, float]) -> None:
    """Writes the distribution of the model's rewards into its config, for `normalise: model`."""
    setattr(model.config, MEAN, metrics["rm/eval/reward_mean"])
    setattr(model.config, STD, metrics["rm/eval/reward_std"])
