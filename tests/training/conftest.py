"""Samples to train on, and the loss of a batch the slow way: one whole sequence at a time through
transformers' own attention."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from agentevo.config import AlgorithmSection
from agentevo.training.batching.passes import token_tables
from agentevo.training.trainer import Trainer
from agentevo.types import Sample


def _samples_of(
    sequences: Sequence[Sequence[int]], seed: int = 0, temperature: float = 1.0, group_size: int = 3
) -> list[Sample]:
    """Samples over these tokens, about half of them trained, with made-up log-probs and advantages.
    Each has a trained token if it can."""
    rng = random.Random(seed)
    found = []
    for index, ids in enumerate(sequences):
        mask = [False, *(rng.random() < 0.5 for _ in ids[1:])]
        if len(ids) > 1 and not any(mask):
            mask[-1] = True

        advantage = rng.gauss(0, 1)
        found.append(
            Sample(
                trajectory_id=f"t{index}",
                group_id=f"g{index // group_size}",
                ids=list(ids),
                loss_mask=mask,
                logprobs=[rng.uniform(-7, -2) if m else 0.0 for m in mask],
                versions=[0 if m else -1 for m in mask],
                advantages=[advantage for m in mask if m],
                temperature=temperature,
            )
        )

    return found


def _slow_loss(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    section: AlgorithmSection,
    reference: PreTrainedModel | None = None,
) -> torch.Tensor:
    """The objective of docs/design.md written token by token: nothing is packed, shared or weighted
    in advance."""
    per_sequence = []
    algorithm = section.resolve()
    bounds = algorithm.loss_hyper
    for sample in samples:
        ids = torch.tensor([sample.ids])
        places = [i for i, m in enumerate(sample.loss_mask) if m]
        if not places:
            continue

        rows = torch.log_softmax(
            model(input_ids=ids, use_cache=False).logits[0] / sample.temperature, -1
        )
        losses = []
        for place, advantage in zip(places, sample.advantages, strict=True):
            logp = rows[place - 1, sample.ids[place]]
            ratio = torch.exp(logp - sample.logprobs[place])
            bounded = torch.clamp(ratio, 1 - bounds["clip_low"], 1 + bounds["clip_high"])
            loss = -torch.minimum(ratio * advantage, bounded * advantage)
            if reference is not None:
                with torch.no_grad():
                    other = torch.log_softmax(
                        reference(input_ids=ids, use_cache=False).logits[0] / sample.temperature, -1
                    )
                distance = other[place - 1, sample.ids[place]] - logp
                loss = loss + section.kl_coef * (torch.exp(distance) - distance - 1)

            entropy = -(rows[place - 1].exp() * rows[place - 1]).sum()
            losses.append(loss - section.entropy_coef * entropy)

        per_sequence.append(torch.stack(losses))

    if algorithm.aggregation == "token-mean":
        return torch.cat(per_sequence).mean()
    if algorithm.aggregation == "seq-mean-token-sum":
        return torch.stack([losses.sum() for losses in per_sequence]).mean()

    return torch.stack([losses.mean() for losses in per_sequence]).mean()


def _gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat(
        [
            (p.grad if p.grad is not None else torch.zeros_like(p)).detach().flatten()
            for p in model.parameters()
        ]
    )


def _referred(trainer: Trainer, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with the reference's log-probs, as `Trainer.prepare` would give them."""
    reference = trainer.roles.reference
    assert reference is not None

    (table,) = token_tables(
        samples, 10**9, torch.device("cpu"), lambda batch: {"ref_logp": reference.logprobs(batch)}
    ).values()
    return [
        msgspec.structs.replace(
            s, columns={**s.columns, "ref_logp": row[: sum(s.loss_mask)].tolist()}
        )
        for s, row in zip(samples, table, strict=True)
    ]


@pytest.fixture(scope="session")
def referred() -> Callable[..., list[Sample]]:
    return _referred


@pytest.fixture(scope="session")
def samples_of() -> Callable[..., list[Sample]]:
    return _samples_of


@pytest.fixture(scope="session")
def slow_loss() -> Callable[..., torch.Tensor]:
    return _slow_loss


@pytest.fixture(scope="session")
def gradient() -> Callable[[torch.nn.Module], torch.Tensor]:
    """All gradients of a model as one vector, [P]."""
    return _gradient
