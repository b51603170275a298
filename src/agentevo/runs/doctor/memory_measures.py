"""Whether a recipe's training fits the free memory of this machine, and which changes of the recipe
save memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from transformers import PreTrainedModel

from agentevo.config import ParallelSection, RunConfig, build_config, to_yaml
from agentevo.errors import AgentEvoError
from agentevo.models.token_rows import causal_model
from agentevo.runs.doctor.checks import MEMORY_ROOM, Check, judge_memory
from agentevo.runs.doctor.memory_estimate import (
    Load,
    Sizes,
    process_terms,
    shape_policy,
    sizes_of,
    total,
    weight_bytes,
)
from agentevo.runtime import devices
from agentevo.runtime.parsing import parse_yaml

RANK = 16
"""The rank of the proposed adapters."""
MIN_TOKENS = 1024
"""The smallest micro-batch that is proposed."""


def check_memory_room(
    config: RunConfig,
    model: PreTrainedModel,
    load_of: Callable[[RunConfig], Load],
    engine_of: Callable[[RunConfig, Sizes], float],
    section: Literal["trainer", "sft"] = "trainer",
) -> Check:
    """Judges the memory that training needs in addition to the loaded `model`. `load_of` and
    `engine_of`: the largest micro-batch, and the bytes of the engine, of the recipe with one of the
    measures. `section`: the section that trains."""
    loaded_bytes = weight_bytes(model)
    sizes_by_model = {config.model.model_dump_json(): sizes_of(model)}

    def needs(changed: RunConfig) -> dict[str, float]:
        key = changed.model.model_dump_json()
        if key not in sizes_by_model:
            sizes_by_model[key] = sizes_of(shape_policy(changed, causal_model(model).config))

        sizes = sizes_by_model[key]
        trainer = changed.trainer.model_copy(update={"parallel": ParallelSection()})
        alone = changed.model_copy(update={"trainer": trainer})
        terms = process_terms(alone, sizes, load=load_of(changed))
        terms["weights"] -= loaded_bytes
        return terms | {"engine": engine_of(changed, sizes)}

    needed = needs(config)
    free = devices.memory(model.device)[0]
    turned: dict[str, float] = {}
    if total(needed) > MEMORY_ROOM * free:
        tree = parse_yaml(to_yaml(config))
        for change in list_measures(config, not devices.is_accelerator(model.device), section):
            # some contradict the recipe, or need a package that is missing
            with suppress(AgentEvoError):
                changed = build_config(tree, change.split(), needs_environment=False)
                turned[change] = total(needs(changed))

    saving = {change: size for change, size in turned.items() if size < total(needed)}
    return judge_memory(needed, free, saving)


def list_measures(config: RunConfig, on_cpu: bool, section: Literal["trainer", "sft"]) -> list[str]:
    """Overrides that may save memory, the cheapest first; several are separated by blanks."""
    measures = []
    tokens = getattr(config, section).micro_batch_tokens
    while (tokens := tokens // 2) >= MIN_TOKENS:
        measures.append(f"{section}.micro_batch_tokens={tokens}")

    measures += ["memory.checkpointing=selective", "memory.checkpointing=full"]
    if config.engine.kv_cache_tokens is None:
        measures.append(f"engine.kv_cache_gb={config.engine.kv_cache_gb / 2:g}")

    measures.append("memory.optimizer=adamw_8bit")
    if not on_cpu:
        measures += ["memory.offload_optimizer=true", "memory.offload_activations=true"]

    measures += ["critic.trunk=shared", "rollout.sharing=turns", "rollout.policy=mask"]
    quantize = "model.lora.quantize=4bit"
    if config.model.lora.enabled:
        measures.append(quantize)
    elif config.model.name != "tiny":
        measures += [f"model.lora.rank={RANK}", f"model.lora.rank={RANK} {quantize}"]

    return measures
