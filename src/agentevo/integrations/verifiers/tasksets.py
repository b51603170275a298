"""Tasksets with an `Env`: verifiers 0.4, `verifiers.v1`.

An attempt is one episode of the environment: its agent's harness runs as configured (`args` of the
recipe is verifiers' own section `env`, with harness and runtime), and the package's interception
forwards its requests to the gateway. The trace's reward is the reward; its named rewards are parts
of it, weighted, and its metrics are metrics. An error in an episode fails the attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

from verifiers.v1 import EvalClientConfig, ModelContext, load_environment, resolve_env_config

from agentevo.agents import Policy
from agentevo.errors import ConfigError, EnvironmentFailure, storable
from agentevo.rewards.returned_values import named_parts
from agentevo.runtime.loop_thread import DedicatedLoop
from agentevo.types import Outcome, Task

SESSION = "X-AgentEvo-Session"


def load_taskset_world(name: str, args: Mapping[str, Any], max_tasks: int) -> TasksetWorld:
    """The environment of an installed taskset. Raises what verifiers raises."""
    taskset = {**args.get("taskset", {}), "id": name}
    return TasksetWorld(
        load_environment(resolve_env_config({**args, "taskset": taskset})), name, max_tasks
    )


class TasksetWorld:
    """See the module, and loading.World."""

    def __init__(self, environment: Any, name: str, max_tasks: int) -> None:
        self.name = name
        self._environment = environment
        self._max_tasks = max_tasks
        self._rows: dict[str, Any] = {}
        self._loop = DedicatedLoop(f"verifiers {name}")
        self._serving: dict[asyncio.AbstractEventLoop, asyncio.Future[None]] = {}
        self._servers: set[asyncio.Task[None]] = set()

    def tasks(self) -> tuple[list[Task], list[Task]]:
        """See VerifiersWorld.tasks. A taskset has no held-out tasks."""
        if not self._rows:
            for number, row in enumerate(islice(self._environment.taskset, self._max_tasks)):
                self._rows[f"train-{number}"] = row

        if not self._rows:
            raise ConfigError(f"verifiers: the taskset {self.name!r} has no tasks")

        return [
            Task(
                id=name,
                query=row.data.prompt_text,
                answer=getattr(row.data, "answer", None),
                metadata={"row": row.hash[:16]},
            )
            for name, row in self._rows.items()
        ], []

    async def play(self, task: Task, policy: Policy) -> Outcome:
        row = self._rows[task.id]
        client = EvalClientConfig(
            base_url=policy.base_url, api_key_var="", headers={SESSION: policy.api_key}
        )

        async def episode() -> Any:
            await self._serve_shared()
            try:
                slot = self._environment.slots(row)[0]
                return await self._environment.run_slot(slot, ModelContext("policy", client))
            finally:
                await self._forget(client)

        return self._outcome(await self._loop.run(episode))

    async def _serve_shared(self) -> None:
        """Starts the shared resources of all episodes, once for each loop. A separate task keeps
        them open, since the task that opened them has to close them."""
        loop = asyncio.get_running_loop()
        if loop not in self._serving:
            up = self._serving[loop] = loop.create_future()

            async def serve() -> None:
                try:
                    async with self._environment.serving():
                        up.set_result(None)
                        await asyncio.Event().wait()
                except Exception as error:  # noqa: BLE001 (handed to the waiting caller)
                    if not up.done():
                        up.set_exception(error)
                    self._serving.pop(loop, None)

            server = loop.create_task(serve())
            self._servers.add(server)
            server.add_done_callback(self._servers.discard)

        await asyncio.shield(self._serving[loop])

    async def _forget(self, client: EvalClientConfig) -> None:
        """Closes the attempt's client: verifiers keeps one for each key, and every attempt has its
        own key."""
        interception = self._environment._interception
        for server in getattr(interception, "servers", [interception]):
            opened = getattr(server, "clients", {}).pop(client.model_dump_json(), None)
            if opened is not None:
                with suppress(Exception):
                    await asyncio.wait_for(opened.close(), 5.0)

    def _outcome(self, episode: Any) -> Outcome:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            words = "; ".join(_words(errors)) or "it gives no reason"
            raise EnvironmentFailure(f"the episode of {self.name} failed: {words}")

        traces = [trace for trace in episode.traces if trace.agent.trainable]
        if len(traces) != 1:
            raise EnvironmentFailure(
                f"the episode of {self.name} has {len(traces)} rollouts to train on, each with its "
                "own reward, but an attempt can have only one: give the others a "
                "model of their own and `trainable` false"
            )

        (trace,) = traces
        parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        parts = named_parts(parts, f"the rewards of {self.name}")
        if not parts:
            raise EnvironmentFailure(f"the episode of {self.name} has no reward")

        reward = sum(parts.values())
        return Outcome(
            reward=reward,
            success=reward >= 1.0,
            reward_parts=parts,
            truncated=bool(trace.is_truncated),
            metrics={name: value for name, value in trace.metrics.items() if value is not None},
        )


def _words(errors: Iterable[Any]) -> list[str]:
    error_texts = (storable(f"{error.type}: {error.message}", 1000) for error in errors)
    return list(dict.fromkeys(error_texts))
