"""A local model in place of a server: a judge or a teacher on the same kind of engine that samples
policies. It has its own event loop and thread, so that no attempt waits for it.

Its requests and answers are those of OpenAI's chat completions, or of token_scores.py, so price
log, budget, cache, deadlines and the order of models work as for any remote model. The model is
loaded at the first question. The same question has the same answer in any batch
(inference/embedded/torch_engine.py). Without a temperature the answer is greedy. Tool calls are not
supported.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from agentevo.config.remote_models import RemoteModelSection
from agentevo.data.messages import messages_of
from agentevo.errors import AgentEvoError, describe_error
from agentevo.inference.conversations.conversation import Conversation
from agentevo.inference.remote_models.http import Unanswered
from agentevo.inference.remote_models.token_scores import check_scores
from agentevo.inference.remote_models.wire import Listen, RemoteReply, Usage
from agentevo.models.chat.answer_form import AnswerForm
from agentevo.models.files.resolve import resolve
from agentevo.models.tool_calls import ContentDelta
from agentevo.runtime.event_loop import in_thread
from agentevo.types import Message, SamplingOverrides

if TYPE_CHECKING:
    from agentevo.inference.remote_models.local_engine import LocalEngine

CLOSE_S = 10.0
_WEIGHTS = (".safetensors", ".bin", ".gguf")


class EngineServer:
    """See the module: the interface of a remote model's `Server`. Any thread may use it."""

    def __init__(self, name: str, section: RemoteModelSection) -> None:
        """Raises ModelError or UnknownNameError if the name is not the name of a model. Loads
        nothing."""
        self._name = name
        self._section = section
        self.url = f"engine:{_identity(section.model)}"
        """The part of the cache's keys that identifies the server: the model and the settings that
        affect its results."""
        self.url += f"#{section.dtype}"
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Task[LocalEngine] | None = None

    def pause_requests(self, seconds: float) -> None:
        """Does nothing, because an engine queues its requests."""

    def post(
        self,
        body: bytes,
        within_s: float,
        listen: Listen | None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[RemoteReply, int]:
        """See ModelServer.post. A `listen` receives the answer when it is complete."""
        request = msgspec.json.decode(body)
        future = asyncio.run_coroutine_threadsafe(
            self._answer(request, within_s), self._running_loop()
        )
        try:
            reply = future.result(within_s)
        except (TimeoutError, concurrent.futures.TimeoutError) as error:
            future.cancel()
            raise self._failure(f"has not answered within {within_s:g} s (timeout_s)") from error
        except concurrent.futures.CancelledError as error:
            raise self._failure("was closed") from error
        except Unanswered:
            raise
        except AgentEvoError as error:
            status = 400 if "response_format" in request else 0  # a retry leaves the form out
            raise self._failure(f"gave no answer: {error}", status) from error
        except Exception as error:
            raise self._failure(f"failed: {describe_error(error)}") from error

        if listen is not None:
            listen(ContentDelta(reply.text))

        return reply, 200

    def close(self) -> None:
        """Ends the engine, and frees its memory."""
        with self._lock:
            loop = self._loop
            self._loop = None

        if loop is None:
            return

        with suppress(Exception):  # no caller waits for the answer now
            asyncio.run_coroutine_threadsafe(self._end(), loop).result(CLOSE_S)

        loop.call_soon_threadsafe(loop.stop)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._loop.run_forever, name=f"agentevo-{self._name}", daemon=True
                ).start()
            return self._loop

    async def _load(self) -> LocalEngine:
        """The loaded model. After a failure, the next question tries again."""
        from agentevo.inference.remote_models.local_engine import load

        if self._loaded is None:
            self._loaded = asyncio.ensure_future(in_thread(load, self._section))

        try:
            return await asyncio.shield(self._loaded)
        except Exception:
            self._loaded = None
            raise

    async def _answer(self, body: Mapping[str, Any], within_s: float) -> RemoteReply:
        if "prompt" in body:
            return await self._score(body, within_s)
        if body.get("tools"):
            raise self._failure(
                "is computed in this process, and calls no tools: leave the tools out"
            )

        until = time.monotonic() + within_s
        loaded = await self._load()
        conversation = Conversation(
            loaded.engine,
            loaded.chat,
            loaded.sampling,
            name=secrets.token_hex(8),
            seed=0,
            context_length=loaded.context_length,
            timeout_s=max(0.01, until - time.monotonic()),
        )
        form = body.get("response_format")
        try:
            (turn,) = await conversation.complete(
                messages_of(body["messages"]),
                overrides=_overrides(body),
                form=None if form is None else _form(form),
            )
        finally:
            await conversation.close()

        thought, text = _split_thought(turn.messages[-1].text, conversation.opening(turn))
        return RemoteReply(
            message=Message("assistant", text, reasoning=thought or None),
            finish_reason=turn.finish_reason,
            usage=Usage(
                prompt_tokens=len(turn.prompt_ids), completion_tokens=len(turn.completion_ids)
            ),
        )

    async def _score(self, body: Mapping[str, Any], within_s: float) -> RemoteReply:
        """The log-probs of the prompt's tokens after its first `num_context`. The others are
        nobody's question, so they are 0."""
        until = time.monotonic() + within_s
        loaded = await self._load()
        prompt_ids = body["prompt"]
        num_context = body["num_context"]
        scores = await loaded.engine.score(
            prompt_ids[:num_context],
            prompt_ids[num_context:],
            deadline_s=max(0.01, until - time.monotonic()),
        )
        return RemoteReply(
            message=Message("assistant", ""),
            finish_reason="stop",
            usage=Usage(prompt_tokens=len(prompt_ids), completion_tokens=0),
            logprobs=[0.0] * (num_context - 1) + check_scores(scores.logprobs),
        )

    async def _end(self) -> None:
        if self._loaded is None:
            return
        with suppress(AgentEvoError):
            await (await self._loaded).engine.close()
        self._loaded = None

    def _failure(self, what: str, status: int = 0) -> Unanswered:
        return Unanswered(
            f"remote model {self._name} (engine) {what}", status=status, is_retryable=False
        )


def _overrides(body: Mapping[str, Any]) -> SamplingOverrides:
    """The sampling settings of the request."""
    return SamplingOverrides(
        temperature=body.get("temperature"),
        top_p=body.get("top_p"),
        top_k=body.get("top_k"),
        min_p=body.get("min_p"),
        max_new_tokens=body.get("max_tokens") or body.get("max_completion_tokens"),
        stop_strings=tuple(body["stop"]) if body.get("stop") else None,
        seed=body.get("seed"),
    )


def _form(form: Mapping[str, Any]) -> AnswerForm:
    schema = form.get("json_schema", {}).get("schema", {"type": "object"})
    return AnswerForm(schema=schema)


def _split_thought(text: str, opening: str) -> tuple[str, str]:
    """Splits an answer into the thought at its beginning, and the text after it."""
    head, mark, rest = text.partition("</think>")
    if not mark or not (head.lstrip().startswith("<think>") or "<think>" in opening):
        return "", text
    return head.replace("<think>", "", 1).strip(), rest.lstrip()


def _identity(name: str) -> str:
    """A model's name, or its folder and the time when its weights were written. So a run that was
    trained further counts as another model."""
    source = resolve(name)
    if not isinstance(source, Path):
        return str(source)
    newest = max(
        (path.stat().st_mtime_ns for path in source.iterdir() if path.suffix in _WEIGHTS), default=0
    )
    return f"{os.path.abspath(source)}@{newest}"
