"""Computes which tokens a grammar allows next, for constrained decoding. It computes the same masks
again for training on the sampled tokens and for checking them. llguidance implements the grammars
(`agentevo[constrained]`).

A mask has one bit for each token of the vocabulary, lowest bit first, in W uint32. It depends only
on the grammar, the tokens that may end its texts, the preceding tokens and the tokenizer, so masks
are never recorded. A turn records its grammar and a digest of its masks. The digest shows whether
recomputed masks are the same.

A grammar may come from any client. Its length, the work to compile it and the work for each mask
are bounded; a grammar that exceeds a limit raises GrammarError, and only its own request fails.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from agentevo.errors import GrammarError, ModelError
from agentevo.runtime.extras import load_extra
from agentevo.types import Constraint, TokenMasks

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

KEPT_GRAMMARS = 64
"""The number of compiled grammars that are cached."""
_LIMITS = {
    "max_grammar_size": 20_000,
    "initial_lexer_fuel": 1_000_000,
    "max_lexer_states": 20_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_items_in_row": 2_000,
}
"""The limits, in llguidance's units of work. They allow about a second for a compilation, and about
10 ms for a mask, which usually takes 0.1 ms."""


class Grammars:
    """The grammars over one model's tokens. Several threads may use it. `vocabulary`: the number of
    the model's logits."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._tokens: dict[tuple[int, ...], LLTokenizer] = {}
        """The tokens that end a text -> llguidance's tokenizer."""
        self._compiled: OrderedDict[tuple[str, tuple[int, ...]], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Grammars:
        """The grammars of a model's tokens."""
        return cls(tokenizer, int(model.config.get_text_config().vocab_size))

    @property
    def num_words(self) -> int:
        """Number of uint32 words of a mask."""
        return -(-self._vocabulary // 32)

    def is_ready(self, grammar: str, end_ids: Sequence[int]) -> bool:
        """Whether `begin` needs no compilation."""
        return (grammar, tuple(end_ids)) in self._compiled

    def begin(self, grammar: str, end_ids: Sequence[int]) -> GrammarState:
        """The state before the first token. The first call compiles the grammar, which may take
        long. Raises GrammarError if the grammar is invalid or exceeds a limit, and
        MissingExtraError if llguidance is not installed."""
        key = (grammar, tuple(end_ids))
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is not None:
                self._compiled.move_to_end(key)

        if matcher is None:
            matcher = self._compile(*key)
            with self._lock:
                self._compiled[key] = matcher
                while len(self._compiled) > KEPT_GRAMMARS:
                    self._compiled.popitem(last=False)

        return GrammarState(matcher.deep_copy(), self.num_words)

    def masks_of(self, constraint: Constraint, ids: Sequence[int]) -> TokenMasks:
        """The masks that a recorded completion was sampled under. Raises GrammarError if their
        digest differs from the recorded one, because this process has another version of llguidance
        or another tokenizer."""
        state = self.begin(constraint.grammar, constraint.end_ids)
        table: dict[bytes, int] = {}
        rows = np.empty(len(ids), dtype=np.int32)
        for place, token in enumerate(ids):
            rows[place] = table.setdefault(state.mask().tobytes(), len(table))
            state.take(token)

        if state.digest() != constraint.masks:
            raise GrammarError(
                "the grammar allows other tokens here than when the turn was sampled: install "
                "the same version of llguidance on both sides"
            )

        return TokenMasks([np.frombuffer(mask, dtype=np.uint32) for mask in table], rows)

    def _compile(self, grammar: str, end_ids: tuple[int, ...]) -> LLMatcher:
        llguidance = _library("llguidance")
        matcher: LLMatcher = llguidance.LLMatcher(
            self._tokens_ending_in(end_ids),
            grammar,
            log_level=0,
            limits=llguidance.LLParserLimits(**_LIMITS, verbose_errors=False),
        )
        if matcher.is_error():
            raise GrammarError(f"the grammar or schema can't be followed: {_problem(matcher)}")

        return matcher

    def _tokens_ending_in(self, end_ids: tuple[int, ...]) -> LLTokenizer:
        with self._lock:
            tokens = self._tokens.get(end_ids)
            if tokens is None:
                tokens = self._read_tokens(end_ids)
                self._tokens[end_ids] = tokens
        return tokens

    def _read_tokens(self, end_ids: tuple[int, ...]) -> LLTokenizer:
        ends = list(end_ids)
        try:
            tokens: LLTokenizer = _library("llguidance.hf").from_tokenizer(
                self._tokenizer, n_vocab=self._vocabulary, eos_token=ends
            )
        except ValueError:  # llguidance does not know the decoder
            plain = _library("llguidance").TokenizerWrapper(_PlainTokens(self._tokenizer, ends[0]))
            tokens = _library("llguidance").LLTokenizer(
                plain, n_vocab=self._vocabulary, eos_token=ends
            )

        return tokens


class _PlainTokens:
    """A tokenizer in the form that llguidance reads, for vocabularies whose tokens are whole
    texts."""

    bos_token_id = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_id: int) -> None:
        """Raises ModelError if tokens are parts of characters."""
        self.eos_token_id = eos_token_id
        self._tokenizer = tokenizer

        texts = [str(tokenizer.decode([token])) for token in range(len(tokenizer))]
        if any("�" in text for text in texts):
            raise ModelError(
                "llguidance can't read this tokenizer: leave out response_format and tool_choice"
            )

        self.tokens = [text.encode() for text in texts]
        self.special_token_ids = list(tokenizer.all_special_ids)

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text if isinstance(text, str) else text.decode(errors="replace")
        ids: list[int] = self._tokenizer.encode(plain, add_special_tokens=False)
        return ids


class GrammarState:
    """The state of one completion within a grammar."""

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._digest = hashlib.blake2b(digest_size=16)

    def mask(self) -> np.ndarray:
        """[W] uint32: the tokens that may come next. At least one is allowed. Raises
        GrammarError."""
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise self._broken()

        mask = np.frombuffer(bits, dtype=np.uint32)[
            : self._num_words
        ]  # bits may have one word more
        if len(mask) < self._num_words or not mask.any():
            raise GrammarError("the grammar allows no token of this model here")

        self._digest.update(mask.tobytes())
        return mask

    def take(self, token: int) -> None:
        """Adds the next token. Raises GrammarError if the mask does not allow the token, or if the
        grammar exceeds a limit afterwards."""
        if not self._matcher.consume_token(token):
            raise self._broken()

    def _broken(self) -> GrammarError:
        return GrammarError(
            f"the grammar or schema allows no continuation here: {_problem(self._matcher)}"
        )

    def digest(self) -> str:
        """The digest of all masks so far; see Constraint.masks."""
        return self._digest.hexdigest()


def unpack_mask(mask: np.ndarray, vocabulary: int) -> np.ndarray:
    """[vocabulary] bool from [W] uint32."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocabulary]
    if len(bits) < vocabulary:
        bits = np.pad(bits, (0, vocabulary - len(bits)))
    return bits.astype(np.bool_)


def _library(module: str) -> Any:
    return load_extra(module, "constrained", "an answer in a given form")


def _problem(matcher: LLMatcher) -> str:
    return matcher.get_error().removesuffix("<non-verbose/>").strip()[:500]
