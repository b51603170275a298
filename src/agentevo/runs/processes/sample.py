"""`agentevo sample`: a sampler of a run as a separate process.

It needs neither weights nor torch: conversations are encoded with the recipe's tokenizer, tokens
come from the engines that announce themselves in RUN/engines/ (or that are given by URL), tasks and
trajectories go through the run's store. It may start before any of them, and waits for them. At a
stop request (SIGTERM, Ctrl-C, the end of its parent) it returns its tasks; if it is killed, its
leases run out and other samplers get the tasks.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING

from transformers import AutoTokenizer, GenerationConfig

from agentevo.agents import Agent, AgentFunction
from agentevo.config import RunConfig
from agentevo.config.named_agents import check_one_policy
from agentevo.errors import ModelError
from agentevo.models.chat.chat_format import ChatFormat
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
    from agentevo.inference.serving.announcements import AnnouncementWatcher
    from agentevo.inference.serving.remote import RemoteEngine
    from agentevo.inference.serving.secret import RunSecret

DONE_S = 2.0
"""How often to look whether the run has committed its last step, in seconds."""
GRACE_S = 2.0
"""How long the service may take to notice a request to stop, in seconds; then it is cancelled. A
stopping service has STOP_TIMEOUT_S more, and then this time once more."""


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
    """Samples until it is asked to stop, or the run's last step is committed; blocks.

    `engines` are URLs; without them it uses those that the run's folder lists. It ends when the
    process `parent` ends, and not before. Raises ConfigError before anything is created.
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
        chat, context_length = conversation(config)
        if not ensure_run_folder(config, within_s=STORE_RETRY_S, stop=stop, note=note):
            return
        if source.read is not None:
            check_same_tasks(config, source.read)

        run_coroutine(
            _sample(
                config,
                name,
                engines,
                player,
                source,
                chat,
                context_length,
                stop,
                ends=parent is None,
                note=note,
            )
        )


def conversation(config: RunConfig) -> tuple[ChatFormat, int]:
    """The chat format of the recipe's model, and the length of its context in tokens; without
    reading its weights."""
    if config.model.name == "tiny":  # created here
        tiny = config.model.tiny
        texts = corpus_of(config) if tiny.tokenizer == "word" else ()
        return ChatFormat(tiny_tokenizer(tiny, texts)), tiny.context_length

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

    return ChatFormat(tokenizer, generation), context_length(shape)


async def _sample(
    config: RunConfig,
    name: str,
    urls: Sequence[str],
    player: Agent,
    source: TaskSource,
    chat: ChatFormat,
    context_length: int,
    stop: Callable[[], bool],
    *,
    ends: bool,
    note: Callable[[str], None],
) -> None:
    async with engines_and_store(config, urls, stop, note, name) as opened:
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
        )
        service = SamplerService(config, sampler, engine, store, source, worker=name, note=note)
        note(f"{name}: sampling for {short(config.run_dir)}")

        with closing(sampler):
            await _serve(service, engine, store, config.trainer.steps, stop, ends=ends)

        written = service.stats()["sampler/groups_written"]
        steps = config.trainer.steps
        end_note = f": the run has made its {steps} step{'s' * (steps != 1)}"
        note(
            f"{name}: stopped after {written:g} group{'s' * (written != 1)}"
            + ("" if stop() else end_note)
        )


@asynccontextmanager
async def engines_and_store(
    config: RunConfig,
    urls: Sequence[str],
    stop: Callable[[], bool],
    note: Callable[[str], None],
    name: str,
) -> AsyncIterator[tuple[RemoteEngine, Store, CallLog] | None]:
    """The run's engines (`urls`, else those of its folder), its store, and the log of calls, all
    closed at the end; None if `stop` came before the store was open. `name`: the name of this
    process, for its traces."""
    from agentevo.inference.serving.directory import EngineDirectory
    from agentevo.inference.serving.remote import RemoteEngine
    from agentevo.inference.serving.secret import RunSecret

    opening = asyncio.create_task(
        open_run_store(config.store_url, within_s=STORE_RETRY_S, notify=note)
    )
    if not await finishes_before_stop(opening, stop):
        yield None
        return

    directory = EngineDirectory(config.run_dir / "engines")
    secret = RunSecret(directory.folder, config.rollout.engine_secret)
    engine = RemoteEngine(
        list(urls) or directory,
        also=() if urls else config.rollout.engine_urls,
        watcher=None if urls else _announcement_watcher(config, secret),
        secret=secret,
        poll_s=config.rollout.poll_s,
    )
    try:
        async with (
            opening.result() as store,
            open_tracing(config, process=name, notify=note, is_remote=True) as tracing,
            call_log(config.store_url, notify=note, tracing=tracing) as calls,
        ):
            with lasting_heap():
                yield engine, store, calls
    finally:
        await engine.close()


def _announcement_watcher(config: RunConfig, secret: RunSecret) -> AnnouncementWatcher | None:
    """For engines that announce themselves in the object store of the weights, if there is one."""
    from agentevo.inference.serving.announcements import AnnouncementWatcher, StoreAnnouncements
    from agentevo.inference.weights.objects import Objects

    url = config.rollout.weights.url
    return (
        AnnouncementWatcher(StoreAnnouncements(Objects(url), secret)) if url is not None else None
    )


async def _serve(
    service: SamplerService,
    engine: RemoteEngine,
    store: Store,
    steps: int,
    stop: Callable[[], bool],
    *,
    ends: bool,
) -> None:
    """Runs the service until `stop` or, where it `ends` by itself, the last step; raises what fails
    in that time."""
    done: list[bool] = []
    await engine.refresh()  # from here on it continues looking

    serving = asyncio.create_task(service.run(lambda: stop() or bool(done)))
    watching = [asyncio.create_task(_until_done(store, steps, done))] if ends else []
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
        await asyncio.sleep(DONE_S)
