"""On the same inputs our functions give TRL's and verl's numbers to 1e-6, gradients too, wherever
the definitions agree.

Theirs were recorded by running their own code (tests/conformance/peers/). Where definitions differ:
test_peers_differences.py.
"""

from __future__ import annotations

import pytest
import torch
from by_name import (
    aggregate,
    aggregation_weights,
    effective_share,
    importance_weights,
    kl,
    preference_loss,
)
from peer_recordings import batch, case, close, our_advantage, our_loss, recording, trl_advantages

from agentevo.algorithms.divergence import KLController
from agentevo.algorithms.value import value_loss

VERL_ADVANTAGES = [
    ("grpo/groups", "grpo", {}),
    ("grpo_vectorized/groups", "grpo", {}),
    ("grpo/groups/no_std", "grpo", {"scale_by_std": False}),
    ("grpo/groups/epsilon", "grpo", {"epsilon": 1e-4}),
    ("grpo_passk/groups/std", "grpo_passk", {}),
    ("grpo_passk/groups/no_std", "grpo_passk", {"scale_by_std": False}),
    ("rloo/groups", "rloo", {}),
    ("rloo_vectorized/groups", "rloo", {}),
    ("rloo_vectorized/single", "rloo", {}),
    ("opo/groups", "opo", {}),
    ("opo/empty", "opo", {}),
    ("gdpo/groups", "gdpo", {}),
    ("gdpo/groups/weights", "gdpo", {"reward_weights": [1.0, 0.5, 2.0]}),
    ("reinforce_plus_plus_baseline/groups", "reinforce_pp_baseline", {}),
    *(
        (f"reinforce_plus_plus/{name}/dense", "reinforce_pp", {})
        for name in ("groups", "single", "empty")
    ),
    ("reinforce_plus_plus/groups/discounted", "reinforce_pp", {"gamma": 0.9}),
    *((f"remax/{name}", "remax", {}) for name in ("groups", "single", "empty")),
    ("remax/groups/dense", "remax", {}),
    *((f"gae/{name}/dense", "gae", {}) for name in ("groups", "single", "empty")),
    ("gae/groups/discounted", "gae", {"gamma": 0.9, "lam": 0.8}),
    ("tir_optimal_token_baseline/groups/dense", "otb", {}),
    ("tir_optimal_token_baseline/groups/tail", "otb", {"handle_zero_tail": False}),
    ("optimal_token_baseline/contiguous/dense", "otb", {}),
]
CRITIC = ("reinforce_pp", "remax", "gae")
"""Ours whose returns are no copy of the advantages, and whose returns verl computes alike."""


@pytest.mark.parametrize(("name", "ours", "hyper"), VERL_ADVANTAGES)
def test_verl_advantages(name, ours, hyper):
    found = case("verl", name)
    inputs = batch(found["batch"])
    advantages, returns = our_advantage(
        ours, inputs, found.get("rewards", "token_rewards"), **hyper
    )
    trained = inputs["mask"] == 1
    assert close(advantages[trained], torch.tensor(found["advantages"])[trained])
    assert float(advantages.abs().max()) > 0.1

    if ours in CRITIC:
        assert close(returns[trained], torch.tensor(found["returns"])[trained])


