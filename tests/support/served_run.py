"""A run's folder with weights and engines, as a trainer has it."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable

import torch

from agentevo.config import EngineSection
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.inference.serving.directory import EngineDirectory
from agentevo.inference.serving.remote import RemoteEngine
from agentevo.inference.weights.weights_folder import WeightsFolder
from agentevo.runs.folder.identity import ensure_run_folder
from agentevo.runs.orchestration.components import load_policy
from agentevo.types import Completion, SamplingParams

PROMPT = [3, 5, 8, 13]


class Run:
    """A run's folder with the weights that a trainer writes, and its engines."""

    def __init__(self, config) -> None:
        ensure_run_folder(config)
        self.config = config
        self.folder = config.run_dir
        self.model = load_policy(config).model
        self.weights = WeightsFolder(self.folder / "weights")
        self.directory = EngineDirectory(self.folder / "engines")
        self.models = {}

    def write(self, version: int) -> None:
        """Weights that differ from version to version."""
        changed = copy.deepcopy(self.model)
        with torch.no_grad():
            for parameter in changed.parameters():
                parameter.mul_(1 + version / 5)
        self.models[version] = changed
        self.weights.write(version, changed, keep=3)

    def expected(self, version: int, params: list[SamplingParams]) -> list[list[int]]:
        """Tokens by an embedded engine."""

        async def work() -> list[Completion]:
            engine = TorchEngine(self.models[version], config=EngineSection(kv_cache_gb=0.1))
            return await asyncio.gather(
                *(engine.generate(PROMPT, param, deadline_s=300) for param in params)
            )

        return [one.ids for one in asyncio.run(work())]

    def logprobs(self, version: int, ids: list[int]) -> torch.Tensor:
        """[len(ids)] of a completion of the prompt, by transformers' own attention in one pass."""
        alone = copy.deepcopy(self.models[version])
        alone.set_attn_implementation("sdpa")
        whole = torch.tensor([PROMPT + ids])
        with torch.no_grad():
            logits = alone(input_ids=whole, use_cache=False).logits[0, len(PROMPT) - 1 : -1]
        return logits.log_softmax(-1).gather(1, whole[0, len(PROMPT) :, None])[:, 0]

    def client(self, **options) -> RemoteEngine:
        return RemoteEngine(EngineDirectory(self.folder / "engines"), poll_s=0.02, **options)


def wait_for(condition: Callable[[], bool], what: str, within_s: float = 300.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.01)


def names(run: Run) -> list[str]:
    return [one.name for one in run.directory.living(5.0)]
