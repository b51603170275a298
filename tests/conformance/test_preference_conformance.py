"""Preference losses against the papers' formulas pair by pair; gradients; no influence of the
order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from by_name import preference_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from agentevo.algorithms.preference import PREFERENCE_LOSSES
from examples import examples

from . import slow_preference as slow

names = st.sampled_from(list(PREFERENCE_LOSSES))
HYPERS = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.1},
    "ipo": {"beta": 0.4},
    "kto": {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7},
    "orpo": {"coef": 0.4},
    "spin": {"beta": 0.2},
    "sppo": {"beta": 0.05},
    "rft": {},
}


@st.composite
def inputs(draw, name, spread=None):
    count = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.5, 20.0, 600.0])) if spread is None else spread
    found = {}
    for key in PREFERENCE_LOSSES[name].needs:
        if key.endswith("lengths"):
            found[key] = torch.tensor(rng.integers(1, 40, count))
        elif key == "desirable":
            found[key] = torch.tensor(rng.random(count) < 0.5)
        elif key == "kl_baseline":
            found[key] = draw(st.sampled_from([-1.0, 0.0, 0.7]))
        else:
            found[key] = torch.tensor(-rng.exponential(scale, count) - 0.01)

    if name == "sppo" and draw(st.booleans()):
        found["chosen_win_prob"] = torch.tensor(rng.random(count))
        if draw(st.booleans()):
            found["rejected_win_prob"] = torch.tensor(rng.random(count))

    return found


def cases(spread=None):
    return names.flatmap(lambda name: st.tuples(st.just(name), inputs(name, spread)))


def one(name, given_inputs, index):
    """The slow loss of one pair."""
    row = {
        key: value if isinstance(value, float) else value[index].item()
        for key, value in given_inputs.items()
    }
    win = (
        [row.pop("chosen_win_prob", 1.0), row.pop("rejected_win_prob", None)]
        if name == "sppo"
        else []
    )
    return getattr(slow, name)(*row.values(), *HYPERS[name].values(), *win)


def num_pairs(name, given_inputs):
    return len(given_inputs[PREFERENCE_LOSSES[name].needs[0]])


def policy_keys(name):
    return [
        key
        for key in PREFERENCE_LOSSES[name].needs
        if key in ("chosen_logp", "rejected_logp", "logp")
    ]


def test_every_preference_loss_has_a_case():
    assert set(PREFERENCE_LOSSES) == set(HYPERS)


@settings(deadline=None)
@given(cases())
def test_equals_the_papers_formulas(case):
    name, data = case
    loss, metrics = preference_loss(name, **data, **HYPERS[name])
    expected = np.mean([one(name, data, index) for index in range(num_pairs(name, data))])
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert all(torch.isfinite(metric) for metric in metrics.values())
    assert name == "rft" or 0 <= metrics["accuracy"] <= 1


@settings(deadline=None, max_examples=examples(60))
@given(cases(spread=2.0))
def test_gradients_equal_finite_differences(case):
    name, data = case
    keys = policy_keys(name)
    leaves = [data[key].clone().requires_grad_() for key in keys]

    def loss(*policy):
        return preference_loss(
            name, **{**data, **dict(zip(keys, policy, strict=True))}, **HYPERS[name]
        )[0]

    assert torch.autograd.gradcheck(loss, leaves, atol=1e-5, rtol=1e-4)


@settings(deadline=None)
@given(cases())
def test_the_order_of_pairs_does_not_matter(case):
    name, data = case
    keys = policy_keys(name)

    def flipped(values):
        return {k: v if isinstance(v, float) else v.flip(0) for k, v in values.items()}

    found = []
    for inputs in (data, flipped(data)):
        leaves = {key: inputs[key].clone().requires_grad_() for key in keys}
        loss, _ = preference_loss(name, **{**inputs, **leaves}, **HYPERS[name])
        loss.backward()
        found.append((loss.item(), {key: leaf.grad for key, leaf in leaves.items()}))

    assert found[1][0] == pytest.approx(found[0][0], rel=1e-9)

    torch.testing.assert_close(flipped(found[1][1]), found[0][1], rtol=1e-12, atol=1e-15)


@settings(deadline=None)
@given(
    names,
    st.sampled_from([0.0, -1e-12, -1e-3, -60.0, -1e4]),
    st.sampled_from([0.0, -1e-3, -60.0, -1e4]),
)
def test_extremes_stay_finite_in_single_precision(name, chosen, rejected):
    data = {}
    for key in PREFERENCE_LOSSES[name].needs:
        value = {
            "chosen_lengths": 1,
            "rejected_lengths": 7,
            "desirable": 1,
            "kl_baseline": 0.1,
        }.get(key, rejected if "rej" in key else chosen)
        data[key] = torch.tensor([value], dtype=torch.bool if key == "desirable" else torch.float32)

    for key in PREFERENCE_LOSSES[name].needs:
        if key.startswith("ref"):
            data[key] = torch.tensor([-30.0])

    keys = policy_keys(name)
    for key in keys:
        data[key].requires_grad_()

    loss, metrics = preference_loss(name, **data)
    loss.backward()
    assert loss.dtype == torch.float32 and torch.isfinite(loss)
    assert all(torch.isfinite(data[key].grad).all() for key in keys) and all(
        torch.isfinite(m) for m in metrics.values()
    )


def test_metrics_say_who_is_ahead():
    data = {
        "chosen_logp": torch.tensor([-1.0, -4.0]),
        "rejected_logp": torch.tensor([-3.0, -2.0]),
        "ref_chosen_logp": torch.tensor([-2.0, -2.0]),
        "ref_rejected_logp": torch.tensor([-2.0, -2.0]),
    }
    _, metrics = preference_loss("dpo", **data, beta=0.5)
    assert {key: value.item() for key, value in metrics.items()} == {
        "reward_chosen": -0.25,
        "reward_rejected": -0.25,
        "reward_margin": 0.0,
        "accuracy": 0.5,
    }


def test_no_pairs_are_no_loss():
    nothing = torch.zeros(0)
    for name in ("dpo", "ipo", "spin", "sppo"):
        loss, _ = preference_loss(name, **dict.fromkeys(PREFERENCE_LOSSES[name].needs, nothing))
        assert loss.item() == 0


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("dpp", {}, "dpo"),
        ("kto", {}, "needs logp, ref_logp, desirable"),
        ("dpo", {"beta": 0.0}, "above 0"),
        ("dpo", {"label_smoothing": 0.7}, "at most 0.5"),
        ("ipo", {"rejected_logp": torch.ones(3)}, "one entry per pair"),
        ("orpo", {"chosen_lengths": torch.tensor([0, 1])}, "without tokens"),
        ("sppo", {"chosen_win_prob": torch.tensor([0.5, 1.5])}, "between 0 and 1"),
        (
            "sppo",
            {"rejected_win_prob": torch.tensor([-0.5, 0.5])},
            "rejected_win_prob must lie between 0 and 1",
        ),
        ("dpo", {"chosen_logp": torch.ones(2, 2)}, "shape .pairs."),
    ],
)
def test_refusals_say_what_to_do(name, change, words):
    keys = (
        "chosen_logp",
        "rejected_logp",
        "ref_chosen_logp",
        "ref_rejected_logp",
        "chosen_lengths",
        "rejected_lengths",
    )
    data = {key: torch.ones(2) for key in keys} | change
    with pytest.raises(ValueError, match=words):
        preference_loss(name, **data)
