"""The engine contract: token ids in, token ids out, with the log-probs of the distribution that
each token was actually sampled from.

An engine knows nothing of agents, rewards or text. It stamps every token with the version of the
weights that emitted it. Agents and samplers need an `Engine`. Trainers need an `UpdatableEngine`,
whose weights can be replaced. Each optional ability of an engine is a protocol of its own that is
checked at run time: `SleepingEngine`, `EmbeddedEngine`, `ScoringEngine`.

`engine.type` in a recipe names an `EngineFactory`. Other packages add theirs under the entry-point
group `agentevo.engines` (docs/engines.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

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

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Weights = Mapping[str, "torch.Tensor"]
"""Tensors by the name of the model's parameter."""
InFlight = Literal["continue", "finish"]
"""The treatment of running requests when an engine gets new weights or goes to sleep: they continue
afterwards from their current state, or end first."""
TokenListener = Callable[[Sequence[int], Sequence[float]], None]
"""Gets the tokens of one request as they are sampled: ids, and the log-prob of each. It is called
on the engine's event loop, between the engine's steps, so it must return at once."""
CANT_SCORE = (
    "this engine can't compute log-probs of given tokens, which rewards by the policy's "
    "probability need: use engine.type=torch, or an engine with `score` (docs/engines.md)"
)
NO_VERSION = -1
"""The version of an engine that has not had any weights of the run yet, or of no engine at all."""


def check_request(sampling: SamplingParams, deadline_s: float) -> None:
    """Raises EngineError for sampling settings that no engine supports, from any caller: otherwise
    a log-prob that is not a number could reach training."""
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
    """Raises EngineError for ids outside the model's vocabulary: in a step they would fail for all
    requests."""
    if min(ids) < 0 or max(ids) >= vocabulary:
        unknown = next(token for token in ids if not 0 <= token < vocabulary)
        raise EngineError(
            f"the request has token {unknown}, the model knows 0 to {vocabulary - 1}: "
            "use its own tokenizer"
        )


def check_score(
    context_ids: Sequence[int], ids: Sequence[int], temperature: float, deadline_s: float
) -> None:
    """Raises EngineError for tokens that no engine can score, from any caller."""
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


class TokenScores(NamedTuple):
    """The log-probs of given tokens under a policy."""

    logprobs: list[float]
    """Natural log-probs, one for each token. 0 is the highest, and none is infinite."""
    version: int
    """Of the weights that all of them come from."""

    @classmethod
    def of(cls, completion: Completion) -> TokenScores:
        """From an answer in the form of a completion."""
        return cls(completion.logprobs, completion.versions[0])

    def completion(self, ids: list[int]) -> Completion:
        """In the form of a completion, for the scored tokens."""
        versions = [self.version] * len(ids)
        return Completion(
            ids=ids, logprobs=self.logprobs, versions=versions, finish_reason="length"
        )


class Engine(Protocol):
    """An engine that generates tokens."""

    @property
    def version(self) -> int:
        """Version of the weights that new tokens come from, or NO_VERSION."""
        ...

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        session: str | None = None,
        deadline_s: float,
        listen: TokenListener | None = None,
    ) -> Completion:
        """Completes `prompt_ids`, the whole context.

        `session` names a conversation whose key-value cache is kept: the next call with the same
        name costs only its new tokens. Raises EngineError for what `check_request` refuses,
        GrammarError for a grammar that it can't compile, RequestTooLongError if the tokens can
        never fit, DeadlineExceededError after `deadline_s` seconds. Cancelling the await frees all
        that the request held.

        `listen` gets the completion's tokens as they are sampled, in order and each once, before
        the next step begins. The completion is authoritative: the tokens that `listen` got are a
        beginning of it, and an engine may call `listen` for none of them. A listener that raises
        ends this request alone, with ListenerError.
        """
        ...

    async def release(self, session: str) -> None:
        """Forgets a conversation; unknown names are fine."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters since the start: generated and computed tokens, prefix hits, queue lengths,
        memory. `engine/kv_capacity_tokens`, if present, is the most tokens whose keys and values
        are held at once."""
        ...


