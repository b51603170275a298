"""Agent Lightning's end of benchmarks/store.py: its in-memory store, in this process and behind its
HTTP server.

An attempt is a rollout that is enqueued, dequeued by a worker, gets a span for each turn, is marked
as succeeded, and is read by its spans.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from importlib.metadata import version
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = (
    "True"  # it would ask the network for prices when it is imported
)

from agentlightning.store import InMemoryLightningStore, LightningStoreClient, LightningStoreServer
from agentlightning.types import EnqueueRolloutRequest, Span

from peer_worker import Line


def make_attempt(turns: int, tokens: int) -> list[dict[str, Any]]:
    """Attributes of each turn's span."""
    half = tokens // turns // 2

    def ids() -> list[int]:
        return [int(50_000 ** random.random()) for _ in range(half)]

    return [
        {
            "prompt_token_ids": ids(),
            "response_token_ids": ids(),
            "logprobs": [-random.random() for _ in range(half)],
            "version": 7,
        }
        for _ in range(turns)
    ]


async def one_round(store: Any, request: dict[str, Any]) -> dict[str, float]:
    size = request["group"]
    num_groups = request["groups"]
    seconds = dict.fromkeys(("lease", "write", "read"), 0.0)
    for _ in range(num_groups):
        await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input={"task": i}) for i in range(size)]
        )
        attempts = [make_attempt(request["turns"], request["tokens"]) for _ in range(size)]
        start = time.perf_counter()
        rollouts = [await store.dequeue_rollout() for _ in range(size)]
        leased = time.perf_counter()

        for rollout, turns in zip(rollouts, attempts, strict=True):
            ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
            await store.add_many_spans(
                [
                    Span.from_attributes(attributes=turn, sequence_id=i, name="turn", **ids)
                    for i, turn in enumerate(turns)
                ]
            )
            await store.update_attempt(
                rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded"
            )

        written = time.perf_counter()
        for rollout in rollouts:
            assert len(await store.query_spans(rollout.rollout_id)) == request["turns"]

        seconds["lease"] += leased - start
        seconds["write"] += written - leased
        seconds["read"] += time.perf_counter() - written

    return {name: size * num_groups / spent for name, spent in seconds.items()}


async def serve(line: Line) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    server = LightningStoreServer(InMemoryLightningStore(), host="127.0.0.1", port=port)
    await server.start()

    stores = {
        "agentlightning": InMemoryLightningStore(),
        "agentlightning_http": LightningStoreClient(f"http://127.0.0.1:{port}"),
    }
    for request in line.requests(
        {"versions": {"agentlightning": version("agentlightning")}, "modes": list(stores)}
    ):
        line.reply(await one_round(stores[request["mode"]], request))


if __name__ == "__main__":
    asyncio.run(serve(Line()))
