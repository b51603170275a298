"""Grammars at an engine: compiled outside its event loop, so that other requests do not wait for a
large one."""

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
"""Compiles grammars one after the other, so that many of them use only one core."""


class EngineGrammars:
    """The grammars of one engine's requests. Nothing is loaded before the first of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._grammars: Grammars | None = None

    async def begin(self, sampling: SamplingParams, deadline_s: float) -> GrammarState | None:
        """The grammar of a request before its first token; None for a request without one. Raises
        GrammarError for an invalid grammar, DeadlineExceededError for one that is not
        compiled in time."""
        if not sampling.grammar:
            return None

        key = (sampling.grammar, sampling.stop_token_ids)
        if self._grammars is not None and self._grammars.is_ready(*key):
            return self._grammars.begin(
                *key
            )  # at once: the order of events decides which requests share a step

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
