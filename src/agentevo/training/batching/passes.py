"""Runs passes of a model over a whole step's samples in micro-batches. Their size affects only
memory, and the load-balancing loss of routers (training/router_balance.py).

With several ranks (training/parallel.py) each rank computes its own micro-batches, and all ranks
get all results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from agentevo.models.compute.sharded import any_sharded
from agentevo.training.batching.images import ImageProvider, token_sizes
from agentevo.training.batching.packing import PackedBatch, pack
from agentevo.training.batching.partition import spread
from agentevo.training.batching.routing import merge_keys
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.training.parallel import gather, num_ranks, rank, stages
from agentevo.training.phases import phase
from agentevo.training.sharding.expert_parallel import any_joint
from agentevo.types import Sample


class PackedStep:
    """The micro-batches of a step that were packed last. Passes over the same tokens in the same
    order take them over, whatever has become of advantages and columns in between."""

    def __init__(self) -> None:
        self._batches: list[tuple[list[int], PackedBatch]] = []
        self._packed: list[tuple[object, ...]] = []

    def batches_of(self, samples: Sequence[Sample]) -> list[tuple[list[int], PackedBatch]] | None:
        """The micro-batches of these samples; None if others were packed."""
        parts = [_parts_of(sample) for sample in samples]
        if len(parts) != len(self._packed) or not all(
            part is kept
            for sample_parts, kept_parts in zip(parts, self._packed, strict=True)
            for part, kept in zip(sample_parts, kept_parts, strict=True)
        ):
            return None

        return [
            (indices, batch.with_tables_of([samples[i] for i in indices]))
            for indices, batch in self._batches
        ]

    def keep(self, samples: Sequence[Sample], batches: list[tuple[list[int], PackedBatch]]) -> None:
        """These samples were packed."""
        self._packed = [_parts_of(sample) for sample in samples]
        self._batches = batches

    def clear(self) -> None:
        """Frees the memory."""
        self._packed = []
        self._batches = []


def _parts_of(sample: Sample) -> tuple[object, ...]:
    """What decides the places of a sample's tokens in a batch. These objects are never changed, so
    the same objects mean the same places."""
    return (
        sample.ids,
        sample.loss_mask,
        sample.masks,
        sample.penalties,
        sample.routed_experts,
        sample.images,
        sample.temperature,
    )


@phase("plan")
def micro_batches(
    samples: Sequence[Sample],
    max_tokens: int,
    device: torch.device,
    *,
    merge: bool = True,
    packed: PackedStep | None = None,
    images: ImageProvider | None = None,
) -> list[tuple[list[int], PackedBatch]]:
    """This rank's micro-batches: the indices of the samples, and the packed samples. The samples of
    a micro-batch have one temperature. See `spread` and, for `merge` and `images`, `pack`. In
    `max_tokens`, the tokens of images count for more (`token_sizes`). `packed`: the micro-batches
    that the step has packed before, with the same limits and on the same device. Raises
    TrainingError for a sample whose images can't be shown to the model."""
    if packed is not None:
        if (batches := packed.batches_of(samples)) is not None:
            return batches
        packed.clear()

    if images is not None:
        images.check(samples)

    alike = defaultdict[float, list[int]](list)
    for index, sample in enumerate(samples):
        alike[sample.temperature].append(index)

    split = []
    for indices in alike.values():
        alike_samples = [samples[i] for i in indices]
        keys = merge_keys(alike_samples)
        sizes = token_sizes(alike_samples, images)
        split += [
            [indices[i] for i in part]
            for part in spread(keys, max_tokens, num_ranks(), merge=merge, sizes=sizes)[rank()]
        ]

    batches = [
        (indices, pack([samples[i] for i in indices], device, merge=merge, images=images))
        for indices in split
    ]
    if packed is not None:
        packed.keep(samples, batches)

    return batches


def null_batches(
    samples: Sequence[Sample],
    num_passes: int,
    device: torch.device,
    *,
    merge: bool = True,
    images: ImageProvider | None = None,
) -> list[PackedBatch]:
    """The extra batches of this rank after `num_passes` passes over its micro-batches. If all ranks
    must run passes together (the model is sharded, or its experts are split), extra batches make
    their number equal. Their results have weight 0. All ranks must call it before the first pass.
    Empty if ranks run passes independently."""
    if num_ranks() == 1 or not (any_sharded() or any_joint()):
        return []
    missing = max(gather(num_passes)) - num_passes
    shortest = min(samples, key=lambda sample: len(sample.ids))
    return [pack([shortest], device, merge=merge, images=images)] * missing


