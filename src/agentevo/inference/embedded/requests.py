"""A request to the embedded engine, from the queue to its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from agentevo.errors import GrammarError, ListenerError
from agentevo.inference.engine import TokenListener
from agentevo.inference.token_listeners import tell
from agentevo.models.grammar import GrammarState
from agentevo.types import Alternatives, Completion, FinishReason, SamplingParams
from agentevo.types.penalties import PenaltyState
from agentevo.types.routed_experts import RoutedExperts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agentevo.inference.embedded.routing import TokenRows
    from agentevo.models.vision.processor import ProcessedImage


@dataclass(eq=False)
class EngineRequest:
    """One call of `generate`, or (future None) the computation of a shared prefix."""

    ids: list[int]
    """The prompt. After an interruption, also the tokens completed so far. The feature tokens of
    images are keys (images.py)."""
    params: SamplingParams
    future: asyncio.Future[Completion] | None
    session: str | None = None
    version: int | None = None
    """The version of the weights that it asks for. None: always the newest."""
    listen: TokenListener | None = None
    grammar: GrammarState | None = None
    """Decides which tokens may come next."""
    penalties: PenaltyState | None = None
    scored: list[int] | None = None
    """Given tokens whose log-probs are requested. `ids` ends with all of them but the last. No
    token is sampled."""
    is_begun: bool = False
    """Whether it has run before."""
    completion: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[Alternatives] = field(default_factory=list)
    drawn_rows: np.ndarray | None = None
    """The routed experts behind the sampled tokens (routing.drawn_rows), after an interruption and
    if the engine records them."""
    known_rows: TokenRows | None = None
    """The experts that were chosen for a prefix of `ids` in an earlier computation
    (RoutingMemory.known)."""
    images: Mapping[str, ProcessedImage] = field(default_factory=dict)
    """The images of the prompt, by digest. Others may be in it."""
    positions: np.ndarray | None = None
    """[A, prompt + 1] int64: the positions of the prompt's tokens and of the token after them, if
    the model can be shown images and they have been needed."""

    def __post_init__(self) -> None:
        self.max_tokens = len(self.ids) + (
            self.params.max_new_tokens if self.future is not None else 0
        )
        self.rng = np.random.Generator(np.random.Philox(key=self.params.seed & (2**64 - 1)))
        self.stop_ids = frozenset(self.params.stop_token_ids)

    @property
    def num_context(self) -> int:
        """The number of tokens at the beginning whose keys and values may come from a cache. The
        other tokens must be computed, because they predict the scored tokens."""
        return len(self.ids) if self.scored is None else len(self.ids) - len(self.scored) + 1

    def to_completion(
        self, reason: FinishReason, routed: RoutedExperts | None = None
    ) -> Completion:
        """The sampled tokens in the form of the answer."""
        return Completion(
            ids=self.completion,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=reason,
            masks="" if self.grammar is None else self.grammar.digest(),
            top_logprobs=self.top_logprobs,
            routed_experts=routed,
        )

    def restart_from(
        self, ids: list[int], rows: np.ndarray | None, known_rows: TokenRows | None
    ) -> None:
        """Starts the request again from `ids`, under the same or other weights. Sampled tokens
        stay, with their `rows`. Given tokens are scored again from the start, so that all scores
        come from the same weights."""
        self.is_begun = True
        self.ids = ids
        self.drawn_rows = rows
        self.known_rows = known_rows
        if self.scored is not None:
            self.logprobs = []
            self.versions = []

    def add_token(self, token: int, logprob: float) -> None:
        """Passes the newest token to penalties, grammar and listener. If one of them raises an
        error, only this request ends."""
        if self.penalties is not None:
            self.penalties.take(token)
        if self.future is None or self.future.done():
            return

        try:
            if self.grammar is not None:
                self.grammar.take(token)
            if self.listen is not None:
                tell(self.listen, [token], [logprob])
        except (GrammarError, ListenerError) as error:
            self.future.set_exception(error)

    def allowed_tokens(self) -> np.ndarray | None:
        """The tokens that may come next, as in `sampling.keep_allowed`. A grammar that can't
        continue ends only this request."""
        if self.grammar is None or self.future is None or self.future.done():
            return None
        try:
            return self.grammar.mask()
        except GrammarError as error:
            self.future.set_exception(error)
            return None

    def finish_reason(self, tokenizer: PreTrainedTokenizerBase | None) -> FinishReason | None:
        """The finish reason after the newest token. None if the request continues."""
        if self.completion[-1] in self.stop_ids:
            return "stop"
        if tokenizer is not None and completes_stop_string(
            tokenizer, self.completion, self.params.stop_strings
        ):
            return "stop"
        return "length" if len(self.completion) >= self.params.max_new_tokens else None

    @property
    def abandoned(self) -> bool:
        return self.future is not None and self.future.done()


def completes_stop_string(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stop_strings: Sequence[str]
) -> bool:
    """Whether the last tokens of a completion contain one of the strings. Earlier tokens were
    checked before."""
    if not stop_strings:
        return False
    # A token may be a single byte. A client may send half of a surrogate pair.
    longest = max(len(text.encode("utf-8", "surrogatepass")) for text in stop_strings)
    tail = tokenizer.decode(list(ids[-longest - 4 :]), skip_special_tokens=False)
    return any(text in tail for text in stop_strings)
