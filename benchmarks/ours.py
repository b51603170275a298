"""Our side of the benchmarks: the embedded engine on the same folder of weights that the peers
get."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from agentevo.config import EngineSection, ModelSection
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.compute.attention import prepare
from agentevo.models.files.load import LoadedModel, load_model
from agentevo.models.files.resolve import fetch
from agentevo.types import Completion, SamplingParams

MODEL = "smollm2-135m-instruct"
DEADLINE_S = 600.0


def model_folder(name: str = MODEL) -> Path:
    """Weights and tokenizer on this machine (downloaded on first use), float32."""
    return fetch(name, progress=print)


def load(folder: Path) -> LoadedModel:
    loaded = load_model(ModelSection(name=str(folder), device="cpu"))
    prepare(loaded.model)
    return loaded


def make_engine(loaded: LoadedModel) -> TorchEngine:
    return TorchEngine(loaded.model, loaded.tokenizer, EngineSection())


def time_generate(
    engine: TorchEngine, prompts: list[list[int]], new_tokens: int, temperature: float, seed: int
) -> tuple[float, int]:
    """Wall seconds, and tokens generated, for all prompts at once. No stop tokens: every completion
    has `new_tokens`."""

    async def run() -> list[Completion]:
        return await asyncio.gather(
            *(
                engine.generate(
                    ids,
                    SamplingParams(
                        temperature=temperature,
                        max_new_tokens=new_tokens,
                        seed=seed * 100_003 + index,
                    ),
                    deadline_s=DEADLINE_S,
                )
                for index, ids in enumerate(prompts)
            )
        )

    started = time.perf_counter()
    completions = asyncio.run(run())
    seconds = time.perf_counter() - started
    return seconds, sum(len(completion.ids) for completion in completions)
