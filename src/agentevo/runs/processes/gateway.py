"""`agentevo serve --gateway`: the gateway to a run's engines as a separate process, for agents that
are started elsewhere, by any user, in any language.

A client with the key of RUN/gateway/secret opens sessions (session_routes.py); a client with a
session's key plays that one attempt with a client of OpenAI's or Anthropic's API. The gateway needs
no torch and holds no weights: tokens come from the engines that announce themselves in
RUN/engines/, and groups go to the run's store, where `agentevo learn` finds them. At a stop
request, the gateway cancels open sessions and writes the existing attempts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing

from agentevo.agents.gateway.gateway import Gateway
from agentevo.config import RunConfig
from agentevo.config.named_agents import check_one_policy
from agentevo.inference.serving.address import EngineAddress
from agentevo.observability.tracing import check_tracing
from agentevo.rollout.external_attempts import OutsideAgent, OutsideSessions
from agentevo.rollout.given_tasks import check_same_tasks
from agentevo.rollout.next_tasks import NextTasks
from agentevo.rollout.sampler import Sampler
from agentevo.rollout.scoring import Scoring
from agentevo.rollout.task_source import TaskSource
from agentevo.runs.folder.identity import ensure_run_folder
from agentevo.runs.processes.endpoint import open_endpoint
from agentevo.runs.processes.sample import chat_of_recipe, engines_and_store
from agentevo.runs.processes.session_routes import SessionRoutes
from agentevo.runtime.console import to_stderr
from agentevo.runtime.event_loop import in_thread, run_coroutine
from agentevo.runtime.retry import STORE_RETRY_S
from agentevo.runtime.signals import POLL_INTERVAL_S, catch_stop_signals


def run_gateway(
    config: RunConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: bool | None = None,
    engines: Sequence[str] = (),
    note: Callable[[str], None] = to_stderr,
) -> None:
    """Serves sessions until it is asked to stop; blocks. `engines` are URLs; without them it uses
    those that the run's folder lists. Raises ConfigError before anything is created."""
    check_one_policy(config)
    check_tracing(config)
    for url in engines:
        EngineAddress.read(url)

    Scoring(config.rewards)
    tasks = TaskSource(config, None) if config.tasks.given else None
    with catch_stop_signals() as stop, open_endpoint(config.run_dir, host, port, tls) as endpoint:
        chat, context_length = chat_of_recipe(config)
        if not ensure_run_folder(config, within_s=STORE_RETRY_S, stop=stop, note=note):
            return
        if tasks is not None and tasks.read is not None:
            check_same_tasks(config, tasks.read)

        async def serve() -> None:
            async with engines_and_store(config, engines, stop, note, "gateway") as opened:
                if opened is None:
                    return

                engine, store, calls = opened
                agent = OutsideAgent(config.agent.timeout_s)
                endpoint.secret.value()

                gateway = Gateway(
                    config.gateway,
                    model=config.model.name,
                    timeout_s=config.engine.timeout_s,
                    note=note,
                    listener=endpoint.listener,
                    tls=endpoint.server_context(),
                )
                sampler = Sampler(
                    config,
                    engine,
                    chat,
                    agent,
                    store,
                    context_length,
                    calls=calls,
                    note=note,
                    gateway=gateway,
                    get_tasks=tuple if tasks is None else tasks.given,
                    task_images={} if tasks is None else tasks.images,
                )
                sessions = OutsideSessions(config, sampler, agent, engine, store, note)
                next_tasks = NextTasks(config, tasks, sessions, store)
                routes = SessionRoutes(sessions, endpoint.secret, engine.stats, next_tasks)
                gateway.added = routes
                with closing(gateway), closing(sampler):
                    base = await in_thread(lambda: gateway.base)
                    routes.bridge = gateway.bridge_to_current_loop()
                    await engine.refresh()  # from here on it continues looking
                    note(f"gateway: sessions at {base}/sessions\n{endpoint.where_the_key_is()}")
                    while not stop():
                        await asyncio.sleep(POLL_INTERVAL_S)
                    await sessions.close()

                note("gateway: stopped")

        run_coroutine(serve())
