"""A process that holds a checkpoint of a run so that a user can chat with it.

    python -m agentevo.runs.evaluation.player RUN last|best|start|STEP [OVERRIDE]...

The process receives requests on standard input and answers on standard output (`player_words.py`).
Output of the recipe's own code goes to standard error. It ends when its standard input ends, so it
also ends if its client crashes. It writes nothing into the run, and downloads nothing.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil

from agentevo.errors import AgentEvoError, ConfigError, describe_error
from agentevo.inference.conversations.conversation import Conversation
from agentevo.models.files.resolve import missing_model
from agentevo.observability.attempt_tokens import TokenBlock, Training, block_of
from agentevo.runs.evaluation import player_words as words
from agentevo.runs.evaluation.chat import without_play
from agentevo.runs.evaluation.contestants import Contestant, find_contestants
from agentevo.runs.evaluation.play import local_parts, run_folder
from agentevo.runs.folder.run_folder import run_config
from agentevo.runtime.console import to_stderr
from agentevo.runtime.credentials import without_passwords
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import SamplingOverrides, Turn

LABEL = "try"
HEARTBEAT_S = 2.0
END_TIMEOUT_S = 5.0
"""The time in seconds that the process has to end after its client is gone."""
SEND_INTERVAL_S = 0.08
"""The interval in seconds at which new text of a reply is sent."""
MAX_CONVERSATIONS = 8
MAX_AT_ONCE = 4
"""The maximum number of concurrent requests. Further requests are refused."""
MAX_LINE = 4 * 2**20
"""The maximum size of a request, in bytes."""
MAX_SHOWN_TOKENS = 4_096
"""The maximum number of tokens of a reply that are shown one by one."""


class EventWriter:
    """Writes events, from any thread."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._encode = msgspec.json.Encoder().encode

    def __call__(self, event: words.Event) -> None:
        line = self._encode(event) + b"\n"
        with self._lock, suppress(OSError, ValueError):  # no reader is left, so the input ends too
            self._out.write(line)
            self._out.flush()


def main(argv: Sequence[str]) -> int:
    """Runs the player until its client is gone."""
    input_pipe, teller = _own_pipes()
    inbox = _Inbox(input_pipe)
    threading.Thread(target=_send_heartbeats, args=(teller,), daemon=True, name="beat").start()

    try:
        run_coroutine(_serve(Path(argv[0]), argv[1], argv[2:], inbox, teller))
    except AgentEvoError as error:
        teller(words.Broken(_clean_text(str(error))))
        return 1
    except Exception as error:
        teller(words.Broken(_clean_text(describe_error(error))))
        raise

    return 0


def _own_pipes() -> tuple[IO[bytes], EventWriter]:
    """The two pipes under new file descriptors, so that the recipe's code can't print to them or
    read from them."""
    input_pipe = os.fdopen(os.dup(0), "rb")
    output_pipe = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return input_pipe, EventWriter(output_pipe)


