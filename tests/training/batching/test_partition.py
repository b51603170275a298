"""Which samples share a micro-batch, and which rank computes it."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentevo.training.batching.partition import split_by_tokens, spread
from agentevo.training.tree import build_tree
from examples import examples

PAIR_COST = 0.01
sequences_of_few_letters = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9
)


def cost(sequences: list[list[int]]) -> float:
    """Distinct beginnings; each attends to every token of itself."""
    nodes = {tuple(s[: n + 1]) for s in sequences for n in range(len(s))}
    return len(nodes) + PAIR_COST * sum(map(len, nodes))


def merit(pieces: list[list[list[int]]]) -> tuple[int, int, float]:
    """Distinct tokens, micro-batches, unevenness: the less, the better, in this order."""
    return (
        sum(build_tree(piece).num_nodes for piece in pieces),
        len(pieces),
        sum(cost(piece) ** 2 for piece in pieces),
    )


def every_split(ordered: list[list[int]], limit: int):
    """All ways of cutting the list whose pieces keep the limit or are a single sequence."""
    for number in range(len(ordered)):
        for cuts in combinations(range(1, len(ordered)), number):
            pieces = [ordered[i:j] for i, j in pairwise((0, *cuts, len(ordered)))]
            if all(len(piece) == 1 or build_tree(piece).num_nodes <= limit for piece in pieces):
                yield pieces


@pytest.mark.slow
@settings(max_examples=examples(60), derandomize=True)
@given(sequences_of_few_letters, st.integers(1, 30))
@example([[1, 1, 1, 1, 1], [1, 1, 1, 1, 2], [1, 1, 1, 1, 0], [2, 2, 2], [2, 2, 1]], 7)
def test_no_other_split_recomputes_less(sequences, limit):
    (split,) = spread(sequences, limit, 1, pair_cost=PAIR_COST)
    found = merit([[sequences[i] for i in piece] for piece in split])
    best = min(merit(pieces) for pieces in every_split(sorted(sequences), limit))
    assert found[:2] == best[:2]
    assert found[2] == pytest.approx(best[2])


@given(sequences_of_few_letters, st.integers(1, 40), st.integers(1, 5), st.booleans())
def test_every_sample_is_in_one_micro_batch_of_one_rank(sequences, limit, ranks, merge):
    dealt = spread(sequences, limit, ranks, merge=merge, pair_cost=PAIR_COST)
    assert len(dealt) == ranks

    pieces = [piece for of_rank in dealt for piece in of_rank]
    assert sorted(index for piece in pieces for index in piece) == list(range(len(sequences)))
    for piece in pieces:
        assert (
            len(piece) == 1
            or build_tree([sequences[index] for index in piece], merge=merge).num_nodes <= limit
        )

    counts = [len(of_rank) for of_rank in dealt]
    assert max(counts) - min(counts) <= (1 if len(pieces) == len(sequences) else 0)


@given(sequences_of_few_letters, st.integers(4, 40), st.integers(2, 5))
def test_ranks_differ_by_no_more_than_their_micro_batches(sequences, limit, ranks):
    dealt = spread(sequences, limit, ranks, pair_cost=PAIR_COST)
    if len({len(of_rank) for of_rank in dealt}) == 1:
        costs = [
            [cost([sequences[index] for index in piece]) for piece in of_rank] for of_rank in dealt
        ]
        loads = [sum(of_rank) for of_rank in costs]
        single = [x for of_rank in costs for x in of_rank]
        assert max(loads) - min(loads) <= max(single) - min(single) + 1e-9


@pytest.mark.slow
@settings(max_examples=examples(60), derandomize=True)
@given(sequences_of_few_letters, st.integers(4, 40), st.integers(2, 3))
def test_no_other_split_over_ranks_has_a_much_cheaper_worst_micro_batch(sequences, limit, ranks):
    pieces = [
        piece
        for of_rank in spread(sequences, limit, ranks, pair_cost=PAIR_COST)
        for piece in of_rank
    ]
    worst = max(cost([sequences[index] for index in piece]) for piece in pieces)
    others = [
        max(map(cost, split))
        for split in every_split(sorted(sequences), limit)
        if len(split) == len(pieces)
    ]
    assert worst <= min(others) * 1.002


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_of_a_realistic_step_are_even(ranks):
    """16 groups of 8 answers of very different lengths."""
    rng = random.Random(ranks)
    sequences = []
    for _ in range(16):
        prompt = [rng.randrange(1000) for _ in range(rng.randrange(100, 600))]
        sequences += [
            [*prompt, *(rng.randrange(1000) for _ in range(rng.randrange(20, 800)))]
            for _ in range(8)
        ]

    dealt = spread(sequences, 8192, ranks)
    loads = [
        sum(build_tree([sequences[index] for index in piece]).num_nodes for piece in of_rank)
        for of_rank in dealt
    ]
    assert max(loads) < 1.06 * sum(loads) / ranks
    assert sum(loads) < 1.06 * build_tree(sequences).num_nodes, "groups are hardly cut"


def test_samples_of_one_prompt_stay_together():
    rng = random.Random(1)
    prompt = [rng.randrange(2, 97) for _ in range(40)]
    sequences = [
        [*prompt, 50 + seed, *(rng.randrange(2, 97) for _ in range(4))] for seed in range(8)
    ]
    assert [len(piece) for piece in split_by_tokens(sequences, 80)] == [8]
    assert [len(piece) for piece in split_by_tokens(sequences, 79)] == [4, 4]
    assert [len(piece) for piece in split_by_tokens(sequences, 80, merge=False)] == [1] * 8


def test_nothing_to_spread():
    assert split_by_tokens([], 64) == []
    assert spread([], 64, 3) == [[], [], []]
