"""Changes of a recipe that save memory, one by one and together. The modules that know the model
(`diagnostics`, `sft_diagnostics`) compute what each saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Literal, TypeVar

from agentevo.config import RunConfig

RANK = 16
"""The rank of the proposed adapters."""
MAX_COMBINED = 3
"""The maximum number of measures that are proposed together."""

Measures = Mapping[str, RunConfig]
"""Maps a measure, as overrides separated by blanks, to the recipe with that measure."""
T = TypeVar("T")


def remember_by_model(make: Callable[[RunConfig], T]) -> Callable[[RunConfig], T]:
    """A function that calls `make` once for each model, because `make` reads only the model of a
    recipe."""
    results: dict[str, T] = {}

    def make_once(config: RunConfig) -> T:
        key = config.model.model_dump_json()
        if key not in results:
            results[key] = make(config)
        return results[key]

    return make_once


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


def kind_of(change: str) -> str:
    """The keys of a measure, without their values."""
    return " ".join(word.partition("=")[0] for word in change.split())


def weigh_measures(
    config: RunConfig,
    list_for: Callable[[RunConfig], Measures],
    needs: Callable[[RunConfig], float],
    room: float,
) -> tuple[dict[str, float], tuple[str, float] | None]:
    """The bytes that a recipe needs with each single measure, and the result of `find_combination`
    if no single measure is enough. Empty and None for a recipe that needs no measure."""
    if needs(config) <= room:
        return {}, None

    needs_by_change = {change: needs(changed) for change, changed in list_for(config).items()}
    is_enough = any(needed <= room for needed in needs_by_change.values())
    return needs_by_change, None if is_enough else find_combination(config, list_for, needs, room)


def find_combination(
    config: RunConfig,
    list_for: Callable[[RunConfig], Measures],
    needs: Callable[[RunConfig], float],
    room: float,
) -> tuple[str, float] | None:
    """The cheapest two or three measures with which the recipe needs at most `room` bytes, and the
    bytes that it then needs. None if there are no such measures. The cost of a measure is the rank
    of its kind in the list, which begins with the cheapest. `list_for`: returns the measures that a
    recipe does not have yet."""
    kinds = list(dict.fromkeys(map(kind_of, list_for(config))))
    cost = {kind: rank for rank, kind in enumerate(kinds, start=1)}

    combinations = [
        (sum(cost[kind_of(change)] for change in changes), " ".join(changes), changed)
        for changes, changed in _combine(config, list_for, cost)
        if len(changes) > 1
    ]
    for _, change, changed in sorted(combinations, key=lambda entry: entry[0]):
        needed = needs(changed)
        if needed <= room:
            return change, needed

    return None


def _combine(
    config: RunConfig,
    list_for: Callable[[RunConfig], Measures],
    cost: Mapping[str, int],
    taken: tuple[str, ...] = (),
) -> Iterator[tuple[tuple[str, ...], RunConfig]]:
    """Combinations of measures of different kinds, in the order of their costs, each with the
    recipe that has them. `list_for` lists a measure again only if it fits the measures before
    it."""
    last = cost[kind_of(taken[-1])] if taken else 0
    for change, changed in list_for(config).items():
        if cost.get(kind_of(change), 0) > last:
            yield (*taken, change), changed
            if len(taken) + 1 < MAX_COMBINED:
                yield from _combine(changed, list_for, cost, (*taken, change))


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
