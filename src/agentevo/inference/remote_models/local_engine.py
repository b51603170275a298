"""The model and the engine behind engine_server.py. Only this module of the package imports torch,
and it is imported at the first question."""

from __future__ import annotations

from dataclasses import dataclass

from agentevo.config.model import ModelSection
from agentevo.config.remote_models import RemoteModelSection
from agentevo.config.sections import EngineSection
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.chat.chat_format import ChatFormat, chat_of
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.positions import context_length
from agentevo.models.files.load import load_model
from agentevo.types import SamplingParams


@dataclass(frozen=True)
class LocalEngine:
    """A loaded model that answers requests."""

    engine: TorchEngine
    chat: ChatFormat
    sampling: SamplingParams
    context_length: int


def load(section: RemoteModelSection) -> LocalEngine:
    """Raises ModelError for a model that can't be read or put on its device."""
    model = ModelSection(name=section.model, dtype=section.dtype, device=section.device)
    loaded = load_model(model)
    config = EngineSection(timeout_s=section.deadline_s, max_running=section.max_at_once)
    chat = chat_of(loaded)
    engine = TorchEngine(prepare(loaded.model), loaded.tokenizer, config)
    sampling = SamplingParams(
        temperature=0.0, max_new_tokens=section.max_new_tokens, stop_token_ids=chat.end_ids
    )
    return LocalEngine(engine, chat, sampling, context_length(loaded.model.config))
