"""The running requests at an SGLang server.

Invariant: a request whose answer ends early for any reason is aborted at the server by its id. It
counts as running until the abort was answered.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from agentevo.errors import EngineError
from agentevo.inference.engine import TokenListener
from agentevo.inference.sglang.wire import (
    ServerFacts,
    SglangClient,
    SglangTokens,
    generate_body,
    read_answer,
)
from agentevo.inference.token_listeners import tell
from agentevo.types import Completion, FinishReason, SamplingParams

CLOSE_S = 10.0


class SglangRequests:
    """The requests. See the module. `versions`: label of weights -> version, for the labels that
    the run has set; `check_whole` raises EngineError when the server holds no whole weights."""

    def __init__(
        self,
        client: SglangClient,
        mark: str,
        vocabulary: int,
        seeded: bool,
        versions: dict[str, int],
        check_whole: Callable[[], None],
    ) -> None:
        self._client = client
        self._mark = mark
        self._vocabulary = vocabulary
        self._seeded = seeded
        self._versions = versions
        self._check_whole = check_whole
        self._numbers = itertools.count()
        self._aborts: set[asyncio.Task[None]] = set()
        self.running: set[str] = set()
        self.generated = self.prompt_tokens = 0

    async def close(self) -> None:
        """Returns when all abandoned requests are aborted."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=CLOSE_S)

    async def draw(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        facts: ServerFacts,
        deadline_s: float,
        listen: TokenListener | None,
    ) -> Completion:
        """Runs a request, as several requests of SGLang if an end-of-text token ends one early. A
        seed's samples depend on the position, so several requests sample the same tokens as one."""
        drawn = Completion(ids=[], logprobs=[], versions=[], finish_reason="length")
        deadline = asyncio.get_running_loop().time() + deadline_s
        reason: FinishReason | None = None
        while reason is None:
            rid = f"{self._mark}-{next(self._numbers)}"
            body = generate_body(
                rid,
                prompt + drawn.ids,
                sampling,
                facts,
                vocabulary=self._vocabulary,
                max_new_tokens=sampling.max_new_tokens - len(drawn.ids),
                seeded=self._seeded,
                stream=listen is not None,
            )
            self.running.add(rid)

            is_answered = False
            try:
                last = await self._part(body, sampling, facts, deadline, drawn, listen)
                is_answered = True
            finally:
                if is_answered:
                    self.running.discard(rid)
                else:
                    self._abort(rid)

            reason = self._reason(last, sampling, drawn)

        self.generated += len(drawn.ids)
        self.prompt_tokens += len(prompt)
        return msgspec.structs.replace(drawn, finish_reason=reason)

    async def _part(
        self,
        body: dict[str, Any],
        sampling: SamplingParams,
        facts: ServerFacts,
        deadline: float,
        drawn: Completion,
        listen: TokenListener | None,
    ) -> SglangTokens:
        """Runs one request of SGLang and adds its tokens to `drawn`. Returns the last piece of its
        answer."""
        before = len(drawn.ids)
        last = None
        async for answer in self._client.answers(body, deadline):
            num_known = 0 if facts.incremental or not body["stream"] else len(drawn.ids) - before
            last = read_answer(answer, sampling, facts, self._vocabulary, done=num_known)
            drawn.ids.extend(last.ids)
            drawn.logprobs.extend(last.logprobs)
            drawn.top_logprobs.extend(last.top)
            if listen is not None and last.ids:
                tell(listen, last.ids, last.logprobs)

        if last is None or last.finish is None:
            raise EngineError("SGLang's answer is incomplete: is the server shutting down?")

        if last.finish["type"] == "abort":
            self._check_whole()
            raise EngineError(f"SGLang has ended the request: {last.finish.get('message')}")

        unknown = set(last.labels) - set(self._versions)
        if unknown or len(last.labels) != len(drawn.ids) - before:
            raise EngineError(
                f"SGLang sampled tokens with weights {sorted(unknown)[:3]}, which this run has "
                "not loaded: the server was restarted, or another client replaces its weights"
            )

        drawn.versions.extend(self._versions[label] for label in last.labels)
        return last

    def _reason(
        self, last: SglangTokens, sampling: SamplingParams, drawn: Completion
    ) -> FinishReason | None:
        """Why the request ends, or None if it continues."""
        is_full = len(drawn.ids) >= sampling.max_new_tokens
        finish = last.finish or {}
        if finish["type"] == "stop":
            matched = finish.get("matched")
            if isinstance(matched, str) or matched in sampling.stop_token_ids:
                return "stop"
            return "length" if is_full else None

        if not is_full:
            raise EngineError(
                f"SGLang has ended a request after {len(drawn.ids)} of {sampling.max_new_tokens} "
                "tokens: it was started with a lower limit"
            )

        return "length"

    def _abort(self, rid: str) -> None:
        """Aborts the request in the background. It counts as running until the abort is done."""

        async def abort() -> None:
            try:
                with suppress(EngineError):  # the server has ended, and so has the request
                    await self._client.abort(rid)
            finally:
                self.running.discard(rid)

        task = asyncio.ensure_future(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
