"""The keys of other systems and ours that stand for them, for refusals of an unknown key.

docs/coming_from.md has the same pairs with remarks; a test compares the two.
"""

from __future__ import annotations

PEER_KEYS: dict[str, dict[str, str]] = {
    "TRL": {
        "environment_factory": "environment.type",
        "max_steps": "trainer.steps",
        "num_generations": "trainer.group_size",
        "generation_batch_size": "trainer.groups_per_step",
        "steps_per_generation": "trainer.minibatches",
        "num_iterations": "trainer.epochs",
        "per_device_train_batch_size": "trainer.micro_batch_tokens",
        "learning_rate": "trainer.learning_rate",
        "lr_scheduler_type": "trainer.schedule",
        "warmup_steps": "trainer.warmup_steps",
        "max_grad_norm": "trainer.max_grad_norm",
        "weight_decay": "trainer.weight_decay",
        "max_completion_length": "sampling.max_new_tokens",
        "temperature": "sampling.temperature",
        "top_p": "sampling.top_p",
        "top_k": "sampling.top_k",
        "min_p": "sampling.min_p",
        "beta": "algorithm.kl_coef",
        "sync_ref_model": "algorithm.reference=synced, algorithm.reference=ema",
        "ref_model_sync_steps": "algorithm.reference_every",
        "ref_model_mixup_alpha": "algorithm.reference_decay",
        "epsilon": "algorithm.clip_low",
        "epsilon_high": "algorithm.clip_high",
        "delta": "algorithm.dual_clip",
        "loss_type": (
            "algorithm.aggregation=token-mean, algorithm.aggregation=seq-mean-token-mean"
        ),
        "importance_sampling_level": "algorithm.name=gspo",
        "scale_rewards": "algorithm.scale_by_std=false",
        "mask_truncated_completions": "algorithm.drop_truncated=true",
        "entropy_coef": "algorithm.entropy_coef",
        "entropy_target": "algorithm.entropy_target",
        "use_vllm": "engine.type=vllm",
        "vllm_importance_sampling_correction": (
            "algorithm.old_logprobs=recomputed, algorithm.importance=token_tis"
        ),
        "vllm_importance_sampling_clip_max": "algorithm.importance_cap",
        "max_staleness": "rollout.staleness",
        "gradient_checkpointing": "memory.checkpointing=full",
        "torch_compile": "trainer.torch_compile",
        "peft_config": "model.lora.rank=16",
        "eval_steps": "evaluation.every",
        "save_steps": "checkpoint.every",
        "save_total_limit": "checkpoint.keep_last",
        "report_to": "tracking.backends",
        "run_name": "tracking.name",
        "log_completions": "tracking.attempts",
        "output_dir": "run.dir",
        "seed": "run.seed",
    },
    "verl": {
        "uid": "tasks.train",
        "data.train_files": "tasks.train",
        "actor_rollout_ref.model.path": "model.name",
        "actor_rollout_ref.model.lora_rank": "model.lora.rank",
        "actor.checkpoint.async_save": "checkpoint.background",
        "actor.fsdp_config.fsdp_size": "trainer.parallel.shard",
        "actor.megatron.tensor_model_parallel_size": "trainer.parallel.tensor",
        "actor.megatron.pipeline_model_parallel_size": "trainer.parallel.pipeline",
        "actor.ulysses_sequence_parallel_size": "trainer.parallel.context",
        "expert_model_parallel_size": "trainer.parallel.expert",
        "data.train_batch_size": "trainer.groups_per_step",
        "actor_rollout_ref.rollout.n": "trainer.group_size",
        "actor.ppo_mini_batch_size": "trainer.minibatches",
        "actor.ppo_epochs": "trainer.epochs",
        "actor.ppo_micro_batch_size_per_gpu": "trainer.micro_batch_tokens",
        "actor.ppo_max_token_len_per_gpu": "trainer.micro_batch_tokens",
        "actor.optim.lr": "trainer.learning_rate",
        "actor.grad_clip": "trainer.max_grad_norm",
        "data.max_response_length": "sampling.max_new_tokens",
        "rollout.multi_turn.max_assistant_turns": "agent.max_turns",
        "rollout.temperature": "sampling.temperature",
        "rollout.top_p": "sampling.top_p",
        "rollout.val_kwargs": "evaluation.temperature, evaluation.samples",
        "rollout.trace.backend": "tracing.backend=mlflow",
        "rollout.trace.token2text": "tracing.token2text",
        "rollout.trace.project_name": "tracing.experiment",
        "rollout.trace.experiment_name": "run.name",
        "rollout.trace.max_samples_per_step_per_worker": "tracing.share",
        "algorithm.adv_estimator": "algorithm.advantage, algorithm.name",
        "algorithm.norm_adv_by_std_in_grpo": "algorithm.scale_by_std",
        "actor.policy_loss.loss_mode": "algorithm.policy_loss",
        "actor.clip_ratio_low": "algorithm.clip_low",
        "actor.clip_ratio_high": "algorithm.clip_high",
        "actor.clip_ratio_c": "algorithm.dual_clip",
        "actor.loss_agg_mode": "algorithm.aggregation",
        "actor.entropy_coeff": "algorithm.entropy_coef",
        "actor.use_kl_loss": "algorithm.kl_in=loss",
        "actor.kl_loss_coef": "algorithm.kl_coef",
        "actor.kl_loss_type": "algorithm.kl=k3",
        "algorithm.use_kl_in_reward": (
            "algorithm.kl_in=reward, algorithm.kl_coef=0.001, algorithm.kl_target"
        ),
        "algorithm.kl_ctrl.target_kl": (
            "algorithm.kl_in=reward, algorithm.kl_coef=0.001, algorithm.kl_target"
        ),
        "algorithm.rollout_correction.rollout_is": (
            "algorithm.importance, algorithm.old_logprobs=recomputed"
        ),
        "algorithm.rollout_correction.rollout_is_threshold": "algorithm.importance_cap",
        "actor.router_replay.mode": "trainer.routing_replay",
        "algorithm.filter_groups": "algorithm.drop_zero_variance, algorithm.dynamic_sampling",
        "critic.optim.lr": "critic.learning_rate",
        "critic.cliprange_value": "critic.clip",
        "trainer.critic_warmup": "critic.pretrain_steps",
        "trainer.total_training_steps": "trainer.steps",
        "trainer.test_freq": "evaluation.every",
        "trainer.save_freq": "checkpoint.every",
        "trainer.logger": "tracking.backends",
        "trainer.project_name": "tracking.project",
        "trainer.experiment_name": "tracking.name",
        "trainer.log_val_generations": "tracking.attempts",
        "trainer.v1.trainer_mode": "rollout.samplers=2",
        "max_off_policy_threshold": "rollout.staleness",
        "max_off_policy_strategy": "rollout.policy=cancel, rollout.policy=wait",
    },
    "ART": {
        "learning_rate": "trainer.learning_rate",
        "loss_fn": "algorithm.name=cispo",
        "kl_penalty_coef": "algorithm.kl_coef",
        "scale_rewards": "algorithm.scale_by_std",
        "importance_sampling_level": "algorithm.policy_loss=gspo_token",
        "max_steps_off_policy": "rollout.staleness",
        "num_rollout_workers": "rollout.max_attempts",
        "eval_every_n_steps": "evaluation.every",
    },
    "Agent Lightning": {
        "n_runners": "rollout.samplers",
        "unresponsive_seconds": "rollout.lease_s",
    },
    "RAGEN": {
        "model_path": "model.name",
        "es_manager.train.env_groups": "trainer.groups_per_step",
        "es_manager.train.group_size": "trainer.group_size",
        "es_manager.val.env_groups": "evaluation.tasks",
        "es_manager.format_penalty": "agent.format_penalty",
        "agent_proxy.max_turn": "agent.max_turns",
        "agent_proxy.max_actions_per_turn": "agent.actions_per_turn",
        "agent_proxy.action_sep": "agent.action_separator",
        "agent_proxy.enable_think": "agent.format=answer",
        "agent_proxy.max_context_window": "agent.memory=turn",
        "agent_proxy.reward_normalization": (
            "algorithm.advantage=grpo, algorithm.advantage=batch_norm, algorithm.advantage=raw"
        ),
        "rollout.rollout_filter_ratio": "algorithm.keep_groups",
        "algorithm.bi_level_gae": "algorithm.advantage=bi_level_gae",
        "algorithm.high_level_gamma": "algorithm.turn_gamma",
        "use_turn_scores": "algorithm.name=turn_grpo, algorithm.name=turn_ppo",
        "actor.clip_ratio_high": "algorithm.clip_high",
        "lora.rank": "model.lora.rank",
        "trainer.total_training_steps": "trainer.steps",
        "seed.train": "run.seed",
    },
    "AgentRL": {
        "browse_agent": "agent.browse",
        "train_file": "tasks.train",
        "model_name_or_path": "model.name",
        "loss_calculater": "algorithm.name=minirl",
        "token_level_loss": "algorithm.token_level_loss",
        "strict_in_bound": "algorithm.strict_in_bound",
        "skip_length_normalization": "algorithm.skip_length_normalization",
        "mcp_manager_url": "agent.tools",
        "epsilon": "algorithm.clip_low",
        "epsilon_higher": "algorithm.clip_high",
        "importance_weight_cap_ratio": "algorithm.cap_ratio",
        "num_generations": "trainer.group_size",
        "gradient_accumulation_steps": "trainer.groups_per_step",
        "db_connection_string": "store.url",
        "new_context": "agent.context.strategy",
        "max_prompt_tokens": "agent.context.max_tokens",
        "repetition_early_stop_times": "agent.max_repeats",
        "preferred_sampling_params": "sampling.temperature, sampling.top_p, sampling.min_p",
        "max_new_tokens": "sampling.max_new_tokens",
        "max_turns": "agent.max_turns",
        "learning_rate": "trainer.learning_rate",
    },
}
"""System -> its key -> ours, or what ours are set to for it."""


def in_our_words(key: str) -> str | None:
    """`TRL's num_generations is trainer.group_size here`, for a key that another system has, under
    whatever section it was written; else None."""
    best = None
    best_rank = 0
    for system, keys in PEER_KEYS.items():
        for theirs, ours in keys.items():
            if (rank := _likeness(key, theirs)) > best_rank:
                best = f"{system}'s {theirs} is {ours} here"
                best_rank = rank

    return best


def _likeness(key: str, theirs: str) -> int:
    """How surely `key` is theirs: 3 if it ends with all of it, 2 if it is the end of it, 1 if the
    last name is the same and says enough by itself; else 0."""
    if f".{key}".endswith(f".{theirs}"):
        return 3
    if theirs.endswith(f".{key}"):
        return 2
    name = key.rpartition(".")[2]
    return int(name == theirs.rpartition(".")[2] and ("_" in name or name == "lr"))
