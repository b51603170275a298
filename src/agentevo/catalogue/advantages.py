"""Advantage estimators by name. Functions: `algorithms/group_relative.py`, `algorithms/returns.py`;
entry: `estimators.advantage`.

In the formulas s_i is the score of trajectory i (the sum of its rewards at trained tokens), mu_g
and std_g mean and unbiased standard deviation of the scores of its group, n the number of
trajectories in the group, t an index over trained tokens, k one over turns.
"""

from __future__ import annotations

from agentevo.catalogue import FUNCTION, CatalogueEntry, Hyperparameter, by_name

_EPSILON = Hyperparameter("epsilon", 1e-6, "added to the divisor", low=0.0, high=0.01)
_SCALE = Hyperparameter("scale_by_std", True, "divide by the standard deviation of the group")
_GAMMA = Hyperparameter("gamma", 1.0, "discount per trained token", low=0.0, high=1.0)
_LAM = Hyperparameter(
    "lam", 1.0, "lambda of GAE: 0 trusts the critic, 1 the rewards", low=0.0, high=1.0
)
_TURN_BASELINE = Hyperparameter(
    "turn_baseline",
    "all",
    "what a turn is compared with: `all` turns of the group; `place`, those at the same place of "
    "their attempts (along the tree: at the same depth); `none`",
    choices=("all", "place", "none"),
)
_WHITEN = Hyperparameter(
    "whiten",
    True,
    "shift and scale the advantages of the batch's trained tokens to mean 0 and variance 1",
)

