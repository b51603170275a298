"""vLLM as an engine. Only the modules of this package know vLLM's names.

vLLM runs in separate processes, which this process starts and ends. None of them listens on a
network. vLLM starts with the model's weights from files in a temporary folder, and gets new weights
in the same way:

    verify -> write -> pause, every cached key and value dropped -> load -> label -> resume

Invariants: a token's log-prob is that of the distribution it was sampled from (vLLM's
`processed_logprobs`). Its version is the label under which vLLM sampled it. No token is sampled
over keys and values of other weights. Partly loaded weights are never served: after a failed load,
every request fails with EngineError, and `check` raises it.

Not promised: the same numbers with other requests in a step (they differ by rounding), and
sleep.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentevo.config import EngineSection
from agentevo.errors import (
    DeadlineExceededError,
    EngineError,
    RequestTooLongError,
    WeightsLostError,
)
from agentevo.inference.embedded.requests import completes_stop_string
from agentevo.inference.engine import (
    NO_VERSION,
    InFlight,
    TokenListener,
    TokenScores,
    Weights,
    check_prompt,
    check_request,
    check_score,
    check_tokens,
)
from agentevo.inference.token_listeners import tell
from agentevo.inference.vllm.arguments import vllm_arguments
from agentevo.inference.vllm.images import VllmImages, check_expanded
from agentevo.inference.vllm.models import check_vllm_model
from agentevo.inference.vllm.options import VllmOptions, read_options
from agentevo.inference.vllm.terms import (
    VllmTokens,
    adapter_of,
    check_sampling,
    engine_arguments,
    load_vllm,
    sampling_params_of,
    scoring_params,
)
from agentevo.inference.vllm.weights import (
    places_of_workers,
    receive_in_workers,
    remove_weights,
    write_adapter_weights,
    write_base,
    write_weights,
)
from agentevo.inference.weights.broadcast_files import IncomingWeights
from agentevo.inference.weights.weight_checks import (
    PublishingEngine,
    VerifiedWeights,
    check_publish,
    verify_weights,
)
from agentevo.models.compute.adapters import is_adapted
from agentevo.models.compute.parameters import trained_weights
from agentevo.models.compute.positions import context_length
from agentevo.models.token_rows import banned_tokens, num_token_rows
from agentevo.models.vision.parts import processor_of
from agentevo.runtime.event_loop import in_thread, run_to_end
from agentevo.types import Completion, FinishReason, SamplingParams
from agentevo.types.images import PromptImage

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from agentevo.models.compute.parts import Spec

SHUTDOWN_S = 10.0
"""The time limit for vLLM's processes to end by themselves."""
LOAD_S = 600.0
"""The time limit for vLLM to load weights from the disk."""


