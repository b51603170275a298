"""`agentevo sample`: a sampler of a run as a separate process.

A sampler needs neither weights nor torch. It encodes conversations with the recipe's tokenizer,
gets tokens from the engines that announce themselves in RUN/engines/ (or from engines at given
URLs), reads tasks from the run's store, and writes trajectories there. It may start before the
engines and the store, and waits for them. At a stop request (SIGTERM, Ctrl-C, the end of its
parent) it returns its tasks. If it is killed, its leases expire and other samplers get the tasks.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING

from transformers import AutoTokenizer, GenerationConfig

from agentevo.agents import AgentFunction
from agentevo.config import RunConfig
from agentevo.config.named_agents import check_one_policy
from agentevo.errors import ModelError
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.chat.model_template import set_template
from agentevo.models.compute.positions import context_length
from agentevo.models.config_overrides import model_config
from agentevo.models.files.resolve import fetch
from agentevo.models.tiny_tokenizer import tiny_tokenizer
from agentevo.observability.tracing import check_tracing, open_tracing
from agentevo.rollout.given_tasks import check_same_tasks
from agentevo.rollout.sampler import Sampler
from agentevo.rollout.service import STOP_TIMEOUT_S, SamplerService
from agentevo.rollout.task_source import TaskSource
from agentevo.runs.folder.store_opening import open_run_store
from agentevo.runs.orchestration.players import check_play, corpus_of, find_agent
from agentevo.runtime.console import to_stderr
from agentevo.runtime.event_loop import run_coroutine
from agentevo.runtime.heap import lasting_heap
from agentevo.runtime.paths import short
from agentevo.runtime.retry import STORE_RETRY_S, with_retries
from agentevo.runtime.signals import POLL_INTERVAL_S, catch_stop_signals, finishes_before_stop
from agentevo.store.call_log import CallLog, call_log
from agentevo.store.store import Store
from agentevo.types import Task

if TYPE_CHECKING:
    from agentevo.inference.serving.remote import RemoteEngine

LAST_STEP_POLL_S = 2.0
"""The interval of checks whether the run has committed its last step, in seconds."""
GRACE_S = 2.0
"""The seconds in which the service must begin to stop after a stop request. A service that is
stopping has STOP_TIMEOUT_S + GRACE_S more. After that it is cancelled."""


def sample(
    config: RunConfig,
    *,
    name: str | None = None,
    engines: Sequence[str] = (),
    parent: int | None = None,
    agent: AgentFunction | None = None,
    tasks: Sequence[Task] | None = None,
    note: Callable[[str], None] = to_stderr,
) -> None:
    """Samples until a stop request, or until the run's last step is committed. Blocks.

    `engines`: the engines' URLs; default: the engines that the run's folder lists. With `parent`,
    it ends when that process ends, and not when the run ends. Raises ConfigError before anything is
    created.
    """
    from agentevo.inference.serving.address import EngineAddress
    from agentevo.inference.serving.secret import RunSecret
    from agentevo.runs.folder.identity import ensure_run_folder

    name = name if name is not None else f"sampler-{socket.gethostname()}-{os.getpid()}"
    for url in (*engines, *config.rollout.engine_urls):
        EngineAddress.read(url)

    RunSecret(config.run_dir / "engines", config.rollout.engine_secret).check()
    check_one_policy(config)
    check_play(config, tasks)
    check_tracing(config)

    source = TaskSource(config, tasks)
    player = find_agent(config, agent)
    with catch_stop_signals(parent) as stop:
        chat, context_length = chat_of_recipe(config)
        if not ensure_run_folder(config, within_s=STORE_RETRY_S, stop=stop, note=note):
            return
        if source.read is not None:
            check_same_tasks(config, source.read)

        async def work() -> None:
            async with engines_and_store(config, engines, stop, note, name) as opened:
                if opened is None:
                    return

                engine, store, calls = opened
                sampler = Sampler(
                    config,
                    engine,
                    chat,
                    player,
                    store,
                    context_length,
                    calls=calls,
                    note=note,
                    get_tasks=source.given,
                    task_images=source.images,
                )
                service = SamplerService(
                    config, sampler, engine, store, source, worker=name, note=note
                )
                note(f"{name}: sampling for {short(config.run_dir)}")

                steps = config.trainer.steps
                with closing(sampler):
                    await _serve(service, engine, store, steps, stop, ends_with_run=parent is None)

                num_groups = service.stats()["sampler/groups_written"]
                end_note = f": the run has made its {steps} step{'s' * (steps != 1)}"
                note(
                    f"{name}: stopped after {num_groups:g} group{'s' * (num_groups != 1)}"
                    + ("" if stop() else end_note)
                )

        run_coroutine(work())


def chat_of_recipe(config: RunConfig) -> tuple[ChatFormat, int]:
    """The chat format and the context length in tokens of the recipe's model. Reads no weights."""
    if config.model.name == "tiny":  # created here
        tiny = config.model.tiny
        texts = corpus_of(config) if tiny.tokenizer == "word" else ()
        own_tokenizer = tiny_tokenizer(tiny, texts)
        set_template(own_tokenizer, config.model)
        processor = None
        if tiny.vision:  # images need torch
            from agentevo.models.tiny_vision import tiny_processor

            processor = tiny_processor(config.model, own_tokenizer)
        return ChatFormat(own_tokenizer, processor=processor), tiny.context_length

    folder = fetch(config.model.name, None)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        shape = model_config(folder, config.model.config_overrides)
        saved = (folder / "generation_config.json").is_file()
        generation = (
            GenerationConfig.from_pretrained(folder)
            if saved
            else GenerationConfig.from_model_config(shape)
        )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"model {config.model.name!r}: tokenizer and configuration in {folder} can't be read "
            f"({reason})"
        ) from error

    set_template(tokenizer, config.model)
    processor = None
    if hasattr(shape, "vision_config"):  # likewise
        from agentevo.models.files.model_class import saved_processor

        processor = saved_processor(folder, shape, tokenizer, config.model.vision)

    return ChatFormat(tokenizer, generation, processor=processor), context_length(shape)


