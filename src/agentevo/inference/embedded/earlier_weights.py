"""Keeps weights of earlier versions that still serve requests, and samples from one of these
versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from agentevo.inference.engine import InFlight, TokenListener, TokenScores
from agentevo.models.compute.linear import drop_packed
from agentevo.models.compute.parameters import trained_weights
from agentevo.models.compute.thread_settings import own_torch_state
from agentevo.models.files.model_copy import copy_policy
from agentevo.types import Completion, SamplingParams
from agentevo.types.images import PromptImage

if TYPE_CHECKING:
    from agentevo.inference.embedded.torch_engine import TorchEngine


class EarlierWeights:
    """Copies of a model by version. Untrained parameters are shared with the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._copies: dict[int, PreTrainedModel] = {}

    def clear(self) -> None:
        self._copies.clear()

    @own_torch_state()
    @torch.no_grad()
    def keep(self, version: int, count: int) -> None:
        """Keeps a copy of the current weights as `version`. Drops all copies but the newest
        `count`."""
        older = sorted(number for number in self._copies if number != version)
        spare = [self._copies.pop(number) for number in older[: max(0, len(older) - count + 1)]]
        if version in self._copies or not count:
            return

        if not spare:
            self._copies[version] = copy_policy(self._model)
            return

        weights = trained_weights(self._model)
        for name, parameter in trained_weights(spare[0]).items():
            parameter.copy_(weights[name])

        drop_packed(spare[0])
        self._copies[version] = spare[0]

    def model_serving(self, requested: int | None, newest: int) -> tuple[int, PreTrainedModel]:
        """The version that serves requests for version `requested`, and its model. This is
        `requested` itself or, if it was dropped, the next version that exists. `newest` is the
        version of the current weights."""
        later = (
            number
            for number in self._copies
            if requested is not None and requested <= number < newest
        )
        version = min(later, default=newest)
        return version, self._model if version == newest else self._copies[version]


class PinnedEngine:
    """The engine for requests that are all sampled from one version: see
    VersionedEngine.serving."""

    def __init__(self, engine: TorchEngine, version: int) -> None:
        self._engine = engine
        self._pinned = version

    @property
    def version(self) -> int:
        """See Engine.version. The version that serves its requests now."""
        return self._engine.version_for(self._pinned)

    @property
    def asleep(self) -> bool:
        """See SleepingEngine.asleep."""
        return self._engine.asleep

    @property
    def slept_s(self) -> float:
        """See SleepingEngine.slept_s."""
        return self._engine.slept_s

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        session: str | None = None,
        deadline_s: float,
        listen: TokenListener | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        """See Engine.generate."""
        return await self._engine.generate(
            prompt_ids,
            sampling,
            session=session,
            deadline_s=deadline_s,
            listen=listen,
            images=images,
            version=self._pinned,
        )

    async def score(
        self,
        context_ids: list[int],
        ids: list[int],
        *,
        temperature: float = 1.0,
        deadline_s: float,
        images: Sequence[PromptImage] = (),
    ) -> TokenScores:
        """See ScoringEngine.score: under the pinned version."""
        return await self._engine.score(
            context_ids,
            ids,
            temperature=temperature,
            deadline_s=deadline_s,
            images=images,
            version=self._pinned,
        )

    async def release(self, session: str) -> None:
        """See Engine.release."""
        await self._engine.release(session)

    async def sleep(self, *, in_flight: InFlight, deadline_s: float) -> None:
        """See SleepingEngine.sleep."""
        await self._engine.sleep(in_flight=in_flight, deadline_s=deadline_s)

    async def wake(self) -> None:
        """See SleepingEngine.wake."""
        await self._engine.wake()

    def stats(self) -> dict[str, float]:
        """See Engine.stats."""
        return self._engine.stats()
