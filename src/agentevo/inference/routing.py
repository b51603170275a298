"""Which experts the embedded engine chose: rows of tokens, kept beside their keys and values.

A sequence has a row for every token that has keys and values (`Sequence.cached`), from the pass
that computed these; a shared prefix likewise. What a completion tells of a token is the row of the
pass that the token after it was drawn in. Those two differ after new weights: keys and values are
computed again, but what was drawn stays drawn, so a request keeps the rows that its drawn tokens
came from (`Request.interrupted`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedModel

from agentevo.errors import EngineError
from agentevo.models.routers import Recording, Routers, routers_of
from agentevo.routed_experts import RoutedExperts

if TYPE_CHECKING:
    from agentevo.inference.batch import StepBatch
    from agentevo.inference.requests import Request
    from agentevo.inference.scheduler import Sequence


class TokenRows:
    """Rows [tokens, layers, top_k] that grow; from any place on they may be written again."""

    def __init__(self) -> None:
        self._rows: np.ndarray | None = None

    def put(self, place: int, rows: np.ndarray) -> None:
        """The rows of the tokens from `place` on."""
        stop = place + len(rows)
        if self._rows is None or len(self._rows) < stop:
            grown = np.empty((2 * stop, *rows.shape[1:]), dtype=rows.dtype)
            if self._rows is not None:
                grown[:place] = self._rows[:place]
            self._rows = grown
        self._rows[place:stop] = rows

    def first(self, count: int) -> np.ndarray:
        """[count, layers, top_k] of the first tokens, all of which have been put."""
        assert self._rows is not None and count <= len(self._rows)
        return self._rows[:count]

    def beginning(self, count: int) -> TokenRows:
        """A copy of the first tokens' rows; of none where none were put."""
        copied = TokenRows()
        if self._rows is not None:
            copied.put(0, self.first(count))
        return copied


def engine_routers(model: PreTrainedModel) -> Routers:
    """Those that an engine records. Raises EngineError for a model that can't tell."""
    routers = routers_of(model)
    if routers is None:
        raise EngineError(
            "engine.routed_experts: the model's routers are not prepared to tell what they choose: "
            "call agentevo.models.routers.routed(model) after prepare(model), or leave the key out"
        )
    return routers


def record(batch: StepBatch, recording: Recording) -> None:
    """Takes down what was chosen in the pass of a step, before its tokens count as cached."""
    rows, begin = recording.rows(), 0
    for sequence, count in batch.work:
        sequence.routed.put(sequence.cached, rows[begin : begin + count])
        begin += count


def told(sequence: Sequence, request: Request, routers: Routers) -> RoutedExperts:
    """What the completion of a request says, whose tokens but the last are all cached."""
    rows = drawn_rows(sequence, request)
    assert rows is not None
    return RoutedExperts.of(rows[request.params.routed_from :], routers.num_experts)


def drawn_rows(sequence: Sequence, request: Request) -> np.ndarray | None:
    """[ids - 1, layers, top_k]: of every token that has a next one, the row of the pass that drew
    that; None before anything was drawn."""
    kept, count = request.drawn_rows, len(sequence.ids) - 1
    if not request.completion:
        return None
    if kept is None:
        return sequence.routed.first(count)
    if len(kept) == count:  # nothing was drawn since they were kept
        return kept
    return np.concatenate([kept, sequence.routed.first(count)[len(kept) :]])