GSPO = {"clip_low": 3e-4, "clip_high": 4e-4}
VERL_LOSSES = [
    *(
        (f"vanilla/{name}", "ppo_clip", {"aggregation": name})
        for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    ),
    (
        "vanilla/seq-mean-token-sum-norm",
        "ppo_clip",
        {"aggregation": "seq-mean-token-sum-norm", "aggregation_hyper": {"norm": 7.0}},
    ),
    ("vanilla/dual_clip", "ppo_clip", {"dual_clip": 3.0}),
    ("vanilla/extreme", "ppo_clip", {"dual_clip": 3.0}),
    ("vanilla/clip_higher", "ppo_clip", {"clip_high": 0.28}),
    ("vanilla/per_token", "ppo_clip", {"advantages": "token_advantages"}),
    ("vanilla/rollout_token", "ppo_clip", {"importance": "token_tis"}),
    ("vanilla/rollout_sequence", "ppo_clip", {"importance": "sequence_tis"}),
    ("gspo/token-mean", "gspo_token", GSPO),
    ("gspo/seq-mean-token-mean", "gspo_token", GSPO | {"aggregation": "seq-mean-token-mean"}),
    ("gspo/seq-mean-token-mean", "gspo", GSPO | {"aggregation": "seq-mean-token-mean"}),
    (
        "gspo/default_bounds",
        "gspo",
        {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "seq-mean-token-mean"},
    ),
    ("gspo/per_token", "gspo_token", GSPO | {"advantages": "token_advantages"}),
    ("sapo/seq-mean-token-mean", "sapo", {"aggregation": "seq-mean-token-mean"}),
    ("sapo/extreme", "sapo", {"aggregation": "seq-mean-token-mean"}),
    ("cispo", "cispo", {"clip_low": 0.2, "clip_high": 0.2}),
    ("cispo/wide", "cispo", {}),
    ("cispo/extreme", "cispo", {"clip_low": 0.2, "clip_high": 0.2}),
    ("gpg", "gpg", {}),
    ("gpg", "reinforce", {}),
    ("gpg/extreme", "gpg", {}),
    *(
        (f"{name}{at}", name, {"clip_low": 0.2, "clip_high": 0.2, "cap": 3.0})
        for name in ("dppo_tv", "dppo_kl")
        for at in ("", "/extreme")
    ),
    ("dppo_tv/narrow", "dppo_tv", {"clip_low": 0.05, "clip_high": 0.05}),
    ("dppo_kl/narrow", "dppo_kl", {"clip_low": 0.01, "clip_high": 0.01}),
    ("dro", "dro", {"beta": 0.5}),
    ("geo_mean", "gmpo", {"aggregation": "seq-mean-token-mean"}),
    ("clip_cov/all_candidates", "clip_cov", {"fraction": 1.0, "low": 0.05, "high": 50.0}),
    ("kl_cov", "kl_cov", {"fraction": 0.2}),
    ("kl_cov/default_coef", "kl_cov", {"fraction": 0.2, "coef": 0.1}),
]
METRICS = {
    "ppo_clip": ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"),
    "gspo": ("pg_clipfrac",),
    "gspo_token": ("pg_clipfrac",),
}


@pytest.mark.parametrize(("name", "ours", "hyper"), VERL_LOSSES)
def test_verl_policy_losses(name, ours, hyper):
    found = case("verl", name)
    loss, gradient, metrics = our_loss(ours, batch(found["batch"]), **hyper)
    assert close(loss, found["loss"])
    assert close(gradient, found["gradient"])
    for metric in METRICS.get(ours, ()):
        if metric in metrics:
            assert metrics[metric] == pytest.approx(found["metrics"][f"actor/{metric}"], abs=1e-6)


TRL_LOSSES = [
    ("loss/grpo", "ppo_clip", {"aggregation": "seq-mean-token-mean"}),
    ("loss/bnpo", "ppo_clip", {}),
    ("loss/dapo", "ppo_clip", {}),
    ("loss_empty/bnpo", "ppo_clip", {}),
    ("loss_empty/dapo", "ppo_clip", {}),
    (
        "loss/dr_grpo",
        "ppo_clip",
        {"aggregation": "seq-mean-token-sum-norm", "aggregation_hyper": {"norm": 7.0}},
    ),
    ("loss/luspo", "ppo_clip", {"aggregation": "seq-mean-token-sum"}),
    ("loss/clip_higher", "ppo_clip", {"clip_high": 0.28}),
    ("loss/beta/plain", "ppo_clip", {"k3_coef": 0.1}),
    ("extreme/dapo_delta", "ppo_clip", {"dual_clip": 3.0}),
    ("loss/cispo", "cispo", {}),
    ("loss/sapo", "sapo", {"aggregation": "seq-mean-token-mean"}),
    ("extreme/sapo", "sapo", {"aggregation": "seq-mean-token-mean"}),
    ("loss/gspo", "gspo", {"aggregation": "seq-mean-token-mean"}),
    ("loss/gspo_dapo", "gspo_token", {}),
    ("loss/gmpo", "gmpo", {"aggregation": "seq-mean-token-mean"}),
    ("loss/gmpo/default", "gmpo", {"aggregation": "seq-mean-token-mean"}),
]


