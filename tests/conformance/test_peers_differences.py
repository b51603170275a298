"""Each place where TRL's or verl's numbers are not ours, shown on their recorded numbers: every
line of the table at the end of docs/coming_from.md.

A test says what theirs is in terms of ours, so it fails if either side changes. Inputs and
recordings: tests/conformance/peers/.
"""

from __future__ import annotations

import math

import pytest
import torch
from by_name import (
    advantage,
    aggregate,
    aggregation_weights,
    effective_share,
    importance_weights,
    kl,
    preference_loss,
)
from peer_recordings import batch, case, close, our_advantage, our_loss, trl_advantages

from agentevo.algorithms.divergence import KLController
from agentevo.algorithms.losses import POLICY_LOSSES


def theirs(peer: str, name: str, key: str = "advantages") -> torch.Tensor:
    return torch.tensor(case(peer, name)[key], dtype=torch.float64)


def whitened(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    counted = values[mask == 1]
    return (values - counted.mean()) * torch.rsqrt(counted.var() + 1e-8) * mask


def defaults(name: str) -> dict:
    return POLICY_LOSSES.resolve(name, {})


# Advantages


@pytest.mark.parametrize(
    ("name", "ours"),
    [("grpo", "grpo"), ("grpo_vectorized", "grpo"), ("rloo", "rloo"), ("opo", "opo")],
)
def test_verl_trains_a_group_of_one_on_its_raw_reward(name, ours):
    inputs = batch("single")
    found = theirs("verl", f"{name}/single")
    advantages = our_advantage(ours, inputs)[0]
    assert close(advantages[:3], found[:3])
    assert close(found[3], 0.75 * inputs["mask"][3])
    assert not advantages[3].any()


def test_verl_whitens_the_raw_reward_of_a_group_of_one_with_the_others():
    inputs = batch("single")
    mask = inputs["mask"]
    centred = torch.tensor([0.5, -0.5, 0.0, 0.75], dtype=torch.float64)[:, None] * mask
    assert close(whitened(centred, mask), theirs("verl", "reinforce_plus_plus_baseline/single"))

    trio = {"group_ids": [0, 0, 0], "mask": torch.ones(3, 1)}
    parts = [
        torch.cat([advantage("grpo", token_rewards=part[:3, None], **trio)[0][:, 0], part[3:]])
        for part in inputs["reward_parts"]
    ]
    assert close(whitened(sum(parts)[:, None] * mask, mask), theirs("verl", "gdpo/single"))
    assert close(
        our_advantage("reinforce_pp_baseline", inputs)[0][:3], whitened(centred[:3], mask[:3])
    )
    assert close(
        our_advantage("gdpo", inputs)[0][:3], whitened(sum(parts)[:3, None] * mask[:3], mask[:3])
    )
    assert not any(
        our_advantage(name, inputs)[0][3].any() for name in ("reinforce_pp_baseline", "gdpo")
    )


def test_verl_refuses_pass_at_k_of_a_group_of_one():
    assert "requires at least 2 samples" in case("verl", "grpo_passk/single")["raised"]
    inputs = batch("single")
    advantages = our_advantage("grpo_passk", inputs)[0]
    assert advantages[0].any() and not advantages[3].any()


def test_verl_gives_the_optimal_baseline_no_baseline_in_a_group_of_one():
    inputs = batch("single")
    mask = inputs["mask"]
    returns = inputs["dense_rewards"].flip(1).cumsum(1).flip(1) * mask
    for name in ("tir_optimal_token_baseline", "optimal_token_baseline"):
        assert close(theirs("verl", f"{name}/single/dense")[3], returns[3])
    assert not our_advantage("otb", inputs, "dense_rewards")[0][3].any()


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_verl_counts_a_row_without_trained_tokens_as_a_score_of_zero(name):
    inputs = batch("empty")
    found = theirs("verl", f"{name}/empty")
    counted = inputs["mask"].clone()
    counted[2, 0] = 1
    ours = our_advantage(name, inputs)[0]
    as_theirs = our_advantage(name, inputs | {"mask": counted})[0]
    assert close(as_theirs[[0, 1, 3, 4]], found[[0, 1, 3, 4]])
    assert not close(ours[:2], found[:2])


def test_verl_scores_an_attempt_of_several_rows_by_its_last():
    inputs = batch("groups")
    found = case("verl", "grpo/sessions")
    four = {key: inputs[key][:4] for key in ("token_rewards", "mask", "group_ids")}
    last = four["token_rewards"] * torch.tensor([0.0, 1.0, 0.0, 1.0])[:, None]
    assert close(
        advantage("grpo", **four | {"token_rewards": last}, trajectory_ids=found["attempts"])[0],
        found["advantages"],
    )

    ours = advantage("grpo", **four, trajectory_ids=found["attempts"])[
        0
    ]  # 1 + 0.25 against 0 + 0.5
    assert ours[0, 0] > 0.7 and found["advantages"][0][0] < -0.7


def test_verl_gpg_scales_by_scores_other_than_zero():
    """9 of 10 scores are not 0; 7 of 10 are in groups whose scores differ."""
    assert close(
        our_advantage("gpg", batch("groups"))[0] * (10 / 9) / (10 / 7), theirs("verl", "gpg/groups")
    )
    assert close(theirs("verl", "gpg/single")[3], 4 / 3 * 0.75 * batch("single")["mask"][3])


def test_equal_rewards_in_float32_become_noise_over_epsilon():
    equal = {
        "token_rewards": torch.full((12, 1), 0.7),
        "mask": torch.ones(12, 1),
        "group_ids": [0] * 12,
    }
    assert not advantage("grpo", **equal)[0].any()
    assert float(theirs("verl", "grpo/equal_float32").abs().max()) > 0.05
    assert float(theirs("trl", "advantages/grpo/equal_float32").abs().max()) > 0.001


def test_verl_optimal_token_baseline_compares_places_not_trained_tokens():
    inputs = batch("groups")
    trained = batch("groups")["mask"] == 1
    ours = our_advantage("otb", inputs, "dense_rewards")[0]
    assert close(ours[trained], theirs("verl", "tir_optimal_token_baseline/groups/dense")[trained])
    assert not close(
        ours[trained], theirs("verl", "optimal_token_baseline/groups/dense")[trained], 0.01
    )


def test_verl_remax_does_not_discount():
    inputs = batch("groups")
    found = theirs("verl", "remax/groups/discounted") * batch("groups")["mask"]
    assert case("verl", "remax/groups/discounted")["arguments"] == {"gamma": 0.9}
    assert close(our_advantage("remax", inputs, "dense_rewards")[0], found)
    assert not close(our_advantage("remax", inputs, "dense_rewards", gamma=0.9)[0], found, 0.01)


@pytest.mark.parametrize("name", ["gae", "remax"])
def test_verl_leaves_numbers_at_untrained_places(name):
    inputs = batch("groups")
    untrained = inputs["mask"] == 0
    assert float(theirs("verl", f"{name}/groups/dense")[untrained].abs().max()) > 0.1
    assert not any(one[untrained].any() for one in our_advantage(name, inputs, "dense_rewards"))


def test_trl_epsilon_is_1e_4():
    found = case("trl", "advantages/grpo/group")
    ours = trl_advantages("grpo", found)
    assert not close(ours, found["advantages"], 1e-5)
    std = (
        torch.tensor(found["rewards"], dtype=torch.float64).view(-1, 3).std(1).repeat_interleave(3)
    )
    assert close(ours * (std + 1e-6) / (std + 1e-4), found["advantages"])


def test_trl_batch_scaling_keeps_the_groups_mean():
    found = case("trl", "advantages/grpo/batch")
    rewards = torch.tensor(found["rewards"], dtype=torch.float64)
    assert close(
        trl_advantages("grpo", found, scale_by_std=False) / (rewards.std() + 1e-4),
        found["advantages"],
    )
    assert not close(trl_advantages("batch_norm", found, epsilon=1e-4), found["advantages"], 0.01)


def test_trl_gdpo_whitens_over_rows_with_epsilon_beside_the_root():
    found = case("trl", "advantages/gdpo")
    summed = trl_advantages("gdpo", found, epsilon=1e-4, whiten=False)
    assert close((summed - summed.mean()) / (summed.std() + 1e-4), found["advantages"])
    assert not close(trl_advantages("gdpo", found, epsilon=1e-4), found["advantages"], 1e-5)


def test_trl_rloo_can_normalise_over_the_batch():
    found = case("trl", "advantages/rloo/normalized")
    ours = trl_advantages("rloo", found)
    assert close((ours - ours.mean()) / (ours.std() + 1e-4), found["advantages"])


# Policy losses


def test_verl_dual_clip_is_on_unless_set():
    found = case("verl", "vanilla/extreme")
    assert found["settings"] == {} and defaults("ppo_clip")["dual_clip"] == 0.0
    assert close(our_loss("ppo_clip", batch("extreme"), dual_clip=3.0)[0], found["loss"])
    assert float(our_loss("ppo_clip", batch("extreme"))[0]) > 1e6


def test_verl_gspo_is_our_gspo_token_with_ppos_bounds_unless_set():
    assert case("verl", "gspo/default_bounds")["settings"] == {}
    assert (defaults("gspo"), defaults("gspo_token")) == (
        {"clip_low": 3e-4, "clip_high": 4e-4},
    ) * 2
    per_token = our_loss("gspo_token", batch("loss"), advantages="token_advantages")[1]
    assert close(per_token, theirs("verl", "gspo/per_token", "gradient"))
    whole = our_loss("gspo", batch("loss"), "seq-mean-token-mean", "token_advantages")[1]
    assert not close(whole, theirs("verl", "gspo/per_token", "gradient"), 0.01)


def test_ratios_are_bounded_by_e_20_in_ours_e_10_in_verl_gspo_and_not_at_all_elsewhere():
    """The last row of `extreme` has A < 0 and a ratio of e^30 at every token, so that nothing but
    the bound holds it."""
    inputs = batch("extreme")
    share = -inputs["advantages"][3, 0] / 4
    gspo = {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "seq-mean-token-mean"}
    others = our_loss("gspo", inputs, **gspo)[0] - share * math.exp(20)
    assert close(others + share * math.exp(10), case("verl", "gspo/extreme")["loss"])

    others = our_loss("gspo", inputs, "seq-mean-token-mean")[0] - share * math.exp(20)
    assert close(others + share * math.exp(30), case("trl", "extreme/gspo")["loss"])
    for peer, name in (
        ("trl", "extreme/dapo"),
        ("verl", "geo_mean/extreme"),
        ("verl", "kl_cov/extreme"),
        ("verl", "clip_cov/extreme"),
    ):
        assert float(case(peer, name)["loss"]) > 1e11

    assert 1e6 < float(our_loss("ppo_clip", inputs)[0]) < 1e9


def test_verl_sapo_ignores_the_aggregation():
    found = [case("verl", f"sapo/{name}")["loss"] for name in ("token-mean", "seq-mean-token-mean")]
    assert found[0] == found[1]
    assert not close(our_loss("sapo", batch("loss"))[0], found[0], 0.01)


def test_verl_cispo_has_ppos_bounds_unless_set():
    assert case("verl", "cispo")["settings"] == {} and defaults("cispo") == {
        "clip_low": 1.0,
        "clip_high": 4.0,
    }
    assert not close(our_loss("cispo", batch("loss"))[0], case("verl", "cispo")["loss"], 0.01)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_verl_dppo_caps_the_ratio_at_3_unless_set(name):
    found = case("verl", name)
    bounds = {"clip_low": 0.2, "clip_high": 0.2}
    assert found["settings"] == {} and defaults(name)["cap"] == 20.0
    assert close(our_loss(name, batch("loss"), cap=3.0, **bounds)[0], found["loss"])
    assert not close(our_loss(name, batch("loss"), **bounds)[0], found["loss"], 0.001)


def test_verl_gmpo_takes_the_mean_over_all_rows_and_the_sign_per_token():
    empty = our_loss("gmpo", batch("loss_empty"), "seq-mean-token-mean")[0]
    assert close(empty * 2 / 3, case("verl", "geo_mean/empty")["loss"])

    inputs = batch("loss")
    found = case("verl", "geo_mean/per_token")
    mask = inputs["mask"]
    advantages = inputs["token_advantages"]
    sign = advantages.sign()
    gap = inputs["logp"] - inputs["old_logp"]
    kept = sign * torch.minimum(sign * gap, sign * gap.clamp(-0.4, 0.2))
    per_row = -(advantages.sum(1) / mask.sum(1)) * torch.exp((kept * mask).sum(1) / mask.sum(1))
    assert close(per_row.mean(), found["loss"])
    assert not close(
        our_loss("gmpo", inputs, "seq-mean-token-mean", "token_advantages", clip_high=0.2)[0],
        found["loss"],
        1e-3,
    )


def test_verl_clip_cov_draws_its_tokens_at_random():
    draws = [case("verl", f"clip_cov/draw_{seed}") for seed in (0, 1)]
    assert (
        draws[0]["settings"] == draws[1]["settings"]
        and abs(draws[0]["loss"] - draws[1]["loss"]) > 0.01
    )

    settings = {"fraction": 0.1, "low": 0.05, "high": 50.0}
    ours = our_loss("clip_cov", batch("loss"), **settings)
    share = draws[0]["metrics"]["actor/pg_clipfrac"]
    assert ours[2]["cov_clipfrac"] == pytest.approx(3 / 33) and share == pytest.approx(
        3 / 33, abs=1e-6
    )


def test_verl_kl_cov_pulls_with_a_tenth_unless_set():
    assert (
        "ppo_kl_coef" not in case("verl", "kl_cov/default_coef")["settings"]
        and defaults("kl_cov")["coef"] == 1.0
    )
    assert close(
        our_loss("kl_cov", batch("loss"), fraction=0.2, coef=0.1)[0],
        case("verl", "kl_cov/default_coef")["loss"],
    )


def test_trl_rloo_clips_one_ratio_per_sequence_of_summed_log_probs():
    inputs = batch("loss")
    found = case("trl", "loss/rloo/off_policy")
    mask = inputs["mask"]
    logp = inputs["logp"].clone().requires_grad_()
    ratio = torch.exp(((logp - inputs["old_logp"]) * mask).sum(1))
    advantages = inputs["advantages"].sum(1) / mask.sum(1)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
    assert close(loss.detach(), found["loss"]) and close(
        torch.autograd.grad(loss, logp)[0], found["gradient"]
    )
    assert not close(our_loss("ppo_clip", inputs, "seq-mean-token-sum")[1], found["gradient"], 0.01)


# Aggregation


def test_verl_token_sum_is_our_token_mean_without_the_divisor():
    inputs = batch("loss")
    ours = aggregate("token-mean", inputs["token_advantages"], inputs["mask"])
    assert close(ours * inputs["mask"].sum(), case("verl", "agg_loss/loss/token-sum")["loss"])


def test_verl_norm_is_the_padded_width_unless_set():
    inputs = batch("loss")
    found = case("verl", "agg_loss/loss/seq-mean-token-sum-norm")
    assert found["arguments"] == {}
    assert close(
        aggregate("seq-mean-token-sum-norm", inputs["token_advantages"], inputs["mask"], norm=7.0),
        found["loss"],
    )

    with pytest.raises(ValueError, match="needs norm"):
        aggregate("seq-mean-token-sum-norm", inputs["token_advantages"], inputs["mask"])


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("seq-mean-token-sum", {}),
        ("seq-mean-token-mean", {}),
        ("seq-mean-token-sum-norm", {"norm": 6.0}),
    ],
)
def test_verl_divides_by_the_configured_number_of_rows(name, hyper):
    """Of 3 rows one is empty; verl's trainer passes 3 as global_batch_size."""
    inputs = batch("loss_empty")
    ours = aggregate(name, inputs["token_advantages"], inputs["mask"], **hyper)
    assert close(ours * 2 / 3, case("verl", f"agg_loss/loss_empty/{name}/global")["loss"])


