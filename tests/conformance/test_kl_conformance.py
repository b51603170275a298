"""KL estimates against Schulman's definitions, their gradients, the bound, and the controllers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from by_name import aggregate, kl
from hypothesis import given, settings
from hypothesis import strategies as st

from agentevo.algorithms.divergence import KL, KLController
from examples import examples

from . import slow_kl as slow

names = st.sampled_from(list(KL))
logprobs = st.floats(-60, 0)
pairs = st.lists(st.tuples(logprobs, logprobs), min_size=1, max_size=8)


def tensors(rows, dtype=torch.float64):
    logp, ref = (torch.tensor([column], dtype=dtype) for column in zip(*rows, strict=True))
    return logp.requires_grad_(), ref


@pytest.mark.parametrize("name", KL)
def test_every_estimate_has_a_definition(name):
    d = 0.5
    assert kl(name, torch.tensor([[d - 1.0]]), torch.tensor([[-1.0]])).item() == pytest.approx(
        slow.value(name, d - 1.0, -1.0)
    )


@settings(deadline=None)
@given(names, pairs)
def test_values_and_gradients_equal_the_definitions(name, rows):
    logp, ref = tensors(rows)
    result = kl(name, logp, ref)
    result.sum().backward()

    # exp(-d) - 1 of the definition has lost the digits below 1e-16 that expm1 keeps
    np.testing.assert_allclose(
        result.detach()[0], [slow.value(name, *row) for row in rows], rtol=1e-11, atol=1e-14
    )
    np.testing.assert_allclose(
        logp.grad[0], [slow.gradient(name, *row) for row in rows], rtol=1e-11, atol=1e-14
    )


@settings(deadline=None, max_examples=examples(30))
@given(
    st.sampled_from([name for name in KL if not name.endswith("+")]),
    st.lists(st.tuples(st.floats(-6, -0.1), st.floats(-6, -0.1)), min_size=1, max_size=5),
)
def test_gradients_equal_finite_differences_inside_the_bound(name, rows):
    rows = [(a, b) for a, b in rows if abs(a - b) > 1e-3] or [(-1.0, -2.0)]
    logp, ref = tensors(rows)
    assert torch.autograd.gradcheck(lambda x: kl(name, x, ref), (logp,))


@settings(deadline=None)
@given(names, st.lists(st.tuples(*[st.floats(-(2.0**127), 2.0**127)] * 2), min_size=1, max_size=5))
def test_finite_input_gives_finite_values_and_gradients(name, rows):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        logp, ref = (
            t.detach().clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
            for t in tensors(rows)
        )
        logp.requires_grad_()
        result = kl(name, logp, ref)
        result.sum().backward()
        assert result.dtype == dtype
        assert torch.isfinite(result).all() and torch.isfinite(logp.grad).all()


def test_a_token_that_ran_away_is_still_pulled_back():
    for name, expected in (
        ("k1", 1),
        ("abs", -1),
        ("k2", -20),
        ("k3", 1 - np.exp(20)),
        ("k1+", -20),
        ("k3+", -20),
    ):
        logp, ref = tensors([(-55.0, -1.0)])
        kl(name, logp, ref).sum().backward()
        assert logp.grad.item() == pytest.approx(expected)


def test_small_differences_keep_their_digits_in_single_precision():
    d = 1e-3
    logp, ref = tensors([(-1.0 + d, -1.0)])
    single = kl("k3", logp.detach().float() * 0 + d, ref.float() * 0)
    assert single.item() == pytest.approx(
        d * d / 2 - d**3 / 6, rel=1e-3
    )  # exp(-d) - 1 + d: rel=0.1


@settings(deadline=None)
@given(names, pairs)
def test_garbage_at_masked_places_reaches_neither_value_nor_gradient(name, rows):
    logp, ref = tensors([*rows, (0.0, 0.0)])
    mask = torch.ones_like(logp)
    mask[0, -1] = 0
    for garbage in (torch.nan, torch.inf, -torch.inf):
        spoilt = logp.detach().clone()
        spoilt[0, -1] = garbage
        spoilt.requires_grad_()

        spoilt_ref = torch.where(mask.bool(), ref, garbage)
        result = kl(name, spoilt, spoilt_ref, mask)
        aggregate("token-mean", result, mask).backward()
        assert result[0, -1] == 0 and spoilt.grad[0, -1] == 0

        torch.testing.assert_close(result[:, :-1], kl(name, logp, ref)[:, :-1], rtol=0, atol=0)
        assert torch.isfinite(spoilt.grad).all()


def test_straight_through_is_unbiased_where_k2_is_and_reference_gets_no_gradient():
    logp, ref = tensors([(-1.0, -2.0)])
    ref.requires_grad_()
    kl("k3", logp, ref).sum().backward()
    assert ref.grad is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: kl("k4", torch.ones(1, 1), torch.ones(1, 1)), "k1|k2|k3"),
        (lambda: kl("k1", torch.ones(1, 1), torch.ones(1, 2)), "same tokens"),
        (lambda: kl("k1", torch.ones(1, 1), torch.ones(1, 1), torch.ones(2, 1)), "same tokens"),
        (lambda: KLController(0.1, 0.1, 10).update(float("nan"), 4), "finite"),
    ],
)
def test_refusals_say_what_to_do(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@given(
    st.floats(0, 1),
    st.floats(0.01, 1),
    st.integers(1, 500),
    st.lists(st.tuples(st.floats(-1, 5), st.integers(0, 2000)), max_size=20),
)
def test_adaptive_controller_follows_the_rule_and_survives_a_restart(coef, target, horizon, steps):
    one = KLController(coef, target, horizon)
    two = KLController(coef, target, horizon)
    for measured, n in steps:
        one.update(measured, n)
        two.update(measured, n)
        fresh = KLController(0.5, target, horizon)
        fresh.load_state_dict(json.loads(json.dumps(two.state_dict())))
        two = fresh

    assert (
        one.coef
        == two.coef
        == pytest.approx(slow.adaptive(coef, target, horizon, steps), rel=1e-12)
    )
    assert one.coef >= 0


def test_a_fixed_coefficient_stays_that_of_the_configuration():
    fixed = KLController(0.001)
    fixed.update(9.0, 64)
    fixed.load_state_dict({"coef": 3.0})
    assert fixed.coef == 0.001
