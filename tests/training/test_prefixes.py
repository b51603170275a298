"""Sequences in sorted order."""

from __future__ import annotations

from itertools import pairwise, takewhile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentevo.training.prefixes import sort_sequences

ids = st.one_of(st.integers(0, 2), st.sampled_from([255, 256, 257, 65536, 2**31 - 1]))
sequences_of_all_sizes = st.lists(st.lists(ids, max_size=9), max_size=9)


@given(sequences_of_all_sizes, st.booleans())
def test_order_and_shared_beginnings(sequences, as_arrays):
    found = sort_sequences(
        [np.array(s, dtype=np.int64) for s in sequences] if as_arrays else sequences
    )
    assert found.order == sorted(range(len(sequences)), key=lambda i: sequences[i])

    in_order = [sequences[i] for i in found.order]
    assert [tokens.tolist() for tokens in found.tokens] == in_order

    common = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*two, strict=False)))
        for two in pairwise(in_order)
    ]
    assert found.shared.tolist() == [0, *common][: len(sequences)]


@given(sequences_of_all_sizes)
def test_without_merging_nothing_is_shared(sequences):
    found = sort_sequences(sequences, merge=False)
    assert found.order == list(range(len(sequences)))
    assert [tokens.tolist() for tokens in found.tokens] == sequences
    assert not found.shared.any()
