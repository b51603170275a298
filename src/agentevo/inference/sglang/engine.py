"""An SGLang server as an engine. Either this process starts the server, or the recipe gives its
URL.

    verify -> write the whole model -> pause, requests put back -> load -> drop cached keys and
    values -> resume

Invariants: a token's version is the label under which SGLang sampled it. A label that this engine
did not set (another run's weights, or a restarted server) is an error. No token is sampled over
keys and values of other weights. A failed load can leave a mixture of old and new weights. The
previous version is then loaded again. If that fails too, every request fails with EngineError until
a complete version is loaded. A request whose answer is lost is not sent again here; its caller
sends it again.

Not promised: the same numbers with other requests in a step, penalties, grammars and scores.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from agentevo.config import EngineSection
from agentevo.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    GrammarError,
    RequestTooLongError,
)
from agentevo.inference.engine import (
    NO_VERSION,
    InFlight,
    TokenListener,
    Weights,
    check_prompt,
    check_request,
    refuse_images,
    why_text_only,
)
from agentevo.inference.serving.guarded_server import GuardedServer
from agentevo.inference.sglang.options import check_keys, read_options
from agentevo.inference.sglang.requests import SglangRequests
from agentevo.inference.sglang.weights import check_writable, write_version
from agentevo.inference.sglang.wire import (
    ServerFacts,
    SglangClient,
    launch_arguments,
    launch_config,
    why_unsupported,
)
from agentevo.inference.weights.weight_checks import PublishingEngine, check_publish
from agentevo.models.compute.parameters import trained_weights
from agentevo.models.token_rows import banned_tokens
from agentevo.runtime.event_loop import in_thread, run_to_end
from agentevo.types import Completion, SamplingParams
from agentevo.types.images import PromptImage

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LOAD_S = 1200.0
"""The time limit for a server to read a version from the disk, in seconds."""
POLL_INTERVAL_S = 0.2


class SglangEngine(PublishingEngine):
    """See the module. `model` has the names and shapes of the weights, and those that are not
    trained. Raises ConfigError for unsupported options. Belongs to one event loop."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        section: EngineSection,
    ) -> None:
        super().__init__(model)
        options = read_options(section)
        keys = check_keys(options)
        check_writable(model)
        if banned_tokens(model):
            raise ConfigError(
                "engine.type=sglang can't leave out the tokens that stand for images, so its "
                "log-probs would not be those of training: set model.vision.images=false, or "
                "engine.type=torch"
            )

        self._options = options
        self._why_text_only = why_text_only(section)
        self._tokenizer = tokenizer
        self._vocabulary = int(model.config.get_text_config().vocab_size)
        self._scratch = Path(tempfile.mkdtemp(prefix="agentevo-sglang-"))
        self._mark = secrets.token_hex(4)
        self._folder = (options.weights_folder or self._scratch) / f"weights-{self._mark}"
        self._numbers = itertools.count()
        self._versions: dict[str, int] = {}
        """Label -> version."""
        self._label = ""
        self._version = NO_VERSION
        self._good_folder: Path | None = None
        """The folder of the weights that the server computes with; None if unknown."""
        self._failure: EngineError | None = None
        self._facts: ServerFacts | None = None
        self._server: GuardedServer | None = None

        if options.url is None:
            self._client = self._start(section)
        else:
            self._client = SglangClient(options.url, keys[0], keys[1], options.ca_file)

        self._changing = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()

        self._draws: set[asyncio.Task[Completion]] = set()
        self._requests = SglangRequests(
            self._client,
            self._mark,
            self._vocabulary,
            options.seeded,
            self._versions,
            self._check_whole,
        )
        self._asleep_since: float | None = None
        self._slept_s = 0.0

    def _start(self, section: EngineSection) -> SglangClient:
        self._good_folder = write_version(self._like, self._tokenizer, {}, self._folder / "base")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]

        key = secrets.token_hex(32)
        config = self._scratch / "server.yaml"
        config.write_text(launch_config(key), encoding="utf-8")
        arguments = launch_arguments(
            self._good_folder,
            "127.0.0.1",
            port,
            {
                "seeded": self._options.seeded,
                "max_running": section.max_running,
                "kv_cache_tokens": section.kv_cache_tokens,
                "dtype": str(self._like.dtype).removeprefix("torch."),
            },
        )
        program = self._options.command or [sys.executable, "-m", "sglang.launch_server"]
        self._server = GuardedServer(
            [*program, *arguments, "--config", str(config), *self._options.args],
            self._options.log_file or self._scratch / "server.log",
        )

        return SglangClient(f"http://127.0.0.1:{port}", key, None, None)

    @property
    def version(self) -> int:
        return self._version

    @property
    def asleep(self) -> bool:
        return self._asleep_since is not None

    @property
    def slept_s(self) -> float:
        """See SleepingEngine."""
        since = self._asleep_since
        return self._slept_s + (0.0 if since is None else time.monotonic() - since)

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        session: str | None = None,
        deadline_s: float,
        listen: TokenListener | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        """See Engine.generate. `session` has no effect, because SGLang finds prefixes by itself."""
        check_request(sampling, deadline_s)
        check_prompt(prompt_ids, sampling, self._vocabulary)
        refuse_images(images, self._why_text_only)
        if sampling.grammar:
            raise GrammarError(
                "engine.type=sglang does not support AgentEvo's grammars: use engine.type=torch"
            )

        facts = self._known()
        reason = why_unsupported(sampling, facts, self._options.seeded)
        if reason:
            raise EngineError(f"engine.type=sglang: {reason}")

        num_tokens = len(prompt_ids) + sampling.max_new_tokens
        if num_tokens > facts.longest or len(prompt_ids) > facts.longest_prompt:
            raise RequestTooLongError(
                f"{len(prompt_ids)} prompt and {sampling.max_new_tokens} new tokens, SGLang takes "
                f"{facts.longest} together: shorten the prompt or lower max_new_tokens"
            )

        self._check_whole()

        async def work() -> Completion:
            await self._open.wait()
            return await self._requests.draw(prompt_ids, sampling, facts, deadline_s, listen)

        draw = asyncio.ensure_future(work())
        self._draws.add(draw)
        try:
            return await self._awake_within(draw, deadline_s)
        finally:
            self._draws.discard(draw)

    async def _awake_within(self, draw: asyncio.Task[Completion], deadline_s: float) -> Completion:
        """The task's result. Raises DeadlineExceededError after `deadline_s` seconds, not counting
        sleep."""
        started_at = time.monotonic()
        slept = self.slept_s
        try:
            while not draw.done():
                remaining_s = deadline_s - (time.monotonic() - started_at) + (self.slept_s - slept)
                if remaining_s <= 0:
                    raise DeadlineExceededError(f"SGLang did not answer within {deadline_s:g} s")
                await asyncio.wait({draw}, timeout=remaining_s)

            if draw.cancelled():
                self._check_whole()
                raise EngineError("the engine is closed: make another one")

            return draw.result()
        finally:
            draw.cancel()

    async def release(self, session: str) -> None:
        """See Engine.release. Does nothing: SGLang stores nothing by session."""

    async def begin(
        self, version: int, weights: Weights | None = None, *, deadline_s: float = 60.0
    ) -> None:
        """See UpdatableEngine.begin. Waits until a starting server is ready."""
        async with self._changing:
            await self._connect()
            label = self._new_label(version)
            if weights is None:
                self._check_whole()
                await self._client.pause()
                await self._client.flush()
                await self._client.relabel(label)

                if not self.asleep:
                    await self._client.resume()

                self._label = label
                self._version = version
                return

            verified = await in_thread(self.verify, weights)
            await self._swap(version, label, verified)

    async def publish(
        self,
        version: int,
        weights: Weights | None = None,
        *,
        in_flight: InFlight = "finish",
        deadline_s: float = 60.0,
    ) -> None:
        """See UpdatableEngine.publish. The deadline applies to requests that have to end. Reading
        the weights has its own limit."""
        if weights is None:
            weights = trained_weights(self._like)

        verified = await self._verify_in_thread(weights)
        with self._counting_publish():
            async with self._changing:
                check_publish(version, self._version, verified, self._like)
                self._check_alive()
                until = time.monotonic() + deadline_s if in_flight == "finish" else None
                await self._swap(version, self._new_label(version), verified, until)

    async def _swap(
        self, version: int, label: str, weights: Weights, until: float | None = None
    ) -> None:
        """Writes and loads the weights. `until`: running requests may end first, until this time of
        the loop's clock."""
        folder = self._folder / label
        try:
            await in_thread(write_version, self._like, self._tokenizer, weights, folder)
            async with self._without_requests(until):
                # Never cancelled: after half of it, the server would wait forever.
                await run_to_end(self._replace(version, label, folder))
        finally:
            if self._good_folder != folder:
                await in_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _replace(self, version: int, label: str, folder: Path) -> None:
        started_at = time.monotonic()
        try:
            await self._load(folder, label)
        except EngineError as error:
            await self._restore(error)
            raise
        finally:
            self._swap_s += time.monotonic() - started_at

        before = self._good_folder
        self._good_folder = folder
        self._label = label
        self._version = version
        self._failure = None

        if before is not None:
            await in_thread(shutil.rmtree, before, ignore_errors=True)

    async def _load(self, folder: Path, label: str) -> None:
        """Loads a version into the server and drops all cached keys and values of other
        versions."""
        await self._client.pause()
        await self._client.load(folder, label, LOAD_S)
        await self._client.flush()
        if not self.asleep:
            await self._client.resume()

    async def _restore(self, error: EngineError) -> None:
        """Loads the previous version again after a failed load. If that fails too, the engine
        serves nothing."""
        restore_error: EngineError | None = None
        if self._good_folder is not None:
            try:
                await self._load(self._good_folder, self._label)
                return
            except EngineError as failure:
                restore_error = failure

        self._failure = EngineError(
            f"SGLang holds incomplete weights: {error}; the previous version could not be loaded "
            f"again ({restore_error or 'it is unknown'}): SGLang serves again after it has loaded "
            "a whole version"
        )
        for draw in self._draws:
            draw.cancel()

    @asynccontextmanager
    async def _without_requests(self, until: float | None) -> AsyncIterator[None]:
        """With `until`, new requests wait while the block runs, and the block begins when no
        request is running. Raises DeadlineExceededError."""
        try:
            if until is not None and not self.asleep:
                self._open.clear()
                while self._requests.running:
                    if time.monotonic() > until:
                        raise DeadlineExceededError(
                            f"{len(self._requests.running)} requests did not end in time: they "
                            "continue as before"
                        )
                    await asyncio.sleep(0.005)

            yield
        finally:
            self._open.set()

    def _new_label(self, version: int) -> str:
        label = f"{self._mark}.{next(self._numbers)}"
        self._versions[label] = version
        return label

    async def _connect(self) -> None:
        """Waits until the server is ready; later calls return immediately. Raises EngineError."""
        if self._facts is not None:
            return

        until = time.monotonic() + self._options.start_timeout_s
        while not await self._client.ready():
            self._check_alive()
            if time.monotonic() > until:
                raise EngineError(
                    f"SGLang at {self._client.url} was not ready within "
                    f"{self._options.start_timeout_s:g} s: see its log, or raise "
                    "engine.options.start_timeout_s"
                )

            await asyncio.sleep(POLL_INTERVAL_S)

        facts = await self._client.facts()
        if self._options.seeded and not facts.seeded:
            raise EngineError(
                f"SGLang at {self._client.url} ignores seeds: start it with "
                "--enable-deterministic-inference, or set engine.options.seeded=false"
            )

        self._facts = facts

    def _known(self) -> ServerFacts:
        if self._facts is None:
            raise EngineError("the engine has no weights yet: call `begin` first")
        return self._facts

    async def forget_cache(self) -> None:
        """See UpdatableEngine.forget_cache."""
        async with self._changing:
            await self._client.pause()
            try:
                await self._client.flush()
            finally:
                if not self.asleep:
                    await self._client.resume()

    async def sleep(self, *, in_flight: InFlight = "finish", deadline_s: float = 60.0) -> None:
        """See SleepingEngine.sleep. The weights stay in memory, so that new ones can be
        published."""
        if not self._known().can_sleep:
            raise EngineError(
                "SGLang can't release its memory: start it with --enable-memory-saver"
            )

        async with self._changing:
            if self.asleep:
                return

            until = time.monotonic() + deadline_s if in_flight == "finish" else None
            async with self._without_requests(until):
                await self._client.pause()
                try:
                    await self._client.release_memory()
                except BaseException:
                    await self._client.resume()
                    raise
                self._asleep_since = time.monotonic()

    async def wake(self) -> None:
        """See SleepingEngine.wake."""
        async with self._changing:
            if self._asleep_since is None:
                return
            await self._client.resume_memory()
            await self._client.flush()
            await self._client.resume()
            self._slept_s = self.slept_s
            self._asleep_since = None

    def check(self) -> None:
        """See UpdatableEngine.check."""
        self._check_alive()
        self._check_whole()

    def _check_alive(self) -> None:
        end_text = self._server.describe_end() if self._server is not None else ""
        if end_text:
            raise EngineError(f"SGLang has ended: {end_text}")

    def _check_whole(self) -> None:
        if self._failure is not None:
            raise EngineError(str(self._failure))

    async def close(self) -> None:
        """See UpdatableEngine.close."""
        for draw in list(self._draws):
            draw.cancel()

        await asyncio.gather(*self._draws, return_exceptions=True)
        await self._requests.close()
        await self._client.close()

        if self._server is not None:
            await in_thread(self._server.close)

        for folder in (self._folder, self._scratch):
            await in_thread(shutil.rmtree, folder, ignore_errors=True)

    def stats(self) -> dict[str, float]:
        """See Engine.stats."""
        return {
            "engine/generated_tokens": float(self._requests.generated),
            "engine/prompt_tokens": float(self._requests.prompt_tokens),
            "engine/running": float(len(self._requests.running)),
            "engine/waiting": 0.0,
            "engine/kv_capacity_tokens": float(self._facts.capacity if self._facts else 0),
            **self._publish_stats(),
            "engine/asleep_s": self.slept_s,
        }
