"""A conversation with a model in the terminal: `agentevo chat`.

    a line -> the history -> Conversation.complete, printed while it samples -> the history

The model runs in a thread with its own event loop. The main thread reads lines and waits for
answers. Ctrl-C therefore interrupts only an answer, and the history keeps the text so far. Each
answer extends the tokens of the answers before it. The conversation is not stored, and does not use
the run's environment and tools.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from agentevo.config import RunConfig
from agentevo.config.agents import SingleTurnSection
from agentevo.config.tasks import TasksSection
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.runs.evaluation.contestants import MAX_NEW_TOKENS, Contestant, find_contestants
from agentevo.runs.evaluation.play import local_parts, run_folder
from agentevo.runs.folder.run_folder import UNSCORED, is_run_folder
from agentevo.runtime.console import without_controls
from agentevo.runtime.event_loop import run_coroutine
from agentevo.runtime.signals import collect_signals
from agentevo.types import Message, SamplingOverrides

LABEL = "chat"
PROMPT = "> "
SIGNAL_INTERVAL_S = 0.2
"""The maximum delay of a Ctrl-C at the prompt, in seconds."""
LOCAL_ENGINE = ("engine.type=torch", "engine.options={}")
"""Overrides for the local engine: a single user needs no server."""


def chat(
    target: str,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    system: str | None = None,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    note: Callable[[str], None],
) -> None:
    """Answers the lines of standard input on standard output until the input ends. In a terminal,
    it shows a prompt. `target`: a run, for its newest checkpoint or the checkpoint of `step`, or
    another target of `agentevo eval` that runs on this machine. Raises ConfigError before a model
    is loaded."""
    contestant = find_model(target, step, overrides)
    config = contestant.config
    system = system if system is not None else getattr(config.agent, "system_prompt", None)
    answer_overrides = SamplingOverrides(
        temperature=config.sampling.temperature if temperature is None else temperature,
        max_new_tokens=max_new_tokens or max(MAX_NEW_TOKENS, config.sampling.max_new_tokens),
    )
    is_terminal = sys.stdin.isatty()
    for line in _opening_notes(contestant, system):
        note(line)

    with ChatModel(contestant, answer_overrides, note) as model:
        if is_terminal:
            note("Ctrl-C ends an answer, Ctrl-D the chat")

        history = [Message("system", system)] if system else []
        # A further Ctrl-C between a prompt and an answer has no effect.
        with collect_signals(*([signal.SIGINT] if is_terminal else [])):
            for line in _typed_lines() if is_terminal else _piped_lines():
                question = Message("user", line)
                try:
                    answer = model.answer([*history, question])
                except AgentEvoError as error:
                    if not is_terminal:
                        raise
                    note(f"error: {error}")
                    continue

                if answer is not None:
                    history += [question, answer]


def find_model(target: str, step: int | None, overrides: Sequence[str]) -> Contestant:
    """The model to chat with. Raises ConfigError for a target without a model, and for a model on a
    server."""
    remote_error = ConfigError(
        f"{target} is a model of a server: use a client of its API; `agentevo chat` takes a run or "
        "a model that runs on this machine"
    )
    if target.startswith(("http://", "https://")):
        raise remote_error  # does not query the server for its models

    target = with_checkpoint(target, step)
    (contestant,) = find_contestants(
        target, (), (*UNSCORED, *LOCAL_ENGINE, *overrides), ("--chat",)
    )
    if contestant.remote is not None:
        raise remote_error

    return contestant


def with_checkpoint(target: str, step: int | None) -> str:
    """Adds the checkpoint to a target that is a run's folder: the checkpoint of `step`, or the
    newest. Raises ConfigError for a step and a target that is no run."""
    if is_run_folder(Path(target)):
        return f"{target}@{'last' if step is None else step}"
    if step is not None:
        raise ConfigError(
            f"--step {step}: {target} is not the folder of a run: give one, or leave --step out"
        )
    return target


def _opening_notes(contestant: Contestant, system: str | None) -> Iterator[str]:
    """Notes for the user before the first line."""
    agent = contestant.config.agent
    folder = contestant.checkpoint
    yield f"model: {contestant.label}{'' if folder is None else f' ({folder.name})'}"
    if system:
        first, *further_lines = system.strip().split("\n")
        is_cut = bool(further_lines or len(first) > 200)
        yield f"system: {without_controls(first)[:200]}{' ...' * is_cut}"

    run = contestant.label.rpartition("@")[0] or contestant.label
    for applies, limitation in (
        (bool(getattr(agent, "tools", ())), "tools are not offered"),
        (contestant.config.environment is not None, "environment is not played"),
    ):
        if applies:
            yield (
                f"its {limitation} here: `agentevo chat {run} --number 0` plays a task with all "
                "of them"
            )


def without_play(config: RunConfig) -> RunConfig:
    """The configuration without agents, tools, environment and rewards."""
    return config.model_copy(
        update={
            "environment": None,
            "agent": SingleTurnSection(),
            "agents": {},
            "tasks": TasksSection(),
            "rewards": (),
            "remote_models": {},
        }
    )


class ChatModel:
    """A loaded model in its own thread, as a context manager. It answers one history at a time."""

    def __init__(
        self,
        contestant: Contestant,
        overrides: SamplingOverrides,
        note: Callable[[str], None],
    ) -> None:
        self._contestant = contestant
        self._overrides = overrides
        self._note = note
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=LABEL, daemon=True)
        self._parts: Any = None
        self._conversation: Any = None

    def __enter__(self) -> Self:
        """Loads the model. Raises the error if loading failed."""
        self._thread.start()
        self._loop.result()
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.result().call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def answer(self, history: Sequence[Message]) -> Message | None:
        """Prints the model's answer to a history that ends with a user's message. After Ctrl-C,
        returns the text so far, or None if there is none."""
        pieces: list[str] = []

        def show(piece: str) -> None:
            pieces.append(piece)
            print(without_controls(piece), end="", flush=True)

        work: Future[Message] | None = None

        loop = self._loop.result()

        def stop(number: int) -> None:
            # In the loop's thread: `work.result()` misses a cancellation by its own thread that
            # comes just before it waits.
            if work is not None:
                loop.call_soon_threadsafe(work.cancel)

        # Signals are collected before the work starts, so that an early Ctrl-C is not lost.
        with collect_signals(signal.SIGINT, on_first=stop) as received:
            coroutine = self._answer(history, show)
            work = asyncio.run_coroutine_threadsafe(coroutine, loop)
            if received:
                work.cancel()
            try:
                answer: Message | None = work.result()
            except CancelledError:
                text = "".join(pieces)
                answer = Message("assistant", text) if text else None
                print(" [ended]", end="")
            finally:
                print(flush=True)

        return answer

    def _run(self) -> None:
        try:
            run_coroutine(self._open())
        except BaseException as error:  # noqa: BLE001 (`__enter__` raises it)
            if not self._loop.done():
                self._loop.set_exception(error)

    async def _open(self) -> None:
        """Loads the model, and keeps it until the end of the conversation."""
        config = without_play(self._contestant.config)
        with run_folder(config, None) as opened_config:
            async with local_parts(self._contestant, opened_config, self._note) as parts:
                await parts.engine.begin(0, deadline_s=opened_config.engine.timeout_s)
                self._parts = parts
                self._conversation = parts.sampler.policy(f"{LABEL}#0", 1.0).conversation
                self._loop.set_result(asyncio.get_running_loop())
                await self._ended.wait()

    async def _answer(self, history: Sequence[Message], show: Callable[[str], None]) -> Message:
        stops = self._contestant.config.sampling.stop
        stream = self._parts.chat.text_stream(stops)

        def on_tokens(_: int, ids: Sequence[int], logprobs: Sequence[float]) -> None:
            show(stream.add(ids))

        (turn,) = await self._conversation.complete(
            history,
            overrides=SamplingOverrides(**self._overrides.given() | {"seed": secrets.randbits(63)}),
            listen=on_tokens,
        )
        show(stream.finish())
        message: Message = turn.messages[-1]
        return message


def _typed_lines() -> Iterator[str]:
    """Lines that a user types at a prompt, until Ctrl-D."""
    with suppress(ImportError):
        import readline  # noqa: F401 (input() edits lines with it)

    while True:
        try:
            line = _type_line()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends the chat)")
            continue

        if line.strip():
            yield line


def _type_line() -> str:
    """Reads a line at the prompt. Raises KeyboardInterrupt at Ctrl-C, EOFError at Ctrl-D."""
    old_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    # readline waits for a key, and does not see a signal that arrived just before the wait. An
    # alarm interrupts that wait, and Python then handles the pending signal.
    old_alarm_handler = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, SIGNAL_INTERVAL_S, SIGNAL_INTERVAL_S)
    try:
        return input(PROMPT)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_alarm_handler)
        signal.signal(signal.SIGINT, old_handler)


def _piped_lines() -> Iterator[str]:
    """Lines of standard input that are not empty. Raises ConfigError for bytes that are not
    text."""
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input, line {number}: not UTF-8: {error}") from error
        if text.strip():
            yield text
