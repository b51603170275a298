"""The token tree: what sequences share is there once, and attention over it is each sequence's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentevo.training.tree import TreeAttention, build_tree

sequences_of_few_letters = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)


@given(sequences_of_few_letters)
@example([[1, 2], [1, 2]])
@example([[1], [1, 2], [1, 2, 0], [0]])
def test_a_tree_holds_each_distinct_beginning_once(sequences):
    tree = build_tree(sequences)
    assert tree.num_nodes == len({tuple(s[: n + 1]) for s in sequences for n in range(len(s))})
    for sequence, path in zip(sequences, tree.paths, strict=True):
        assert tree.ids[path].tolist() == sequence
        assert tree.positions[path].tolist() == list(range(len(sequence)))
    added = [node for first, count, _ in tree.runs for node in range(first, first + count)]
    assert added == list(range(tree.num_nodes)), "every node is some run's query, in order"
    for first, count, path in tree.runs:
        assert path[-count:].tolist() == list(range(first, first + count))


@given(sequences_of_few_letters, st.randoms(use_true_random=False))
def test_the_tree_does_not_depend_on_the_order_of_sequences(sequences, rng):
    shuffled = list(sequences)
    rng.shuffle(shuffled)
    one, other = build_tree(sequences), build_tree(shuffled)
    assert one.ids.tolist() == other.ids.tolist()
    assert one.positions.tolist() == other.positions.tolist()


@given(sequences_of_few_letters)
def test_without_merging_every_sequence_is_a_trunk_of_its_own(sequences):
    tree = build_tree(sequences, merge=False)
    assert sorted(node for path in tree.paths for node in path) == list(range(sum(map(len, sequences))))
    for sequence, path in zip(sequences, tree.paths, strict=True):
        assert tree.ids[path].tolist() == sequence
        assert tree.positions[path].tolist() == list(range(len(sequence)))


def attention_alone(q, k, v, scaling, window, softcap):
    """One sequence, [n, H, D], naively."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    out = torch.empty_like(q)
    for place in range(len(q)):
        first = 0 if window is None else max(0, place - window + 1)
        scores = torch.einsum("hd,khd->hk", q[place], k[first : place + 1]) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        out[place] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[first : place + 1])
    return out


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 1.5), (4, 2.0)])
def test_attention_over_the_tree_is_that_of_each_sequence_alone(window, softcap):
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(sequences_of_few_letters)
    @example([[i, *[1] * n] for i, n in ((0, 1), (1, 40), (2, 3), (3, 60))])
    def any_tree(sequences):
        tree = build_tree(sequences)
        generator = torch.Generator().manual_seed(len(sequences))
        q, k, v = (torch.randn(tree.num_nodes, heads, 8, generator=generator) for heads in (4, 2, 2))
        found = TreeAttention(tree, torch.device("cpu")).attend(0, q, k, v, 0.4, window, softcap)
        for path in map(torch.as_tensor, tree.paths):
            expected = attention_alone(q[path], k[path], v[path], 0.4, window, softcap)
            torch.testing.assert_close(found[path], expected, rtol=1e-5, atol=1e-5)

    any_tree()


def test_sequences_of_very_different_sizes_do_not_pad_each_other():
    """Padding inside attention stays within a small multiple of the work that has to be done."""
    rng = np.random.default_rng(0)
    sequences = [[index, *rng.integers(0, 50, size=length).tolist()] for index, length in enumerate([1, 2, 5, 30, 100, 400, 401, 3])]
    plan = TreeAttention(build_tree(sequences), torch.device("cpu"))
    padded = sum(bucket.queries.numel() * bucket.keys.shape[1] for bucket in plan.buckets)
    needed = sum(len(sequence) ** 2 for sequence in sequences)
    assert padded < 2 * needed
