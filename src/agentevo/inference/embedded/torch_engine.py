"""The embedded engine: continuous batching over any transformers causal LM, on the trainer's own
weights.

Each step computes the new tokens of every running sequence in one forward pass (prompts in chunks,
completions one token each), samples a token for those that are up to date, and releases finished
ones. Steps run on the event loop; agents wake between steps, so their next turns join the next
step.

New weights are published in two phases: `verify` checks all of them while requests run (in any
thread), and `publish` swaps them in. A failure or cancellation before the swap leaves the old
version serving. An engine that sleeps computes nothing and holds no key-value memory.

Promises. A token's log-prob is that of the distribution it was sampled from. The same request
(prompt, parameters, seed, weights) gives the same tokens and log-probs, with any other requests in
a step, in chunks of any size, with or without a cached prefix, and after an interruption. They are
equal to the last bit if `models/compute/invariance.py` finds no obstacle, otherwise up to float
rounding. Memory stays within `engine.kv_cache_tokens`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from collections.abc import Sequence as Images
from contextlib import asynccontextmanager

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentevo.config import EngineSection
from agentevo.errors import DeadlineExceededError, EngineError
from agentevo.inference.embedded.batch import StepWork, build_batch, choose_work
from agentevo.inference.embedded.earlier_weights import EarlierWeights, PinnedEngine
from agentevo.inference.embedded.grammars import EngineGrammars
from agentevo.inference.embedded.images import EngineImages
from agentevo.inference.embedded.kv_cache import kv_bytes_per_token
from agentevo.inference.embedded.requests import EngineRequest
from agentevo.inference.embedded.routing import routed_experts_of
from agentevo.inference.embedded.routing_memory import RoutingMemory
from agentevo.inference.embedded.sampling import draw_with_alternatives
from agentevo.inference.embedded.scheduler import Scheduler, Sequence
from agentevo.inference.embedded.scores import score_request, scored_completion, take_scores
from agentevo.inference.embedded.state_batch import StateBatch
from agentevo.inference.embedded.state_scheduler import StateScheduler
from agentevo.inference.embedded.states import state_support
from agentevo.inference.engine import (
    CANT_SEE,
    Engine,
    InFlight,
    TokenListener,
    TokenScores,
    Weights,
    check_prompt,
    check_request,
    check_score,
    check_tokens,
    refuse_images,
    why_text_only,
)
from agentevo.inference.weights.weight_checks import (
    PublishingEngine,
    VerifiedWeights,
    check_publish,
    verify_weights,
)
from agentevo.models.compute.adapters import adapter_names, use_adapter
from agentevo.models.compute.invariance import batch_dependence
from agentevo.models.compute.linear import drop_packed
from agentevo.models.compute.positions import context_length, length_advice
from agentevo.models.compute.rows import row_settings
from agentevo.models.compute.thread_settings import own_torch_state
from agentevo.models.token_rows import banned_tokens, num_token_rows, token_logits
from agentevo.models.vision.parts import processor_of
from agentevo.models.vision.processor import ProcessedImage
from agentevo.runtime.devices import empty_cache
from agentevo.types import Completion, SamplingParams
from agentevo.types.images import PromptImage
from agentevo.types.penalties import PenaltyState

POLL_INTERVAL_S = 0.05
"""The shortest interval at which a waiting request checks whether a sleeping engine is awake
again."""
MAX_FAILED_STEPS = 3
"""The engine ends after this many failed steps in a row."""


class TorchEngine(PublishingEngine):
    """See the module. `model` must have gone through `agentevo.models.compute.attention.prepare`;
    `tokenizer` is needed for stop strings only."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: EngineSection | None = None,
    ) -> None:
        super().__init__(model)
        self.model = model
        self._earlier = EarlierWeights(model)
        self.tokenizer = tokenizer

        self.config = config or EngineSection()
        if self.config.batch_invariant and (why := batch_dependence(model)) is not None:
            raise EngineError(
                "engine.batch_invariant: the numbers of a completion could depend on the other "
                f"requests in a step, because {why}: use float32 on an x86 CPU (model.device=cpu "
                "model.dtype=float32) and a decoder without experts, or leave the key out"
            )

        support = None if row_settings(model) is None else state_support(model)
        kv_tokens = self.config.kv_cache_tokens or int(
            self.config.kv_cache_gb * 2**30 / kv_bytes_per_token(model)
        )
        records = self.config.routed_experts
        self._routing = RoutingMemory.of(model, kv_tokens, self.version_for) if records else None
        self._routers = None if self._routing is None else self._routing.routers
        length = context_length(model.config)
        advice = length_advice(model.config)
        self.scheduler = (
            Scheduler(self.config, length, kv_tokens, advice, self._routing)
            if support is None
            else StateScheduler(self.config, length, kv_tokens, advice, support)
        )
        on_cpu = next(model.parameters()).device.type == "cpu"
        self._prefill_tokens = self.config.prefill_tokens or (512 if on_cpu else 4096)
        self._vocabulary = num_token_rows(model)
        processor = processor_of(model)
        self._images = (
            None
            if processor is None
            else EngineImages(model, processor, kv_tokens * kv_bytes_per_token(model))
        )
        if (
            self._images is not None
            and self._images.sees_both_ways
            and (support is None or (support.continues and not support.appends))
        ):
            raise EngineError(
                f"{type(model).__name__}: the tokens of an image see each other, and its passes "
                "can't continue by a whole image at once: choose another model"
            )

        self._grammars = EngineGrammars(tokenizer, int(model.config.get_text_config().vocab_size))
        self._version = 0
        self.failed_steps = 0
        """The number of consecutive failed steps until now."""
        self.failure: EngineError | None = None
        """The error that every request got when a step last failed."""
        self._is_admission_paused = False
        """Whether no request is admitted, because weights will be swapped or the engine will
        sleep."""
        self._asleep_since: float | None = None
        self._pump: asyncio.Task[None] | None = None
        self._generated = self._computed = self._steps = 0
        self._busy_s = self._asleep_s = 0.0

    @property
    def version(self) -> int:
        return self._version

    @property
    def asleep(self) -> bool:
        return self._asleep_since is not None

    @property
    def slept_s(self) -> float:
        """See SleepingEngine.slept_s."""
        return self._asleep_s + (
            time.monotonic() - self._asleep_since if self._asleep_since is not None else 0.0
        )

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        session: str | None = None,
        deadline_s: float,
        listen: TokenListener | None = None,
        images: Images[PromptImage] = (),
        version: int | None = None,
    ) -> Completion:
        """See Engine.generate. `version`: see `serving`."""
        check_request(sampling, deadline_s)
        check_prompt(prompt_ids, sampling, self._vocabulary)
        if sampling.stop_strings and self.tokenizer is None:
            raise EngineError(
                "stop strings need a tokenizer: build TorchEngine with one, or use stop_token_ids"
            )

        began_at = time.monotonic()
        slept_s = self.slept_s
        ids, shown = await self._read_images(prompt_ids, images, deadline_s)
        grammar = await self._grammars.begin(sampling, deadline_s)
        penalty_settings = sampling.penalties
        penalties = None if penalty_settings is None else PenaltyState(penalty_settings, prompt_ids)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = EngineRequest(
            ids, sampling, future, session, version, listen, grammar, penalties, images=shown
        )
        return await self._queue_and_wait(request, deadline_s, began_at, slept_s)

    async def score(
        self,
        context_ids: list[int],
        ids: list[int],
        *,
        temperature: float = 1.0,
        deadline_s: float,
        images: Images[PromptImage] = (),
        version: int | None = None,
    ) -> TokenScores:
        """See ScoringEngine.score. `version`: see `serving`."""
        check_score(context_ids, ids, temperature, deadline_s)
        check_tokens((*context_ids, *ids), self._vocabulary)
        if never := sorted(set(ids) & set(banned_tokens(self.model))):
            raise EngineError(
                f"score: token {never[0]} stands for an image or a part of one and is never "
                "sampled, so it has no log-prob: put it into the context"
            )

        began_at = time.monotonic()
        slept_s = self.slept_s
        keys, shown = await self._read_images(context_ids, images, deadline_s)
        request = score_request(keys, ids, temperature, version, shown)
        return TokenScores.of(await self._queue_and_wait(request, deadline_s, began_at, slept_s))

    async def _read_images(
        self, prompt_ids: list[int], images: Images[PromptImage], deadline_s: float
    ) -> tuple[list[int], dict[str, ProcessedImage]]:
        """The prompt's keys and its images, see EngineImages.read."""
        if self._images is None:
            refuse_images(images, CANT_SEE)
            return list(prompt_ids), {}

        refuse_images(images, why_text_only(self.config))
        return await self._images.read(prompt_ids, images, deadline_s)

    async def _queue_and_wait(
        self, request: EngineRequest, deadline_s: float, began_at: float, slept_s: float
    ) -> Completion:
        """Queues the request and waits for its answer. `began_at`: the monotonic time at which the
        deadline began. `slept_s`: how long the engine had slept by then."""
        ends = began_at + deadline_s
        future = request.future
        assert future is not None

        self.scheduler.submit(request)
        self._start_pump()
        try:
            while not future.done():
                remaining_s = ends + (self.slept_s - slept_s) - time.monotonic()
                if remaining_s <= 0:
                    raise self._deadline_error(deadline_s)
                await asyncio.wait(
                    [future],
                    timeout=max(remaining_s, POLL_INTERVAL_S) if self.asleep else remaining_s,
                )
            return future.result()
        finally:
            future.cancel()  # marks the request as abandoned, so the scheduler drops it

    def keep(self, count: int) -> None:
        """See VersionedEngine.keep."""
        self._earlier.keep(self._version, count)

    def serving(self, version: int) -> Engine:
        """See VersionedEngine.serving."""
        return PinnedEngine(self, version)

    def version_for(self, requested: int | None) -> int:
        """The version that serves requests for version `requested`. None: the newest."""
        return self._earlier.model_serving(requested, self._version)[0]

    def _deadline_error(self, deadline_s: float) -> DeadlineExceededError:
        state = (
            f"{len(self.scheduler.running)} running, {len(self.scheduler.waiting)} "
            f"waiting{', asleep' if self.asleep else ''}"
        )
        return DeadlineExceededError(
            f"no completion within {deadline_s:g} s ({state}): raise engine.timeout_s or lower "
            "sampling.max_new_tokens"
        )

    async def release(self, session: str) -> None:
        """See Engine.release."""
        self.scheduler.release(session)

    async def begin(
        self, version: int, weights: Weights | None = None, *, deadline_s: float = 60.0
    ) -> None:
        """See UpdatableEngine.begin."""
        if weights is not None:
            verify_weights(self.model, weights).swap_in()
        self._version = version
        self._forget_all()

    async def publish(
        self,
        version: int,
        weights: Weights | None = None,
        *,
        in_flight: InFlight = "finish",
        deadline_s: float = 60.0,
        adapter: str | None = None,
    ) -> None:
        """See UpdatableEngine.publish. `in_flight`: "finish" lets running requests end on the old
        weights (new ones wait); "continue" recomputes their context under the new weights and
        continues, each token labelled with the version that sampled it. `adapter`: the model's
        adapter that serves from now on."""
        verified = (
            weights
            if isinstance(weights, VerifiedWeights) or weights is None
            else self.verify(weights)
        )
        with self._counting_publish():
            self._check_publish(version, verified, adapter)
            async with self._pause_admission("publish", in_flight, deadline_s):
                self._check_publish(version, verified, adapter)  # another may have come first
                started = time.perf_counter()
                if verified is not None:
                    verified.swap_in()
                if adapter is not None:
                    use_adapter(self.model, adapter)

                self._version = version
                self._weights_changed()
                self._swap_s += time.perf_counter() - started

    def _check_publish(
        self, version: int, weights: VerifiedWeights | None, adapter: str | None
    ) -> None:
        check_publish(version, self._version, weights, self.model)
        if adapter is not None and adapter not in adapter_names(self.model):
            raise EngineError(
                f"the model has no adapter {adapter!r} (it has: "
                f"{', '.join(adapter_names(self.model)) or 'none'}): load it first"
            )

    async def sleep(self, *, in_flight: InFlight = "finish", deadline_s: float = 60.0) -> None:
        """See SleepingEngine.sleep. Sleep does not count towards deadlines. The caller that puts
        the engine to sleep has to wake it."""
        if self.asleep:
            return
        async with self._pause_admission("sleep", in_flight, deadline_s):
            if self._asleep_since is None:
                self._asleep_since = time.monotonic()
            self._weights_changed()
            if self._images is not None:
                self._images.forget()
            empty_cache(next(self.model.parameters()).device)

    async def wake(self) -> None:
        """See SleepingEngine.wake."""
        if self._asleep_since is None:
            return
        self._asleep_s += time.monotonic() - self._asleep_since
        self._asleep_since = None
        if self.scheduler.waiting:
            self._start_pump()

    async def forget_cache(self) -> None:
        """See UpdatableEngine.forget_cache."""
        self.scheduler.forget_cache()
        if self._images is not None:
            self._images.forget()

    def _weights_changed(self) -> None:
        """Call this after the weights were changed in place. Drops everything that the old weights
        computed."""
        drop_packed(self.model)
        self.scheduler.forget_cache()
        if self._images is not None:
            self._images.weights_changed()

    def _forget_all(self) -> None:
        self._earlier.clear()
        if self._routing is not None:
            self._routing.begin()
        if self._images is not None:
            self._images.forget()
        self._weights_changed()

    def check(self) -> None:
        """See UpdatableEngine.check."""
        if self.failed_steps >= MAX_FAILED_STEPS:
            raise EngineError(
                f"{self.failed_steps} steps in a row have failed, so this engine ends, and other "
                f"engines get its requests; the last error: {self.failure}"
            ) from self.failure

    async def close(self) -> None:
        """See UpdatableEngine.close."""
        self._forget_all()

    def stats(self) -> dict[str, float]:
        """See Engine.stats."""
        scheduler = self.scheduler
        return {
            "engine/generated_tokens": self._generated,
            "engine/computed_tokens": self._computed,
            "engine/steps": self._steps,
            "engine/busy_s": self._busy_s,
            "engine/prefix_hit_tokens": scheduler.prefix_hit_tokens,
            "engine/session_hit_tokens": scheduler.session_hit_tokens,
            "engine/running": len(scheduler.running),
            "engine/waiting": len(scheduler.waiting),
            "engine/kv_tokens": scheduler.memory_tokens(),
            "engine/kv_capacity_tokens": scheduler.kv_tokens,
            **self._publish_stats(),
            "engine/asleep_s": self.slept_s,
            **({} if self._routing is None else self._routing.stats()),
            **({} if self._images is None else self._images.stats()),
        }

    @asynccontextmanager
    async def _pause_admission(
        self, what: str, in_flight: InFlight, deadline_s: float
    ) -> AsyncIterator[None]:
        """Queued requests wait while the block runs. With "finish" the block begins when all
        requests that have begun are done. A failure or cancellation before that changes nothing.
        Only one block runs at a time."""
        holding = False
        try:
            try:
                async with asyncio.timeout(deadline_s):
                    while self._is_admission_paused:
                        await asyncio.sleep(0.001)
                    holding = self._is_admission_paused = True
                    # Requests that were sent back before the engine fell asleep continue on waking.
                    while in_flight == "finish" and self.scheduler.has_begun and not self.asleep:
                        await asyncio.sleep(
                            0
                        )  # the steps run on this event loop, between two sleeps
            except TimeoutError:
                raise DeadlineExceededError(
                    f"{what}: requests were still running after {deadline_s:g} s; the old weights "
                    "keep serving"
                ) from None

            yield
        finally:
            if holding:
                self._is_admission_paused = False
                self._start_pump()

    def _start_pump(self) -> None:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Runs steps until no work is left. If a step fails, every open request fails with the
        error."""
        scheduler = self.scheduler
        await asyncio.sleep(0)  # requests that are made at the same moment join the first step
        try:
            while True:
                scheduler.drop_abandoned()
                finished = self._step()
                if finished is None:
                    break

                self.failed_steps = 0
                for _ in range(4 if finished else 1):  # lets agents ask for their next turn
                    await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001 (whatever a step raises, every open request has to be answered)
            failure = EngineError(f"the engine's step failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.failed_steps += 1
            self.failure = failure
            for request in scheduler.abort():
                if request.future is not None and not request.future.done():
                    request.future.set_exception(failure)

    def _admit(self) -> None:
        """While no new request is admitted, those that have begun continue."""
        self.scheduler.grow()
        self.scheduler.admit(begun_only=self._is_admission_paused)

    @own_torch_state()
    @torch.inference_mode()
    def _step(self) -> int | None:
        """Admits requests, then runs one forward pass, or one for each version that running
        requests ask for. Returns how many requests finished; None if none was running."""
        if not self.asleep:
            self._admit()
        if not self.scheduler.running:
            return None

        started = time.perf_counter()
        by_version: dict[int, list[Sequence]] = {}
        for sequence in self.scheduler.running:
            requested = None if sequence.request is None else sequence.request.version
            version, _ = self._earlier.model_serving(requested, self._version)
            by_version.setdefault(version, []).append(sequence)

        finished = sum(self._pass(version, running) for version, running in by_version.items())
        self._steps += 1
        self._busy_s += time.perf_counter() - started
        return finished

    def _pass(self, version: int, running: list[Sequence]) -> int:
        """Runs one forward pass under that version. Returns how many requests it finished."""
        _, model = self._earlier.model_serving(version, self._version)
        batch: StepWork
        if isinstance(self.scheduler, StateScheduler):
            batch = StateBatch(self.scheduler, running, self._prefill_tokens, self._images)
        else:
            work = choose_work(running, self._prefill_tokens)
            device = next(self.model.parameters()).device
            batch = build_batch(self.scheduler.cache, work, device, self._images, self._routers)

        outputs = batch.logits(model, version)
        logits = token_logits(self.model, outputs)  # [sampled + scored, tokens]
        for sequence, count in batch.work:
            sequence.cached += count

        finished = self._emit(batch, logits[: len(batch.sampled)], version)
        for sequence, request in take_scores(batch, logits[len(batch.sampled) :], version):
            finished += 1
            self._answer(sequence, request, scored_completion(request))

        for sequence, _ in batch.work:
            if (
                sequence.request is not None
                and sequence.request.future is None
                and sequence.cached == len(sequence.ids)
            ):
                self.scheduler.finish_prefix(sequence)
                finished += 1

        self._computed += sum(count for _, count in batch.work)
        return finished

    def _emit(self, batch: StepWork, logits: torch.Tensor, version: int) -> int:
        """Samples a token for each sequence whose tokens are all computed. Answers requests that
        end."""
        if not batch.sampled:
            return 0

        requests = [s.request for s in batch.sampled if s.request is not None]
        masks = [r.allowed_tokens() for r in requests] if any(r.grammar for r in requests) else []
        changes = [None if r.penalties is None else r.penalties.changes() for r in requests]
        tokens, logprobs, likeliest = draw_with_alternatives(
            logits,
            [r.params for r in requests],
            [float(r.rng.random()) for r in requests],
            masks,
            changes,
        )
        finished = 0
        for sequence, request, token, logprob, top in zip(
            batch.sampled, requests, tokens, logprobs, likeliest, strict=True
        ):
            if request.params.top_logprobs:
                request.top_logprobs.append(top)

            request.completion.append(token)
            request.logprobs.append(logprob)
            request.versions.append(version)
            sequence.ids.append(token)

            request.add_token(token, logprob)
            reason = request.finish_reason(self.tokenizer)
            if reason is not None:
                finished += 1
                routed = routed_experts_of(sequence, request, self._routers)
                self._answer(sequence, request, request.to_completion(reason, routed))

        self._generated += len(tokens)
        return finished

    def _answer(self, sequence: Sequence, request: EngineRequest, completion: Completion) -> None:
        self.scheduler.finish(sequence)
        if request.future is not None and not request.future.done():
            request.future.set_result(completion)