@pytest.mark.parametrize(("name", "ours", "hyper"), TRL_LOSSES)
def test_trl_policy_losses(name, ours, hyper):
    found = case("trl", name)
    loss, gradient, _ = our_loss(ours, batch(found["batch"]), **hyper)
    assert close(loss, found["loss"])
    assert close(gradient, found["gradient"])


def test_trl_rloo_on_policy_has_our_gradient():
    inputs = batch("loss")
    gradient = our_loss("ppo_clip", inputs | {"old_logp": inputs["logp"]}, "seq-mean-token-sum")[1]
    assert close(gradient, case("trl", "loss/rloo/on_policy")["gradient"])


@pytest.mark.parametrize(
    ("name", "ours", "hyper"),
    [
        ("group", "grpo", {"epsilon": 1e-4}),
        ("none", "grpo", {"scale_by_std": False}),
        ("unscored", "grpo", {"epsilon": 1e-4}),
        ("../rloo", "rloo", {}),
    ],
)
def test_trl_advantages(name, ours, hyper):
    found = case(
        "trl", f"advantages/{name[3:]}" if name.startswith("../") else f"advantages/grpo/{name}"
    )
    assert close(trl_advantages(ours, found, **hyper), found["advantages"])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("threshold", "kind", "floor"), [("2.0", "tis", 0.0), ("0.5_2.0", "mis", 0.5)]
)
def test_verl_rollout_weights(level, threshold, kind, floor):
    inputs = batch("loss")
    found = case("verl", f"rollout_is/{level}/{threshold}")
    weights = importance_weights(
        f"{level}_{kind}", inputs["old_logp"], inputs["rollout_logp"], inputs["mask"], 2.0, floor
    )
    assert close(weights, found["weights"])
    assert effective_share(weights, inputs["mask"]) == pytest.approx(
        found["metrics"]["ess"], abs=1e-6
    )


@pytest.mark.parametrize("name", ["loss", "loss_empty"])
@pytest.mark.parametrize(
    ("ours", "theirs", "hyper"),
    [
        ("token-mean", "token-mean", {}),
        ("seq-mean-token-sum", "seq-mean-token-sum", {}),
        ("seq-mean-token-mean", "seq-mean-token-mean", {}),
        ("seq-mean-token-sum-norm", "seq-mean-token-sum-norm/scale", {"norm": 16.0}),
    ],
)
def test_verl_aggregations(name, ours, theirs, hyper):
    inputs = batch(name)
    found = case("verl", f"agg_loss/{name}/{theirs}")
    values = inputs["token_advantages"].clone().requires_grad_()
    loss = aggregate(ours, values, inputs["mask"], **hyper)
    assert close(loss.detach(), found["loss"])
    assert close(torch.autograd.grad(loss, values)[0], found["gradient"])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(name, name) for name in ("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+")]
    + [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")],
)
def test_verl_kl(ours, theirs):
    inputs = batch("loss")
    found = case("verl", f"kl_penalty/loss/{theirs}")
    logp = inputs["logp"].clone().requires_grad_()
    values = kl(ours, logp, inputs["ref_logp"])
    assert close(values.detach(), found["values"])
    assert close(torch.autograd.grad(values.sum(), logp)[0], found["gradient"])


