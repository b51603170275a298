"""Changes of a recipe that save memory. What each saves is computed by whoever knows the model
(`diagnostics`, `mesh_estimate`)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from agentevo.config import RunConfig

RANK = 16
"""Of the adapters that are proposed."""


def list_measures(
    config: RunConfig, on_cpu: bool, section: Literal["trainer", "sft"] = "trainer"
) -> dict[str, RunConfig]:
    """Changes that save memory and are not made yet, the cheapest first: overrides, separated by
    blanks -> the recipe with them (and, where a change is one of degree, with less and less).
    `section`: the one that trains; `sft` has no engine and no critic beside it."""
    memory = config.memory
    changed = {}
    tokens = getattr(config, section).micro_batch_tokens
    while (tokens := tokens // 2) >= 1024:
        changed[f"{section}.micro_batch_tokens={tokens}"] = _change(
            config, section, micro_batch_tokens=tokens
        )

    if memory.checkpointing == "none" and not memory.offload_activations:
        changed["memory.checkpointing=selective"] = _change(
            config, "memory", checkpointing="selective"
        )

    if memory.checkpointing != "full":
        changed["memory.checkpointing=full"] = _change(config, "memory", checkpointing="full")

    cache = config.engine.kv_cache_gb
    if section == "trainer" and config.engine.kv_cache_tokens is None:
        changed[f"engine.kv_cache_gb={cache / 2:g}"] = _change(
            config, "engine", kv_cache_gb=cache / 2
        )

    if memory.optimizer == "adamw":
        changed["memory.optimizer=adamw_8bit"] = _change(config, "memory", optimizer="adamw_8bit")

    for key in () if on_cpu else ("offload_optimizer", "offload_activations"):
        if key not in memory.offloads and not (
            key == "offload_activations" and memory.checkpointing == "selective"
        ):
            changed[f"memory.{key}=true"] = _change(config, "memory", **{key: True})

    if section == "trainer" and config.critic.trunk == "own" and "values" in config.algorithm.needs:
        changed["critic.trunk=shared"] = _change(config, "critic", trunk="shared")

    rollout = config.rollout
    if section == "trainer" and rollout.staleness and not rollout.samplers:
        if rollout.sharing == "overlap" and rollout.transport is None:
            changed["rollout.sharing=turns"] = _change(config, "rollout", sharing="turns")
        if rollout.policy == "wait":
            changed["rollout.policy=mask"] = _change(config, "rollout", policy="mask")

    return changed | _list_adapters(config)


def _list_adapters(config: RunConfig) -> dict[str, RunConfig]:
    """LoRA, and LoRA over a base of 4 bits, where PEFT is installed and the recipe can have it."""
    is_refused = config.model.name == "tiny" or config.trainer.parallel.pipeline > 1
    if find_spec("peft") is None or is_refused:
        return {}

    lora = config.model.lora
    four = "model.lora.quantize=4bit"
    if lora.enabled:
        is_whole = lora.quantize == "none"
        return {four: _change_lora(config, quantize="4bit")} if is_whole else {}

    rank = f"model.lora.rank={RANK}"
    adapted = _change_lora(config, rank=RANK)
    return {rank: adapted, f"{rank} {four}": _change_lora(adapted, quantize="4bit")}


def _change_lora(config: RunConfig, **values: object) -> RunConfig:
    return _change(config, "model", lora=config.model.lora.model_copy(update=values))


def _change(config: RunConfig, section: str, **values: object) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
