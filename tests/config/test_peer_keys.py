"""A key of another system is answered with ours, with why it is not needed, or with that there is
none; a value that means something else there is asked about (peer_keys.md)."""

import re

import pytest

from agentevo.config import build_config, config_keys
from agentevo.config.peer_keys import peer_keys, peer_values, translations
from agentevo.config.recipe import RunConfig
from agentevo.errors import ConfigError, UnknownNameError

DOORS = {"environment": {"type": "test_doors"}}


def refusal(*overrides):
    with pytest.raises(ConfigError) as error:
        build_config(DOORS, overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("trainer.num_generations=4", "TRL's num_generations is trainer.group_size here"),
        (
            "actor_rollout_ref.rollout.n=4",
            "verl's actor_rollout_ref.rollout.n is trainer.group_size here",
        ),
        ("rollout.n=4", "verl's actor_rollout_ref.rollout.n is trainer.group_size here"),
        (
            "actor_rollout_ref.actor={ppo_epochs: 2, optim: {lr: 1e-6}}",
            "verl's actor.ppo_epochs is trainer.epochs here; "
            "verl's actor.optim.lr is trainer.learning_rate here",
        ),
        (
            "actor_rollout_ref.rollout.trace={token2text: true}",
            "verl's rollout.trace.token2text is tracing.token2text here",
        ),
        ("critic.optim.lr=1e-6", "verl's critic.optim.lr is critic.learning_rate here"),
        (
            "es_manager.train.env_groups=8",
            "RAGEN's es_manager.train.env_groups is trainer.groups_per_step here",
        ),
        ("actor_rollout_ref.rollout.n_agent=5", "rollout.n_agent is trainer.group_size here"),
        ("gconfig.n_samples=4", "AReaL's gconfig.n_samples is trainer.group_size here"),
        ("pretrain=x", "OpenRLHF's pretrain is model.name here"),
        ("critic.optim.betas=[0.9, 0.99]", "RAGEN's critic.optim.betas is trainer.betas here"),
        ("ds.lora.rank=8", "OpenRLHF's ds.lora.rank is model.lora.rank here"),
        ("vf_coef=0.1", "TRL's vf_coef is critic.coef here"),
        ("save_interval=100", "other systems' save_interval is checkpoint.every here"),
        ("actor.foo=1", "unknown key"),
        ("trainer.temperature=1", "unknown key; did you mean sampling.temperature?"),
        ("trainer.group_sizes=4", "unknown key; did you mean trainer.group_size?"),
        ("trainer.learning-rate=1", "unknown key; did you mean trainer.learning_rate?"),
        ("trainer.optimizer=adamw", "unknown key; did you mean memory.optimizer?"),
        ("modle=x", "unknown key; did you mean model?"),
    ],
)
def test_a_key_of_another_system_is_answered_with_ours(override, hint):
    assert refusal(override).endswith(hint)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor.ppo_mini_batch_size=64", "trainer.minibatches here: theirs is a size in prompts"),
        ("trainer.ppo_mini_batch_size=64", "data.train_batch_size / ppo_mini_batch_size"),
        ("training={ppo_batch_size: 64}", "train_batch_size / ppo_batch_size"),
        ("trainer.total_epochs=15", "trainer.steps here: theirs counts passes over the data"),
        ("num_train_epochs=3", "trainer.steps here: theirs counts passes over the data"),
        ("generation_batch_size=64", "theirs counts completions, ours tasks"),
        ("warmup_ratio=0.1", "trainer.warmup_steps here: theirs is a share of all steps"),
        ("ref_model_mixup_alpha=0.6", "1 - alpha"),
        ("epsilon=0.2", "TRL's epsilon is algorithm.clip_low here"),
        ("train.batch_size=128", "OpenRLHF's train.batch_size is trainer.minibatches here: theirs"),
        ("algo.kl.init_coef=0.01", "is algorithm.kl_coef here: with algorithm.kl_in=reward"),
        ("dataset=x", "tasks.train, data.train here: tasks to be rewarded for, or conversations"),
        ("exp_name=x", "TRL's exp_name is run.name here"),
        ("local_batch_size=4", "theirs counts completions of one process, ours tasks of all"),
        ("ref_adapter_name=x", "algorithm.reference here: base is the policy without its adapter"),
        ("model.beta=0.04", "TRL's beta is algorithm.kl_coef here"),
        ("rollout.beta=0.1", "DPO's beta is algorithm.beta"),
        ("beta=0.04", "algorithm.kl_coef here: in GRPO and RLOO; DPO's beta is algorithm.beta"),
        ("episodes=1000", "trainer.steps here: a step plays trainer.groups_per_step x"),
        ("agent.max_steps=5", "is agent.max_turns here"),
        ("environment.max_steps=5", "is environment.max_actions here"),
        ("vision_encoder=clip-vit-large", "model.vision.freeze here: the tower that reads pixels"),
        ("action_space=gui", "environment.type here: for gui it is browser"),
        ("environment.action_space=gui_actions", "environment.actions lists what it may do"),
        ("reward=ruler", "did you mean rewards?"),
    ],
)
def test_a_count_is_told_from_a_size_and_a_word_from_its_other_meaning(override, words):
    assert words in refusal(override)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.return_raw_chat=True", "verl's data.return_raw_chat is not needed here: prompts"),
        ("actor_rollout_ref.rollout.mode=async", "verl's rollout.mode is not needed here"),
        ("actor_rollout_ref.rollout.name=vllm", "verl's rollout.name is engine.type here"),
        ("allocation_mode=sglang:d4+fsdp:d4", "AReaL's allocation_mode is trainer.parallel here"),
        ("actor.state_masking=true", "Search-R1's actor.state_masking is not needed here"),
        ("trainer.nnodes=2", "agentevo launch --set trainer_nodes=2"),
        ("ptx_coef=0.05", "OpenRLHF's ptx_coef has no counterpart here"),
        ("reward_manager.source=register", "rewards here: your own function by import"),
        ("muon.lr=0.02", "OpenRLHF's muon.lr has no counterpart here"),
        ("world_size=8", "TRL's world_size is not needed here: torchrun --nproc-per-node"),
        ("model_adapter_name=x", "a run trains one adapter"),
        ("router_aux_loss_coef=0.1", "did you mean trainer.router_aux_loss_coef?"),
        ("actor.megatron.recompute_method=full", "verl's actor.megatron.* has no counterpart"),
        ("training.foo=1", "RAGEN's training.* has no counterpart here"),
        ("distributed=true", "torchrun --nproc-per-node"),
    ],
)
def test_what_is_not_needed_and_what_is_not_there_is_said(override, words):
    assert words in refusal(override)


