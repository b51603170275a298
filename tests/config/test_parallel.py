"""How processes share a training is refused where their number doesn't allow it."""

from __future__ import annotations

import pytest

from agentevo.config import ParallelSection


@pytest.mark.parametrize(
    ("sizes", "world", "replicas"),
    [({}, 1, 1), ({}, 4, 4), ({"shard": 2}, 4, 2), ({"shard": 2, "tensor": 2, "expert": 2}, 8, 2)],
)
def test_what_is_left_over_are_replicas(sizes, world, replicas):
    assert ParallelSection(**sizes).replicas(world) == replicas


def test_sizes_that_do_not_divide_the_processes_are_refused():
    with pytest.raises(ValueError, match="shard=3 x tensor=1 x context=1 is 3, which does not"):
        ParallelSection(shard=3).replicas(4)
    with pytest.raises(ValueError, match="expert=4 does not divide the 2 processes"):
        ParallelSection(shard=2, tensor=2, expert=4).replicas(4)
