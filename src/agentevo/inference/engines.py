"""Engines by name, as `engine.type` gives it; other packages register theirs as entry points."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentevo.config import EngineSection
from agentevo.inference.engine import EngineFactory, UpdatableEngine
from agentevo.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

engines: Registry[EngineFactory] = Registry("engines")


@engines.register("torch")
def torch_engine(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, section: EngineSection
) -> UpdatableEngine:
    """Embedded: continuous batching in this process, on the trainer's own weights."""
    from agentevo.inference.torch_engine import TorchEngine

    return TorchEngine(model, tokenizer, section)
