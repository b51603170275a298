"""Assigns a step's samples to micro-batches, and the micro-batches to ranks.

Samples are sorted, and a micro-batch is a stretch of sorted samples, so it merges everything that
its samples share. A cut before sample i makes the next micro-batch recompute what i shares with the
previous sample. Nothing else is computed twice:

    tokens of the stretch [i, j) = new(i) + ... + new(j - 1) + shared(i)
    new(k) = length(k) - shared(k)

With one rank, the split under the token budget recomputes the fewest tokens; ties are broken by the
fewest micro-batches, then by the most even costs. Several ranks wait for the slowest one, so their
split minimises the cost of the costliest stretch, including recomputed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from agentevo.training.prefixes import sort_sequences

Sequences = Sequence[Sequence[int]] | Sequence[np.ndarray]
PAIR_COST = 1 / 6144
"""The cost of one token's attention to another token, relative to all other costs of a token. In a
transformer of width H with L layers it is 4 LH / 24 LH^2 operations = 1 / 6H; here H = 1024."""


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
    sizes: Sequence[np.ndarray] | None = None,
) -> list[list[list[int]]]:
    """The micro-batches of each rank, as in `split_by_tokens`. `sizes`: for each sequence, how many
    tokens each of its tokens counts for [T] int64; None if each counts for one.

    Every rank has the same number of micro-batches, or one less if there are too few sequences. The
    cost of a rank is tokens + pair_cost * query-key pairs. The costs of two ranks differ by at most
    the difference between the costliest and the cheapest micro-batch.
    """
    if not sequences:
        return [[] for _ in range(ranks)]

    line = _CostLine.of(sequences, merge, pair_cost, sizes)
    starts = (
        _split_for_one_rank(line, max_tokens)
        if ranks == 1
        else _split_evenly(line, max_tokens, ranks)
    )
    stretches = list(zip(starts, [*starts[1:], line.num], strict=True))
    if ranks == 1:
        return [[line.order[i:j] for i, j in stretches]]

    return [
        [line.order[i:j] for i, j in by_rank]
        for by_rank in _assign_to_ranks(line, stretches, ranks)
    ]


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
    def of(
        cls,
        sequences: Sequences,
        merge: bool,
        pair_cost: float,
        sizes: Sequence[np.ndarray] | None,
    ) -> _CostLine:
        in_order = sort_sequences(sequences, merge=merge)
        lengths = np.array([len(ids) for ids in in_order.tokens], dtype=np.int64)
        shared = in_order.shared
        if sizes is not None:
            sums = [np.append(0, np.cumsum(sizes[index])) for index in in_order.order]
            lengths = np.array([sum_of_sizes[-1] for sum_of_sizes in sums])
            shared = np.array([part[num] for part, num in zip(sums, shared, strict=True)])

        def path_cost(length: np.ndarray) -> np.ndarray:
            return length + pair_cost * (length * (length + 1) / 2)

        shared_costs = path_cost(shared)
        tokens = np.concatenate([[0], np.cumsum(lengths - shared)])
        return cls(
            in_order.order,
            tokens,
            shared,
            np.concatenate([[0.0], np.cumsum(path_cost(lengths) - shared_costs)]),
            shared_costs,
        )

    @property
    def num(self) -> int:
        return len(self.order)

    def cost(self, starts: np.ndarray | int, ends: np.ndarray | int) -> np.ndarray:
        return self.costs[ends] - self.costs[starts] + self.shared_costs[starts]


def _split_for_one_rank(line: _CostLine, max_tokens: int) -> list[int]:
    """The beginnings of the best split's micro-batches. Dynamic programming over the beginning of
    the last micro-batch finds them in O(samples * samples that fit in a micro-batch). The best
    split has the fewest recomputed tokens, then the fewest micro-batches, then the smallest sum of
    squared costs."""
    scale = line.num + 1
    # The best split of the first n sequences: recomputed tokens * scale + micro-batches in one
    # number, the sum of squared costs, and the beginning of its last micro-batch.
    keys = np.zeros(line.num + 1, dtype=np.int64)
    squares = np.zeros(line.num + 1)
    last_start = np.zeros(line.num + 1, dtype=np.int64)
    keys_if_begun = np.empty(
        line.num, dtype=np.int64
    )  # the keys if another micro-batch begins at the sequence
    first = 0
    for end in range(1, line.num + 1):
        keys_if_begun[end - 1] = keys[end - 1] + line.shared[end - 1] * scale + 1

        # Step 1: the earliest beginning of a last micro-batch that fits the limit.
        while (
            first < end - 1
            and line.tokens[end] - line.tokens[first] + line.shared[first] > max_tokens
        ):
            first += 1  # once a stretch is too long, so is every longer one

        # Step 2: among the possible beginnings, the smallest key, and among equal keys the most
        # even split.
        window = keys_if_begun[first:end]
        keys[end] = window.min()
        best_starts = np.flatnonzero(window == keys[end]) + first
        sums = squares[best_starts] + line.cost(best_starts, end) ** 2
        most_even = int(sums.argmin())
        last_start[end] = best_starts[most_even]
        squares[end] = sums[most_even]

    # Step 3: back from the end, micro-batch by micro-batch.
    starts = [int(last_start[line.num])]
    while starts[-1] > 0:
        starts.append(int(last_start[starts[-1]]))

    return starts[::-1]


def _split_evenly(line: _CostLine, max_tokens: int, ranks: int) -> list[int]:
    """The beginnings of micro-batches. Their number is the least possible multiple of `ranks`.
    Bisection minimises the cost of the costliest micro-batch."""
    # Step 1: the number of micro-batches, a multiple of the ranks if there are enough sequences.
    needed = len(list(_fill_greedily(line, max_tokens, np.inf)))
    num_batches = min(line.num, -(-needed // ranks) * ranks)

    # Step 2: bisection for the least cost limit under which this number is enough.
    low = float(line.costs[-1]) / num_batches
    high = float(line.costs[-1])
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        low, high = (
            (low, middle)
            if len(list(_fill_greedily(line, max_tokens, middle))) <= num_batches
            else (middle, high)
        )

    # Step 3: while there are too few micro-batches, halve the costliest one.
    starts = list(_fill_greedily(line, max_tokens, high))
    while len(starts) < num_batches:
        ends = np.array([*starts[1:], line.num])
        costs = np.where(ends - starts > 1, line.cost(np.array(starts), ends), -1.0)
        costliest = int(costs.argmax())
        cuts = np.arange(starts[costliest] + 1, ends[costliest])
        halves = np.maximum(line.cost(starts[costliest], cuts), line.cost(cuts, ends[costliest]))
        starts.insert(costliest + 1, int(cuts[halves.argmin()]))

    return starts


def _fill_greedily(line: _CostLine, max_tokens: int, max_cost: float) -> Iterator[int]:
    """The beginnings of micro-batches that are filled to the limit one after another. Their number
    is the least possible."""
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


def _assign_to_ranks(
    line: _CostLine, stretches: Sequence[tuple[int, int]], ranks: int
) -> list[list[tuple[int, int]]]:
    """Assigns one micro-batch per round to each rank, from the costliest to the cheapest. The
    costliest micro-batch of a round goes to the rank with the least cost so far."""
    costs = {stretch: float(line.cost(*stretch)) for stretch in stretches}
    ordered = sorted(stretches, key=costs.__getitem__, reverse=True)
    by_rank: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for round_start in range(0, len(ordered), ranks):
        for rank, stretch in zip(
            sorted(range(ranks), key=loads.__getitem__),
            ordered[round_start : round_start + ranks],
            strict=False,
        ):
            by_rank[rank].append(stretch)
            loads[rank] += costs[stretch]

    return by_rank
