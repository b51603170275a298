"""Keeps the experts that an engine reported, for contexts that are computed again.

A client holds one row for each token of its conversation. Later tokens may be sampled over keys and
values that were computed again, because the cache was dropped or went to another branch. The engine
therefore keeps the rows of its answers by the name of the session, and the rows of an interrupted
request with the request. It replays them as long as the same weights serve:

    known(request) = the longest beginning of its ids whose rows these weights have chosen for it

Other weights choose experts without these rows, as if they computed the context for the first time.
A cache is used up to the first token whose row differs from the known one.

Bounded: a session's rows are dropped when it is released. Rows of versions that no longer serve are
dropped when weights are published. If the rows take more than a share of the key-value memory
(`SHARE`), the oldest are dropped. Nothing is promised for dropped rows and for requests without a
session. If two turns of a session have the same ids and different rows, either may be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from transformers import PreTrainedModel

from agentevo.inference.embedded.kv_cache import kv_bytes_per_token
from agentevo.inference.embedded.routing import TokenRows, Weights, engine_routers
from agentevo.models.compute.routers import Routers

if TYPE_CHECKING:
    from agentevo.inference.embedded.requests import EngineRequest
    from agentevo.inference.embedded.scheduler import Sequence

SHARE = 1 / 8
"""The most CPU memory for the rows of sessions, as a share of the bytes of key-value memory."""


class KnownPrefix(NamedTuple):
    """The first `num_tokens` of these rows."""

    rows: TokenRows
    num_tokens: int

    def agrees(self, rows: TokenRows, count: int) -> int:
        """The number of the first `count` tokens that can come from a cache with these rows."""
        both = min(count, self.num_tokens)
        agreed = self.rows.agreement(rows, both)
        return count if agreed == both else agreed

    def of_resumed(self, rows: TokenRows, common: int) -> TokenRows:
        """The rows with which a session continues. `rows`: the rows of its cache, whose first
        `common` tokens are the beginning of the new prompt."""
        longer = common > self.num_tokens and self.agrees(rows, common) == common
        best = KnownPrefix(rows, common) if longer else self
        goes_on = best.rows is rows and best.num_tokens == rows.count
        return rows if goes_on else best.rows.beginning(best.num_tokens)


class _Path(NamedTuple):
    ids: np.ndarray
    """[T] int32"""
    rows: TokenRows
    """The rows of these ids, and possibly of later tokens."""
    num_bytes: int

    def begins(self, path: _Path) -> bool:
        """Whether the other path has all rows of this one."""
        size = len(self.ids)
        return (
            self.rows.weights == path.rows.weights
            and size <= len(path.ids)
            and self.ids[-1] == path.ids[size - 1]
            and np.array_equal(self.ids, path.ids[:size])
            and self.rows.agreement(path.rows, size) == size
        )


class RoutingMemory:
    """See the module. `serves` returns the version that serves requests for a version; None means
    the newest."""

    def __init__(
        self, routers: Routers, max_bytes: int, serves: Callable[[int | None], int]
    ) -> None:
        self.routers = routers
        self.max_bytes = max_bytes
        self._serves = serves
        self._beginnings = 0
        self._paths: dict[str, list[_Path]] = {}
        """Session -> its paths, the newest last. The session that was answered last comes last."""
        self.num_bytes = 0

    @classmethod
    def of(
        cls, model: PreTrainedModel, kv_tokens: int, serves: Callable[[int | None], int]
    ) -> RoutingMemory:
        """The memory for an engine with `kv_tokens` tokens of key-value memory. Raises EngineError
        for a model whose routers can't report their choices."""
        routers = engine_routers(model)
        return cls(routers, int(SHARE * kv_tokens * kv_bytes_per_token(model)), serves)

    def weights(self, version: int | None) -> Weights:
        """Identifies the weights that now serve requests for that version: how often the numbering
        has restarted, and the version."""
        return self._beginnings, self._serves(version)

    def known(self, request: EngineRequest) -> KnownPrefix:
        """The known rows of a request, without copying. See the module."""
        weights = self.weights(request.version)
        known_rows = request.known_rows
        if known_rows is not None and known_rows.weights == weights:
            return KnownPrefix(known_rows, min(known_rows.count, len(request.ids)))

        best = KnownPrefix(TokenRows(weights), 0)
        paths = self._paths.get(request.session, []) if request.session is not None else []
        ids = np.array(request.ids if paths else [], dtype=np.int32)
        for path in reversed(paths):
            if path.rows.weights == weights and best.num_tokens < len(ids):
                size = min(len(path.ids), len(ids))
                differs = (path.ids[:size] != ids[:size]).nonzero()[0]
                count = int(differs[0]) if len(differs) else size
                if count > best.num_tokens:
                    best = KnownPrefix(path.rows, count)

        return best

    def known_to_any(self, requests: Iterable[EngineRequest], ids: list[int]) -> TokenRows | None:
        """The known rows of a prefix that some requests share, from any of these requests."""
        best = None
        for request in requests:
            if request.ids[: len(ids)] == ids:
                rows, count = self.known(request)
                if count > (0 if best is None else best.num_tokens):
                    best = KnownPrefix(rows, min(count, len(ids)))
        return None if best is None else best.rows.beginning(best.num_tokens)

    def keep(self, session: str, sequence: Sequence) -> None:
        """Stores the rows of a request that was answered."""
        rows = sequence.routed
        ids = np.array(sequence.ids[: rows.count], dtype=np.int32)
        path = _Path(ids, rows, ids.nbytes + rows.num_bytes)
        before = self._paths.pop(session, [])
        self._paths[session] = [old for old in before if not old.begins(path)] + [path]
        self.num_bytes += sum(stored.num_bytes for stored in self._paths[session])
        self.num_bytes -= sum(old.num_bytes for old in before)
        while self.num_bytes > self.max_bytes:
            oldest = next(iter(self._paths))
            self.num_bytes -= self._paths[oldest].pop(0).num_bytes
            if not self._paths[oldest]:
                del self._paths[oldest]

    def release(self, session: str) -> None:
        """Forgets the session."""
        self.num_bytes -= sum(path.num_bytes for path in self._paths.pop(session, []))

    def forget_outdated(self) -> None:
        """Call this when weights may have changed. Forgets the rows of weights that no longer
        serve."""
        for session in list(self._paths):
            serving = [
                path
                for path in self._paths[session]
                if path.rows.weights is not None
                and path.rows.weights == self.weights(path.rows.weights[1])
            ]
            self.num_bytes -= sum(path.num_bytes for path in self._paths[session])
            self.num_bytes += sum(path.num_bytes for path in serving)

            if serving:
                self._paths[session] = serving
            else:
                del self._paths[session]

    def begin(self) -> None:
        """Call this when versions are renumbered. Forgets all rows, including those of interrupted
        requests."""
        self._beginnings += 1
        self.forget_outdated()

    def stats(self) -> dict[str, float]:
        """See Engine.stats."""
        return {"engine/routing_bytes": self.num_bytes}