class VllmEngine(PublishingEngine):
    """See the module. `model` has the names and shapes of the weights and the initial weights;
    nothing is computed with it. Starting takes a minute or more. Raises ConfigError for settings
    that vLLM does not support, MissingExtraError if vLLM is not installed, EngineError if vLLM does
    not start."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: EngineSection | None = None,
    ) -> None:
        super().__init__(model)
        self.config = config or EngineSection(type="vllm")
        options = read_options(self.config)
        check_vllm_model(model)
        self._vllm = load_vllm(options.start_timeout_s)
        passed_on = vllm_arguments(options)
        self._is_drafting = options.is_drafting
        self._tokenizer = tokenizer
        self._vocabulary = num_token_rows(model)
        num_rows = int(model.config.get_text_config().vocab_size)
        self._banned = banned_tokens(model)
        self._unused = [*self._banned, *range(self._vocabulary, num_rows)]
        self._context = options.max_model_len or context_length(model.config)
        self._folder = Path(tempfile.mkdtemp(prefix="agentevo-vllm-"))
        self._base = self._folder / "base"
        self._llm = self._start(options, passed_on)
        self._images = VllmImages(processor_of(model), self._llm)
        self._adapter: Any = None
        """vLLM's object for the serving adapter; None if the model has no adapter."""
        self._version = NO_VERSION
        self._failure: EngineError | None = None
        self._publishing = asyncio.Lock()
        self._numbers = itertools.count()
        self._running: set[str] = set()
        self._generated = self._computed = self._prefix_hits = 0

    def _start(self, options: VllmOptions, passed_on: Mapping[str, Any]) -> Any:
        """Starts vLLM with the weights of the model and waits until it is ready. `passed_on`:
        arguments that only vLLM knows."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            write_base(self._like, self._base, is_drafting=self._is_drafting)
            arguments = AsyncEngineArgs(
                model=str(self._base),
                max_model_len=self._context,
                **engine_arguments(self._like, self.config, options),
                **passed_on,
            )
            return AsyncLLM.from_engine_args(arguments)
        except Exception as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise EngineError(
                f"vLLM did not start ({type(error).__name__}: {error}): its own lines above say "
                "why; its settings are engine.options and engine.kv_cache_gb"
            ) from error

    @property
    def version(self) -> int:
        return self._version

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
        """See Engine.generate. `session` has no effect, because vLLM finds cached keys and values
        by their tokens."""
        check_request(sampling, deadline_s)
        check_sampling(sampling, is_drafting=self._is_drafting)
        check_prompt(prompt_ids, sampling, self._vocabulary)
        self._check_room(prompt_ids, sampling.max_new_tokens)

        if sampling.stop_strings and self._tokenizer is None:
            raise EngineError(
                "stop strings need a tokenizer: build VllmEngine with one, or use stop_token_ids"
            )

        streams = listen is not None or bool(sampling.stop_strings)
        drawn = VllmTokens()
        stopped = False
        params = sampling_params_of(
            sampling,
            self._vocabulary,
            self._unused,
            streams=streams,
            is_drafting=self._is_drafting,
        )
        async with self._open_request(prompt_ids, images, params, deadline_s) as (name, outputs):
            async for answer in outputs:
                (output,) = answer.outputs
                if stopped:  # tokens that vLLM sampled before it received the abort
                    drawn.end(output)
                    continue

                before = len(drawn.ids)
                self._generated += drawn.add(output, sampling)
                if stopped := self._cut_at_stop_string(drawn, before, sampling):
                    await self._llm.abort(name)
                if listen is not None and len(drawn.ids) > before:
                    tell(listen, drawn.ids[before:], drawn.logprobs[before:])

            if images:
                check_expanded(prompt_ids, answer.prompt_token_ids)
            self._count_context(len(prompt_ids), answer.num_cached_tokens or 0)

        if drawn.finish_reason not in ("stop", "length") and not stopped:
            raise self._failure or EngineError(
                f"vLLM has ended the request ({drawn.finish_reason}): ask again"
            )

        reason: FinishReason = "stop" if stopped or drawn.finish_reason == "stop" else "length"
        return Completion(
            ids=drawn.ids,
            logprobs=drawn.logprobs,
            versions=drawn.versions(),
            finish_reason=reason,
            top_logprobs=drawn.top_logprobs,
        )

    def _cut_at_stop_string(self, drawn: VllmTokens, before: int, sampling: SamplingParams) -> bool:
        """Whether one of the tokens from index `before` on completes a stop string. If so, drops
        the tokens after it."""
        if self._tokenizer is None or not sampling.stop_strings:
            return False
        for count in range(before + 1, len(drawn.ids) + 1):
            if completes_stop_string(self._tokenizer, drawn.ids[:count], sampling.stop_strings):
                drawn.cut(count)
                return True
        return False

    async def score(
        self,
        context_ids: list[int],
        ids: list[int],
        *,
        temperature: float = 1.0,
        deadline_s: float,
        images: Sequence[PromptImage] = (),
    ) -> TokenScores:
        """See ScoringEngine.score. Only at temperature 1, and for models that are shown no
        images."""
        check_score(context_ids, ids, temperature, deadline_s)
        if temperature != 1:
            raise EngineError(
                f"score: temperature={temperature:g}: vLLM computes log-probs of given tokens at "
                "temperature 1 only: use that, or use engine.type=torch"
            )
        if self._banned:
            raise EngineError(
                "score: the model never samples tokens that stand for images, and vLLM gives them "
                "a share of the log-probs of given tokens: use engine.type=torch"
            )

        all_ids = [*context_ids, *ids]
        check_tokens(all_ids, self._vocabulary)
        self._check_room(all_ids, 1)

        ends = time.monotonic() + deadline_s
        while True:  # again if new weights were loaded in between
            version = self._version
            tokens = VllmTokens()
            async with self._open_request(
                all_ids, images, scoring_params(), ends - time.monotonic()
            ) as (_, outputs):
                async for answer in outputs:
                    (output,) = answer.outputs
                    tokens.add(output, SamplingParams())

            if tokens.finish_reason == "abort":
                raise self._failure or EngineError("vLLM has ended the request: ask again")

            self._count_context(len(all_ids), 0)
            if tokens.versions() == [version]:
                prompt_logprobs = answer.prompt_logprobs
                places = [
                    prompt_logprobs.start_indices[at]
                    for at in range(len(context_ids), len(all_ids))
                ]
                return TokenScores([prompt_logprobs.logprobs[place] for place in places], version)

    async def release(self, session: str) -> None:
        """See Engine.release. Does nothing: vLLM stores nothing by session."""

    def stats(self) -> dict[str, float]:
        """See Engine.stats. Requests that wait in vLLM count as running."""
        cache = self._llm.vllm_config.cache_config
        return {
            "engine/generated_tokens": self._generated,
            "engine/computed_tokens": self._computed + self._generated,
            "engine/prefix_hit_tokens": self._prefix_hits,
            "engine/running": len(self._running),
            "engine/waiting": 0,
            "engine/kv_capacity_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
            **self._publish_stats(),
        }

    async def begin(
        self, version: int, weights: Weights | None = None, *, deadline_s: float = 60.0
    ) -> None:
        """See UpdatableEngine.begin."""
        if weights is None and is_adapted(self._like) and self._adapter is None:
            weights = trained_weights(self._like)  # vLLM was started with the base only
        verified = None if weights is None else verify_weights(self._like, weights)
        async with self._publishing:
            await self._swap(version, verified, "continue", deadline_s)

    async def publish(
        self,
        version: int,
        weights: Weights | None = None,
        *,
        in_flight: InFlight = "finish",
        deadline_s: float = 60.0,
    ) -> None:
        """See UpdatableEngine.publish. A cancellation while vLLM loads takes effect after the load:
        then the new version serves."""
        if weights is None:
            raise EngineError(
                "vLLM has its own weights, which can't be changed in place: publish the weights"
            )

        verified = await self._verify_in_thread(weights)
        with self._counting_publish():
            async with self._publishing:
                check_publish(version, self._version, verified, self._like)
                await self._swap(version, verified, in_flight, deadline_s)

    async def places(self, specs: Mapping[str, Spec]) -> list[str]:
        """See ReceivingEngine.places."""
        self.check()
        return await places_of_workers(self._llm.collective_rpc, self._like, specs)

    async def receive(
        self, version: int, incoming: IncomingWeights, *, in_flight: InFlight, deadline_s: float
    ) -> None:
        """See ReceivingEngine.receive. vLLM continues to compute until its workers have all
        weights."""
        with self._counting_publish():
            with self._changing_nothing(f"receive version {version}"):
                await receive_in_workers(self._llm.collective_rpc, incoming, self._base)

            async with self._publishing:
                check_publish(version, self._version, None, self._like)
                self.check()
                await self._pause(in_flight, deadline_s)
                await run_to_end(self._switch_weights(version, has_new_weights=True))

    async def _swap(
        self,
        version: int,
        weights: VerifiedWeights | None,
        in_flight: InFlight,
        deadline_s: float,
    ) -> None:
        """Switches to the weights (None: the current ones) and labels them with the version."""
        self.check()
        path = None if weights is None else self._folder / f"weights-{next(self._numbers)}"
        before = self._adapter
        try:
            if path is not None and weights is not None and is_adapted(self._like):
                await in_thread(write_adapter_weights, self._like, weights, path)
            elif path is not None and weights is not None:
                await in_thread(write_weights, self._like, weights, path)
                with self._changing_nothing(f"read version {version}"):
                    async with asyncio.timeout(LOAD_S):
                        files = (str(path), str(self._base))
                        await self._llm.collective_rpc("read_agentevo_weights", args=files)

            await self._pause(in_flight, deadline_s)
            await run_to_end(self._switch_weights(version, path, has_new_weights=path is not None))
        finally:
            if self._adapter is before:
                await in_thread(remove_weights, path)
            elif before is not None:
                await in_thread(remove_weights, Path(before.lora_path))

    @contextmanager
    def _changing_nothing(self, what: str) -> Iterator[None]:
        """Converts errors of vLLM's workers during work that changes nothing."""
        try:
            yield
        except WeightsLostError:
            raise
        except Exception as error:
            self.check()
            raise EngineError(
                f"weights refused, nothing changed: vLLM could not {what} "
                f"({type(error).__name__}: {error})"
            ) from error

    async def _pause(self, in_flight: InFlight, deadline_s: float) -> None:
        """Stops all computation and drops all cached keys and values: a token that is sampled over
        keys and values of other weights belongs to no version. If this fails, vLLM resumes."""
        mode = "wait" if in_flight == "finish" else "keep"
        try:
            async with asyncio.timeout(deadline_s):
                await self._llm.pause_generation(mode=mode, clear_cache=True)
        except BaseException as error:
            await run_to_end(self._llm.resume_generation())
            if isinstance(error, TimeoutError):
                raise DeadlineExceededError(
                    f"publish: requests were still running after {deadline_s:g} s; the old "
                    "weights keep serving"
                ) from None
            raise

    async def _switch_weights(
        self, version: int, path: Path | None = None, *, has_new_weights: bool
    ) -> None:
        """Switches a paused vLLM to new weights. `has_new_weights`: new weights are in `path` or in
        the workers. If this fails, vLLM may have a mixture of new and old weights, and samples
        nothing from then on."""
        started = time.perf_counter()
        try:
            async with asyncio.timeout(LOAD_S):
                if path is not None and is_adapted(self._like):
                    self._adapter = adapter_of(path)
                    await self._llm.add_lora(self._adapter)
                elif has_new_weights:
                    await self._llm.collective_rpc("load_agentevo_weights")
                await self._llm.update_weight_version(str(version))
        except Exception as error:
            self._failure = EngineError(
                f"vLLM has failed to load version {version} and may hold a part of it, so this "
                f"engine ends, and other engines get its requests ({type(error).__name__}: "
                f"{error})"
            )
            await self._llm.abort(list(self._running))
            raise self._failure from error

        self._version = version
        await self._llm.resume_generation()
        self._swap_s += time.perf_counter() - started

    async def forget_cache(self) -> None:
        """See UpdatableEngine.forget_cache."""
        async with self._publishing:
            self.check()
            await self._pause("continue", LOAD_S)
            await self._llm.resume_generation()

    def check(self) -> None:
        """See UpdatableEngine.check."""
        if self._failure is None and self._llm.errored:
            self._failure = EngineError(
                "vLLM's processes have ended, so this engine ends, and other engines get its "
                "requests: its own lines above say why"
            )
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """See UpdatableEngine.close."""
        if self._failure is None:
            self._failure = EngineError("the engine is closed: it takes no more requests")
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()
        await in_thread(self._llm.shutdown, timeout=SHUTDOWN_S)
        await in_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _check_room(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        if len(prompt_ids) + max_new_tokens > self._context:
            raise RequestTooLongError(
                f"prompt of {len(prompt_ids)} tokens + max_new_tokens {max_new_tokens} is more "
                f"than the context of {self._context} tokens: lower sampling.max_new_tokens, or "
                "shorten the conversation"
            )

    def _count_context(self, tokens: int, cached: int) -> None:
        self._prefix_hits += cached
        self._computed += tokens - cached

    @asynccontextmanager
    async def _open_request(
        self,
        prompt_ids: Sequence[int],
        images: Sequence[PromptImage],
        params: Any,
        deadline_s: float,
    ) -> AsyncIterator[tuple[str, AsyncIterator[Any]]]:
        """Opens a request to vLLM and yields its name and its outputs. The end of the block ends
        the request."""
        self.check()
        ends = time.monotonic() + deadline_s
        name = str(next(self._numbers))
        prompt = await self._images.prompt_of(prompt_ids, images, deadline_s)

        adapter = self._adapter
        if adapter is not None:
            adapter = adapter_of(Path(adapter.lora_path), fresh=False)

        self._running.add(name)
        try:
            async with (
                asyncio.timeout(ends - time.monotonic()),
                aclosing(self._llm.generate(prompt, params, name, lora_request=adapter)) as outputs,
            ):
                yield name, outputs
        except TimeoutError:
            raise DeadlineExceededError(
                f"no completion within {deadline_s:g} s ({len(self._running)} requests at vLLM): "
                "raise engine.timeout_s or lower sampling.max_new_tokens"
            ) from None
        except (self._vllm.exceptions.VLLMError, ValueError) as error:
            self.check()
            raise EngineError(f"vLLM has refused the request: {error}") from error
        finally:
            self._running.discard(name)
