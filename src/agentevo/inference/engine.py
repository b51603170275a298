"""The engine contract: token ids in, token ids out, with the log-probs of the distribution that
each token was actually sampled from.

An engine knows nothing of agents, rewards or text. It labels every token with the version of the
weights that sampled it. Agents and samplers need an `Engine`. Trainers need an `UpdatableEngine`,
whose weights can be replaced. Each optional ability of an engine is a protocol of its own that is
checked at run time: `SleepingEngine`, `EmbeddedEngine`, `ScoringEngine`.

`engine.type` in a recipe names an `EngineFactory`. Other packages add theirs under the entry-point
group `agentevo.engines` (docs/engines.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from agentevo.config import EngineSection
from agentevo.errors import EngineError, GrammarError
from agentevo.types import (
    LARGEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    MAX_GRAMMAR,
    MAX_STOP_STRING,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    Completion,
    SamplingParams,
)
from agentevo.types.image_span import why_misplaced
from agentevo.types.images import PromptImage

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Weights = Mapping[str, "torch.Tensor"]
"""Tensors, by the names of the model's parameters."""
InFlight = Literal["continue", "finish"]
"""What happens to running requests when an engine gets new weights or goes to sleep. `continue`:
they resume afterwards from their current state. `finish`: they end first."""
TokenListener = Callable[[Sequence[int], Sequence[float]], None]
"""A function that gets the tokens of one request as they are sampled: ids, and the log-prob of
each. The engine calls it on its event loop, between steps, so it must return quickly."""
CANT_SCORE = (
    "this engine can't compute log-probs of given tokens, which rewards by the policy's "
    "probability need: use engine.type=torch, or an engine with `score` (docs/engines.md)"
)
CANT_SEE = (
    "this engine's model can't be shown images: choose a vision-language model (model.name, "
    "docs/engines.md), or remove the images"
)
NO_VERSION = -1
"""The version of an engine that has not received weights of the run yet. Also the version if there
is no engine."""


def check_request(sampling: SamplingParams, deadline_s: float) -> None:
    """Raises EngineError for sampling settings that no engine supports. Without this check, a
    log-prob that is NaN could reach training."""
    ranges = (
        (
            "temperature",
            sampling.temperature == 0
            or LOWEST_TEMPERATURE <= sampling.temperature <= LARGEST_TEMPERATURE,
            f"0 (greedy) or {LOWEST_TEMPERATURE:g} to {LARGEST_TEMPERATURE:g}",
        ),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k >= 0, "at least 0 (which keeps all)"),
        ("min_p", 0 <= sampling.min_p < 1, "at least 0 and below 1"),
        ("max_new_tokens", sampling.max_new_tokens >= 1, "at least 1"),
        (
            "top_logprobs",
            0 <= sampling.top_logprobs <= MAX_TOP_LOGPROBS,
            f"0 to {MAX_TOP_LOGPROBS}",
        ),
    )
    for name, is_right, allowed in ranges:
        if not is_right:  # nor is NaN
            raise EngineError(f"sampling: {name}={getattr(sampling, name)!r} must be {allowed}")

    if len(sampling.stop_strings) > MAX_STOP_STRINGS or not all(
        0 < len(text) <= MAX_STOP_STRING for text in sampling.stop_strings
    ):
        raise EngineError(
            f"sampling: stop_strings must be at most {MAX_STOP_STRINGS}, each of 1 to "
            f"{MAX_STOP_STRING} characters"
        )

    if sampling.routed_from < 0:
        raise EngineError(f"sampling: routed_from={sampling.routed_from} must be at least 0")

    if len(sampling.grammar) > MAX_GRAMMAR:
        raise GrammarError(
            f"the grammar or schema has {len(sampling.grammar)} characters, the limit is "
            f"{MAX_GRAMMAR}: give a smaller one"
        )

    problem = None if sampling.penalties is None else sampling.penalties.problem
    if problem is not None:
        raise EngineError(f"sampling: penalties: {problem}")
    if sampling.grammar and not sampling.stop_token_ids:
        raise GrammarError("a grammar needs stop_token_ids: nothing else ends its texts")
    if not math.isfinite(deadline_s):
        raise EngineError(f"the deadline of a request must be in seconds, not {deadline_s!r}")


def check_tokens(ids: Sequence[int], vocabulary: int) -> None:
    """Raises EngineError for ids outside the model's vocabulary. In a step, such an id would fail
    all requests."""
    if min(ids) < 0 or max(ids) >= vocabulary:
        unknown = next(token for token in ids if not 0 <= token < vocabulary)
        raise EngineError(
            f"the request has token {unknown}, the model knows 0 to {vocabulary - 1}: "
            "use its own tokenizer"
        )


