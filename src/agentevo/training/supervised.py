"""Supervised training on conversations: the mean negative log-prob of what the assistant says. The cold start before RL."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from agentevo.config import ColdStartSection, TrainerSection
from agentevo.errors import TrainingError
from agentevo.models.chat import ChatFormat
from agentevo.training.optimization import make_optimizer
from agentevo.training.packing import pack, split_by_tokens
from agentevo.types import Message, Sample


def conversation_sample(messages: Sequence[Message], chat: ChatFormat, name: str) -> Sample:
    """A sample that trains every assistant message, its end-of-turn token included."""
    ids: list[int] = []
    mask: list[bool] = []
    new: list[Message] = []
    for message in messages:
        if message.role != "assistant":
            new.append(message)
            continue
        prompt = chat.continuation(new, ended_with_stop=True) if ids else chat.first_prompt(new)
        said = chat.completion(message.content)
        ids += [*prompt, *said]
        mask += [False] * len(prompt) + [True] * len(said)
        new = []
    return Sample(
        trajectory_id=name,
        group_id=name,
        ids=ids,
        loss_mask=mask,
        logprobs=[0.0] * len(ids),
        versions=[0 if m else -1 for m in mask],
        advantages=[0.0] * len(ids),
    )


def train_supervised(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    section: ColdStartSection,
    trainer: TrainerSection,
    *,
    seed: int,
    progress: Callable[[int, int, float], None],
    stop: Callable[[], bool] = lambda: False,
) -> list[float]:
    """`section.epochs` passes over the episodes (samples of one `trajectory_id`) in random order; returns the mean loss per token, in
    nats, of every optimizer step.

    `progress(step, total, loss)` is called after each. `stop()` is asked before each. Gradient norm limit and micro-batch size are the
    trainer's.
    """
    optimizer = make_optimizer(model.parameters(), section.learning_rate, trainer.weight_decay, trainer.betas)
    episodes: dict[str, list[Sample]] = {}
    for sample in samples:
        episodes.setdefault(sample.trajectory_id, []).append(sample)
    order = list(episodes)
    rng = random.Random(seed)
    per_epoch = math.ceil(len(order) / section.batch_episodes)
    total = per_epoch * section.epochs
    losses: list[float] = []
    for _ in range(section.epochs):
        rng.shuffle(order)
        for start in range(0, len(order), section.batch_episodes):
            if stop():
                return losses
            done = len(losses) / total
            scale = min(1.0, done / 0.1 + 1 / total / 0.1) if done < 0.1 else 0.5 * (1 + math.cos(math.pi * (done - 0.1) / 0.9))
            for group in optimizer.param_groups:
                group["lr"] = section.learning_rate * scale
            batch = [sample for name in order[start : start + section.batch_episodes] for sample in episodes[name]]
            losses.append(_update(model, optimizer, batch, trainer))
            progress(len(losses), total, losses[-1])
    return losses


def _update(model: PreTrainedModel, optimizer: torch.optim.Optimizer, samples: list[Sample], trainer: TrainerSection) -> float:
    weight = 1.0 / sum(sum(s.loss_mask) for s in samples)
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for indices in split_by_tokens(samples, trainer.micro_batch_tokens):
        batch = pack([samples[i] for i in indices], next(model.parameters()).device)
        logp, _ = batch.forward(model)
        loss = -(weight * logp).sum()
        if not torch.isfinite(loss):
            raise TrainingError("the supervised loss is not finite, the weights were not changed: lower cold_start.learning_rate")
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.max_grad_norm)
    optimizer.step()
    return total