@pytest.mark.parametrize(
    ("name", "ours", "hyper"),
    [("grpo", "seq-mean-token-mean", {}), ("dr_grpo", "seq-mean-token-sum-norm", {"norm": 6.0})],
)
def test_trl_divides_by_all_rows(name, ours, hyper):
    loss = our_loss("ppo_clip", batch("loss_empty"), ours, aggregation_hyper=hyper)[0]
    assert close(loss * 2 / 3, case("trl", f"loss_empty/{name}")["loss"])


@pytest.mark.parametrize(
    ("name", "ours", "hyper"),
    [
        ("grpo", "seq-mean-token-mean", {}),
        ("bnpo", "token-mean", {}),
        ("dr_grpo", "seq-mean-token-sum-norm", {"norm": 7.0}),
    ],
)
def test_trl_means_depend_on_the_micro_batches(name, ours, hyper):
    """Rows 0-1 and 2-5: the sum of theirs is not the loss of the whole, as it is for dapo; that of
    ours is."""
    parts = sum(case("trl", f"micro/{name}/{index}")["loss"] for index in (0, 1))
    assert abs(parts - case("trl", f"loss/{name}")["loss"]) > 1e-3
    assert sum(case("trl", f"micro/dapo/{index}")["loss"] for index in (0, 1)) == pytest.approx(
        case("trl", "loss/dapo")["loss"], abs=1e-9
    )

    inputs = batch("loss")
    weights = aggregation_weights(ours, inputs["mask"], **hyper)
    split = [
        our_loss(
            "ppo_clip", {key: one[at] for key, one in inputs.items()}, ours, weights=weights[at]
        )[0]
        for at in (slice(0, 2), slice(2, 6))
    ]
    assert close(sum(split), case("trl", f"loss/{name}")["loss"])


