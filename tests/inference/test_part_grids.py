"""What changed of a tensor that lies in boxes, each of which a process has."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentevo.errors import EngineError
from agentevo.inference.weights.weight_delta import (
    box_keys,
    change_of,
    checksum,
    combine_checksums,
    with_delta,
)
from agentevo.models.compute.parts import Box, boxes_of, grid_of
from examples import examples


@st.composite
def grids(draw):
    """(shape, grid)."""
    shape = draw(st.lists(st.integers(1, 7), max_size=3))
    return shape, [
        [0, *sorted(draw(st.sets(st.integers(1, length - 1), max_size=3)) if length > 1 else ())]
        for length in shape
    ]


@settings(max_examples=examples(60), deadline=None)
@given(case=grids(), share=st.sampled_from([0.0, 0.1, 0.9]), seed=st.integers(0, 99))
def test_what_changed_of_boxes_is_what_changed_of_the_tensor(case, share, seed):
    """Each box is compared by itself, as by a process that has it alone."""
    shape, grid = case
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(shape, generator=generator).bfloat16()
    new = torch.where(torch.rand(shape, generator=generator) < share, -old, old)
    boxes = boxes_of(grid, shape)
    assert sum(torch.zeros(box.sizes).numel() for box in boxes) == new.numel()
    assert grid_of(random.Random(seed).sample(boxes, len(boxes)), shape) == grid

    change = {
        f"{kind}:{key}": tensor
        for key, box in zip(box_keys("w", len(boxes)), boxes, strict=True)
        for kind, tensor in change_of(old[box.slices], new[box.slices].contiguous()).items()
    }
    kept = old.clone()
    several = {"w": grid} if len(boxes) > 1 else {}
    found = with_delta({"w": old, "other": old}, change, several)
    assert torch.equal(found["w"], new)
    assert torch.equal(old, kept)
    assert found["other"] is old

    if several:
        whole = checksum(found["w"], grid)
        assert whole == combine_checksums(checksum(new[box.slices]) for box in boxes)
        flipped = new.clone()
        flipped.view(torch.int16).view(-1)[-1] ^= 1
        assert checksum(flipped, grid) != whole


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0,), (3,))],
        [Box((0,), (3,)), Box((2,), (2,))],
        [Box((0,), (2,)), Box((2,), (2,)), Box((2,), (2,))],
    ],
)
def test_boxes_that_do_not_fill_a_tensor_are_none_of_it(boxes):
    with pytest.raises(ValueError, match=r"begin at|of a tensor"):
        grid_of(boxes, (4,))


@pytest.mark.parametrize(
    ("change", "grid", "problem"),
    [
        ({"whole:w#0": torch.zeros(1)}, [[0, 2], [0]], "is torch.float32 \\(1,\\)"),
        ({"whole:w#2": torch.zeros(2, 4)}, [[0, 2], [0]], "an entry"),
        ({"gaps:w#1": torch.zeros(1, dtype=torch.uint8)}, [[0, 2], [0]], "no values"),
        ({}, [[0, 2]], "a grid of w"),
        ({}, [[0, 4], [0]], "a grid of w"),
        ({}, [[2, 0], [0]], "a grid of w"),
    ],
)
def test_what_can_not_be_of_boxes_is_refused(change, grid, problem):
    with pytest.raises(EngineError, match=problem):
        with_delta({"w": torch.zeros(4, 4)}, change, {"w": grid})
