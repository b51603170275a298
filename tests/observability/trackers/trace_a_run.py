"""Traces a run that ends at once, into MLflow; reads by MLflow's own API what has arrived.

python trace_a_run.py PLACE ATTEMPTS: the URI of a database that need not be there, or of a server,
or the folder of a run whose one key is tracing.backend=mlflow. Prints JSON: the spans of each trace
that was found, and what the tracer has told.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from agentevo.config import RunConfig, build_config
from agentevo.observability.tracing import open_tracing
from agentevo.store.call_log import AttemptCalls, CallLog, record_call

EXPERIMENT = "agentevo-traces"
CALLS = 3
"""Of an attempt, besides itself."""


class Nowhere:
    """A store of calls that keeps none."""

    async def write_calls(self, calls: Any) -> None: ...
    async def renew_calls(self, recorder: str) -> None: ...
    async def close(self) -> None: ...


def run_of(place: str) -> RunConfig:
    """A recipe as a person would have it."""
    folder = Path(place) if "://" not in place else Path.cwd() / "run"
    folder.mkdir(exist_ok=True)
    keys: dict[str, Any] = {"backend": "mlflow", "flush_s": 600}  # the machine may be slow
    keys |= {"endpoint": place, "experiment": EXPERIMENT} if "://" in place else {}

    return build_config(
        {
            "run": {"dir": str(folder), "name": EXPERIMENT},
            "model": {"name": "tiny"},
            "environment": {"type": "coins"},
            "tracing": keys,
        }
    )


async def run(place: str, attempts: int) -> tuple[list[str], float]:
    """What the tracer has told, and how long the end took."""
    told: list[str] = []

    async def nowhere() -> Any:
        return Nowhere()

    async with open_tracing(
        run_of(place), process="trainer", notify=told.append, is_remote=False
    ) as tracer:
        assert tracer is not None
        async with CallLog(nowhere, tracing=tracer) as log:
            for number in range(attempts):
                with AttemptCalls(log, f"t/train@1#{number}").attempt("Player"):
                    for _ in range(CALLS):
                        with record_call("policy", "generate"):
                            pass

        ended = time.monotonic()

    return told, time.monotonic() - ended


def found(uri: str) -> list[int]:
    """How many spans each trace has."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None

    numbers: list[int] = []
    token = None
    while True:
        page = client.search_traces(
            locations=[experiment.experiment_id], max_results=100, page_token=token
        )
        numbers += [len(trace.data.spans) for trace in page]
        token = page.token
        if not token:
            return numbers


if __name__ == "__main__":
    place = sys.argv[1]
    told, end_s = asyncio.run(run(place, int(sys.argv[2])))
    uri = place if "://" in place else f"sqlite:///{place}/tracing/mlruns.db"
    print(json.dumps({"traces": found(uri), "told": told, "end_s": end_s}))