@pytest.mark.parametrize(
    "override",
    ["actor.foo=1", "tool.timeout=1", "trainer.nodes=2", "retrieval.url=x", "sampling.frequency=1"],
)
def test_a_far_guess_is_not_made(override):
    assert refusal(override).endswith("unknown key")


def test_two_systems_that_mean_different_things_are_both_named():
    text = refusal("train_batch_size=256")
    assert "verl's data.train_batch_size is trainer.groups_per_step here" in text
    assert "OpenRLHF's train_batch_size is trainer.minibatches here" in text


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("num_generations", "trainer.group_size"),
        ("bf16", "model.dtype=bfloat16"),
        ("load_in_4bit", "model.lora.quantize=4bit"),
        ("push_to_hub", "agentevo models RUN --push ORG/NAME"),
        ("early_stopping", "evaluation.stop_after"),
        ("load_best_model_at_end", "checkpoint.keep_best"),
        ("save_best_model", "checkpoint.keep_best"),
        ("gradient_checkpointing", "memory.checkpointing=full"),
        ("report_to", "tracking.backends"),
        ("num_train_epochs", "trainer.steps"),
        ("tensor_parallel_size", "trainer.parallel.tensor"),
        ("device_map", "model.device"),
        ("fsdp", "trainer.parallel.shard"),
        ("attn_implementation", "not needed"),
        ("lora_r", "model.lora.rank"),
        ("torch_dtype", "model.dtype"),
        ("optim", "memory.optimizer"),
        ("output_dir", "run.dir"),
        ("logging_steps", "not needed"),
        ("gpu_memory_utilization", "engine.kv_cache_gb"),
        ("adv_estimator", "algorithm.advantage"),
        ("clip_ratio_high", "algorithm.clip_high"),
        ("kl_loss_coef", "algorithm.kl_coef"),
    ],
)
def test_explain_leads_from_a_word_of_others_to_ours(word, ours):
    with pytest.raises(UnknownNameError, match=rf"(?s){re.escape(word)}.*{re.escape(ours)}"):
        config_keys().explain(word)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.epsilon=0.2", "TRL and AgentRL call epsilon, is algorithm.clip_low and"),
        ("algorithm.epsilon='0.1'", "algorithm.clip_low and algorithm.clip_high"),
        ("trainer.micro_batch_tokens=4", "it counts tokens, where verl's"),
        ("trainer.warmup_steps=0.1", "it counts steps"),
        ("sampling.top_k=-1", "0 keeps all tokens here"),
        ("evaluation.every=-1", "0 evaluates only before and after"),
        ("checkpoint.every=-1", "0 saves only at the end"),
        ("agent.format_penalty=-0.1", "it is subtracted"),
        ("rollout.staleness=0.1", "verl's staleness_threshold is a share"),
        ("model.dtype=bf16", "it is bfloat16 here"),
        ("model.dtype=fp16", "there is no float16 here"),
        ("memory.checkpointing=true", "it is full here"),
        ("algorithm.kl=low_var_kl", "it is k3 here"),
        ("algorithm.policy_loss=vanilla", "ppo_clip"),
        ("trainer.parallel=fsdp2", "trainer.parallel.shard=N"),
        ("algorithm.name=GSPO", "did you mean gspo?"),
        ("reward_model=auto_ruler", "it is rewards=[ruler] here"),
        ("rewards=auto_ruler", "did you mean ruler?"),
        ("trainer.minibatches=64", "verl's ppo_mini_batch_size, a size"),
        ("algorithm={clip_low: 0.8, clip_high: 1.2}", "set clip_low=0.2 clip_high=0.2"),
    ],
)
def test_a_value_that_means_something_else_elsewhere_is_asked_about(override, words):
    assert words in refusal(override)


