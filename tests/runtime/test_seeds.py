"""Seeds: equal parts give equal seeds anywhere, different ones unrelated seeds."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st

from agentevo.runtime.seeds import derive_seed

parts = st.lists(st.integers() | st.text(string.printable, max_size=8), max_size=4)


def test_a_seed_is_the_same_on_every_machine_for_ever():
    """A number written down: another one would change every stored run's random choices."""
    assert derive_seed(0, "train", 7) == 2536648068798368005
    assert derive_seed() == derive_seed()


@given(parts, parts)
def test_different_parts_give_different_seeds(one, other):
    assert (derive_seed(*one) == derive_seed(*other)) == (one == other)


@given(parts)
def test_a_seed_is_a_63_bit_number(one):
    assert 0 <= derive_seed(*one) < 2**63


def test_types_and_borders_of_parts_count():
    assert (
        len(
            {
                derive_seed(1, 2),
                derive_seed("1", 2),
                derive_seed(12),
                derive_seed("12"),
                derive_seed(1, 2, ""),
            }
        )
        == 5
    )
