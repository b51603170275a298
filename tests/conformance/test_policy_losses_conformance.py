"""Every policy loss against its slow float64 version, with gradients by central differences, and
what must not change it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import slow_policy_losses as slow
import torch
from by_name import aggregation_weights, batch_statistics, policy_loss, policy_terms
from hypothesis import given, settings
from hypothesis import strategies as st

from agentevo.algorithms import blocks
from agentevo.algorithms.entries import FUNCTION
from agentevo.algorithms.losses import POLICY_LOSSES, required_aggregation
from examples import examples

HYPER = {
    "ppo_clip": [{}, {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}],
    "gspo": [{}, {"clip_low": 0.3, "clip_high": 0.5}],
    "gspo_token": [{"clip_low": 0.3, "clip_high": 0.5}],
    "gmpo": [{}],
    "cispo": [{}, {"clip_low": 0.2, "clip_high": 0.3}],
    "sapo": [{}],
    "dppo_tv": [{}],
    "dppo_kl": [{}, {"cap": 2.0, "clip_low": 0.2}],
    "dro": [{"beta": 0.3}],
    "gpg": [{}],
    "reinforce": [{}],
    "clip_cov": [{"fraction": 0.3, "low": 0.0, "high": 100.0}, {"low": 0.5}],
    "kl_cov": [{"fraction": 0.3}, {}],
    "minirl": [
        {},
        {"token_level_loss": False},
        {"token_level_loss": False, "strict_in_bound": True, "skip_length_normalization": True},
    ],
    "decoupled_ppo": [{}, {"mode": "mask", "cap": 1.5}],
}
CASES = [(name, hyper) for name, choices in HYPER.items() for hyper in choices]
each_case = pytest.mark.parametrize(
    ("name", "hyper"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)]
)
shapes = st.tuples(st.integers(1, 4), st.integers(1, 5))


def batch(
    seed: int, shape: tuple[int, int], *, extreme: bool = False, garbage: bool = True
) -> dict[str, torch.Tensor]:
    """float64 inputs of every kind: holes, sometimes empty rows, advantages with zeros and ties;
    NaN and inf at untrained places."""
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) < 0.7
    if rng.random() < 0.3:
        mask[rng.integers(shape[0])] = False

    per_row = rng.choice([-1.3, -0.5, 0.0, 0.5, 0.5, 2.0], size=(shape[0], 1))
    advantages = (
        np.where(rng.random(shape) < 0.5, per_row, rng.normal(size=shape))
        if rng.random() < 0.5
        else np.broadcast_to(per_row, shape)
    )
    logp = -rng.exponential(1.0, shape) - 1e-3
    spread = 25.0 if extreme else 0.5

    def near() -> np.ndarray:
        return (
            np.minimum(logp + spread * rng.normal(size=shape).clip(-2.4, 2.4), -1e-4)
            if not extreme
            else logp + spread * rng.normal(size=shape).clip(-2.4, 2.4)
        )

    named = {
        "logp": logp,
        "old_logp": near(),
        "advantages": advantages,
        "rollout_logp": near(),
        "proximal_logp": near(),
    }
    rubbish = (
        rng.choice([np.nan, np.inf, -np.inf, 1e300], size=shape) if garbage else np.zeros(shape)
    )
    out = {key: torch.tensor(np.where(mask, value, rubbish)) for key, value in named.items()}
    return {**out, "mask": torch.tensor(mask)}


def aggregation_of(name: str, hyper: dict[str, object]) -> str:
    return required_aggregation(name, POLICY_LOSSES.resolve(name, hyper)) or "token-mean"


def loss_and_gradient(
    name: str, inputs: dict[str, torch.Tensor], **extra: object
) -> tuple[float, torch.Tensor, dict[str, float]]:
    logp = inputs["logp"].clone().requires_grad_()
    loss, metrics = policy_loss(name, **{**inputs, "logp": logp}, **extra)
    (gradient,) = torch.autograd.grad(loss, logp)
    return loss.item(), gradient, metrics


def slow_total(
    name: str, hyper: dict[str, object], now: np.ndarray, inputs: dict[str, np.ndarray]
) -> np.ndarray:
    """Token losses times their weights, [S, T] (for minirl the whole loss, [1])."""
    resolved = POLICY_LOSSES.resolve(name, hyper)
    arguments = (now, inputs["logp"], inputs["old_logp"], inputs["advantages"], inputs["mask"])
    if name == "minirl":
        return np.array([slow.minirl_total(*arguments, **resolved)])

    losses = slow.LOSSES[name](
        *arguments, p=inputs["proximal_logp"], q=inputs["rollout_logp"], **resolved
    )
    mask = inputs["mask"]
    weights = np.zeros(mask.shape)
    rows = [s for s in range(mask.shape[0]) if slow.row_tokens(mask, s)]
    for s, t in slow.tokens(mask):
        by_row = aggregation_of(name, hyper) == "seq-mean-token-mean"
        weights[s, t] = (
            1 / (len(rows) * len(slow.row_tokens(mask, s)))
            if by_row
            else 1 / len(slow.tokens(mask))
        )

    return losses * weights


def test_every_policy_loss_has_a_case() -> None:
    assert set(POLICY_LOSSES) - {FUNCTION} == set(HYPER)


@each_case
@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32), shape=shapes, extreme=st.booleans())
def test_agrees_with_the_slow_version(
    name: str, hyper: dict[str, object], seed: int, shape: tuple[int, int], extreme: bool
) -> None:
    inputs = batch(seed, shape, extreme=extreme and not name.startswith("dppo"))
    loss, gradient, metrics = loss_and_gradient(
        name, inputs, aggregation=aggregation_of(name, hyper), **hyper
    )
    arrays = {key: value.numpy() for key, value in inputs.items()}
    expected = slow_total(name, hyper, arrays["logp"], arrays)
    assert loss == pytest.approx(expected.sum(), rel=1e-9, abs=1e-9)
    assert all(math.isfinite(value) for value in metrics.values())

    step = 1e-6
    wanted = np.zeros(shape)
    for place in slow.tokens(arrays["mask"]):
        up = arrays["logp"].copy()
        down = arrays["logp"].copy()
        up[place] += step
        down[place] -= step
        wanted[place] = (
            slow_total(name, hyper, up, arrays) - slow_total(name, hyper, down, arrays)
        ).sum() / (2 * step)

    np.testing.assert_allclose(
        gradient.numpy(), wanted, rtol=1e-4, atol=1e-6 * max(1.0, np.abs(expected).max())
    )


@each_case
@settings(max_examples=examples(30), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_finite_and_of_the_input_type(
    name: str, hyper: dict[str, object], seed: int, dtype: torch.dtype
) -> None:
    inputs = {
        key: value if key == "mask" else value.to(dtype)
        for key, value in batch(seed, (4, 6), extreme=True).items()
    }
    aggregation = aggregation_of(name, hyper)
    losses, found = policy_terms(
        name,
        **{**inputs, "logp": inputs["logp"].requires_grad_()},
        aggregation=aggregation,
        **hyper,
    )
    assert losses.dtype == dtype and losses.shape == inputs["mask"].shape
    assert not losses[~inputs["mask"]].any() and all(
        not values[~inputs["mask"]].any() for values in found.values()
    )

    if dtype == torch.float16:
        return  # e^20 is beyond its largest number

    loss, gradient, metrics = loss_and_gradient(
        name, {k: v.detach() for k, v in inputs.items()}, aggregation=aggregation, **hyper
    )
    assert (
        math.isfinite(loss)
        and gradient.isfinite().all()
        and all(math.isfinite(value) for value in metrics.values())
    )
    assert gradient.dtype == dtype and not gradient[~inputs["mask"]].any()


@each_case
@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 2**32), shape=st.tuples(st.integers(2, 5), st.integers(1, 6)))
def test_padding_order_and_split_change_nothing(
    name: str, hyper: dict[str, object], seed: int, shape: tuple[int, int]
) -> None:
    inputs = batch(seed, shape)
    arguments = {"aggregation": aggregation_of(name, hyper), **hyper}
    loss, gradient, _ = loss_and_gradient(name, inputs, **arguments)

    order = torch.tensor(np.random.default_rng(seed).permutation(shape[0]))
    moved, moved_gradient, _ = loss_and_gradient(
        name, {key: value[order] for key, value in inputs.items()}, **arguments
    )
    assert moved == pytest.approx(loss, rel=1e-12, abs=1e-12)

    torch.testing.assert_close(moved_gradient, gradient[order], rtol=1e-12, atol=1e-12)

    rubbish = torch.full((shape[0], 3), math.nan, dtype=torch.float64)
    padded = {
        key: torch.cat([value, rubbish if key != "mask" else rubbish > 0], 1)
        for key, value in inputs.items()
    }
    wide, wide_gradient, _ = loss_and_gradient(name, padded, **arguments)
    assert wide == pytest.approx(loss, rel=1e-12, abs=1e-12)

    torch.testing.assert_close(wide_gradient[:, : shape[1]], gradient, rtol=1e-12, atol=1e-12)

    weights = aggregation_weights(str(arguments["aggregation"]), inputs["mask"])
    whole = {key: inputs[key] for key in ("logp", "old_logp", "advantages", "mask")}
    statistics = batch_statistics(name, **whole, **arguments)
    parts = []
    for row in range(shape[0]):
        part = {key: value[row : row + 1] for key, value in inputs.items()}
        parts.append(
            loss_and_gradient(
                name, part, weights=weights[row : row + 1], statistics=statistics, **arguments
            )[:2]
        )

    assert sum(part for part, _ in parts) == pytest.approx(loss, rel=1e-12, abs=1e-12)

    torch.testing.assert_close(
        torch.cat([part for _, part in parts]), gradient, rtol=1e-12, atol=1e-12
    )


@each_case
def test_empty_batches_give_zero(name: str, hyper: dict[str, object]) -> None:
    inputs = batch(0, (3, 4))
    inputs["mask"] = torch.zeros(3, 4, dtype=torch.bool)
    loss, gradient, metrics = loss_and_gradient(
        name, inputs, aggregation=aggregation_of(name, hyper), **hyper
    )
    assert loss == 0.0 and not gradient.any() and all(value == 0.0 for value in metrics.values())


@pytest.mark.parametrize(
    "name", ["ppo_clip", "gspo", "gmpo", "sapo", "dro", "kl_cov", "decoupled_ppo"]
)
@settings(max_examples=examples(10), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_gradcheck_where_nothing_is_stopped(name: str, seed: int) -> None:
    inputs = batch(seed, (3, 4), garbage=False)
    hyper = HYPER[name][-1]

    def loss(logp: torch.Tensor) -> torch.Tensor:
        return policy_loss(
            name, **{**inputs, "logp": logp}, aggregation=aggregation_of(name, hyper), **hyper
        )[0]

    if name == "kl_cov":  # the chosen tokens are constants of the minibatch
        whole = {key: inputs[key] for key in ("logp", "old_logp", "advantages", "mask")}
        fixed = batch_statistics(name, **whole, **hyper)
        fixed["threshold"] -= 1e-3
        found = policy_terms(name, **inputs, statistics=fixed, **hyper)[1]["cov_klfrac"]

        def loss(logp: torch.Tensor) -> torch.Tensor:
            chosen = policy_terms(name, **{**inputs, "logp": logp}, statistics=fixed, **hyper)
            assert (chosen[1]["cov_klfrac"] == found).all()
            return chosen[0].sum()

    assert torch.autograd.gradcheck(
        loss, (inputs["logp"].clone().requires_grad_(),), eps=1e-7, atol=1e-5
    )


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if POLICY_LOSSES[name].statistics])
def test_statistics_in_blocks_of_rows_are_those_of_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {key: batch(11, (7, 5))[key] for key in ("logp", "old_logp", "advantages", "mask")}
    found = []
    for tokens in (blocks.BLOCK_TOKENS, 11):  # all rows at once, then 2, 2, 2 and 1
        monkeypatch.setattr(blocks, "BLOCK_TOKENS", tokens)
        found.append(batch_statistics(name, **whole, **HYPER[name][0]))
    assert found[0] and found[1] == pytest.approx(found[0], rel=1e-12)


def test_metrics_are_means_over_trained_tokens() -> None:
    old = torch.zeros(2, 3)
    logp = torch.log(torch.tensor([[1.5, 1.0, 5.0], [1.0, 9.0, 9.0]]))
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    advantages = torch.tensor([[1.0, 1.0, -1.0], [1.0, 1.0, 1.0]])
    _, metrics = policy_loss(
        "ppo_clip",
        logp=logp,
        old_logp=old,
        advantages=advantages,
        mask=mask,
        dual_clip=3.0,
    )
    assert metrics["pg_clipfrac"] == pytest.approx(1 / 4) and metrics[
        "pg_clipfrac_lower"
    ] == pytest.approx(1 / 4)
    assert metrics["ppo_kl"] == pytest.approx(-(math.log(1.5) + math.log(5.0)) / 4)


def test_gspo_refuses_aggregations_that_break_its_ratio() -> None:
    inputs = batch(0, (2, 3))
    for name in ("gspo", "gmpo"):
        with pytest.raises(
            ValueError, match=r"one ratio per sequence.*aggregation=seq-mean-token-mean"
        ):
            policy_loss(name, **inputs)
    policy_loss("gspo_token", **inputs)


def test_minirl_names_the_aggregation_of_its_switches() -> None:
    inputs = batch(0, (2, 3))
    with pytest.raises(ValueError, match="Choose aggregation=seq-mean-token-sum"):
        policy_loss("minirl", **inputs, token_level_loss=False, skip_length_normalization=True)
    with pytest.raises(ValueError, match="does nothing with token_level_loss"):
        policy_loss("minirl", **inputs, skip_length_normalization=True)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ppo", {}, "did you mean"),
        ("ppo_clip", {"clip_low": 1.5}, "at least 0 and at most 1"),
        ("ppo_clip", {"dual_clip": 0.9}, "0 for off, or a number above 1"),
        ("ppo_clip", {"clip": 0.2}, "no hyper-parameter 'clip'"),
        ("ppo_clip", {"mask": torch.ones(2, 4)}, r"mask has shape \[2, 4\]"),
        ("ppo_clip", {"old_logp": torch.ones(3)}, r"old_logp has shape \[3\]"),
        ("dro", {}, "needs beta"),
        ("decoupled_ppo", {"rollout_logp": None}, "needs rollout_logp|rollout_logp"),
        ("decoupled_ppo", {"proximal_logp": None}, "needs proximal_logp"),
        ("decoupled_ppo", {"importance": "token_tis"}, "already"),
        ("ppo_clip", {"importance": "token_tis", "rollout_logp": None}, "needs rollout_logp"),
        ("ppo_clip", {"importance": "tis"}, "one of none, token_tis"),
    ],
)
def test_refusals_say_what_to_do(name: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_loss(name, **{**batch(0, (2, 3)), **change})


def test_dual_clip_may_be_none() -> None:
    inputs = batch(3, (2, 3))
    assert (
        policy_loss("ppo_clip", **inputs, dual_clip=None)[0] == policy_loss("ppo_clip", **inputs)[0]
    )


def test_covariance_ties_are_chosen_together_whatever_their_order() -> None:
    logp = torch.tensor([[-1.0, -3.0, -1.0, -3.0]], dtype=torch.float64)
    inputs = {
        "logp": logp,
        "old_logp": logp,
        "advantages": torch.tensor([[1.0, -1.0, 1.0, -1.0]]).double(),
        "mask": torch.ones(1, 4),
    }
    found = policy_terms("kl_cov", **inputs, fraction=0.25)[1]["cov_klfrac"]
    assert found.tolist() == [[1.0, 1.0, 1.0, 1.0]]


@pytest.mark.parametrize("fraction", [0.0002, 0.1, 0.5])
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_the_rounding_of_a_pass_changes_no_choice_of_tokens(name: str, fraction: float) -> None:
    """The threshold is that of a pass over the whole minibatch, and the log-probs that are compared
    with it come from passes over its parts, which round otherwise."""
    inputs = batch(4, (8, 12), garbage=False)
    hyper = {"fraction": fraction} | ({"low": 0.0} if name == "clip_cov" else {})
    whole = {key: inputs[key] for key in ("logp", "old_logp", "advantages", "mask")}
    statistics = batch_statistics(name, **whole, **hyper)

    def chosen(logp: torch.Tensor) -> torch.Tensor:
        metrics = policy_terms(name, **{**inputs, "logp": logp}, statistics=statistics, **hyper)[1]
        return metrics["cov_clipfrac" if name == "clip_cov" else "cov_klfrac"]

    exact = chosen(inputs["logp"])
    assert exact.any()
    for rounding in (-1e-6, 1e-6):
        assert (chosen(inputs["logp"] * (1 + rounding)) == exact).all()


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_equal_advantages_have_no_covariance_to_act_on(name: str) -> None:
    logp = -torch.rand(3, 7, generator=torch.Generator().manual_seed(0))
    inputs = {
        "logp": logp,
        "old_logp": logp,
        "advantages": torch.full((3, 7), 0.1),
        "mask": torch.ones(3, 7),
    }
    hyper = {"low": 0.0} if name == "clip_cov" else {}
    _, metrics = policy_loss(name, **inputs, **hyper)
    assert metrics["cov_clipfrac" if name == "clip_cov" else "cov_klfrac"] == 0.0
