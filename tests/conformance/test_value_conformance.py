"""The critic's loss against loops; gradients; no influence of garbage, padding, order, or split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from by_name import aggregation_weights
from hypothesis import given, settings
from hypothesis import strategies as st

from agentevo.algorithms.aggregation import AGGREGATIONS
from agentevo.algorithms.value import explained_variance, value_loss
from examples import examples

from . import slow_aggregation as slow


@st.composite
def batches(draw):
    rows = draw(st.integers(1, 5))
    tokens = draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    mask = rng.random((rows, tokens)) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    mask[rng.random(rows) < 0.2] = False
    garbage = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    spread = draw(st.sampled_from([0.0, 0.3, 3.0]))
    columns = [
        np.where(mask, rng.normal(size=mask.shape) * scale, garbage) for scale in (1.0, spread, 0.5)
    ]
    return (*columns, mask)


def tensors(batch):
    return [torch.tensor(column) for column in batch]


@settings(deadline=None)
@given(batches(), st.sampled_from([None, 0.05, 0.2, 2.0]), st.sampled_from(list(AGGREGATIONS)))
def test_equals_the_loops(batch, clip, aggregation):
    values, returns, old, mask = batch
    hyper = {"norm": 3.0} if aggregation == "seq-mean-token-sum-norm" else {}
    v, target, before, bits = tensors(batch)
    weights = aggregation_weights(aggregation, bits, **hyper)
    loss, metrics = value_loss(v, target, bits, old_values=before, clip=clip, weights=weights)
    losses = slow.value_loss(values, returns, mask, old, clip)
    assert loss.item() == pytest.approx(
        slow.aggregate(aggregation, losses, mask, **hyper), rel=1e-12, abs=1e-14
    )

    plain = slow.value_loss(values, returns, mask)
    trained = max(mask.sum(), 1)
    assert metrics["vf_clipfrac"].item() == pytest.approx((losses > plain).sum() / trained)

    r = returns[mask]
    v = values[mask]
    explained = 1 - np.var(r - v) / np.var(r) if len(set(r.tolist())) > 1 else 0.0
    measured = explained_variance(*tensors(batch)[:2], bits).item()
    assert measured == pytest.approx(explained, rel=1e-9, abs=1e-9)
    assert all(torch.isfinite(metric) for metric in metrics.values())


@settings(deadline=None, max_examples=examples(40))
@given(batches(), st.sampled_from([None, 0.2]))
def test_gradients_equal_finite_differences(batch, clip):
    v, target, before, bits = tensors(batch)
    v = torch.where(bits, v, 0.0).requires_grad_()
    weights = aggregation_weights("token-mean", bits)

    def loss(x):
        return value_loss(x, target, bits, old_values=before, clip=clip, weights=weights)[0]

    assert torch.autograd.gradcheck(loss, (v,), atol=1e-6)


@settings(deadline=None)
@given(batches(), st.integers(1, 3))
def test_micro_batches_padding_order_and_garbage(batch, size):
    v, target, before, bits = tensors(batch)
    whole = v.clone().requires_grad_()
    parts = v.clone().requires_grad_()
    weights = aggregation_weights("token-mean", bits)
    loss, _ = value_loss(whole, target, bits, old_values=before, clip=0.2, weights=weights)
    loss.backward()
    assert torch.isfinite(whole.grad).all() and (whole.grad[~bits] == 0).all()

    total = 0.0
    for start in range(0, len(v), size):
        part = slice(start, start + size)
        own = (parts[part], target[part], bits[part])
        piece, _ = value_loss(*own, old_values=before[part], clip=0.2, weights=weights[part])
        piece.backward()
        total += piece.item()

    assert total == pytest.approx(loss.item(), rel=1e-12)

    torch.testing.assert_close(whole.grad, parts.grad, rtol=0, atol=0)
    columns = (v, target, bits, before, weights)
    *own, old, of_token = [torch.nn.functional.pad(t.flip(0), (2, 1)) for t in columns]
    flipped, _ = value_loss(*own, old_values=old, clip=0.2, weights=of_token)
    assert flipped.item() == pytest.approx(loss.item(), rel=1e-12)


def test_single_precision_and_equal_returns():
    v = torch.tensor([[0.5, 1.5]])
    target = torch.full((1, 2), 0.1)
    mask = torch.ones(1, 2, dtype=torch.bool)
    half = torch.full((1, 2), 0.5)
    loss, _ = value_loss(v, target, mask, old_values=None, clip=None, weights=half)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(0.5 * (0.16 + 1.96) / 2)
    assert explained_variance(v, target, mask).item() == 0


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"clip": 0.2}, "needs old_values"),
        ({"old_values": torch.ones(2, 2)}, "old_values: shape"),
        ({"weights": torch.ones(1, 1)}, "weights: shape"),
    ],
)
def test_refusals_say_what_to_do(extra, words):
    ones = torch.ones(1, 2)
    given = {"old_values": None, "clip": None, "weights": ones} | extra
    with pytest.raises(ValueError, match=words):
        value_loss(ones, ones, ones.bool(), **given)
