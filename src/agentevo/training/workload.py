"""The operations that a micro-batch needs, counted twice: as they are done, each distinct token
once, and as it would be if each sample were computed by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from agentevo.models.compute.flops import (
    ForwardWork,
    ModelFlops,
    model_flops,
    work_of_depths,
    work_of_sequences,
)
from agentevo.training.batching.packing import PackedBatch
from agentevo.training.parallel import num_processes, rank, sum_over_ranks
from agentevo.types import Sample

DISTINCT = "trainer/distinct_flops"
LOGICAL = "trainer/logical_flops"

_WHOLE: WeakKeyDictionary[PreTrainedModel, ModelFlops] = WeakKeyDictionary()


def keep_flops(model: PreTrainedModel) -> None:
    """The operations of a pass of the whole model, before processes divide it."""
    _WHOLE[model] = model_flops(model)


class FlopCounter:
    """Sums over the micro-batches of one optimizer step. A pass that only repeats another one to
    save memory is not counted."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.of_model = _WHOLE.get(model) or model_flops(model)
        self._sums = {DISTINCT: 0.0, LOGICAL: 0.0}

    def count_training(self, samples: Sequence[Sample], batch: PackedBatch) -> None:
        """Counts a forward and backward pass over samples that are packed as `batch`, by the model
        or by another one of its size."""
        self._sums[DISTINCT] += self.of_model.training(self._distinct(batch))
        self._sums[LOGICAL] += self.of_model.training(self._logical(samples))

    def count_inference(self, batch: PackedBatch) -> None:
        """Counts a pass without gradient; `stood_for` counts its samples, each computed by
        itself."""
        self._sums[DISTINCT] += self.of_model.forward(self._distinct(batch))

    def stood_for(self, samples: Sequence[Sample]) -> None:
        """Counts the samples of `computed` passes, each computed by itself; they may come from
        several batches, and are those of all ranks."""
        if rank() == 0:
            self._sums[LOGICAL] += self.of_model.forward(self._logical(samples))

    def take(self) -> dict[str, float]:
        """Returns the metrics over all ranks, and restarts the count."""
        sums = self._sums
        self._sums = {DISTINCT: 0.0, LOGICAL: 0.0}
        return sum_over_ranks(sums)

    def _distinct(self, batch: PackedBatch) -> ForwardWork:
        depths = torch.as_tensor(batch.plan.tree.positions)
        return work_of_depths(depths, len(batch.logit_nodes), self.of_model.windows)

    def _logical(self, samples: Sequence[Sample]) -> ForwardWork:
        return work_of_sequences(
            [len(s.ids) for s in samples],
            sum(s.num_trained for s in samples),
            self.of_model.windows,
        )


def speed_metrics(
    trained: Mapping[str, float], seconds: float, peak_flops_per_s: float
) -> dict[str, float]:
    """Tokens per second and MFU of an update that took `seconds`, both as computed and as if each
    sample were computed by itself. It is empty if nothing was trained. `peak` is that of each
    process's device; where it was measured on a busy machine, and an update is faster, that is the
    peak."""
    metrics: dict[str, float] = {}
    if not seconds:
        return metrics

    for name, flops, mfu in (
        ("distinct", DISTINCT, "perf/mfu"),
        ("logical", LOGICAL, "perf/mfu_logical"),
    ):
        if f"trainer/{name}_tokens" in trained:
            metrics[f"perf/tokens_per_s_{name}"] = trained[f"trainer/{name}_tokens"] / seconds
        if flops in trained:
            reached = trained[flops] / seconds / num_processes()
            peak = max(peak_flops_per_s, reached) if flops == DISTINCT else peak_flops_per_s
            metrics[mfu] = reached / peak

    return metrics