def check_prompt(prompt_ids: Sequence[int], sampling: SamplingParams, vocabulary: int) -> None:
    """Raises EngineError for an empty prompt, and for ids outside the model's vocabulary in the
    prompt or in the penalties."""
    if not prompt_ids:
        raise EngineError("the prompt is empty: an engine needs at least one token to predict from")
    last = sampling.penalties.last_token if sampling.penalties else 0
    check_tokens((*prompt_ids, max(last, 0)), vocabulary)


def check_score(
    context_ids: Sequence[int], ids: Sequence[int], temperature: float, deadline_s: float
) -> None:
    """Raises EngineError for tokens that no engine can score."""
    if not context_ids or not ids:
        raise EngineError(
            "score: the context and the tokens must have at least one token each: there is nothing "
            "to predict from, or nothing to predict"
        )

    if not LOWEST_TEMPERATURE <= temperature <= LARGEST_TEMPERATURE:  # nor is NaN
        raise EngineError(
            f"score: temperature={temperature!r} must be {LOWEST_TEMPERATURE:g} to "
            f"{LARGEST_TEMPERATURE:g}"
        )

    if not math.isfinite(deadline_s):
        raise EngineError(f"the deadline of a request must be in seconds, not {deadline_s!r}")


def check_images(prompt_ids: Sequence[int], images: Sequence[PromptImage]) -> None:
    """Raises EngineError for images that are out of order, overlap or leave the prompt, and for
    files that are not those of their spans. Whether the bytes have the digest is not checked."""
    problem = why_misplaced([image.span for image in images], len(prompt_ids))
    if problem:
        raise EngineError(f"the request's images: {problem}")

    for image in images:
        if image.span.digest != image.file.part.sha256:
            raise EngineError(
                f"the request's images: the span of the image {image.span.digest[:12]}... comes "
                f"with the file {image.file.part.sha256[:12]}...: send the file of each span"
            )


def why_text_only(section: EngineSection) -> str:
    """Why an engine with these settings refuses images, whatever its model; empty if it does not,
    or if it is of another package."""
    if section.type == "sglang":
        return "engine.type=sglang can't be shown images: set engine.type=torch, which can"
    if section.batch_invariant:
        return "engine.batch_invariant holds for text only: leave the key out for images"
    return ""


def refuse_images(images: Sequence[PromptImage], why: str) -> None:
    """Raises EngineError with this reason, if there are images and it is not empty."""
    if images and why:
        raise EngineError(why)


def images_option(engine: Engine, images: Sequence[PromptImage]) -> dict[str, Any]:
    """The argument `images` for `engine.generate`, left out if there are none. Raises EngineError
    for an engine that does not have it."""
    if not images:
        return {}

    parameters = signature(engine.generate).parameters
    if "images" not in parameters and not any(
        parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()
    ):
        raise EngineError(CANT_SEE)
    return {"images": images}


class TokenScores(NamedTuple):
    """The log-probs of given tokens under a policy."""

    logprobs: list[float]
    """Natural log-probs, one for each token. 0 is the highest, and none is infinite."""
    version: int
    """The version of the weights that computed all of them."""

    @classmethod
    def of(cls, completion: Completion) -> TokenScores:
        """Converts an answer that has the form of a completion."""
        return cls(completion.logprobs, completion.versions[0])

    def completion(self, ids: list[int]) -> Completion:
        """Converts the scores to the form of a completion."""
        versions = [self.version] * len(ids)
        return Completion(
            ids=ids, logprobs=self.logprobs, versions=versions, finish_reason="length"
        )


class Engine(Protocol):
    """An engine that generates tokens."""

    @property
    def version(self) -> int:
        """The version of the weights that sample new tokens, or NO_VERSION."""
        ...

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
        """Completes `prompt_ids`, the whole context.

        `session` names a conversation. The engine keeps its key-value cache, so the next call with
        this name computes only the new tokens. Raises EngineError for what `check_request` refuses,
        GrammarError for a grammar that can't be compiled, RequestTooLongError if the tokens can
        never fit, DeadlineExceededError after `deadline_s` seconds. Cancelling the call frees all
        resources of the request.

        `listen` gets each token of the completion once, in order, before the next step begins. The
        tokens that `listen` got are always a prefix of the completion. An engine without streaming
        may leave `listen` out. A listener that raises ends this request alone, with ListenerError.

        `images`: all images of the prompt, in its order. `prompt_ids` have the feature tokens of
        each one, as VisionProcessor makes them, and the spans count in them. Tokens that stand for
        images are never sampled (models/token_rows.py). Raises EngineError for images that don't
        belong to the prompt or the model. A caller passes it only if there are images, so an engine
        that can't be shown any may leave it out; one that has it refuses them (`refuse_images`).
        """
        ...

    async def release(self, session: str) -> None:
        """Frees the cache of a conversation. Unknown names are ignored."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters since the start: generated and computed tokens, prefix hits, queue lengths,
        memory. `engine/kv_capacity_tokens`, if present, is the most tokens that the key-value cache
        can hold."""
        ...


