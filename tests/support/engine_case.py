"""An engine of a small model, and what its numbers are compared with: a case of
`engine_conformance`."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from sampled_distribution import log_distribution

from agentevo.config import EngineSection, LoraSection, ModelSection, TinyModel
from agentevo.errors import EngineError
from agentevo.inference.engine import EngineFactory, UpdatableEngine
from agentevo.models.compute.adapters import add_adapter
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.parameters import trained_weights
from agentevo.models.files.load import load_model
from agentevo.types import Completion, SamplingParams
from agentevo.types.penalties import Penalties

TOLERANCE = 1e-4
PATIENCE_S = 300.0
"""For what ends by itself, on any machine."""
CONTEXT = 1024
PROMPT = [int(token) for token in np.random.default_rng(1).integers(10, 250, 40)]
PLAIN = SamplingParams(max_new_tokens=24, seed=5)
Weights = Mapping[str, torch.Tensor]


@dataclass
class Case:
    """An engine, and what its numbers are compared with. It belongs to one event loop."""

    engine: UpdatableEngine
    alone: Any
    """The same model as transformers runs it, without a cache."""
    tokenizer: Any
    old: Weights
    new: Weights
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)

    @classmethod
    def of(cls, factory: EngineFactory, section: EngineSection, **lora: Any) -> Case:
        """Of an engine that computes in float32. `lora`: the section of an adapter that is trained
        over the model."""
        shape = TinyModel(
            hidden_size=64, num_layers=2, num_heads=2, context_length=CONTEXT, tokenizer="byte"
        )
        made = load_model(ModelSection(name="tiny", device="cpu", tiny=shape), seed=1)
        model = made.model
        if lora:
            with torch.no_grad():
                for name, one in _wide(model, 3).items():
                    model.get_parameter(name).copy_(one)
            model = add_adapter(model, LoraSection(**lora), seed=1)

        alone = copy.deepcopy(model)
        alone.set_attn_implementation("eager")
        model = prepare(model)
        old, new = (_wide(model, seed) for seed in (1, 2))
        return cls(factory(model, made.tokenizer, section), alone, made.tokenizer, old, new)

    def run(self, work: Awaitable[None]) -> None:
        async def whole() -> None:
            await work

        self.runner.run(whole())

    def close(self) -> None:
        self.run(self.engine.close())
        self.runner.close()

    @property
    def flat(self) -> Weights:
        """Weights under which every token is almost as likely as any other."""
        return {**self.old, "lm_head.weight": 0.02 * self.old["lm_head.weight"]}

    async def begin(self, version: int = 1, weights: Weights | None = None) -> None:
        """The engine serves these weights, or `old`, under that version."""
        await self.engine.begin(version, weights or self.old, deadline_s=PATIENCE_S)

    async def draw(
        self, sampling: SamplingParams = PLAIN, prompt: Sequence[int] = PROMPT, **more: Any
    ) -> Completion:
        return await self.engine.generate(
            list(prompt), sampling, **({"deadline_s": PATIENCE_S} | more)
        )

    def logprobs(
        self,
        weights: Weights,
        prompt: Sequence[int],
        ids: Sequence[int],
        sampling: SamplingParams = PLAIN,
    ) -> np.ndarray:
        """[n, V] under these weights: the distributions that `ids` were drawn from, if `sampling`
        says how."""
        with torch.no_grad():
            self.alone.load_state_dict(weights, strict=False)
            logits = self.alone(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits

        rows = logits[0, len(prompt) - 1 : -1].double().numpy()
        given = sampling.penalties
        return np.stack(
            [
                log_distribution(
                    row if given is None else penalised(row, given, prompt, ids[:place]), sampling
                )
                for place, row in enumerate(rows)
            ]
        )

    def difference(
        self,
        weights: Weights,
        found: Completion,
        sampling: SamplingParams = PLAIN,
        prompt: Sequence[int] = PROMPT,
    ) -> np.ndarray:
        """[n]: how far each log-prob is from that of the distribution under these weights."""
        assert len(found.ids) == len(found.logprobs) == len(found.versions)
        rows = self.logprobs(weights, prompt, found.ids, sampling)
        with np.errstate(invalid="ignore"):
            wanted = rows[np.arange(len(rows)), found.ids]
            return np.abs(wanted - np.array(found.logprobs))


def _wide(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Weights under which what a token sees, and at which place, shows in its distribution."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (1.0 if trained_weight.dim() == 1 else 0.0)
        + (0.2 if trained_weight.dim() == 1 else 0.15)
        * torch.randn(trained_weight.shape, generator=generator)
        for name, trained_weight in trained_weights(model).items()
    }


def penalised(
    logits: np.ndarray, given: Penalties, prompt: Sequence[int], drawn: Sequence[int]
) -> np.ndarray:
    """Logits [V] as the formula in `agentevo/penalties.py` says, token by token."""
    found = logits.copy()
    for token in {*prompt, *drawn}:
        found[token] *= given.repetition if found[token] <= 0 else 1 / given.repetition
    for token in set(drawn):
        found[token] -= given.presence + given.frequency * list(drawn).count(token)
    for token, bias in given.logit_bias:
        found[token] += bias
    return found


def sampled(**changes: Any) -> SamplingParams:
    return msgspec.structs.replace(PLAIN, **changes)


async def drawn_or_refused(case: Case, sampling: SamplingParams, why: str) -> Completion | None:
    """None for a request that is refused with a message that names `why`."""
    (found,) = await asyncio.gather(case.draw(sampling), return_exceptions=True)
    if isinstance(found, Completion):
        return found
    assert isinstance(found, EngineError) and why in str(found)
    return None


async def told(case: Case, count: int, sampling: SamplingParams) -> asyncio.Task[Completion]:
    """A request that runs on, once so many tokens of it have been told."""
    seen: list[int] = []
    task = asyncio.ensure_future(case.draw(sampling, listen=lambda ids, _: seen.extend(ids)))
    async with asyncio.timeout(PATIENCE_S):
        while len(seen) < count and not task.done():
            await asyncio.sleep(0.001)
    assert not task.done(), "the request ended before anything could happen in its middle"
    return task