class UpdatableEngine(Engine, Protocol):
    """An engine whose weights the run replaces; it belongs to one event loop."""

    async def begin(
        self, version: int, weights: Weights | None = None, *, deadline_s: float = 60.0
    ) -> None:
        """Numbers the weights at the start of a run, fresh or resumed: from now on the weights that
        the engine holds are `version`, which may be lower than the one before. `weights` replaces
        them first; None means that they are right, or were changed in place. Cached keys and values
        are not used afterwards. Called while no request is running. Raises EngineError for
        `weights` that the engine can't take over."""
        ...

    def verify(self, weights: Weights) -> Weights:
        """The first phase of `publish`, for any thread, while requests run: checks everything and
        changes nothing. Returns the weights in the form in which `publish` takes them over at once.
        Raises EngineError for weights that the engine can't take over."""
        ...

    async def publish(
        self,
        version: int,
        weights: Weights | None = None,
        *,
        in_flight: InFlight = "finish",
        deadline_s: float = 60.0,
    ) -> None:
        """Serves newer weights from now on; verifies all of them before it changes any, unless they
        come from `verify`. None: they were changed in place. Weights that are not trained (the base
        under adapters) may be left out. A failure or cancellation leaves the old version serving.
        Raises EngineError, and DeadlineExceededError if requests do not end in time."""
        ...

    async def forget_cache(self) -> None:
        """Drops every cached key and value, so that later results do not depend on earlier
        requests. A conversation that continues keeps its recorded experts, if there are any."""
        ...

    def check(self) -> None:
        """Raises EngineError when the engine can only fail, so that its requests should go to
        another one."""
        ...

    async def close(self) -> None:
        """Releases all resources. No method is called afterwards."""
        ...


@runtime_checkable
class EmbeddedEngine(Protocol):
    """An engine that computes with a model in this process: the trainer's own, or a copy of it."""

    @property
    def model(self) -> PreTrainedModel: ...


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that can release its memory for a while."""

    @property
    def asleep(self) -> bool: ...

    @property
    def slept_s(self) -> float:
        """Seconds asleep so far, including those of a sleep under way. They count towards no
        request's deadline."""
        ...

    async def sleep(self, *, in_flight: InFlight, deadline_s: float) -> None:
        """Computes nothing from now on and releases the key-value memory, until `wake`.
        `in_flight`: running requests end first, or are queued again with what they have completed.
        New requests wait. Weights may be published. If requests do not end in time, raises
        DeadlineExceededError and stays awake as before."""
        ...

    async def wake(self) -> None:
        """Resumes; an engine that is awake ignores it."""
        ...


@runtime_checkable
class ScoringEngine(Protocol):
    """An engine that scores tokens that it did not sample."""

    async def score(
        self,
        context_ids: list[int],
        ids: list[int],
        *,
        temperature: float = 1.0,
        deadline_s: float,
    ) -> TokenScores:
        """The log-prob of each of `ids` after `context_ids` and those before it, under the newest
        weights at this temperature, without filters. Raises EngineError for tokens that can't be
        scored, RequestTooLongError for tokens that can never fit, DeadlineExceededError after
        `deadline_s` seconds. Cancelling the await frees all that the request held."""
        ...


@runtime_checkable
class VersionedEngine(Protocol):
    """An engine that can keep earlier weights for requests that ask for them."""

    def keep(self, count: int) -> None:
        """Keeps a copy of the current trained weights, which serves alongside newer weights until
        `count` publishes from now; older copies are dropped."""
        ...

    def serving(self, version: int) -> Engine:
        """This engine for requests that are all sampled from that version, or from the next one
        that still exists."""
        ...


class EngineFactory(Protocol):
    """Makes the engine that `engine.type` names."""

    def __call__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, section: EngineSection
    ) -> UpdatableEngine:
        """`model` is what the engine computes with if it is an EmbeddedEngine; to others it says
        names, shapes and where its files are (`model.name_or_path`), and the weights come with
        `begin`. Raises ConfigError for keys of `section` that it does not support. The first line
        of its docstring is what `agentevo list engines` shows."""
        ...
