"""Where TRL's and verl's numbers are not ours on the same inputs, and why ours are as they are.

Found by running their own functions (recordings in tests/conformance/peers/). Each entry names the
test that shows it on their numbers; where nothing stands here, values and gradients agree to 1e-6
(tests/conformance/test_peers_numbers.py).
"""

from __future__ import annotations

from dataclasses import dataclass

VERSIONS = {"verl": "0.9.1", "TRL": "1.16.0"}
"""What was run."""


@dataclass(frozen=True)
class Difference:
    kind: str
    """As in the configuration (`describe.PIECES`), or another function: "importance", "kl
    controller"."""
    names: tuple[str, ...]
    """Our entries that it concerns."""
    peer: str
    theirs: str
    ours: str
    """What ours does instead, and why."""
    test: str
    """In tests/conformance/test_peers_differences.py."""


def differences_of(kind: str, name: str) -> list[Difference]:
    return [one for one in DIFFERENCES if one.kind == kind and name in one.names]


_NO_COMPARISON = "0: without another attempt the score says nothing about how good this one was"

DIFFERENCES = (
    Difference(
        "advantage",
        ("grpo", "rloo", "opo"),
        "verl",
        "a group of one keeps its raw reward as advantage (rloo_vectorized: 0)",
        _NO_COMPARISON,
        "test_verl_trains_a_group_of_one_on_its_raw_reward",
    ),
    Difference(
        "advantage",
        ("reinforce_pp_baseline", "gdpo"),
        "verl",
        "the raw reward of a group of one is whitened together with the other groups' "
        "differences, and shifts them all",
        "0, and left out of the whitening: raw and centred scores have no common scale",
        "test_verl_whitens_the_raw_reward_of_a_group_of_one_with_the_others",
    ),
    Difference(
        "advantage",
        ("grpo_passk",),
        "verl",
        "a group of one ends the run with a ValueError",
        f"{_NO_COMPARISON}; a lost attempt must not end a run",
        "test_verl_refuses_pass_at_k_of_a_group_of_one",
    ),
    Difference(
        "advantage",
        ("otb",),
        "verl",
        "a group of one keeps its raw return",
        _NO_COMPARISON,
        "test_verl_gives_the_optimal_baseline_no_baseline_in_a_group_of_one",
    ),
    Difference(
        "advantage",
        ("grpo", "rloo"),
        "verl",
        "a row without trained tokens enters its group's mean, spread and count as a score of 0",
        "it has no score and enters nothing: a failed attempt must not lower the baseline of the "
        "others",
        "test_verl_counts_a_row_without_trained_tokens_as_a_score_of_zero",
    ),
    Difference(
        "advantage",
        ("grpo",),
        "verl",
        "of an attempt with several rows only the last row's reward counts",
        "the sum over all rows of the attempt: a reward counts wherever it was paid",
        "test_verl_scores_an_attempt_of_several_rows_by_its_last",
    ),
    Difference(
        "advantage",
        ("gpg",),
        "verl",
        "alpha = rows / rows whose score is not 0; a group of one gets alpha times its raw reward",
        "alpha = rows / rows in groups whose scores differ, the paper's B/(B - M): a group that "
        "is all right gives no gradient either",
        "test_verl_gpg_scales_by_scores_other_than_zero",
    ),
    Difference(
        "advantage",
        ("grpo",),
        "verl, TRL",
        "statistics are in the rewards' float32: ten equal rewards of 0.7 get 0.056 in verl, "
        "twelve 0.001 in TRL, rounding over epsilon",
        "exactly 0, statistics in float64: a group without spread teaches nothing",
        "test_equal_rewards_in_float32_become_noise_over_epsilon",
    ),
    Difference(
        "advantage",
        ("otb",),
        "verl",
        "optimal_token_baseline compares attempts place by place, also where some have an "
        "observation there; the tir_ form does not",
        "the n-th trained token with the n-th trained token, as the tir_ form",
        "test_verl_optimal_token_baseline_compares_places_not_trained_tokens",
    ),
    Difference(
        "advantage",
        ("remax",),
        "verl",
        "gamma is ignored",
        "discounted by gamma (default 1, where both agree)",
        "test_verl_remax_does_not_discount",
    ),
    Difference(
        "advantage",
        ("gae", "remax"),
        "verl",
        "untrained places hold numbers other than 0 that every later step has to mask",
        "0 there: nothing can leak where a mask is forgotten",
        "test_verl_leaves_numbers_at_untrained_places",
    ),
    Difference(
        "advantage",
        ("grpo",),
        "TRL",
        "epsilon is 1e-4 and not configurable",
        "epsilon is a setting, 1e-6 unless set: 1e-4 shrinks groups of small spread. With "
        "epsilon=1e-4 both agree",
        "test_trl_epsilon_is_1e_4",
    ),
    Difference(
        "advantage",
        ("batch_norm",),
        "TRL",
        'scale_rewards="batch" takes the mean of the group and the spread of the batch',
        "mean and spread of the batch, which is what BRPO is",
        "test_trl_batch_scaling_keeps_the_groups_mean",
    ),
    Difference(
        "advantage",
        ("gdpo",),
        "TRL",
        "the sum is normalised over rows, (A - mean) / (std + 1e-4), and each reward with "
        "epsilon 1e-4",
        "whitened over trained tokens, as in verl: the loss is a mean over tokens too. The "
        "unwhitened sums agree with epsilon=1e-4",
        "test_trl_gdpo_whitens_over_rows_with_epsilon_beside_the_root",
    ),
    Difference(
        "advantage",
        ("rloo",),
        "TRL",
        "normalize_advantages (off unless set) normalises over the batch besides",
        "no second normalisation: it is not RLOO's estimator any more",
        "test_trl_rloo_can_normalise_over_the_batch",
    ),
    Difference(
        "policy_loss",
        ("ppo_clip",),
        "verl",
        "dual clip at 3 unless clip_ratio_c is set; there is no off, only a large value",
        "off unless set, as in PPO; dual_clip=3 gives verl's numbers",
        "test_verl_dual_clip_is_on_unless_set",
    ),
    Difference(
        "policy_loss",
        ("gspo", "gspo_token"),
        "verl",
        "gspo is our gspo_token, with any aggregation, bounds 0.2 unless set",
        "both forms by their names and the paper's bounds: sequence ratios move by 1e-4 or so, "
        "and 0.2 hardly ever clips",
        "test_verl_gspo_is_our_gspo_token_with_ppos_bounds_unless_set",
    ),
    Difference(
        "policy_loss",
        ("ppo_clip", "gspo", "gspo_token", "gmpo", "kl_cov", "clip_cov"),
        "verl, TRL",
        "largest ratio: e^20 in verl's vanilla, e^10 in its gspo, unbounded in its geo_mean, "
        "kl_cov and clip_cov and in all of TRL's",
        "e^20 in every ratio, without gradient beyond: one rule, and no overflow",
        "test_ratios_are_bounded_by_e_20_in_ours_e_10_in_verl_gspo_and_not_at_all_elsewhere",
    ),
    Difference(
        "policy_loss",
        ("sapo",),
        "verl",
        "always aggregates by seq-mean-token-mean, whatever is configured",
        "the aggregation that is asked for; the preset asks for seq-mean-token-mean, as in the "
        "paper",
        "test_verl_sapo_ignores_the_aggregation",
    ),
    Difference(
        "policy_loss",
        ("cispo",),
        "verl",
        "both bounds are PPO's 0.2 unless set",
        "no lower bound, as in the paper, and 5 as the largest weight, which ScaleRL (arXiv "
        "2510.13786) and TRL's docs recommend",
        "test_verl_cispo_has_ppos_bounds_unless_set",
    ),
    Difference(
        "policy_loss",
        ("dppo_tv", "dppo_kl"),
        "verl",
        "the ratio is capped at 3: the 20 in its code is overridden by the actor's clip_ratio_c",
        "cap 20, as verl's code means it: a low cap biases, says section 5.4 of the paper "
        "according to that code",
        "test_verl_dppo_caps_the_ratio_at_3_unless_set",
    ),
    Difference(
        "policy_loss",
        ("gmpo",),
        "verl",
        "mean over all rows of the micro-batch (empty ones count), the clip's side by the sign "
        "of each token's advantage",
        "mean over rows with trained tokens, the side by the sign of the row's mean advantage, "
        "which is what multiplies the ratio",
        "test_verl_gmpo_takes_the_mean_over_all_rows_and_the_sign_per_token",
    ),
    Difference(
        "policy_loss",
        ("clip_cov",),
        "verl",
        "draws its tokens at random between the bounds, so the loss depends on the random state",
        "the largest covariances, so that a replay gives the same loss. Where all candidates are "
        "chosen, both agree",
        "test_verl_clip_cov_draws_its_tokens_at_random",
    ),
    Difference(
        "policy_loss",
        ("kl_cov",),
        "verl",
        "ppo_kl_coef is 0.1 unless set, against 1 in the function's own text",
        "1, as in the authors' scripts",
        "test_verl_kl_cov_pulls_with_a_tenth_unless_set",
    ),
    Difference(
        "policy_loss",
        ("ppo_clip",),
        "TRL",
        "RLOOTrainer clips one ratio per sequence, exp of the summed log-ratio",
        "preset rloo clips per token: a summed log-ratio leaves 1 +- 0.2 for nearly any long "
        "answer. On-policy the gradients agree",
        "test_trl_rloo_clips_one_ratio_per_sequence_of_summed_log_probs",
    ),
    Difference(
        "aggregation",
        ("token-mean",),
        "verl",
        "token-sum: no divisor at all",
        "not there: its gradient grows with the batch. It is token-mean times the number of "
        "trained tokens",
        "test_verl_token_sum_is_our_token_mean_without_the_divisor",
    ),
    Difference(
        "aggregation",
        ("seq-mean-token-sum-norm",),
        "verl",
        "the divisor is the padded width of the micro-batch unless loss_scale_factor is set",
        "norm must be given: padding must not change a loss",
        "test_verl_norm_is_the_padded_width_unless_set",
    ),
    Difference(
        "aggregation",
        ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
        "verl",
        "the trainer divides by the configured number of rows, empty ones among them; the "
        "function alone leaves them out",
        "divided by the rows with trained tokens",
        "test_verl_divides_by_the_configured_number_of_rows",
    ),
    Difference(
        "aggregation",
        ("seq-mean-token-mean", "seq-mean-token-sum-norm"),
        "TRL",
        "loss_type grpo and dr_grpo divide by all rows, empty ones among them",
        "divided by the rows with trained tokens",
        "test_trl_divides_by_all_rows",
    ),
    Difference(
        "aggregation",
        ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
        "TRL",
        "loss_type bnpo, grpo and dr_grpo take a mean per micro-batch, so the loss depends on "
        "how rows are cut; dapo's does not",
        "weights belong to the whole minibatch: parts add up to it",
        "test_trl_means_depend_on_the_micro_batches",
    ),
    Difference(
        "kl",
        ("k1", "k2", "k3"),
        "verl, TRL",
        "verl: k1, k2 unbounded, k3 cut at 10 and without gradient beyond; TRL: k3 unbounded",
        "the log-ratio's value is bounded to +-20, its gradient goes on: a token that has run "
        "away is still pulled back, without overflow",
        "test_verl_and_trl_do_not_bound_the_log_ratio_of_the_kl_as_ours",
    ),
    Difference(
        "kl",
        ("k3",),
        "TRL",
        "multiplied with the probability ratio (use_bias_correction_kl, on unless set), with a "
        "gradient through it",
        "plain k3; k3+ is the form with the KL's own gradient. With the switch off both agree",
        "test_trl_weighs_its_kl_with_the_ratio_unless_told_otherwise",
    ),
    Difference(
        "kl controller",
        ("adaptive",),
        "verl",
        "n / horizon is unbounded: a step of more than 5 horizons can turn the coefficient "
        "negative",
        "min(n / horizon, 1): the coefficient stays above 0",
        "test_verl_adaptive_kl_can_turn_its_coefficient_negative",
    ),
    Difference(
        "importance",
        ("sequence_mis", "token_mis"),
        "verl",
        "where every weight is masked, the effective sample size divides by zero and the step "
        "fails",
        "effective sample size 0",
        "test_verl_divides_by_zero_where_every_weight_is_masked",
    ),
    Difference(
        "preference_loss",
        ("ipo",),
        "TRL",
        "on mean log-probs per token",
        "on sums, as the paper's eq. 17; give sums divided by their lengths for TRL's",
        "test_trl_ipo_is_of_mean_log_probs",
    ),
    Difference(
        "preference_loss",
        ("dpo",),
        "TRL",
        "loss_type sigmoid ignores label_smoothing; robust is (-(1 - s) log sigmoid(beta h) + s "
        "log sigmoid(-beta h)) / (1 - 2 s)",
        "conservative DPO, the likelihood of a label that is wrong with probability s",
        "test_trl_dpo_ignores_label_smoothing_and_its_robust_form_subtracts",
    ),
)
