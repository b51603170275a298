"""Records the experts that the embedded engine chose, as one row per token, stored alongside the
keys and values.

A sequence has a row for every token that has keys and values (`Sequence.cached`), from the pass
that computed them. A shared prefix has rows, too. A sequence may have rows of further tokens, which
the same weights computed before (`routing_memory.py`). When these tokens are computed again, they
go to the same experts. For each token, a completion has the row of the pass in which the next token
was sampled. After new weights this row differs from the sequence's row: keys and values are
computed again, and the new weights choose other experts, but sampled tokens stay. So a request
keeps the rows that its sampled tokens came from (`EngineRequest.restart_from`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from agentevo.errors import EngineError
from agentevo.models.compute.routers import OWN, Recording, RouterReplay, Routers, routers_of
from agentevo.types.routed_experts import RoutedExperts, row_dtype

if TYPE_CHECKING:
    from agentevo.inference.embedded.batch import StepBatch
    from agentevo.inference.embedded.requests import EngineRequest
    from agentevo.inference.embedded.scheduler import Sequence


Weights = tuple[int, int]
"""The weights that chose the experts, see RoutingMemory.weights."""


class TokenRows:
    """Rows [tokens, layers, top_k] of consecutive tokens, beginning with the first token. The same
    weights chose all of them. Rows are added and never changed, so that several owners may share
    them."""

    def __init__(self, weights: Weights | None = None) -> None:
        self.weights = weights
        self.count = 0
        self._rows: np.ndarray | None = None

    @property
    def num_bytes(self) -> int:
        """Their size in memory, with room to grow."""
        return 0 if self._rows is None else self._rows.nbytes

    def put(self, place: int, rows: np.ndarray) -> None:
        """Adds the rows of the tokens from `place` on. `place` may be at most the number of known
        rows, and known rows stay."""
        rows = rows[self.count - place :]
        stop = self.count + len(rows)
        if self._rows is None or len(self._rows) < stop:
            grown = np.empty((2 * stop, *rows.shape[1:]), dtype=rows.dtype)
            if self._rows is not None:
                grown[: self.count] = self._rows[: self.count]
            self._rows = grown

        self._rows[self.count : stop] = rows
        self.count = stop

    def first(self, count: int) -> np.ndarray:
        """The rows [count, layers, top_k] of the first tokens. `put` must have been called for all
        of them."""
        assert self._rows is not None and count <= self.count
        return self._rows[:count]

    def beginning(self, count: int) -> TokenRows:
        """A copy of the first tokens' rows. Empty if there are none."""
        copied = TokenRows(self.weights)
        if self._rows is not None:
            copied.put(0, self.first(count))
        return copied

    def agreement(self, rows: TokenRows, count: int) -> int:
        """Of the first `count` tokens, which both have, the number before the first token that goes
        to other experts."""
        if self is rows or not count:
            return count
        differs = np.sort(self.first(count)) != np.sort(rows.first(count))
        places = differs.any((1, 2)).nonzero()[0]
        return int(places[0]) if len(places) else count


def engine_routers(model: PreTrainedModel) -> Routers:
    """The routers that an engine records. Raises EngineError for a model whose routers can't report
    their choices."""
    routers = routers_of(model)
    if routers is None:
        raise EngineError(
            "engine.routed_experts: the model's routers are not prepared to report their "
            "choices: call agentevo.models.compute.routers.enable_routing(model) after "
            "prepare(model), or leave the key out"
        )
    return routers


def recording_of(batch: StepBatch, routers: Routers | None) -> Recording | None:
    """The recording of a step's chosen experts. None if the engine does not record. Tokens with
    known rows go to the same experts again."""
    if routers is None:
        return None
    if all(sequence.routed.count <= sequence.cached for sequence, _ in batch.work):
        return Recording(routers)

    total = batch.input_ids.shape[1]
    rows = np.full((total, routers.layers, routers.top_k), OWN, dtype=np.int64)
    begin = 0
    for sequence, count in batch.work:
        num_known = min(sequence.routed.count, sequence.cached + count)
        if num_known > sequence.cached:
            known_rows = sequence.routed.first(num_known)[sequence.cached :]
            rows[begin : begin + len(known_rows)] = known_rows
        begin += count

    return Recording(routers, RouterReplay(torch.as_tensor(rows, device=batch.input_ids.device)))


def record(batch: StepBatch, recording: Recording) -> None:
    """Stores the chosen experts of a step, before its tokens count as cached."""
    rows = recording.rows().astype(row_dtype(recording.routers.num_experts))
    begin = 0
    for sequence, count in batch.work:
        sequence.routed.put(sequence.cached, rows[begin : begin + count])
        begin += count


def routed_experts_of(
    sequence: Sequence, request: EngineRequest, routers: Routers | None
) -> RoutedExperts | None:
    """The routed experts for the completion of a request, whose tokens are all cached except the
    last. None if the engine does not record."""
    if routers is None:
        return None
    rows = drawn_rows(sequence, request)
    assert rows is not None
    return RoutedExperts.of(rows[request.params.routed_from :], routers.num_experts)


def drawn_rows(sequence: Sequence, request: EngineRequest) -> np.ndarray | None:
    """[ids - 1, layers, top_k]: for every token but the last, the row of the pass that sampled the
    next token. None before the first sampled token."""
    earlier_rows = request.drawn_rows
    count = len(sequence.ids) - 1
    if not request.completion:
        return None
    if earlier_rows is None:
        return sequence.routed.first(count)
    if len(earlier_rows) == count:  # no token was sampled since these rows were stored
        return earlier_rows
    return np.concatenate([earlier_rows, sequence.routed.first(count)[len(earlier_rows) :]])