class UpdatableEngine(Engine, Protocol):
    """An engine whose weights can be replaced. It belongs to one event loop."""

    async def begin(
        self, version: int, weights: Weights | None = None, *, deadline_s: float = 60.0
    ) -> None:
        """Sets the weights and their version at the start of a new or resumed run. `weights`
        replaces the engine's weights; None keeps them, for example after a change in place.
        `version` may be lower than the previous one. Cached keys and values are dropped. The caller
        makes sure that no request is running. Raises EngineError for `weights` that the engine
        can't load."""
        ...

    def verify(self, weights: Weights) -> Weights:
        """The first phase of `publish`: checks the weights and changes nothing. Any thread may call
        it while requests run. Returns the weights in a form that `publish` can load without delay.
        Raises EngineError for weights that the engine can't load."""
        ...

    async def publish(
        self,
        version: int,
        weights: Weights | None = None,
        *,
        in_flight: InFlight = "finish",
        deadline_s: float = 60.0,
    ) -> None:
        """Replaces the weights with newer ones. Verifies all weights before it changes any, unless
        they come from `verify`. None: they were changed in place. Untrained weights (the base under
        adapters) may be left out. A failure or cancellation leaves the old version serving. Raises
        EngineError for weights that it can't load, and DeadlineExceededError if requests do not end
        in time."""
        ...

    async def forget_cache(self) -> None:
        """Drops all cached keys and values, so that later results do not depend on earlier
        requests. A conversation that continues keeps its recorded experts."""
        ...

    def check(self) -> None:
        """Raises EngineError if every request would fail on this engine, so that requests go to
        another engine."""
        ...

    async def close(self) -> None:
        """Releases all resources. No method may be called afterwards."""
        ...


@runtime_checkable
class EmbeddedEngine(Protocol):
    """An engine that computes with a model in this process. The model is the trainer's, or a copy
    of it."""

    @property
    def model(self) -> PreTrainedModel: ...


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that can release its memory temporarily."""

    @property
    def asleep(self) -> bool: ...

    @property
    def slept_s(self) -> float:
        """Seconds asleep so far, including the current sleep. They do not count towards the
        deadlines of requests."""
        ...

    async def sleep(self, *, in_flight: InFlight, deadline_s: float) -> None:
        """Stops computing and releases the key-value memory until `wake`. `in_flight`: running
        requests end first, or are queued again with the tokens that they have. New requests wait.
        New weights may be published during sleep. Raises DeadlineExceededError and stays awake if
        requests do not end in time."""
        ...

    async def wake(self) -> None:
        """Resumes. Does nothing if the engine is awake."""
        ...


@runtime_checkable
class ScoringEngine(Protocol):
    """An engine that can score given tokens."""

    async def score(
        self,
        context_ids: list[int],
        ids: list[int],
        *,
        temperature: float = 1.0,
        deadline_s: float,
        images: Sequence[PromptImage] = (),
    ) -> TokenScores:
        """The log-prob of each of `ids`, given `context_ids` and the preceding `ids`, under the
        newest weights at this temperature, without filters. `images`: those of the context, as in
        Engine.generate. Raises EngineError for tokens that
        can't be scored, RequestTooLongError for tokens that can never fit, DeadlineExceededError
        after `deadline_s` seconds. Cancelling the call frees all resources of the request."""
        ...


@runtime_checkable
class VersionedEngine(Protocol):
    """An engine that can keep earlier weights for requests that ask for them."""

    def keep(self, count: int) -> None:
        """Keeps a copy of the current trained weights, which serves requests alongside newer
        weights until `count` more versions were published. Drops older copies."""
        ...

    def serving(self, version: int) -> Engine:
        """Returns an engine whose requests are all sampled from that version, or from the next
        version that still exists."""
        ...


class EngineFactory(Protocol):
    """Creates the engine that `engine.type` names."""

    def __call__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, section: EngineSection
    ) -> UpdatableEngine:
        """An EmbeddedEngine computes with `model`. Other engines read names, shapes and the path of
        its files (`model.name_or_path`) from it, and get the weights in `begin`. Raises ConfigError
        for keys of `section` that the engine does not support. `agentevo list engines` shows the
        first line of the factory's docstring."""
        ...
