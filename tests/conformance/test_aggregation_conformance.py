"""Aggregations against loops; no influence of garbage, padding, order, or split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from by_name import aggregate, aggregation_weights, weighted_sum
from hypothesis import given, settings
from hypothesis import strategies as st

from agentevo.algorithms.aggregation import AGGREGATIONS

from . import slow_aggregation as slow

names = st.sampled_from(list(AGGREGATIONS))


@st.composite
def batches(draw):
    """values [S, T] with NaN where untrained, mask with holes and empty rows, trajectory ids."""
    rows = draw(st.integers(1, 7))
    tokens = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    mask = rng.random((rows, tokens)) < draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    mask[rng.random(rows) < 0.2] = False
    values = np.where(
        mask, rng.normal(size=(rows, tokens)) * draw(st.sampled_from([1e-3, 1.0, 1e6])), np.nan
    )
    ids = [draw(st.sampled_from(["a", ("b", 1), 3])) for _ in range(rows)]
    return values, mask, ids


def hyper(name: str) -> dict[str, float]:
    return {"norm": 7.5} if name == "seq-mean-token-sum-norm" else {}


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_every_aggregation_has_loops(name):
    values = np.array([[1.0, 2.0], [5.0, 0.0]])
    mask = np.array([[True, True], [True, False]])
    result = aggregate(name, torch.tensor(values), torch.tensor(mask), **hyper(name))
    assert result.item() == pytest.approx(slow.aggregate(name, values, mask, **hyper(name)))


@settings(deadline=None)
@given(
    names, batches(), st.booleans(), st.sampled_from([torch.float64, torch.float32]), st.booleans()
)
def test_equals_the_loops(name, batch, with_ids, dtype, float_mask):
    values, mask, ids = batch
    ids = ids if with_ids else None
    tensor = torch.tensor(values, dtype=dtype)
    given_mask = torch.tensor(mask, dtype=torch.float32 if float_mask else torch.bool)
    result = aggregate(name, tensor, given_mask, trajectory_ids=ids, **hyper(name))
    assert result.dtype == dtype and result.shape == ()

    expected = slow.aggregate(name, values, mask, ids, **hyper(name))
    scale = np.abs(values[mask]).sum() + 1e-300
    assert abs(result.item() - expected) <= (1e-12 if dtype == torch.float64 else 1e-5) * scale


@pytest.mark.slow
@settings(deadline=None)
@given(names, batches(), st.integers(0, 3), st.randoms(use_true_random=False))
def test_padding_order_and_names_of_trajectories_do_not_matter(name, batch, extra, random):
    values, mask, ids = batch
    order = list(range(len(ids)))
    random.shuffle(order)
    renamed = [{"a": 9, ("b", 1): 4, 3: -2}[ids[place]] for place in order]
    plain = aggregate(
        name, torch.tensor(values), torch.tensor(mask), trajectory_ids=ids, **hyper(name)
    )

    padded_values = torch.nn.functional.pad(torch.tensor(values), (extra, 1), value=torch.inf)[
        order
    ]
    padded_mask = torch.nn.functional.pad(torch.tensor(mask), (extra, 1))[order]
    other = aggregate(name, padded_values, padded_mask, trajectory_ids=renamed, **hyper(name))
    torch.testing.assert_close(
        other, plain, rtol=1e-12, atol=1e-12 * (1 + np.nansum(np.abs(values)))
    )


@settings(deadline=None)
@given(names, batches(), st.integers(1, 4))
def test_micro_batches_with_the_whole_batchs_weights_add_up(name, batch, size):
    values, mask, ids = batch
    whole, parts = (torch.tensor(values, requires_grad=True) for _ in range(2))
    bits = torch.tensor(mask)
    loss = aggregate(name, whole, bits, trajectory_ids=ids, **hyper(name))
    loss.backward()

    weights = aggregation_weights(name, bits, trajectory_ids=ids, **hyper(name))
    total = 0.0
    for start in range(0, len(ids), size):
        part = slice(start, start + size)
        piece = weighted_sum(parts[part], weights[part], bits[part])
        piece.backward()
        total += piece.item()

    assert total == pytest.approx(
        loss.item(), rel=1e-12, abs=1e-12 * (1 + np.nansum(np.abs(values)))
    )

    torch.testing.assert_close(whole.grad, parts.grad, rtol=0, atol=0)
    torch.testing.assert_close(
        whole.grad, weights, rtol=0, atol=0
    )  # also: finite, and 0 where untrained


def test_no_rows_and_no_tokens_give_zero():
    for shape in ((0, 4), (3, 0), (2, 3)):
        for name in AGGREGATIONS:
            assert (
                aggregate(
                    name, torch.full(shape, torch.nan), torch.zeros(shape), **hyper(name)
                ).item()
                == 0
            )


def test_a_trajectory_counts_once_however_many_rows_it_has():
    values = torch.tensor([[1.0, 1.0], [1.0, 1.0], [5.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]])
    assert (
        aggregate("per-trajectory-token-mean", values, mask, trajectory_ids=["x", "x", "y"]).item()
        == 3
    )
    assert aggregate("seq-mean-token-mean", values, mask).item() == pytest.approx(7 / 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: aggregate("token-meen", torch.ones(1, 1), torch.ones(1, 1)), "token-mean"),
        (
            lambda: aggregate("seq-mean-token-sum-norm", torch.ones(1, 1), torch.ones(1, 1)),
            "needs norm",
        ),
        (
            lambda: aggregate(
                "seq-mean-token-sum-norm", torch.ones(1, 1), torch.ones(1, 1), norm=0.0
            ),
            "above 0",
        ),
        (
            lambda: aggregate("token-mean", torch.ones(1, 1), torch.ones(1, 1), norm=2.0),
            "no hyper-parameter",
        ),
        (
            lambda: aggregate(
                "per-trajectory-token-mean",
                torch.ones(2, 1),
                torch.ones(2, 1),
                trajectory_ids=["a"],
            ),
            "one per row",
        ),
    ],
)
def test_refusals_say_what_to_do(call, words):
    with pytest.raises(ValueError, match=words):
        call()