class _Inbox:
    """The requests. A thread reads them, and `take` returns them on the event loop."""

    def __init__(self, input_pipe: IO[bytes]) -> None:
        self._pipe = input_pipe
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._buffered: list[bytes | None] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True, name="inbox").start()

    def _read(self) -> None:
        while line := self._pipe.readline(MAX_LINE):
            self._put(line)
        self._put(None)
        time.sleep(END_TIMEOUT_S)
        os._exit(0)  # the loop is loading a model, or a recipe's code does not return

    def _put(self, line: bytes | None) -> None:
        with self._lock:
            if self._loop is None:
                self._buffered.append(line)
                return
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, line)

    def open(self) -> None:
        """Delivers lines to the running event loop from now on."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
            for line in self._buffered:
                self._queue.put_nowait(line)

    async def take(self) -> bytes | None:
        """The next line; None when the client is gone."""
        return await self._queue.get()


def _send_heartbeats(teller: EventWriter) -> None:
    process = psutil.Process()
    while True:
        teller(words.Beat(process.memory_info().rss))
        time.sleep(HEARTBEAT_S)


def _clean_text(text: str) -> str:
    return without_passwords(text)[: words.MAX_TEXT]


def find_player(run: Path, which: str, overrides: Sequence[str]) -> Contestant:
    """The model to try. Raises ConfigError for a missing checkpoint, and for a base model that is
    not on this machine."""
    settings = ["engine.type=torch", "engine.options={}", *overrides]
    if which == words.START:
        config = run_config(run, settings)
        contestant = Contestant(which, config)
    else:
        (contestant,) = find_contestants(f"{run}@{which}", (), settings, ())

    checkpoint = contestant.checkpoint
    if checkpoint is None or (checkpoint / "adapter_config.json").is_file():
        missing = missing_model(contestant.config.model.name)
        if missing:
            raise ConfigError(missing)

    return contestant


async def _serve(
    run: Path, which: str, overrides: Sequence[str], inbox: _Inbox, teller: EventWriter
) -> None:
    started_at = time.monotonic()
    teller(words.Loading("reading the run's recipe"))
    contestant = find_player(run, which, overrides)
    config = without_play(contestant.config)
    teller(words.Loading(f"loading {contestant.checkpoint or contestant.config.model.name}"))

    with run_folder(config, None) as opened_config:
        async with local_parts(contestant, opened_config, to_stderr) as parts:
            model = parts.model
            step = _step(contestant.checkpoint)
            await parts.engine.begin(step, deadline_s=opened_config.engine.timeout_s)
            size = sum(parameter.numel() for parameter in model.parameters())
            teller(words.Ready(time.monotonic() - started_at, size, str(model.device)))
            inbox.open()
            await CheckpointPlayer(parts, teller).run(inbox)


def _step(checkpoint: Path | None) -> int:
    """The version of the player's tokens: the checkpoint's step, else 0."""
    if checkpoint is None or not (checkpoint / "checkpoint.json").is_file():
        return 0
    from agentevo.models.checkpoint_manifest import read

    return read(checkpoint).step


class CheckpointPlayer:
    """Handles the requests. `parts`: orchestration.components.Components."""

    def __init__(self, parts: Any, send: Callable[[words.Event], None]) -> None:
        self._parts = parts
        self._send = send
        self._running: dict[str, asyncio.Task[None]] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        """The ids of the running requests. Requests that are cancelled and no longer counted."""
        self._conversations: OrderedDict[str, Conversation] = OrderedDict()
        self._read = msgspec.json.Decoder(words.Request).decode

    async def run(self, inbox: _Inbox) -> None:
        """Runs until the client is gone."""
        try:
            while (line := await inbox.take()) is not None:
                self.take_line(line)
        finally:
            unfinished = [*self._running.values(), *self._stopping]
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    def take_line(self, line: bytes) -> None:
        """Starts a request, or refuses it."""
        try:
            request = self._read(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._send(words.FailedChat("", f"the request is not valid: {error}"))
            return

        if isinstance(request, words.Stop):
            if (stopped := self._running.pop(request.id, None)) is not None:
                stopped.cancel()
                self._stopping.add(stopped)
                stopped.add_done_callback(self._stopping.discard)
            return

        if request.id in self._running or len(self._running) >= MAX_AT_ONCE:
            self._send(
                words.FailedChat(
                    request.id, "the player is busy: stop its current request, or wait"
                )
            )
            self._send(words.Done(request.id))
            return

        task = asyncio.ensure_future(self._follow(request))
        self._running[request.id] = task
        task.add_done_callback(partial(self._end, request.id))

    def _end(self, name: str, task: asyncio.Task[None]) -> None:
        """Sends the end of every started request. A request that is cancelled before its first step
        runs none of its own lines, so it can't send its end itself."""
        if self._running.get(name) is task:
            del self._running[name]
        if task.cancelled():
            self._send(words.FailedChat(name, "stopped"))
        self._send(words.Done(name))

    async def _follow(self, request: words.Chat) -> None:
        """Handles a request, and turns any error into the request's answer."""
        try:
            await self._chat(request)
        except AgentEvoError as error:
            self._send(words.FailedChat(request.id, _clean_text(str(error))))
        except Exception as error:  # noqa: BLE001 (a recipe's own code, too)
            self._send(words.FailedChat(request.id, _clean_text(describe_error(error))))

    async def _chat(self, request: words.Chat) -> None:
        started_at = time.monotonic()
        conversation = await self._conversation(request.conversation)
        drawn: list[int] = []
        telling = asyncio.ensure_future(self._send_text(request.id, drawn))
        overrides = SamplingOverrides(
            temperature=request.temperature,
            max_new_tokens=request.max_new_tokens,
            seed=secrets.randbits(63),
        )
        try:
            (turn,) = await conversation.complete(
                request.messages,
                overrides=overrides,
                listen=lambda number, ids, logprobs: drawn.extend(ids),
            )
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

        self._send(
            words.Replied(
                id=request.id,
                text=turn.messages[-1].text,
                tokens=self._tokens_of(turn),
                num_tokens=len(turn.completion_ids),
                num_prompt=len(conversation.prompt_ids(turn.index)),
                seconds=time.monotonic() - started_at,
                finish=turn.finish_reason,
            )
        )

    async def _conversation(self, name: str) -> Conversation:
        if name not in self._conversations:
            policy = self._parts.sampler.policy(f"{LABEL}/{name}#0", 1.0)
            self._conversations[name] = policy.conversation
            while len(self._conversations) > MAX_CONVERSATIONS:
                _, oldest = self._conversations.popitem(last=False)
                await oldest.close()

        self._conversations.move_to_end(name)
        return self._conversations[name]

    async def _send_text(self, name: str, drawn: list[int]) -> None:
        sent_text = ""
        while True:
            await asyncio.sleep(SEND_INTERVAL_S)
            # The last characters of an incomplete text may change with the next token.
            text = self._parts.chat.text(drawn).rstrip("�") if drawn else ""
            if len(text) > len(sent_text) and text.startswith(sent_text):
                self._send(words.Text(name, text[len(sent_text) :]))
                sent_text = text

    def _tokens_of(self, turn: Turn) -> TokenBlock:
        """The tokens of a turn, as pages show them."""
        tokenizer = self._parts.tokenizer
        size = min(len(turn.completion_ids), MAX_SHOWN_TOKENS)
        return block_of(
            turn,
            0,
            size,
            turn.parent,
            False,
            lambda ids: str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)),
            Training(None, None, None),
        )


if __name__ == "__main__":
    # The process may not access the hub, unless the environment already says otherwise.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(sys.argv[1:]))