# KL


def test_verl_and_trl_do_not_bound_the_log_ratio_of_the_kl_as_ours():
    """Ours stands still beyond 20 and pulls on; verl's k1 and k2 go on, and its k3 stops at 10 and
    pulls no more."""
    inputs = batch("extreme")
    logp = inputs["logp"].clone().requires_grad_()
    gap = (logp - inputs["old_logp"]).detach()
    far = gap.abs() > 20
    for name in ("k1", "k2", "k3"):
        values = kl(name, logp, inputs["old_logp"])
        gradient = torch.autograd.grad(values.sum(), logp)[0]
        found = theirs("verl", f"kl_penalty/extreme/{name}", "values")
        slope = theirs("verl", f"kl_penalty/extreme/{name}", "gradient")
        assert gradient[far].all()

        if name == "k3":
            cut = values.detach() > 10
            assert close(found[cut], torch.full_like(found[cut], 10.0)) and not slope[cut].any()
            assert close(found[~cut], values.detach()[~cut])
        else:
            assert close(found, gap if name == "k1" else 0.5 * gap**2)
            assert close(values.detach()[~far], found[~far]) and not close(
                values.detach()[far], found[far], 0.1
            )

    assert float(case("trl", "extreme/beta")["loss"]) > 1e10


def test_trl_weighs_its_kl_with_the_ratio_unless_told_otherwise():
    assert case("trl", "loss/beta/default")["loss"] == case("trl", "loss/beta/weighted")["loss"]

    inputs = batch("loss")
    logp = inputs["logp"].clone().requires_grad_()
    penalty = kl("k3", logp, inputs["ref_logp"]) * torch.exp(logp - inputs["old_logp"])
    policy, gradient, _ = our_loss("ppo_clip", inputs)
    added = 0.1 * aggregate("token-mean", penalty, inputs["mask"])
    found = case("trl", "loss/beta/weighted")
    assert close(policy + added.detach(), found["loss"])
    assert close(gradient + torch.autograd.grad(added, logp)[0], found["gradient"])
    assert not close(our_loss("ppo_clip", inputs, k3_coef=0.1)[0], found["loss"], 1e-3)


