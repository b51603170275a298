"""The experts that the embedded engine chose: rows of tokens, stored alongside their keys and
values.

A sequence has a row for every token that has keys and values (`Sequence.cached`), from the pass
that computed these. So has a shared prefix. A sequence may have rows of further tokens: the same
weights have computed these before (`routing_memory.py`), and they go to the same experts when they
are computed again. For each token a completion has the row of the pass in which the next token was
sampled. After new weights this row differs from the sequence's: keys and values are computed again,
under the choices of the new weights, but sampled tokens stay, so a request keeps the rows that its
sampled tokens came from (`EngineRequest.restart_from`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from agentevo.errors import EngineError
from agentevo.models.routers import OWN, Recording, RouterReplay, Routers, routers_of
from agentevo.routed_experts import RoutedExperts, row_dtype

if TYPE_CHECKING:
    from agentevo.inference.batch import StepBatch
    from agentevo.inference.requests import EngineRequest
    from agentevo.inference.scheduler import Sequence


Weights = tuple[int, int]
"""Which weights chose: see RoutingMemory.weights."""


class TokenRows:
    """Rows [tokens, layers, top_k] of consecutive tokens from the first on, all chosen by the same
    weights. Rows are added and never changed, so that several owners may share them."""

    def __init__(self, weights: Weights | None = None) -> None:
        self.weights = weights
        self.count = 0
        self._rows: np.ndarray | None = None

    @property
    def num_bytes(self) -> int:
        """Their size in memory, with room to grow."""
        return 0 if self._rows is None else self._rows.nbytes

    def put(self, place: int, rows: np.ndarray) -> None:
        """Adds the rows of the tokens from `place` on, which must not begin after the last known
        row; known rows are kept."""
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
        """[count, layers, top_k] of the first tokens; `put` was called for all of them."""
        assert self._rows is not None and count <= self.count
        return self._rows[:count]

    def beginning(self, count: int) -> TokenRows:
        """A copy of the first tokens' rows; empty if none were put."""
        copied = TokenRows(self.weights)
        if self._rows is not None:
            copied.put(0, self.first(count))
        return copied

    def agreement(self, rows: TokenRows, count: int) -> int:
        """How many of the first `count` tokens, which both have, go to the same experts, up to the
        first that does not."""
        if self is rows or not count:
            return count
        differs = np.sort(self.first(count)) != np.sort(rows.first(count))
        places = differs.any((1, 2)).nonzero()[0]
        return int(places[0]) if len(places) else count


def engine_routers(model: PreTrainedModel) -> Routers:
    """The routers that an engine records. Raises EngineError for a model that can't report its
    choices."""
    routers = routers_of(model)
    if routers is None:
        raise EngineError(
            "engine.routed_experts: the model's routers are not prepared to report their "
            "choices: call agentevo.models.routers.routed(model) after prepare(model), or leave "
            "the key out"
        )
    return routers


def recording_of(batch: StepBatch, routers: Routers | None) -> Recording | None:
    """The recording of the choices in the pass of a step; None for an engine that does not record.
    Tokens whose rows are known already go to these experts again."""
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
    """Records the choices in the pass of a step, before its tokens count as cached."""
    rows = recording.rows().astype(row_dtype(recording.routers.num_experts))
    begin = 0
    for sequence, count in batch.work:
        sequence.routed.put(sequence.cached, rows[begin : begin + count])
        begin += count


def routed_experts_of(
    sequence: Sequence, request: EngineRequest, routers: Routers | None
) -> RoutedExperts | None:
    """The routed experts in the completion of a request, all of whose tokens but the last are
    cached; None for an engine that does not record."""
    if routers is None:
        return None
    rows = drawn_rows(sequence, request)
    assert rows is not None
    return RoutedExperts.of(rows[request.params.routed_from :], routers.num_experts)


def drawn_rows(sequence: Sequence, request: EngineRequest) -> np.ndarray | None:
    """[ids - 1, layers, top_k]: of every token that has a next one, the row of the pass that
    sampled it; None before the first sampled token."""
    earlier_rows = request.drawn_rows
    count = len(sequence.ids) - 1
    if not request.completion:
        return None
    if earlier_rows is None:
        return sequence.routed.first(count)
    if len(earlier_rows) == count:  # no token was sampled since they were kept
        return earlier_rows
    return np.concatenate([earlier_rows, sequence.routed.first(count)[len(earlier_rows) :]])
