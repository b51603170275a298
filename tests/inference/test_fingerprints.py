"""Two tensors of one dtype and shape have one fingerprint exactly if they have the same bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentevo.inference.weights import fingerprints
from agentevo.inference.weights.fingerprints import fingerprint

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int64]
SIZES = [1, 3, 7, 8, 9, 1000, 9_001]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(fingerprints, "CHUNK", 64)
    fingerprints._factors.cache_clear()
    yield
    fingerprints._factors.cache_clear()


def some(dtype, size, seed=0):
    bits = torch.randint(
        0,
        256,
        (size * dtype.itemsize,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    return bits.view(dtype)


def bits_of(tensor):
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_one_flipped_bit_is_found_wherever_it_is(dtype, size):
    tensor = some(dtype, size)
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before

    for byte in {0, size * dtype.itemsize // 2, size * dtype.itemsize - 1}:
        for bit in (0, 7):
            bits_of(tensor)[byte] ^= 1 << bit
            assert fingerprint(tensor) != before
            bits_of(tensor)[byte] ^= 1 << bit

    assert fingerprint(tensor) == before


@given(st.integers(0, 2**32), st.integers(0, 2999), st.integers(0, 2999))
def test_two_exchanged_elements_are_found(seed, one, other):
    tensor = some(torch.int16, 3000, seed)
    changed = tensor.clone()
    changed[[one, other]] = changed[[other, one]]
    same = torch.equal(tensor, changed)
    assert (fingerprint(tensor) == fingerprint(changed)) == same


def test_a_block_that_lies_elsewhere_is_found():
    """Of the size of a chunk, where only the chunk's factor tells them apart."""
    block = some(torch.int64, 64)
    zeros = torch.zeros(64, dtype=torch.int64)
    found = {
        fingerprint(torch.cat([block if place == at else zeros for place in range(6)]))
        for at in range(6)
    }
    assert len(found) == 6


def test_values_that_compare_equal_or_never_are_told_apart_by_their_bits():
    zero = torch.tensor([0.0, 1.0])
    assert fingerprint(zero) != fingerprint(torch.tensor([-0.0, 1.0]))
    quiet, other = (
        torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        for bits in (0x7FC00000, 0x7FC00001)
    )
    assert quiet.isnan() and other.isnan()
    assert fingerprint(quiet) == fingerprint(quiet.clone()) != fingerprint(other)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_lies_strangely_in_memory_has_the_fingerprint_of_its_values(dtype):
    tensor = some(dtype, 30_000).reshape(100, 300)
    assert fingerprint(tensor.T) == fingerprint(tensor.T.contiguous()) != fingerprint(tensor)
    assert fingerprint(tensor.flatten()[1:]) == fingerprint(tensor.flatten()[1:].clone())
    assert fingerprint(tensor[:, ::2]) == fingerprint(tensor[:, ::2].contiguous())


def test_empty_and_0_dim_tensors_have_one():
    assert fingerprint(torch.empty(0, 3)) == fingerprint(torch.empty(0, dtype=torch.int8))
    assert fingerprint(torch.tensor(2.0)) == fingerprint(torch.tensor([2.0]))
    assert fingerprint(torch.tensor(2.0)) != fingerprint(torch.tensor(3.0))


def test_it_is_the_formula_of_the_docstring():
    """In Python's own integers."""
    tensor = some(torch.int64, 200)
    words = [word % 2**64 for word in tensor.tolist()]
    odd = fingerprints._odd
    sums = [
        sum(
            word * odd(2 * (place % 64) + which) * odd(2 * (place // 64) + which + 2**40)
            for place, word in enumerate(words)
        )
        % 2**64
        for which in (0, 1)
    ]
    assert fingerprint(tensor) == f"{sums[0]:016x}{sums[1]:016x}"
