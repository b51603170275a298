r"""Runs verl's own functions on the inputs of `recording.py` and writes what they answer to
verl.json. Imports nothing of AgentEvo.

Made with verl 0.9.1 in an environment of its own:

    python3.11 -m venv PEER
    PEER/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    PEER/bin/pip install numpy omegaconf tensordict==0.10.0 transformers==5.9.0 \
        pandas packaging codetiming hydra-core accelerate datasets \
        "ray>=2.41" "TransferQueue>=0.1.10" pillow cachetools uvicorn fastapi torchdata peft
    PEER/bin/pip install --no-deps verl==0.9.1
    PEER/bin/python tests/conformance/peers/record_verl.py
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from recording import Batch, batches, write
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

Case = dict[str, Any]
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def sessions(made: dict[str, Batch]) -> Case:
    """GRPO where attempts have several rows, by the trainer's own function: rows 0, 1 and 2, 3 of
    one task are an attempt each."""
    inputs = {key: value[:4] for key, value in made["groups"].items()}
    rewards = inputs["token_rewards"]
    data = DataProto.from_dict(
        tensors={"token_level_rewards": rewards.clone(), "response_mask": inputs["mask"]},
        non_tensors={"uid": np.array(["task"] * 4, dtype=object)},
    )
    keys = ["task_0_0", "task_0_1", "task_1_0", "task_1_1"]
    found = compute_advantage_for_multi_trajectories(data, keys, core_algos.AdvantageEstimator.GRPO)

    return {
        "function": "compute_advantage_for_multi_trajectories",
        "batch": "groups",
        "attempts": [0, 0, 1, 1],
        "advantages": found.batch["advantages"],
    }


def dtype_of(*tensors: torch.Tensor) -> Case:
    other = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors} - {"float64"}
    return {"dtype": other.pop()} if other else {}


def advantage(
    made: dict[str, Batch],
    batch: str,
    estimator: str,
    *,
    rewards: str = "token_rewards",
    **arguments: Any,
) -> Case:
    """By the registered estimator of that name, called as verl's trainer calls it: with whatever of
    the batch it takes."""
    inputs = made[batch]
    function = core_algos.get_adv_estimator_fn(estimator)
    known = {
        "token_level_rewards": inputs[rewards].clone(),
        "response_mask": inputs["mask"],
        "index": np.array([f"task-{one}" for one in inputs["group_ids"].tolist()], dtype=object),
        "values": inputs["values"],
        "reward_baselines": inputs["baseline_rewards"],
        "old_log_probs": inputs["logp"],
        "sum_pi_squared": inputs["sum_pi_squared"],
        "config": AlgoConfig(
            norm_adv_by_std_in_grpo=arguments.get("norm_adv_by_std_in_grpo", True),
            gamma=arguments.get("gamma", 1.0),
        ),
    }
    taken = {
        key: value
        for key, value in (known | arguments).items()
        if key in inspect.signature(function).parameters
    }
    advantages, returns = function(**taken)

    return {
        "function": function.__name__,
        "batch": batch,
        "rewards": rewards,
        "arguments": arguments,
        "advantages": advantages,
        "returns": returns,
        **dtype_of(advantages),
    }


def gdpo(made: dict[str, Batch], batch: str, weights: list[float] | None) -> Case:
    inputs = made[batch]
    rows, tokens = inputs["mask"].shape
    attention = torch.ones(
        rows, 1 + tokens, dtype=torch.int64
    )  # each row's score goes to its last place, which has to be trained
    names = [f"reward_{index}" for index in range(len(inputs["reward_parts"]))]
    advantages, _ = core_algos.compute_gdpo_outcome_advantage(
        inputs["token_rewards"],
        inputs["mask"],
        np.array(inputs["group_ids"].tolist()),
        config=AlgoConfig(gdpo_reward_keys=names, gdpo_reward_weights=weights),
        non_tensor_batch={
            name: part.numpy() for name, part in zip(names, inputs["reward_parts"], strict=True)
        },
        batch={"prompts": torch.zeros(rows, 1), "attention_mask": attention},
    )

    return {
        "function": "compute_gdpo_outcome_advantage",
        "batch": batch,
        "arguments": {"gdpo_reward_weights": weights},
        "advantages": advantages,
        **dtype_of(advantages),
    }


def advantages(made: dict[str, Batch]) -> dict[str, Case]:
    cases = {}
    for batch in ("groups", "single", "empty"):
        for name in (
            "grpo",
            "grpo_vectorized",
            "rloo",
            "rloo_vectorized",
            "opo",
            "gpg",
            "reinforce_plus_plus_baseline",
            "remax",
        ):
            cases[f"{name}/{batch}"] = advantage(made, batch, name)

        for name in (
            "reinforce_plus_plus",
            "gae",
            "remax",
            "optimal_token_baseline",
            "tir_optimal_token_baseline",
        ):
            cases[f"{name}/{batch}/dense"] = advantage(
                made, batch, name, rewards="dense_rewards", gamma=1.0, lam=1.0
            )

        cases[f"gdpo/{batch}"] = gdpo(made, batch, None)

    cases["grpo/sessions"] = sessions(made)
    cases["grpo/groups/no_std"] = advantage(made, "groups", "grpo", norm_adv_by_std_in_grpo=False)
    cases["grpo/groups/epsilon"] = advantage(made, "groups", "grpo", epsilon=1e-4)
    for scaled in (True, False):
        cases[f"grpo_passk/groups/{'std' if scaled else 'no_std'}"] = advantage(
            made, "groups", "grpo_passk", norm_adv_by_std_in_grpo=scaled
        )

    cases["gdpo/groups/weights"] = gdpo(made, "groups", [1.0, 0.5, 2.0])
    cases["remax/groups/discounted"] = advantage(
        made, "groups", "remax", rewards="dense_rewards", gamma=0.9
    )
    try:
        cases["grpo_passk/single"] = advantage(made, "single", "grpo_passk")
    except ValueError as error:
        cases["grpo_passk/single"] = {
            "function": "compute_grpo_passk_outcome_advantage",
            "raised": repr(error),
        }

    cases["gae/groups/discounted"] = advantage(
        made, "groups", "gae", rewards="dense_rewards", gamma=0.9, lam=0.8
    )
    cases["reinforce_plus_plus/groups/discounted"] = advantage(
        made, "groups", "reinforce_plus_plus", rewards="dense_rewards", gamma=0.9
    )
    cases["tir_optimal_token_baseline/groups/tail"] = advantage(
        made,
        "groups",
        "tir_optimal_token_baseline",
        rewards="dense_rewards",
        handle_zero_tail=False,
    )
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        cases[f"{name}/contiguous/dense"] = advantage(
            made, "contiguous", name, rewards="dense_rewards"
        )

    equal = made["groups"] | {
        "token_rewards": (made["groups"]["mask"].cumsum(1) == 1).float() * 0.7
    }
    equal["token_rewards"] *= equal["mask"]
    equal["group_ids"] = torch.zeros(10, dtype=torch.int64)
    cases["grpo/equal_float32"] = advantage({"equal": equal}, "equal", "grpo")
    return cases


def policy_loss(
    made: dict[str, Batch],
    batch: str,
    mode: str,
    aggregation: str = "token-mean",
    advantages: str = "advantages",
    rollout: str | None = None,
    global_batch: dict[str, int] | None = None,
    seed: int = 0,
    **settings: Any,
) -> Case:
    """Loss and its gradient in the log-probs, with `settings` in verl's ActorConfig or its
    policy_loss section."""
    inputs = made[batch]
    inner = {
        key: value
        for key, value in settings.items()
        if key in PolicyLossConfig.__dataclass_fields__
    }
    outer = {key: value for key, value in settings.items() if key not in inner}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=mode, **inner),
        global_batch_info=dict(global_batch or {}),
        **outer,
    )
    logp = inputs["logp"].clone().requires_grad_()

    weights = None
    if rollout:
        weights, _ = compute_rollout_correction_weights(
            inputs["old_logp"] - inputs["rollout_logp"], inputs["mask"], rollout, 2.0
        )

    torch.manual_seed(seed)
    loss, metrics = core_algos.POLICY_LOSS_REGISTRY[mode](
        old_log_prob=inputs["old_logp"],
        log_prob=logp,
        advantages=inputs[advantages],
        response_mask=inputs["mask"],
        loss_agg_mode=aggregation,
        config=config,
        rollout_is_weights=weights,
    )
    gradient = torch.autograd.grad(loss, logp)[0]

    return {
        "function": core_algos.POLICY_LOSS_REGISTRY[mode].__name__,
        "batch": batch,
        "advantages": advantages,
        "aggregation": aggregation,
        "settings": settings,
        "loss": loss,
        "gradient": gradient,
        "metrics": metrics,
        **dtype_of(loss),
    }


def policy_losses(made: dict[str, Batch]) -> dict[str, Case]:
    off = {"clip_ratio_c": 1e9}
    cases = {
        f"vanilla/{name}": policy_loss(made, "loss", "vanilla", name, **off)
        for name in AGGREGATIONS
    }
    cases["vanilla/dual_clip"] = policy_loss(made, "loss", "vanilla")
    cases["vanilla/clip_higher"] = policy_loss(made, "loss", "vanilla", clip_ratio_high=0.28, **off)
    cases["vanilla/per_token"] = policy_loss(
        made, "loss", "vanilla", advantages="token_advantages", **off
    )
    for level in ("token", "sequence"):
        cases[f"vanilla/rollout_{level}"] = policy_loss(
            made, "loss", "vanilla", rollout=level, **off
        )

    cases["vanilla/global_batch"] = policy_loss(
        made, "loss_empty", "vanilla", "seq-mean-token-mean", global_batch={"global_batch_size": 3}
    )
    bounds = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        cases[f"gspo/{aggregation}"] = policy_loss(made, "loss", "gspo", aggregation, **bounds)

    cases["gspo/default_bounds"] = policy_loss(made, "loss", "gspo", "seq-mean-token-mean")
    cases["gspo/per_token"] = policy_loss(
        made, "loss", "gspo", advantages="token_advantages", **bounds
    )
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        cases[f"sapo/{aggregation}"] = policy_loss(made, "loss", "sapo", aggregation)
    for mode in ("cispo", "gpg", "dppo_tv", "dppo_kl"):
        cases[mode] = policy_loss(made, "loss", mode)

    cases["cispo/wide"] = policy_loss(
        made, "loss", "cispo", clip_ratio_low=1.0, clip_ratio_high=4.0
    )
    for mode, bound in (("dppo_tv", 0.05), ("dppo_kl", 0.01)):
        cases[f"{mode}/narrow"] = policy_loss(
            made, "loss", mode, clip_ratio_low=bound, clip_ratio_high=bound, clip_ratio_c=20.0
        )

    cases["dro"] = policy_loss(made, "loss", "dro", dro_beta=0.5)
    cases["geo_mean"] = policy_loss(
        made, "loss", "geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4
    )
    cases["geo_mean/per_token"] = policy_loss(
        made, "loss", "geo_mean", advantages="token_advantages", clip_ratio_low=0.4
    )
    cases["geo_mean/empty"] = policy_loss(
        made, "loss_empty", "geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4
    )
    few = {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.05, "clip_cov_ub": 50.0}
    cases["clip_cov/all_candidates"] = policy_loss(
        made, "loss", "clip_cov", **(few | {"clip_cov_ratio": 1.0})
    )
    for seed in (0, 1):
        cases[f"clip_cov/draw_{seed}"] = policy_loss(made, "loss", "clip_cov", seed=seed, **few)

    cases["kl_cov"] = policy_loss(made, "loss", "kl_cov", kl_cov_ratio=0.2, ppo_kl_coef=1.0)
    cases["kl_cov/default_coef"] = policy_loss(made, "loss", "kl_cov", kl_cov_ratio=0.2)
    for mode in (
        "vanilla",
        "gspo",
        "sapo",
        "cispo",
        "gpg",
        "dppo_tv",
        "dppo_kl",
        "geo_mean",
        "kl_cov",
    ):
        cases[f"{mode}/extreme"] = policy_loss(made, "extreme", mode)

    cases["clip_cov/extreme"] = policy_loss(
        made, "extreme", "clip_cov", clip_cov_lb=1e9, clip_cov_ub=1e10
    )  # no candidates
    return cases


def rollout_weights(made: dict[str, Batch]) -> dict[str, Case]:
    inputs = made["loss"]
    cases = {}
    for level in ("token", "sequence"):
        for threshold in (2.0, "0.5_2.0"):
            gap = inputs["old_logp"] - inputs["rollout_logp"]
            weights, metrics = compute_rollout_correction_weights(
                gap, inputs["mask"], level, threshold
            )
            cases[f"rollout_is/{level}/{threshold}"] = {
                "function": "compute_rollout_correction_weights",
                "batch": "loss",
                "weights": weights,
                "metrics": {"ess": metrics["rollout_is_eff_sample_size"]},
            }

    for level in ("token", "sequence"):
        try:
            compute_rollout_correction_weights(
                torch.full_like(inputs["logp"], 3.0), inputs["mask"], level, "0.5_2.0"
            )
            raised = ""
        except ZeroDivisionError as error:
            raised = repr(error)

        cases[f"rollout_is/{level}/all_out"] = {
            "function": "compute_rollout_correction_weights",
            "raised": raised,
        }

    return cases


def aggregations(made: dict[str, Batch]) -> dict[str, Case]:
    cases = {}
    for batch in ("loss", "loss_empty"):
        for name in AGGREGATIONS:
            for label, extra in {
                "": {},
                "/scale": {"loss_scale_factor": 16},
                "/global": {"global_batch_size": len(made[batch]["mask"])},
            }.items():
                values = made[batch]["token_advantages"].clone().requires_grad_()
                loss = core_algos.agg_loss(values, made[batch]["mask"], name, **extra)
                gradient = torch.autograd.grad(loss, values)[0]
                cases[f"agg_loss/{batch}/{name}{label}"] = {
                    "function": "agg_loss",
                    "batch": batch,
                    "arguments": extra,
                    "loss": loss,
                    "gradient": gradient,
                }

    inputs = made["loss"]
    cases["agg_loss/micro"] = {
        "function": "agg_loss",
        "losses": [
            core_algos.agg_loss(inputs["token_advantages"][at], inputs["mask"][at], "token-mean")
            for at in (slice(0, 2), slice(2, 6))
        ],
    }
    cases["agg_loss/micro"]["losses"] = [float(one) for one in cases["agg_loss/micro"]["losses"]]
    return cases


def penalties(made: dict[str, Batch]) -> dict[str, Case]:
    cases = {}
    far = made["extreme"] | {"ref_logp": made["extreme"]["old_logp"]}
    for batch, inputs in {"loss": made["loss"], "extreme": far}.items():
        for name in (
            "k1",
            "kl",
            "k2",
            "mse",
            "k3",
            "low_var_kl",
            "abs",
            "k1+",
            "k2+",
            "k3+",
            "abs+",
        ):
            logp = inputs["logp"].clone().requires_grad_()
            values = core_algos.kl_penalty(logp, inputs["ref_logp"], name)
            gradient = torch.autograd.grad(values.sum(), logp)[0]
            cases[f"kl_penalty/{batch}/{name}"] = {
                "function": "kl_penalty",
                "batch": batch,
                "values": values,
                "gradient": gradient,
            }

    controller = core_algos.AdaptiveKLController(0.1, 0.05, 100)
    coefficients = []
    for kl, rows in ((0.01, 10), (0.2, 30), (0.051, 100), (0.0, 600)):
        controller.update(kl, rows)
        coefficients.append(float(controller.value))

    cases["adaptive_kl"] = {"function": "AdaptiveKLController", "coefficients": coefficients}
    return cases


def value_losses(made: dict[str, Batch]) -> dict[str, Case]:
    inputs = made["groups"]
    cases = {}
    for clip in (0.5, 0.05):
        for aggregation in ("token-mean", "seq-mean-token-mean"):
            values = inputs["values"].clone().requires_grad_()
            returns = inputs["dense_rewards"]
            old = inputs["values"] + 0.3 * inputs["logp"]
            loss, clipped = core_algos.compute_value_loss(
                values, returns, old, inputs["mask"], clip, aggregation
            )
            cases[f"value_loss/{clip}/{aggregation}"] = {
                "function": "compute_value_loss",
                "batch": "groups",
                "loss": loss,
                "gradient": torch.autograd.grad(loss, values)[0],
                "clipped": clipped,
            }

    return cases


PARTS: tuple[Callable[[dict[str, Batch]], dict[str, Case]], ...] = (
    advantages,
    policy_losses,
    rollout_weights,
    aggregations,
    penalties,
    value_losses,
)

if __name__ == "__main__":
    recorded: dict[str, Case] = {}
    everything = batches()
    for part in PARTS:
        recorded |= part(everything)
    write(
        "verl", {name: version(name) for name in ("verl", "torch", "numpy")}, everything, recorded
    )
