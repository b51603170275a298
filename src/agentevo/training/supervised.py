"""Supervised training on conversations: the mean negative log-prob of the assistant's tokens. For
`agentevo sft` and the cold start alike.

A step's loss is the mean over all trained tokens of its batch, however it is cut into
micro-batches; shared beginnings are computed once. The seed alone decides which conversations a
step has, so a resumed run continues with the same ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from agentevo.config import ColdStartSection, MemorySection, SFTSection, TrainerSection
from agentevo.models.chat.chat_format import NO_IMAGES, ChatFormat
from agentevo.models.compute.adapters import dropping_out
from agentevo.models.compute.rows import shares_prefixes
from agentevo.runtime.seeds import derive_seed
from agentevo.training.batching.images import ImageProvider
from agentevo.training.batching.passes import (
    device_of,
    micro_batches,
    null_batches,
    run_null_batches,
)
from agentevo.training.kernels.logprobs import selected_logprobs
from agentevo.training.kernels.output_layer import allowed_logits, token_logprobs
from agentevo.training.learner import Learner
from agentevo.training.optimization import Optimization, decay
from agentevo.training.parallel import anywhere, gather, rank, sum_over_ranks
from agentevo.training.phases import phase
from agentevo.training.router_balance import RouterBalance, listening
from agentevo.training.sharding.layouts import layouts_of
from agentevo.training.token_numbers import TokenNumbers
from agentevo.training.workload import FlopCounter
from agentevo.types import Message, Sample
from agentevo.types.image_span import ImageSpan
from agentevo.types.images import ImageFile, images_of_samples


def conversation_sample(
    messages: Sequence[Message],
    chat: ChatFormat,
    name: str,
    images: Mapping[str, ImageFile] = NO_IMAGES,
) -> Sample:
    """A sample that trains every assistant message, its end-of-turn token included. `images`: those
    of the messages, by digest."""
    ids: list[int] = []
    mask: list[bool] = []
    spans: list[ImageSpan] = []
    new: list[Message] = []
    for message in messages:
        if message.role != "assistant":
            new.append(message)
            continue

        if ids:
            ended_with_stop = chat.has_ended(ids[-1], new, images=images)
            prompt = chat.continuation(new, ended_with_stop=ended_with_stop, images=images)
        else:
            prompt = chat.first_prompt(new, images=images)
        spans += [span.shifted(len(ids)) for span in chat.image_spans(prompt, new, images)]
        answer = chat.completion(message)
        ids += [*prompt, *answer]
        mask += [False] * len(prompt) + [True] * len(answer)
        new = []

    return Sample.given(name, name, ids, mask, images=tuple(spans), processor=chat.fingerprint)


class SupervisedTrainer:
    """`step` by step over `total_steps`; `section` says how. `key` is the recipe's name of the
    section, for messages."""

    def __init__(
        self,
        model: PreTrainedModel,
        section: SFTSection,
        total_steps: int,
        key: str = "sft",
        *,
        memory: MemorySection | None = None,
        dropout_seed: int | None = None,
    ) -> None:
        """`dropout_seed`: each step draws the adapters' dropout from it and from its own number;
        None leaves dropout to the caller. Raises ConfigError for a model without the loss of
        `router_aux_loss_coef`."""
        self.model = model
        self.images = ImageProvider.of(model)
        self.section = section
        self.total_steps = total_steps
        self.flops = FlopCounter(model)
        self.balance = RouterBalance.of(
            model, section.router_aux_loss_coef, f"{key}.router_aux_loss_coef"
        )
        self._dropout_seed = dropout_seed
        self.numbers: TokenNumbers | None = None
        """See Learner.numbers: nothing was sampled, so nothing is compared."""
        self.optimization = Optimization(
            model.parameters(),
            TrainerSection(
                learning_rate=section.learning_rate,
                weight_decay=section.weight_decay,
                betas=section.betas,
                max_grad_norm=section.max_grad_norm,
            ),
            memory=memory,
            key=key,
            layouts=layouts_of(model),
        )

    @property
    def steps(self) -> int:
        """The number of optimizer steps so far."""
        return self.optimization.steps

    def begin(self) -> None:
        """Does nothing, because there is no model other than the policy."""

    def show(self, images: Mapping[str, ImageFile]) -> None:
        """See Learner.show."""
        if self.images is not None:
            self.images.hold(images)

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step on the mean loss per trained token. Raises TrainingError, and changes
        no weight, if a number is not finite."""
        if self._dropout_seed is None:
            return self._step(samples)
        rank_parts = [rank()] if rank() else []
        seed = derive_seed(self._dropout_seed, "dropout", self.steps + 1, *rank_parts)
        with dropping_out(self.model, seed):
            return self._step(samples)

    def _step(self, samples: Sequence[Sample]) -> dict[str, float]:
        section = self.section
        lr = self.optimization.begin(scheduled_rate(section, self.steps, self.total_steps))
        trained = sum(s.num_trained for s in samples)
        sums = {"sft/loss": 0.0, "trainer/logical_tokens": 0.0, "trainer/distinct_tokens": 0.0}
        merge = shares_prefixes(self.model, section.prefix_merging)
        device = device_of(self.model)
        batches = micro_batches(
            samples, section.micro_batch_tokens, device, merge=merge, images=self.images
        )
        nulls = null_batches(samples, len(batches), device, merge=merge, images=self.images)

        if self.balance is not None:
            self.balance.begin(samples)
            sums["sft/router_aux_loss"] = 0.0

        for indices, packed in batches:
            batch = packed if self.balance is None else packed.with_all_rows()
            self.flops.count_training([samples[i] for i in indices], batch)
            with phase("forward"):
                with listening(self.balance, batch) as routers:
                    logp, _ = token_logprobs(self.model, batch)
                loss = -(logp / trained).sum()

            sums["sft/loss"] += float(loss.detach())
            if routers is not None:
                router_loss = routers.loss()
                loss = loss + routers.coef * router_loss
                sums["sft/router_aux_loss"] += float(router_loss.detach())

            self.optimization.backward(loss)
            sums["trainer/logical_tokens"] += batch.num_logical
            sums["trainer/distinct_tokens"] += batch.num_distinct

        run_null_batches(self.model, nulls, self.optimization.backward)
        norm = self.optimization.finish()
        metrics = {
            "actor/grad_norm": norm,
            "actor/lr": lr,
            "trainer/trained_tokens": float(trained),
        }
        return sum_over_ranks(sums) | metrics | self.flops.take()

    def held_out(
        self, samples: Sequence[Sample], *, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """See `held_out_metrics`."""
        return held_out_metrics(
            self.model, samples, self.section.micro_batch_tokens, stop=stop, images=self.images
        )

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs in addition to the model's weights."""
        return {"optimization": self.optimization.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of state_dict."""
        self.optimization.load_state_dict(state["optimization"])


def scheduled_rate(section: SFTSection, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step` (from 0): linear warm-up over the first
    warmup_ratio of all steps, then the schedule."""
    done = step / total_steps
    warmup = section.warmup_ratio
    if done < warmup:
        return section.learning_rate * min(1.0, done / warmup + 1 / total_steps / warmup)
    return section.learning_rate * decay(
        section.schedule, (done - warmup) / (1 - warmup), section.min_lr_ratio
    )


def plan_batches(sizes: Mapping[str, int], section: SFTSection, seed: int) -> list[list[str]]:
    """The names of the conversations of every optimizer step. Each epoch has an order of its own.
    `sizes`: name -> tokens."""
    order = list(sizes)
    rng = random.Random(seed)
    batches: list[list[str]] = []
    for _ in range(section.epochs):
        rng.shuffle(order)
        batch: list[str] = []
        used = 0
        for name in order:
            full = (
                len(batch) == section.batch_conversations
                if section.batch_tokens is None
                else used + sizes[name] > section.batch_tokens
            )
            if batch and full:
                batches.append(batch)
                batch = []
                used = 0

            batch.append(name)
            used += sizes[name]

        batches.append(batch)

    return batches


@torch.no_grad()
def held_out_metrics(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    micro_batch_tokens: int,
    *,
    stop: Callable[[], bool] = lambda: False,
    images: ImageProvider | None = None,
) -> dict[str, float] | None:
    """Mean loss per trained token in nats, its exponential, and the share of trained tokens that
    are the model's first choice. None if `stop()` was true, on any process, before a micro-batch.
    All processes call it."""
    sums = {"loss": 0.0, "right": 0.0, "count": 0.0}
    device = device_of(model)
    batches = micro_batches(samples, micro_batch_tokens, device, images=images)
    nulls = null_batches(samples, len(batches), device, images=images)
    for place in range(max(gather(len(batches)))):
        if anywhere(stop()):
            return None

        counts = place < len(batches)
        if not counts and not nulls:
            continue

        batch = batches[place][1] if counts else nulls[0]
        logits = allowed_logits(model, batch)
        if not counts:
            continue

        logp, _ = selected_logprobs(logits, batch.rows, batch.targets, batch.temperature)
        sums["loss"] -= float(logp.double().sum())
        sums["right"] += int((logits.argmax(-1)[batch.rows] == batch.targets).sum())
        sums["count"] += len(batch.targets)

    loss, right, count = sum_over_ranks(sums).values()
    mean = loss / count
    return {
        "sft/eval/loss": mean,
        "sft/eval/perplexity": math.exp(min(mean, 700.0)),
        "sft/eval/token_accuracy": right / count,
    }


def train_supervised(
    samples: Sequence[Sample],
    section: ColdStartSection,
    trainer: TrainerSection,
    *,
    make: Callable[[SFTSection, int], Learner],
    seed: int,
    progress: Callable[[int, int, float], None],
    stop: Callable[[], bool] = lambda: False,
    warn: Callable[[str], None] = lambda text: None,
    images: Mapping[str, ImageFile] = NO_IMAGES,
) -> list[float]:
    """`section.epochs` passes over the episodes (samples of one `trajectory_id`) in random order;
    returns the mean loss per token, in nats, of every optimizer step.

    `progress(step, total, loss)` is called after each. Training ends early after a pass whose mean
    loss per token is at most `section.until_loss`, and when `stop()` is true before a step.
    `warn(text)` is called if no pass reaches that loss. Gradient norm limit and micro-batch size
    are the trainer's. `make(settings, steps)`: the trainer that makes the steps. `images`: those of
    the samples, by digest.
    """
    settings = SFTSection(
        epochs=section.epochs,
        batch_conversations=section.batch_episodes,
        learning_rate=section.learning_rate,
        warmup_ratio=0.1,
        weight_decay=trainer.weight_decay,
        betas=trainer.betas,
        max_grad_norm=trainer.max_grad_norm,
        micro_batch_tokens=trainer.micro_batch_tokens,
        prefix_merging=trainer.prefix_merging,
    )
    episodes: dict[str, list[Sample]] = {}
    for sample in samples:
        episodes.setdefault(sample.trajectory_id, []).append(sample)

    batches = plan_batches(
        {name: sum(len(s.ids) for s in rows) for name, rows in episodes.items()}, settings, seed
    )
    supervised = make(settings, len(batches))
    per_pass = len(batches) // section.epochs
    losses: list[float] = []
    tokens: list[int] = []
    for batch in batches:
        if stop():
            return losses
        shown = [sample for name in batch for sample in episodes[name]]
        if images:
            supervised.show(images_of_samples(shown, images))
        losses.append(supervised.step(shown)["sft/loss"])
        tokens.append(sum(sample.num_trained for sample in shown))
        progress(len(losses), len(batches), losses[-1])
        if section.until_loss and len(losses) % per_pass == 0:
            mean_loss = np.average(losses[-per_pass:], weights=tokens[-per_pass:])
            if mean_loss <= section.until_loss:
                return losses

    if section.until_loss:
        warn(
            f"the last pass of the cold start has a mean loss of {mean_loss:.3f} nats per token, "
            f"above cold_start.until_loss={section.until_loss:g}: raise cold_start.epochs or "
            "cold_start.until_loss"
        )
    return losses