@pytest.mark.parametrize(
    "override",
    ["algorithm.epsilon=1e-4", "algorithm={clip_low: 0.2, clip_high: 5}", "checkpoint.every=0"],
)
def test_a_value_that_makes_sense_here_is_taken(override):
    build_config(DOORS, [override])


def test_one_word_names_an_algorithm_and_a_reward():
    judge = {"judge": {"base_url": "http://127.0.0.1:9/v1", "model": "judge"}}
    words = {"algorithm": "gspo", "rewards": "ruler"}
    config = build_config({**DOORS, **words, "remote_models": judge})
    assert config.algorithm.name == "gspo"
    assert [reward.name for reward in config.rewards] == ["ruler"]


@pytest.mark.slow
def test_every_system_has_its_table_and_no_key_of_it_twice():
    systems = {peer.system for peer in peer_keys()}
    assert {"TRL", "verl", "OpenRLHF", "RAGEN", "AReaL", "AgentRL", "transformers"} <= systems
    keys = [(peer.system, peer.key) for peer in peer_keys()]
    assert len(set(keys)) == len(keys)
    for peer in peer_keys():
        assert peer.key == peer.key.lower()
        probe = peer.key.removesuffix("*") + "x" * peer.key.endswith("*")
        assert translations(probe), peer.key


def test_our_keys_exist_in_tables_and_remarks_and_values_are_of_our_keys():
    known = set(config_keys().names())
    for peer in peer_keys():
        for key in peer.our_keys:
            assert key in known or " " in key, (peer.key, key)

    theirs = {peer.key for peer in peer_keys()}
    sections = "|".join(RunConfig.model_fields)
    for remark in [peer.remark for peer in peer_keys()] + [value.remark for value in peer_values()]:
        for key in re.findall(rf"\b(?:{sections})(?:\.[a-z][a-z_0-9]*)+", remark):
            assert key in known or key in theirs, remark

    assert {value.key for value in peer_values()} <= known