@asynccontextmanager
async def engines_and_store(
    config: RunConfig,
    urls: Sequence[str],
    stop: Callable[[], bool],
    note: Callable[[str], None],
    name: str,
) -> AsyncIterator[tuple[RemoteEngine, Store, CallLog] | None]:
    """Opens the run's engines (at `urls`, else those that its folder lists), its store, and the log
    of calls, and closes them at the end. None if `stop` was true before the store was open. `name`:
    the name of this process in traces."""
    from agentevo.inference.serving.announcements import AnnouncementWatcher
    from agentevo.inference.serving.directory import EngineDirectory
    from agentevo.inference.serving.remote import RemoteEngine
    from agentevo.inference.serving.secret import RunSecret

    store_opening = asyncio.create_task(
        open_run_store(config.store_url, within_s=STORE_RETRY_S, notify=note)
    )
    if not await finishes_before_stop(store_opening, stop):
        yield None
        return

    directory = EngineDirectory(config.run_dir / "engines")
    secret = RunSecret(directory.folder, config.rollout.engine_secret)
    engine = RemoteEngine(
        list(urls) or directory,
        also=() if urls else config.rollout.engine_urls,
        watcher=None if urls else AnnouncementWatcher.of(config, secret),
        secret=secret,
        poll_s=config.rollout.poll_s,
    )
    try:
        async with (
            store_opening.result() as store,
            open_tracing(config, process=name, notify=note, is_remote=True) as tracing,
            call_log(config.store_url, notify=note, tracing=tracing) as calls,
        ):
            with lasting_heap():
                yield engine, store, calls
    finally:
        await engine.close()


async def _serve(
    service: SamplerService,
    engine: RemoteEngine,
    store: Store,
    steps: int,
    stop: Callable[[], bool],
    *,
    ends_with_run: bool,
) -> None:
    """Runs the service until `stop`, or with `ends_with_run` until the run's last step is
    committed. Raises the service's errors."""
    done: list[bool] = []
    await engine.refresh()  # starts the search for engines

    serving = asyncio.create_task(service.run(lambda: stop() or bool(done)))
    watching = [asyncio.create_task(_until_done(store, steps, done))] if ends_with_run else []
    try:
        while not serving.done() and not stop() and not done:
            finished, _ = await asyncio.wait(
                [serving, *watching], timeout=POLL_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
            )
            for task in finished:
                task.result()

        await asyncio.wait([serving], timeout=GRACE_S)
        if service.stopping:
            await asyncio.wait([serving], timeout=STOP_TIMEOUT_S + GRACE_S)
    finally:
        for task in (serving, *watching):
            task.cancel()
        await asyncio.gather(serving, *watching, return_exceptions=True)

    if not serving.cancelled():
        serving.result()


async def _until_done(store: Store, steps: int, done: list[bool]) -> None:
    while True:
        last = await with_retries(store.last_step, within_s=STORE_RETRY_S, what="last_step")
        if last is not None and last.step >= steps:
            done.append(True)
            return
        await asyncio.sleep(LAST_STEP_POLL_S)
