"""Compiles an engine's grammars outside its event loop, so that other requests do not wait for a
large grammar."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from agentevo.errors import DeadlineExceededError, GrammarError, MissingExtraError, ModelError
from agentevo.models.grammar import Grammars, GrammarState
from agentevo.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COMPILER = ThreadPoolExecutor(1, thread_name_prefix="agentevo-grammars")
"""Compiles one grammar at a time, so that many grammars use only one core."""


class EngineGrammars:
    """The grammars of one engine's requests. The grammar package is loaded with the first request
    that needs it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._grammars: Grammars | None = None

    async def begin(self, sampling: SamplingParams, deadline_s: float) -> GrammarState | None:
        """The grammar of a request, in the state before its first token. None for a request without
        a grammar. Raises GrammarError if the grammar is invalid, DeadlineExceededError if it is not
        compiled in time."""
        if not sampling.grammar:
            return None

        key = (sampling.grammar, sampling.stop_token_ids)
        if self._grammars is not None and self._grammars.is_ready(*key):
            return self._grammars.begin(
                *key
            )  # no await: the order of events decides which requests share a step

        compiling = asyncio.get_running_loop().run_in_executor(_COMPILER, self._begin, *key)
        try:
            async with asyncio.timeout(deadline_s):
                return await compiling
        except TimeoutError:
            raise DeadlineExceededError(
                f"the grammar was not compiled within {deadline_s:g} s: give a smaller one"
            ) from None
        except (MissingExtraError, ModelError) as error:
            raise GrammarError(str(error)) from error

    def _begin(self, grammar: str, end_ids: tuple[int, ...]) -> GrammarState:
        if self._tokenizer is None:
            raise GrammarError("a grammar needs a tokenizer: build the engine with one")
        if self._grammars is None:
            self._grammars = Grammars(self._tokenizer, self._vocabulary)
        return self._grammars.begin(grammar, end_ids)
