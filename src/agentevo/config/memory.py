"""The recipe's keys for what training keeps in memory, and on which device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from agentevo.runtime.section import Section

if TYPE_CHECKING:
    from agentevo.config.recipe import RunConfig


class MemorySection(Section):
    """What training keeps in memory, and where, for `agentevo train`, `agentevo sft` and the cold
    start. `agentevo doctor` says which key helps when a recipe does not fit. Weights in
    bfloat16 (model.dtype) are always trained by float32 copies."""

    checkpointing: Literal["none", "selective", "full"] = "none"
    """What a decoder layer keeps for the backward pass: everything that it needs (`none`); matrix
    products and attention, with the rest recomputed (`selective`); only its input (`full`: least
    memory, about a third more computation)."""
    offload_activations: bool = False
    """Move the tensors that decoder layers keep to the CPU until the backward pass. Needs a GPU.
    Not with checkpointing=selective."""
    offload_optimizer: bool = False
    """Keep optimizer state and float32 weights on the CPU, and do the optimizer step there. Needs a
    GPU."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps the two moments in 8 bits per number and a scale per 256 (arXiv
    2110.02861), by torchao: pip install 'agentevo[8bit]'."""

    @property
    def offloads(self) -> tuple[str, ...]:
        """The keys that are switched on and need a GPU."""
        return tuple(
            key for key in ("offload_activations", "offload_optimizer") if getattr(self, key)
        )


def memory_contradictions(config: RunConfig) -> Iterator[str]:
    """Contradictions within the section, and with the model's device, as 'what: remedy'."""
    memory = config.memory
    if memory.offload_activations and memory.checkpointing == "selective":
        yield (
            "memory.offload_activations can't move the tensors that memory.checkpointing=selective "
            "keeps: set checkpointing to full or none"
        )

    if config.model.device == "cpu":
        yield from [offload_refusal(key) for key in memory.offloads]


def offload_refusal(key: str) -> str:
    """The error for an offload of a model that is on the CPU already."""
    return (
        f"memory.{key} moves tensors from a GPU to the CPU, but the model is on the CPU "
        f"already: set memory.{key}=false"
    )
