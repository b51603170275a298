"""Whether a recipe's training fits the free memory of this machine, and which changes of the recipe
save memory."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal

from transformers import PreTrainedModel

from agentevo.config import ParallelSection, RunConfig
from agentevo.models.token_rows import causal_model
from agentevo.runs.doctor.checks import MEMORY_ROOM, Check, judge_memory
from agentevo.runs.doctor.memory_estimate import (
    Load,
    Sizes,
    process_terms,
    sizes_of,
    total,
    weight_bytes,
)
from agentevo.runs.doctor.unloaded_policy import shape_policy
from agentevo.runtime import devices

RANK = 16
"""The rank of the proposed adapters."""


def check_memory_room(
    config: RunConfig,
    model: PreTrainedModel,
    load_of: Callable[[RunConfig], Load],
    engine_of: Callable[[RunConfig, Sizes], float],
    section: Literal["trainer", "sft"] = "trainer",
) -> Check:
    """Judges the memory that training needs in addition to the loaded `model`. `load_of` and
    `engine_of`: the largest micro-batch, and the bytes of the engine, of the recipe with one of the
    measures. `section`: see `list_measures`."""
    loaded_bytes = weight_bytes(model)
    sizes_by_model = {config.model.model_dump_json(): sizes_of(model)}

    def needs(changed: RunConfig) -> dict[str, float]:
        key = changed.model.model_dump_json()
        if key not in sizes_by_model:
            shape = causal_model(model).config
            sizes_by_model[key] = sizes_of(shape_policy(changed, shape))

        sizes = sizes_by_model[key]
        terms = process_terms(
            _change(changed, "trainer", parallel=ParallelSection()), sizes, load=load_of(changed)
        )
        terms["weights"] -= loaded_bytes
        return terms | {"engine": engine_of(changed, sizes)}

    needed = needs(config)
    free = devices.memory(model.device)[0]
    measures = {}
    if total(needed) > MEMORY_ROOM * free:
        measures = list_measures(config, not devices.is_accelerator(model.device), section)

    turned = {change: total(needs(changed)) for change, changed in measures.items()}
    return judge_memory(needed, free, turned)


def list_measures(
    config: RunConfig, on_cpu: bool, section: Literal["trainer", "sft"] = "trainer"
) -> dict[str, RunConfig]:
    """Measures that save memory and that the recipe does not have yet, the cheapest first. A change
    of degree is listed several times, with smaller and smaller values. `section`: the section that
    trains; `sft` has neither engine nor critic."""
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
    """LoRA, and LoRA on a base model in 4 bits, if PEFT is installed and the recipe allows it."""
    is_unsupported = config.model.name == "tiny" or config.trainer.parallel.pipeline > 1
    if find_spec("peft") is None or is_unsupported:
        return {}

    lora = config.model.lora
    quantize_4bit = "model.lora.quantize=4bit"
    if lora.enabled:
        is_unquantized = lora.quantize == "none"
        return {quantize_4bit: _change_lora(config, quantize="4bit")} if is_unquantized else {}

    rank = f"model.lora.rank={RANK}"
    adapted = _change_lora(config, rank=RANK)
    return {rank: adapted, f"{rank} {quantize_4bit}": _change_lora(adapted, quantize="4bit")}


def _change_lora(config: RunConfig, **values: object) -> RunConfig:
    return _change(config, "model", lora=config.model.lora.model_copy(update=values))


def _change(config: RunConfig, section: str, **values: object) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
