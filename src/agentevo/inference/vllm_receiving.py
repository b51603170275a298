"""The parent's side of weights that vLLM's workers receive themselves (`WeightLoader`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agentevo.errors import EngineError, WeightsLostError
from agentevo.inference.verified import check_shapes
from agentevo.inference.vllm_weights import saves_as_it_is
from agentevo.models.adapters import is_adapted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agentevo.inference.broadcast_files import Incoming
    from agentevo.models.parts import Spec

CALL_S = 60.0
"""Longest time for the workers to answer a call, between two steps of the model."""
POLL_S = 0.05
Call = Callable[..., Awaitable[Any]]
"""Calls a method of every worker, and returns what they return, in their order."""


async def places_of_workers(
    call: Call, model: PreTrainedModel, specs: Mapping[str, Spec]
) -> list[str]:
    """The workers' devices; none with an adapter, which vLLM reads from files, and where a
    checkpoint of the model has other tensors than its modules. Raises EngineError for weights that
    are not the model's."""
    check_shapes(model, {name: spec.shape for name, spec in specs.items()})
    if is_adapted(model) or not saves_as_it_is(model, specs):
        return []
    async with asyncio.timeout(CALL_S):
        return list(await call("place_of_agentevo_weights"))


async def receive_in_workers(call: Call, incoming: Incoming, base: Path) -> None:
    """Every worker has them, and has changed nothing. It ends whatever happens: each step of a
    worker has a deadline of its own. Raises EngineError."""
    given = (msgspec.json.encode(incoming).decode(), str(base))
    async with asyncio.timeout(CALL_S):
        await call("begin_agentevo_weights", args=given)

    while True:
        async with asyncio.timeout(CALL_S):
            found = await call("end_agentevo_weights")
        if None not in found:
            break
        await asyncio.sleep(POLL_S)

    for kind, failure in (("refused", EngineError), ("lost", WeightsLostError)):
        for one in found:
            if one[0] == kind:
                raise failure(f"weights {kind}, nothing changed: {one[1]}")
