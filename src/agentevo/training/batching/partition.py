"""Assigns a step's samples to micro-batches, and these to ranks.

Samples are sorted, and a micro-batch is a stretch of them, so it merges everything that its samples
share. A cut before sample i makes the next micro-batch recompute what i shares with the previous
sample. Nothing else is computed twice:

    tokens of the stretch [i, j) = new(i) + ... + new(j - 1) + shared(i)
    new(k) = length(k) - shared(k)

With one rank, the split recomputes the fewest tokens under the budget. Among such splits it has the
fewest micro-batches, and among these the most even ones. Several ranks wait for the slowest one, so
evenness comes first: the split has the cheapest costliest stretch, including recomputed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from agentevo.training.prefixes import sort_sequences

Sequences = Sequence[Sequence[int]] | Sequence[np.ndarray]
PAIR_COST = 1 / 6144
"""The cost of one token's attention to another token, as a share of all other costs of a token: 4
LH of 24 LH^2 operations in a transformer of width H with L layers, which is 1 / 6H; here for H =
1024."""


def split_by_tokens(
    sequences: Sequences, max_tokens: int, *, merge: bool = True
) -> list[list[int]]:
    """The indices of the sequences of each micro-batch. A micro-batch has at most `max_tokens`
    distinct tokens. A longer sequence is a separate micro-batch."""
    return spread(sequences, max_tokens, 1, merge=merge)[0]


def spread(
    sequences: Sequences,
    max_tokens: int,
    ranks: int,
    *,
    merge: bool = True,
    pair_cost: float = PAIR_COST,
) -> list[list[list[int]]]:
    """The micro-batches of each rank, as in `split_by_tokens`.

    Every rank has the same number of micro-batches, or one less if there are too few sequences. The
    cost of a rank is tokens + pair_cost * query-key pairs. The costs of two ranks differ by no more
    than the costs of the costliest and the cheapest micro-batch.
    """
    if not sequences:
        return [[] for _ in range(ranks)]

    line = _CostLine.of(sequences, merge, pair_cost)
    starts = (
        _least_recomputed(line, max_tokens) if ranks == 1 else _evenest(line, max_tokens, ranks)
    )
    stretches = list(zip(starts, [*starts[1:], line.num], strict=True))
    if ranks == 1:
        return [[line.order[i:j] for i, j in stretches]]

    return [[line.order[i:j] for i, j in dealt] for dealt in _deal(line, stretches, ranks)]


@dataclass(frozen=True, eq=False)
class _CostLine:
    """S sequences in sorted order. The stretch [i, j) has tokens[j] - tokens[i] + shared[i] tokens,
    and its cost follows the same formula."""

    order: list[int]
    tokens: np.ndarray
    """[S + 1] int64: the new tokens of all sequences before each sequence."""
    shared: np.ndarray
    """[S] int64: the tokens that each sequence shares with the previous one."""
    costs: np.ndarray
    """[S + 1] float64: the cost of the new tokens of all sequences before each sequence."""
    shared_costs: np.ndarray
    """[S] float64: the cost of the shared tokens, which a cut before the sequence adds."""

    @classmethod
    def of(cls, sequences: Sequences, merge: bool, pair_cost: float) -> _CostLine:
        in_order = sort_sequences(sequences, merge=merge)
        lengths = np.array([len(ids) for ids in in_order.tokens], dtype=np.int64)

        def path_cost(length: np.ndarray) -> np.ndarray:
            return length + pair_cost * (length * (length + 1) / 2)

        shared_costs = path_cost(in_order.shared)
        tokens = np.concatenate([[0], np.cumsum(lengths - in_order.shared)])
        return cls(
            in_order.order,
            tokens,
            in_order.shared,
            np.concatenate([[0.0], np.cumsum(path_cost(lengths) - shared_costs)]),
            shared_costs,
        )

    @property
    def num(self) -> int:
        return len(self.order)

    def cost(self, starts: np.ndarray | int, ends: np.ndarray | int) -> np.ndarray:
        return self.costs[ends] - self.costs[starts] + self.shared_costs[starts]


def _least_recomputed(line: _CostLine, max_tokens: int) -> list[int]:
    """The beginnings of the best split's micro-batches, found by dynamic programming over the
    beginning of the last one, in O(samples * samples that fit in one). The best split has the
    fewest recomputed tokens, then the fewest micro-batches, then the smallest sum of squared
    costs."""
    scale = line.num + 1
    # The best split of the first n sequences: recomputed tokens * scale + micro-batches in one
    # number, the sum of squared costs, and the beginning of its last micro-batch.
    keys = np.zeros(line.num + 1, dtype=np.int64)
    squares = np.zeros(line.num + 1)
    begin = np.zeros(line.num + 1, dtype=np.int64)
    opened = np.empty(line.num, dtype=np.int64)  # the keys if one more micro-batch begins there
    first = 0
    for end in range(1, line.num + 1):
        opened[end - 1] = keys[end - 1] + line.shared[end - 1] * scale + 1

        # Step 1: the earliest beginning of a last micro-batch that fits the limit.
        while (
            first < end - 1
            and line.tokens[end] - line.tokens[first] + line.shared[first] > max_tokens
        ):
            first += 1  # once a stretch is too long, so is every longer one

        # Step 2: among the beginnings from there on, the smallest key, and among equal keys the
        # evenest.
        window = opened[first:end]
        keys[end] = window.min()
        places = np.flatnonzero(window == keys[end]) + first
        sums = squares[places] + line.cost(places, end) ** 2
        chosen = int(sums.argmin())
        begin[end] = places[chosen]
        squares[end] = sums[chosen]

    # Step 3: back from the end, micro-batch by micro-batch.
    starts = [int(begin[line.num])]
    while starts[-1] > 0:
        starts.append(int(begin[starts[-1]]))

    return starts[::-1]


def _evenest(line: _CostLine, max_tokens: int, ranks: int) -> list[int]:
    """The beginnings of micro-batches. Their number is the least possible multiple of `ranks`, and
    bisection makes the costliest one as cheap as possible."""
    # Step 1: the number of micro-batches, a multiple of the ranks if there are enough sequences.
    needed = len(list(_fill_greedily(line, max_tokens, np.inf)))
    number = min(line.num, -(-needed // ranks) * ranks)

    # Step 2: bisection for the least cost limit under which this number is enough.
    low = float(line.costs[-1]) / number
    high = float(line.costs[-1])
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        low, high = (
            (low, middle)
            if len(list(_fill_greedily(line, max_tokens, middle))) <= number
            else (middle, high)
        )

    # Step 3: if there are fewer now, the costliest are halved.
    starts = list(_fill_greedily(line, max_tokens, high))
    while len(starts) < number:
        ends = np.array([*starts[1:], line.num])
        costs = np.where(ends - starts > 1, line.cost(np.array(starts), ends), -1.0)
        widest = int(costs.argmax())
        cuts = np.arange(starts[widest] + 1, ends[widest])
        halves = np.maximum(line.cost(starts[widest], cuts), line.cost(cuts, ends[widest]))
        starts.insert(widest + 1, int(cuts[halves.argmin()]))

    return starts


def _fill_greedily(line: _CostLine, max_tokens: int, max_cost: float) -> Iterator[int]:
    """The beginnings of micro-batches that are each filled to the limit, which gives the least
    number of them."""
    start = 0
    while start < line.num:
        yield start
        by_tokens = np.searchsorted(
            line.tokens, line.tokens[start] - line.shared[start] + max_tokens, side="right"
        )
        by_cost = np.searchsorted(
            line.costs, line.costs[start] - line.shared_costs[start] + max_cost, side="right"
        )
        start = max(start + 1, int(min(by_tokens, by_cost)) - 1)


def _deal(
    line: _CostLine, stretches: Sequence[tuple[int, int]], ranks: int
) -> list[list[tuple[int, int]]]:
    """Gives each rank one micro-batch per round, from the costliest down. The costliest of a round
    goes to the rank with the least cost so far."""
    costs = {stretch: float(line.cost(*stretch)) for stretch in stretches}
    ordered = sorted(stretches, key=costs.__getitem__, reverse=True)
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for begin in range(0, len(ordered), ranks):
        for rank, stretch in zip(
            sorted(range(ranks), key=loads.__getitem__),
            ordered[begin : begin + ranks],
            strict=False,
        ):
            dealt[rank].append(stretch)
            loads[rank] += costs[stretch]

    return dealt
