"""Chooses the engine of a run if its recipe names none. On a CUDA GPU this is vLLM or SGLang, if
one of them is installed, because a step of the embedded engine runs hundreds of small kernels.
Otherwise it is the embedded engine.

The process that starts the run makes the choice once and writes it to the run's config.yaml. Later
processes read the choice from there, whatever their own machine has. If processes are started
separately and share no folder, the recipe must name an engine, since each process might choose
differently.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import NamedTuple

from agentevo.config import RunConfig, sources
from agentevo.runtime.device_names import CUDA

OWN = "torch"
FOR_GPUS = ("vllm", "sglang")
"""Engines for GPUs. The first one that is installed is used."""


class EngineChoice(NamedTuple):
    """An engine, and the reason why it was chosen."""

    type: str
    why: str


def choose_engine(device: str, installed: Collection[str], embedded_for: str = "") -> EngineChoice:
    """Chooses the engine of a run, given the kind of device and the installed packages.
    `embedded_for`: the setting of the recipe that needs the embedded engine."""
    if device != CUDA:
        return EngineChoice(OWN, f"which is the default on {device}")

    if embedded_for:
        return EngineChoice(OWN, f"which {embedded_for} needs")

    for name in FOR_GPUS:
        if name in installed:
            return EngineChoice(
                name,
                "made for GPUs, and installed (with weights of its own in the GPU's "
                f"memory); engine.type={OWN} chooses the embedded one",
            )

    return EngineChoice(
        OWN,
        "which is slow on a GPU; neither vllm nor sglang is installed: pip install "
        "'agentevo[vllm]'",
    )


def embedded_for(config: RunConfig, *, is_separate: bool = False) -> str:
    """The key of a setting in the recipe that only the embedded engine supports, or an empty text.
    `is_separate`: engines run in separate processes, even if the recipe starts none."""
    engine = config.engine
    rollout = config.rollout
    lora = config.model.lora
    is_separate = is_separate or rollout.samplers > 0
    requirements = {
        "model.name=tiny": config.model.name == "tiny",
        "engine.batch_invariant": engine.batch_invariant,
        "engine.routed_experts": engine.routed_experts,
        "trainer.routing_replay=rollout": config.trainer.routing_replay == "rollout",
        "a rollout of several policies (agents)": bool(config.agents),
        "rollout.sharing=turns": rollout.staleness > 0
        and not is_separate
        and rollout.sharing == "turns",
        "rollout.transport=shared": rollout.transport == "shared",
        "trainer.parallel": config.trainer.parallel.is_spread and not is_separate,
        "model.lora": lora.enabled
        and bool(
            lora.quantize != "none"
            or lora.dora
            or lora.bias != "none"
            or lora.modules_to_save
            or lora.rank_pattern
            or lora.alpha_pattern
        ),
    }
    return next((key for key, holds in requirements.items() if holds), "")


def installed_engines() -> list[str]:
    """The packages of FOR_GPUS that can be imported here."""
    return [name for name in FOR_GPUS if find_spec(name) is not None]


def load_with_engine(
    load: Callable[[list[str]], RunConfig], *, note: Callable[[str], None], is_separate: bool
) -> RunConfig:
    """Loads a configuration with `load`, and adds the engine: the run's engine if the run has
    begun, otherwise the one of `engine_override`."""
    config = load([])
    if is_separate and (config.rollout.weights.url is not None or find_spec("torch") is None):
        return config  # the engine that another machine would choose is not known here

    override = engine_override([config], resume=True, note=note, is_separate=is_separate)
    return load(override) if override else config


def engine_override(
    configs: Sequence[RunConfig],
    *,
    resume: bool,
    note: Callable[[str], None],
    is_separate: bool = False,
) -> list[str]:
    """The override that names the engine, if no recipe of these runs does. Empty for the embedded
    engine. A resumed run keeps its engine. For a new run on a GPU, `note` gets the engine and the
    reason. `is_separate` as in `embedded_for`. Raises ModelError for a device that does not
    exist."""
    if any("type" in config.engine.model_fields_set for config in configs):
        return []

    first = configs[0]
    recorded = first.run_dir / "config.yaml"
    if resume and recorded.is_file():
        recorded_engine = sources.read_yaml(recorded).get("engine")
        type_ = recorded_engine.get("type", OWN) if isinstance(recorded_engine, Mapping) else OWN
        return [] if type_ == OWN else [f"engine.type={type_}"]

    if first.model.device not in ("auto", CUDA):
        return []

    from agentevo.runtime.devices import find

    device = find(first.model.device).type
    reasons = (embedded_for(config, is_separate=is_separate) for config in configs)
    reason = next(filter(None, reasons), "")
    choice = choose_engine(device, installed_engines(), reason)
    if device == CUDA:
        note(f"engine: {choice.type}, {choice.why}")
    return [] if choice.type == OWN else [f"engine.type={choice.type}"]
