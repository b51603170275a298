"""Routing replay in the passes of one policy (docs/training.md):

    none     the routers choose; choices that differ from the engine's record are counted
    rollout  every pass replays the engine's record (R3, arXiv 2510.11370)
    update   the pass that computes the old log-probs records, the update's replay it (R2 of verl)

Replay covers only the policy's passes and those of a critic that shares its trunk: reference,
critic and process reward are separate models, with their own choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from transformers import PreTrainedModel

from agentevo.errors import TrainingError
from agentevo.models.compute.routers import KEY, Recording, RouterReplay, routers_of
from agentevo.training.batching.packing import PackedBatch
from agentevo.training.batching.routing import check_recorded, with_rows
from agentevo.training.batching.samples import SampleRow
from agentevo.training.parallel import gather
from agentevo.types import Sample


class RoutingReplay:
    """See the module."""

    def __init__(self, mode: Literal["none", "rollout", "update"], policy: PreTrainedModel) -> None:
        """Raises TrainingError for a policy whose routers can't replay."""
        self.mode = mode
        self.routers = routers_of(policy)
        self._recording: Recording | None = None
        self._recorded: list[tuple[int, np.ndarray]] = []

        if mode != "none" and self.routers is None:
            raise TrainingError(
                f"{KEY}={mode}: the policy's routers are not prepared for it: call "
                "agentevo.models.compute.routers.enable_routing(model) after prepare(model), or "
                "set it to none"
            )

    @property
    def reads_records(self) -> bool:
        """Whether the engine's records are used."""
        return self.mode != "update" and self.routers is not None

    def begin(self, rows: Sequence[SampleRow]) -> list[SampleRow]:
        """The rows of a step. If nothing is replayed and some rows have no record, the records of
        all rows are removed. Raises TrainingError if a record is missing or does not fit the
        policy's routers."""
        self._recorded = []
        samples = [row.sample for row in rows]
        if self.mode == "rollout" or all(sample.routed_experts is not None for sample in samples):
            assert self.routers is not None
            check_recorded(samples, self.routers)
            return list(rows)

        bare = [msgspec.structs.replace(sample, routed_experts=None) for sample in samples]
        return [row._replace(sample=sample) for row, sample in zip(rows, bare, strict=True)]

    def before_update(self, batch: PackedBatch) -> PackedBatch:
        """The batch for a pass of the policy before the update; the update may replay that pass
        later."""
        if self.mode != "update":
            return self.in_update(batch)
        assert self.routers is not None
        self._recording = Recording(self.routers)
        return batch.with_routing(self._recording)

    def heard(self, indices: Sequence[int], batch: PackedBatch) -> None:
        """Keeps the routing records of the last pass. `indices`: the samples of its batch."""
        if self._recording is not None:
            rows = self._recording.rows()
            self._recording = None
            paths = zip(indices, batch.plan.tree.paths, strict=True)
            self._recorded += [(index, rows[path]) for index, path in paths]

    def finish(self, rows: Sequence[SampleRow]) -> list[SampleRow]:
        """The rows of a step after all its passes, with the records of these passes."""
        if self.mode != "update":
            return list(rows)
        assert self.routers is not None
        recorded_rows = dict(item for of_rank in gather(self._recorded) for item in of_rank)
        self._recorded = []
        return [
            row._replace(sample=with_rows(row.sample, recorded_rows[index], self.routers))
            for index, row in enumerate(rows)
        ]

    def in_update(self, batch: PackedBatch) -> PackedBatch:
        """The batch for a pass of the policy that replays the recorded experts."""
        if batch.routed_experts is None:
            return batch
        return batch.with_routing(RouterReplay(batch.routed_experts, apply=self.mode != "none"))

    def check(self, samples: Sequence[Sample]) -> None:
        """Raises TrainingError for samples that an update can't replay."""
        if self.mode != "none":
            assert self.routers is not None
            check_recorded(samples, self.routers)


def mismatches(batch: PackedBatch) -> dict[str, float]:
    """Sums over the trained tokens of a finished pass. For each token: the share of layers whose
    router would choose other experts than the recorded ones, at the position that predicts the
    token; and 1 if any layer would. Empty if nothing was recorded."""
    routing = batch.plan.routing
    differs = routing.differs() if isinstance(routing, RouterReplay) else None
    if differs is None:
        return {}

    at_tokens = differs[batch.logit_nodes[batch.rows]]  # [M, layers]
    return {
        "actor/router_mismatch": float(at_tokens.double().mean(1).sum()),
        "actor/router_mismatch_tokens": float(at_tokens.any(1).sum()),
    }
