"""The token tree: what sequences share is there once, and attention over it is each sequence's
own."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from agentevo.training.tree import build_tree, segments

sequences_of_few_letters = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9
)


@given(sequences_of_few_letters)
@example([[1, 2], [1, 2]])
@example([[1], [1, 2], [1, 2, 0], [0]])
def test_a_tree_holds_each_distinct_beginning_once(sequences):
    tree = build_tree(sequences)
    assert tree.num_nodes == len({tuple(s[: n + 1]) for s in sequences for n in range(len(s))})
    for sequence, path in zip(sequences, tree.paths, strict=True):
        assert tree.ids[path].tolist() == sequence
        assert tree.positions[path].tolist() == list(range(len(sequence)))
        for node in path:
            below = {int(n) for other in tree.paths if node in other for n in other[other >= node]}
            assert below == set(range(node, tree.ends[node])), (
                "what lies below a node follows it without a gap"
            )

    found = segments(tree)
    assert [node for one in found for node in range(one.first, one.last)] == list(
        range(tree.num_nodes)
    )
    for one in found:
        assert (
            len({tuple(tree.ends[one.first : one.last])}) == 1 and one.end == tree.ends[one.first]
        )


@given(sequences_of_few_letters, st.randoms(use_true_random=False))
def test_the_tree_does_not_depend_on_the_order_of_sequences(sequences, rng):
    shuffled = list(sequences)
    rng.shuffle(shuffled)
    one = build_tree(sequences)
    other = build_tree(shuffled)
    assert one.ids.tolist() == other.ids.tolist()
    assert one.positions.tolist() == other.positions.tolist()


@given(sequences_of_few_letters)
def test_without_merging_every_sequence_is_a_trunk_of_its_own(sequences):
    tree = build_tree(sequences, merge=False)
    assert sorted(node for path in tree.paths for node in path) == list(
        range(sum(map(len, sequences)))
    )
    for sequence, path in zip(sequences, tree.paths, strict=True):
        assert tree.ids[path].tolist() == sequence
        assert tree.positions[path].tolist() == list(range(len(sequence)))