ADVANTAGES = by_name(
    [
        CatalogueEntry(
            name="raw",
            meaning="the trajectory's score, without a baseline (ARPO)",
            formula="A_i = s_i",
            source="REINFORCE, Williams 1992; as ARPO in RAGEN's StarPO code, arXiv 2504.20073",
            peers={"RAGEN": "reward_norm_type arpo (March 2025); state + identity later"},
        ),
        CatalogueEntry(
            name="batch_norm",
            meaning="scores normalised over all trajectories of the batch (BRPO)",
            formula="A_i = (s_i - mean) / (std + epsilon), over the batch; a batch of one gives 0",
            source="BRPO in RAGEN's StarPO code, arXiv 2504.20073",
            hyper=(_EPSILON,),
            peers={
                "RAGEN": "reward_norm_type brpo, put before GAE; a batch of one keeps its raw "
                "reward"
            },
        ),
        CatalogueEntry(
            name="grpo",
            within_group=True,
            meaning="score against the mean of its group, in units of the group's spread",
            formula="A_i = (s_i - mu_g) / (std_g + epsilon); scale_by_std=false: A_i = s_i - "
            "mu_g (Dr. GRPO)",
            source="DeepSeekMath, arXiv 2402.03300, section 4.1.2; Dr. GRPO, arXiv 2503.20783",
            hyper=(_SCALE, _EPSILON),
            peers={
                "verl": "grpo, grpo_vectorized; scale_by_std is norm_adv_by_std_in_grpo",
                "TRL": 'GRPOTrainer, scale_rewards="group" or "none"',
            },
        ),
        CatalogueEntry(
            name="grpo_passk",
            within_group=True,
            meaning="only the best of a group is reinforced, by its lead over the second best",
            formula="A_best = (s_best - s_second) / (std_g + epsilon), all others 0; a tie for "
            "the best gives 0",
            source="arXiv 2503.19595 (policy optimisation for inference-time objectives)",
            hyper=(_SCALE, _EPSILON),
            peers={"verl": "grpo_passk"},
        ),
        CatalogueEntry(
            name="rloo",
            within_group=True,
            meaning="score against the mean of the other trajectories of its group",
            formula="A_i = n / (n - 1) (s_i - mu_g) = s_i - mean of the others",
            source="Back to basics, arXiv 2402.14740; Kool et al. 2019",
            peers={"verl": "rloo, rloo_vectorized", "TRL": "RLOOTrainer"},
        ),
        CatalogueEntry(
            name="opo",
            within_group=True,
            meaning="score against the mean of its group weighted by length, near the baseline "
            "of least variance",
            formula="A_i = s_i - sum_j(l_j s_j) / sum_j(l_j), l_j = trained tokens of trajectory j",
            source="OPO, arXiv 2505.23585",
            peers={"verl": "opo"},
        ),
        CatalogueEntry(
            name="gpg",
            within_group=True,
            meaning="score against the mean of its group, scaled up to make up for groups whose "
            "scores are all equal",
            formula="A_i = alpha (s_i - mu_g), alpha = trajectories / trajectories in groups "
            "whose scores differ",
            source="GPG, arXiv 2504.02546",
            peers={"verl": "gpg"},
        ),
        CatalogueEntry(
            name="maxrl",
            within_group=True,
            meaning="score against the mean of its group in units of that mean: hard tasks weigh "
            "more",
            formula="A_i = (s_i - mu_g) / (mu_g + epsilon), scores of at least 0; 0 where mu_g "
            "is 0",
            source="Maximum likelihood reinforcement learning, arXiv 2602.02710",
            hyper=(_EPSILON,),
            peers={"prime-rl": "max_rl"},
        ),
        CatalogueEntry(
            name="gdpo",
            within_group=True,
            meaning="each reward normalised within its group before they are added, so that none "
            "dominates",
            formula="A_i = whiten(sum_r w_r (s_ri - mu_rg) / (std_rg + epsilon)), whitened over "
            "the batch's trained tokens; w_r default 1",
            source="GDPO, arXiv 2601.05242",
            hyper=(_EPSILON, _WHITEN),
            needs=("reward_parts",),
            peers={
                "verl": "gdpo, with gdpo_reward_keys and gdpo_reward_weights",
                "TRL": 'multi_objective_aggregation="normalize_then_sum"',
            },
        ),
        CatalogueEntry(
            name="reinforce_pp",
            meaning="return-to-go of each token, whitened over the batch (REINFORCE++)",
            formula="G_t = r_t + gamma G_{t+1}; A = whiten(G); returns G",
            source="REINFORCE++, arXiv 2501.03262",
            hyper=(_GAMMA,),
            peers={
                "verl": "reinforce_plus_plus; up to 0.8 it lost the return at observation tokens"
            },
        ),
        CatalogueEntry(
            name="reinforce_pp_baseline",
            within_group=True,
            meaning="score against the mean of its group, whitened over the batch instead of the "
            "group",
            formula="A_i = whiten(s_i - mu_g), over the batch's trained tokens; groups of one "
            "are left out and get 0",
            source="REINFORCE++, arXiv 2501.03262, baseline variant",
            peers={"verl": "reinforce_plus_plus_baseline"},
        ),
        CatalogueEntry(
            name="remax",
            meaning="return-to-go of each token against the score of a greedy attempt at the "
            "same task",
            formula="A_t = G_t - b, G_t = r_t + gamma G_{t+1}; returns G",
            source="ReMax, arXiv 2310.10505",
            hyper=(_GAMMA,),
            needs=("baseline_rewards",),
            peers={"verl": "remax"},
        ),
        CatalogueEntry(
            name="gae",
            meaning="generalised advantage estimation with a critic, over trained tokens",
            formula="delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; "
            "returns A + V; then A = whiten(A)",
            source="GAE, arXiv 1506.02438, eq. 16",
            hyper=(_GAMMA, _LAM, _WHITEN),
            needs=("values",),
            peers={"verl": "gae (always whitened)"},
        ),
        CatalogueEntry(
            name="turn_gae",
            meaning="GAE with a turn as one step: all tokens of a turn get the turn's advantage",
            formula="r_k = sum of the turn's rewards, V_k = value at its first token; delta_k = "
            "r_k + gamma V_{k+1} - V_k; "
            "A_k = delta_k + gamma lam A_{k+1}; returns A_k + V_k; then A = whiten(A)",
            source="GAE, arXiv 1506.02438, eq. 16, on the turns' decision process of StarPO, "
            "arXiv 2504.20073",
            hyper=(
                Hyperparameter("gamma", 1.0, "discount per turn", low=0.0, high=1.0),
                _LAM,
                _WHITEN,
            ),
            needs=("values", "turn_ids"),
        ),
        CatalogueEntry(
            name="bi_level_gae",
            meaning="GAE over turns, then over the tokens of each turn towards the turn's return",
            formula="turns: delta_k = r_k + turn_gamma V_{e(k+1)} - V_{e(k)}, A_k = delta_k + "
            "turn_gamma turn_lam A_{k+1}, e(k) its end; "
            "tokens: GAE(gamma, lam) in each turn with reward A_k + V_{e(k)} at e(k); returns A "
            "+ V; then A = whiten(A)",
            source="RAGEN, ragen/trainer/core_algos.py (May 2025)",
            hyper=(
                _GAMMA,
                _LAM,
                Hyperparameter("turn_gamma", 0.95, "discount per turn", low=0.0, high=1.0),
                Hyperparameter("turn_lam", 1.0, "lambda of the GAE over turns", low=0.0, high=1.0),
                _WHITEN,
            ),
            needs=("values", "turn_ids"),
            peers={
                "RAGEN": "algorithm.bi_level_gae, high_level_gamma; one lam for both levels; "
                "skips turns whose reward is 0"
            },
        ),
        CatalogueEntry(
            name="turn_returns",
            within_group=True,
            meaning="return-to-go of each turn against all turns of the group",
            formula="R_k = r_k + gamma R_{k+1}; A_k = (R_k - mean) / (std + epsilon), mean and "
            "std over the turns of the group, or over its k-th turns; returns R",
            source="step rewards of GRPO with process supervision, DeepSeekMath, arXiv "
            "2402.03300, section 4.1.3, with a discount per turn",
            hyper=(
                Hyperparameter("gamma", 1.0, "discount per turn", low=0.0, high=1.0),
                _SCALE,
                _EPSILON,
                _TURN_BASELINE,
            ),
            needs=("turn_ids",),
        ),
        CatalogueEntry(
            name="tree_returns",
            within_group=True,
            meaning="return-to-go of each turn along the tree of turns, against all turns of the "
            "group",
            formula="R_k = r_k + gamma sum of R over the turns that continue k; A_k = (R_k - "
            "mean) / (std + epsilon), mean and std over "
            "the turns of the group, or over those as deep as k; returns R",
            source="as turn_returns, on trajectories that branch",
            hyper=(
                Hyperparameter("gamma", 1.0, "discount per turn", low=0.0, high=1.0),
                _SCALE,
                _EPSILON,
                _TURN_BASELINE,
            ),
            needs=("turn_ids", "turn_parents"),
        ),
        CatalogueEntry(
            name="credit",
            meaning="the credit that your own function gives each turn (algorithm.credit)",
            formula="R_k = credit(group)_k; A_k = (R_k - mean) / (std + epsilon), mean and std "
            "over the turns of the group, or over its k-th turns; turn_baseline=none: A_k = R_k; "
            "returns R",
            source="your function; docs/rewards.md",
            hyper=(_SCALE, _EPSILON, _TURN_BASELINE),
            needs=("turn_ids", "turn_credit"),
        ),
        CatalogueEntry(
            name="prime",
            within_group=True,
            meaning="outcomes and process rewards, each against the mean of the others of its "
            "group (PRIME)",
            formula="A_t = s_i - mean_{j != i} s_j + process_coef sum_{u >= t} gamma^(u - t) "
            "(p_u - mean_{j != i} m_j), p process "
            "rewards, m_j their mean over trajectory j; then A = whiten(A)",
            source="PRIME, arXiv 2502.01456, section 3.2; its code whitens",
            hyper=(
                _GAMMA,
                Hyperparameter(
                    "process_coef",
                    1.0,
                    "weight of the process rewards; the outcome has weight 1",
                    low=0.0,
                ),
                _WHITEN,
            ),
            needs=("process_rewards",),
            peers={
                "verl": "recipe/prime: reward_dpo_coef 5, reward_gt_coef 5 (1 : 1); process "
                "rewards scaled by their largest sum"
            },
        ),
        CatalogueEntry(
            name="otb",
            within_group=True,
            meaning="return-to-go against the baseline of least variance for its group and time "
            "(optimal token baseline)",
            formula="w_t = 1 - 2 pi_t + sum_v pi_v^2; W_t = w_1 + ... + w_t; B_t = sum_i G_t W_t "
            "/ sum_i W_t over the group's rows that "
            "reach t; A_t = G_t - B_t; returns G",
            source="The optimal token baseline, arXiv 2602.07078; verl/trainer/ppo/core_algos.py "
            "(TIR form)",
            hyper=(
                Hyperparameter(
                    "handle_zero_tail",
                    True,
                    "no baseline where only one trajectory of the group is left; it would be its "
                    "own return",
                ),
            ),
            needs=("logp", "sum_pi_squared"),
            peers={
                "verl": "tir_optimal_token_baseline; optimal_token_baseline where masks have no "
                "holes"
            },
        ),
        CatalogueEntry(
            name=FUNCTION,
            meaning="the advantage that your own function computes (algorithm.advantage_function)",
            formula="A = advantage(inputs), of each trajectory or of each token",
            source="your function; docs/algorithms.md",
        ),
    ]
)
