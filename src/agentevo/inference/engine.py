"""The engine contract: token ids in, token ids out, with the log-probs of the distribution that
each token was really drawn from.

An engine knows nothing of agents, rewards or text. It stamps every token with the version of the
weights that emitted it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, runtime_checkable

import torch

from agentevo.types import Completion, SamplingParams

InFlight = Literal["continue", "finish"]
"""What becomes of running requests when an engine gets new weights or goes to sleep: they go on
afterwards from where they are, or end first."""


class Engine(Protocol):
    """Anything that generates tokens under weights that can be replaced."""

    @property
    def version(self) -> int:
        """Of the weights that new tokens come from."""
        ...

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        session: str | None = None,
        deadline_s: float,
    ) -> Completion:
        """Completes `prompt_ids`, the whole context.

        `session` names a conversation whose key-value cache is kept: the next call with the same
        name costs only its new tokens. Raises RequestTooLongError if the tokens can never fit,
        DeadlineExceededError after `deadline_s` seconds. Cancelling the await frees whatever the
        request held.
        """
        ...

    async def release(self, session: str) -> None:
        """Forgets a conversation; unknown names are fine."""
        ...

    async def publish(
        self, version: int, weights: Mapping[str, torch.Tensor] | None, *, deadline_s: float
    ) -> None:
        """Serves new weights from now on; verifies all of them before it changes any. None: they
        were changed in place. Weights that are not trained (the base under adapters) may be left
        out."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters since the start: generated and computed tokens, prefix hits, queue lengths,
        memory."""
        ...


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that can give its memory back for a while."""

    @property
    def asleep(self) -> bool: ...

    @property
    def slept_s(self) -> float:
        """Seconds asleep so far, those of a sleep under way among them. They count towards no
        request's deadline."""
        ...

    async def sleep(self, *, in_flight: InFlight, deadline_s: float) -> None:
        """Computes nothing from now on; see TorchEngine.sleep."""
        ...

    def wake(self) -> None:
        """Goes on."""
        ...