def run_null_batches(
    model: PreTrainedModel,
    nulls: Sequence[PackedBatch],
    backward: Callable[[torch.Tensor], None],
) -> None:
    """Runs passes whose gradient has weight 0, to match the number of the other ranks'
    micro-batches."""
    for batch in nulls:
        backward(0.0 * token_logprobs(model, batch)[0].sum())


@torch.no_grad()
def token_tables(
    samples: Sequence[Sample],
    max_tokens: int,
    device: torch.device,
    compute: Callable[[PackedBatch], Mapping[str, torch.Tensor]],
    *,
    merge: bool = True,
    packed: PackedStep | None = None,
    listen: Callable[[Sequence[int], PackedBatch], None] | None = None,
    images: ImageProvider | None = None,
) -> dict[str, torch.Tensor]:
    """Calls `compute` for each micro-batch. It returns name -> [M] for the trained tokens, and the
    results are collected in tables name -> [S, T] float32 on the CPU.

    Row s holds the trained tokens of sample s from the left, then zeros. `packed` and `images`: see
    `micro_batches`. `listen` is called after `compute` with the indices of the samples of each of
    this rank's micro-batches.
    """
    width = max(s.num_trained for s in samples)
    batches = micro_batches(samples, max_tokens, device, merge=merge, packed=packed, images=images)
    nulls = null_batches(samples, len(batches), device, merge=merge, images=images)

    parts = []
    for indices, batch in batches:
        for name, values in compute(batch).items():
            parts.append((name, indices, batch.table(values.float()).cpu()))
        if listen is not None:
            listen(indices, batch)

    for batch in nulls:
        compute(batch)

    tables: dict[str, torch.Tensor] = {}
    for name, indices, part in [part for of_rank in gather(parts) for part in of_rank]:
        table = tables.setdefault(name, torch.zeros(len(samples), width))
        table[torch.tensor(indices), : part.shape[1]] = part

    return tables


def backward_through_sums(
    model: PreTrainedModel,
    batches: Sequence[tuple[list[int], PackedBatch]],
    owners: Sequence[int],
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    backward: Callable[[torch.Tensor], None],
    nulls: Sequence[PackedBatch] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Differentiates a loss of whole answers exactly, for any division of their rows into
    micro-batches.

    owners: for each sample, the number of its answer, 0..N-1. loss_of: summed log-probs [N] ->
    scalar. `backward` is called with a scalar per micro-batch, whose gradients in the model's
    weights add up to that of the loss. `nulls`: see `null_batches`. Returns the loss and the sums
    [N], detached.

    One micro-batch: one pass. Several: a pass without gradient finds the sums s and g = dloss/ds;
    then sum_i g_i s_i has the same gradient and splits into micro-batches.
    """
    num = max(owners) + 1
    if len(batches) == 1 and num_ranks() == 1 and stages() is None:
        sums = _sums(model, *batches[0], owners, num)
        loss = loss_of(sums)
        backward(loss)
        return loss.detach(), sums.detach()

    with torch.no_grad():
        local_sums = [_sums(model, indices, batch, owners, num).cpu() for indices, batch in batches]
        for batch in nulls:
            token_logprobs(model, batch)

        total = (
            torch.stack([sums for of_rank in gather(local_sums) for sums in of_rank])
            .sum(0)
            .to(device_of(model))
        )

    leaf = total.requires_grad_()
    loss = loss_of(leaf)
    (slope,) = torch.autograd.grad(loss, leaf)

    if not torch.isfinite(loss):
        backward(loss)  # refuses it

    for indices, batch in batches:
        backward((slope * _sums(model, indices, batch, owners, num)).sum())

    run_null_batches(model, nulls, backward)
    return loss.detach(), total.detach()


@phase("forward")
def _sums(
    model: PreTrainedModel,
    indices: Sequence[int],
    batch: PackedBatch,
    owners: Sequence[int],
    num: int,
) -> torch.Tensor:
    """[N]: the summed log-probs of each answer's tokens in this micro-batch."""
    logp, _ = token_logprobs(model, batch)
    owner = torch.tensor([owners[i] for i in indices], device=logp.device)[batch.samples]
    return logp.new_zeros(num).index_add(0, owner, logp)


def device_of(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device
