"""`agentevo serve RUN --openai`: serves a run's trained model, or a recipe's model, to any client
of OpenAI's or Anthropic's API, with a key of its own. Nothing is trained and nothing is recorded;
the run's folder gets only the key and, while the model is served, the URL (endpoint.py)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path

from agentevo.agents.gateway.gateway import Gateway
from agentevo.agents.gateway.shared_session import SharedSession
from agentevo.config import RunConfig
from agentevo.config.routing import without_routing
from agentevo.inference.conversations.conversation import Conversation
from agentevo.inference.engines import check_engine, engines
from agentevo.models.chat.chat_format import chat_of
from agentevo.models.checkpoint_manifest import read as read_manifest
from agentevo.models.compute.positions import context_length
from agentevo.rollout.sampler import sampling_params
from agentevo.runs.orchestration.components import check_memory, load_policy
from agentevo.runs.processes.endpoint import SERVING, open_endpoint
from agentevo.runtime.console import to_stderr
from agentevo.runtime.event_loop import in_thread, run_coroutine
from agentevo.runtime.signals import POLL_INTERVAL_S, catch_stop_signals
from agentevo.training.checkpoint import Checkpoints


def serve_model(
    config: RunConfig,
    *,
    checkpoint: str | None = "best",
    host: str = "127.0.0.1",
    port: int = 0,
    tls: bool | None = None,
    name: str | None = None,
    note: Callable[[str], None] = to_stderr,
) -> None:
    """Serves a checkpoint of the run (`best`, `last`, a path, or None for the recipe's own model)
    until it is asked to stop; blocks. `name`: the model's name for clients. Raises ConfigError, or
    CheckpointError if there is no such checkpoint, before anything is created."""
    config = without_routing(config)
    checkpoints = Checkpoints(config.run_dir / "checkpoints", config.checkpoint.keep_last)
    path = None if checkpoint is None else checkpoints.find(checkpoint)
    check_memory(config)
    check_engine(config.engine)

    make_engine = engines.get(config.engine.type)
    with (
        catch_stop_signals() as stop,
        open_endpoint(config.run_dir, host, port, tls, SERVING) as endpoint,
    ):
        loaded = load_policy(config, path)
        engine = make_engine(loaded.model, loaded.tokenizer, config.engine)
        shown_name = name or config.run_dir.name

        async def serve() -> None:
            chat = chat_of(loaded)
            sampling = sampling_params(config.sampling, chat, config.sampling.temperature)

            def new_conversation() -> Conversation:
                return Conversation(
                    engine,
                    chat,
                    sampling,
                    name=secrets.token_hex(8),
                    seed=secrets.randbits(63),
                    context_length=context_length(loaded.model.config),
                    timeout_s=config.engine.timeout_s,
                )

            gateway = Gateway(
                config.gateway,
                model=shown_name,
                timeout_s=config.engine.timeout_s,
                note=note,
                listener=endpoint.listener,
                tls=endpoint.server_context(),
            )
            try:
                await engine.begin(_step(path), deadline_s=config.engine.timeout_s)
                base = await in_thread(lambda: gateway.base)
                key = endpoint.secret.value()
                whole_calls = config.gateway.whole_calls
                gateway.add(SharedSession(new_conversation, base, key, whole_calls=whole_calls))
                what = config.model.name if path is None else path
                note(f"serving {what} as {shown_name!r} at {base}\n{endpoint.how_to(base)}")

                with endpoint.announce(base):
                    while not stop():
                        engine.check()
                        await asyncio.sleep(POLL_INTERVAL_S)

                note(f"{shown_name}: stopped")
            finally:
                await in_thread(gateway.close)
                await engine.close()

        run_coroutine(serve())


def _step(checkpoint: Path | None) -> int:
    """The step that a checkpoint is of, which becomes the version of its tokens; 0 for a model that
    no run has saved."""
    if checkpoint is None:
        return 0
    return read_manifest(checkpoint).step if (checkpoint / "checkpoint.json").is_file() else 0