def test_verl_adaptive_kl():
    controller = KLController(0.1, 0.05, 100)
    for kl_value, rows, expected in zip(
        (0.01, 0.2, 0.051), (10, 30, 100), case("verl", "adaptive_kl")["coefficients"], strict=False
    ):
        controller.update(kl_value, rows)
        assert controller.coef == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("clip", [0.5, 0.05])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_verl_value_loss(clip, aggregation):
    inputs = batch("groups")
    found = case("verl", f"value_loss/{clip}/{aggregation}")
    values = inputs["values"].clone().requires_grad_()
    old = inputs["values"] + 0.3 * inputs["logp"]
    loss, metrics = value_loss(
        values,
        inputs["dense_rewards"],
        inputs["mask"] != 0,
        old_values=old,
        clip=clip,
        weights=aggregation_weights(aggregation, inputs["mask"]),
    )
    assert close(loss.detach(), found["loss"])
    assert close(torch.autograd.grad(loss, values)[0], found["gradient"])
    assert float(metrics["vf_clipfrac"]) == pytest.approx(found["clipped"], abs=1e-6)


PAIRS = ("chosen_logp", "rejected_logp", "ref_chosen_logp", "ref_rejected_logp")


@pytest.mark.parametrize(
    ("name", "ours", "per_token"),
    [
        ("sigmoid", "dpo", False),
        ("sigmoid", "spin", False),
        ("ipo", "ipo", True),
        ("sppo_hard", "sppo", False),
    ],
)
def test_trl_preference_losses(name, ours, per_token):
    """IPO agrees once all four sums are divided by their lengths; the gradient is then taken in the
    sums."""
    inputs = batch("pairs")
    found = case("trl", f"dpo/{name}")
    leaves = [inputs[key].clone().requires_grad_() for key in PAIRS[:2]]
    lengths = [inputs[f"{key.split('_')[-2]}_lengths"] if per_token else 1.0 for key in PAIRS]
    given = dict(zip(PAIRS, [*leaves, inputs[PAIRS[2]], inputs[PAIRS[3]]], strict=True))
    scaled = {
        key: value / length for (key, value), length in zip(given.items(), lengths, strict=True)
    }
    loss, _ = preference_loss(ours, beta=0.1, **scaled)
    assert close(loss.detach(), found["loss"])

    for ours_gradient, theirs in zip(
        torch.autograd.grad(loss, leaves), found["gradients"], strict=True
    ):
        assert close(ours_gradient, theirs)


@pytest.mark.parametrize(
    ("name", "shift", "hyper"),
    [
        ("kto", 0.0, {"desirable_weight": 1.5, "undesirable_weight": 0.5}),
        ("kto/negative_kl", -5.0, {}),
    ],
)
def test_trl_kto(name, shift, hyper):
    inputs = batch("pairs")
    found = case("trl", name)
    logp = inputs["chosen_logp"].clone().requires_grad_()
    baseline = float((inputs["kl_gap"] + shift).mean())
    loss, _ = preference_loss(
        "kto",
        logp=logp,
        ref_logp=inputs["ref_chosen_logp"],
        desirable=inputs["desirable"],
        kl_baseline=baseline,
        **hyper,
    )
    assert close(loss.detach(), found["loss"])
    assert close(torch.autograd.grad(loss, logp)[0], found["gradients"][0])


def test_trl_orpo_odds():
    """The odds-ratio term: ours with its coefficient less ours without."""
    inputs = batch("pairs")
    found = case("trl", "orpo")
    leaves = [inputs[key].clone().requires_grad_() for key in PAIRS[:2]]
    given = dict(zip(PAIRS[:2], leaves, strict=True)) | {
        key: inputs[key] for key in ("chosen_lengths", "rejected_lengths")
    }
    loss = (
        preference_loss("orpo", coef=0.1, **given)[0]
        - preference_loss("orpo", coef=0.0, **given)[0]
    )
    assert close(loss.detach(), found["loss"])

    for ours, theirs in zip(torch.autograd.grad(loss, leaves), found["gradients"], strict=True):
        assert close(ours, theirs)


def test_both_peers_were_given_the_same_inputs():
    assert recording("verl")["batches"] == recording("trl")["batches"]
    for peer in ("verl", "trl"):
        assert set(recording(peer)) == {"peer", "versions", "command", "batches", "cases"}