def test_verl_adaptive_kl_can_turn_its_coefficient_negative():
    """600 sequences at a KL below the target, against a horizon of 100."""
    assert case("verl", "adaptive_kl")["coefficients"][-1] < 0
    controller = KLController(0.1, 0.05, 100)
    controller.update(0.0, 600)
    assert controller.coef == pytest.approx(0.08)


# Importance weights and preferences


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_verl_divides_by_zero_where_every_weight_is_masked(level):
    assert "ZeroDivisionError" in case("verl", f"rollout_is/{level}/all_out")["raised"]
    inputs = batch("loss")
    weights = importance_weights(
        f"{level}_mis", inputs["old_logp"] + 3.0, inputs["old_logp"], inputs["mask"], 2.0, 0.5
    )
    assert not weights.any() and effective_share(weights, inputs["mask"]) == 0.0


def pairs() -> dict[str, torch.Tensor]:
    return {
        key: batch("pairs")[key]
        for key in ("chosen_logp", "rejected_logp", "ref_chosen_logp", "ref_rejected_logp")
    }


def test_trl_ipo_is_of_mean_log_probs():
    assert not close(preference_loss("ipo", **pairs())[0], case("trl", "dpo/ipo")["loss"], 0.1)


def test_trl_dpo_ignores_label_smoothing_and_its_robust_form_subtracts():
    """sigmoid: no smoothing. robust: (-(1 - s) a + s b) / (1 - 2 s) with a, b the log-sigmoids at
    +-beta h; ours -(1 - s) a - s b."""
    plain, half, ours = (
        preference_loss("dpo", label_smoothing=s, **pairs())[0] for s in (0.0, 0.5, 0.2)
    )
    assert close(plain, case("trl", "dpo/sigmoid_smoothed")["loss"]) and not close(
        ours, case("trl", "dpo/sigmoid_smoothed")["loss"], 1e-3
    )

    a = -plain
    b = plain - 2 * half
    assert close(-0.8 * a - 0.2 * b, ours)
    assert close((-0.8 * a + 0.2 * b) / 0.6, case("trl", "dpo/robust")["loss"])
