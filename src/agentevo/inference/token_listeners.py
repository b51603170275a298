"""Passing a request's tokens to its listener (engine.TokenListener).

Invariant: the tokens that the listener has received are a prefix of the completion, and after
`finish` the whole completion. A request that begins again, because its engine has died, is sampled
again with the same seed. The new tokens are then compared with those that the listener has, and are
not passed again. If they differ (under newer weights, or on hardware with other rounding), the
request ends. Log-probs are passed once and not compared. The log-probs of the completion are
authoritative.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentevo.errors import ListenerError, StreamDivergedError, describe_error
from agentevo.inference.engine import TokenListener
from agentevo.types import Completion


def tell(listen: TokenListener, ids: Sequence[int], logprobs: Sequence[float]) -> None:
    """Passes tokens to the listener. Raises ListenerError for any exception of the listener."""
    try:
        listen(ids, logprobs)
    except ListenerError:
        raise
    except (Exception, asyncio.CancelledError) as error:
        raise ListenerError(
            f"the listener of a request's tokens raised {describe_error(error)}"
        ) from error


class StreamedTokens:
    """The tokens that the listener of one request has received. See the module."""

    def __init__(self, listen: TokenListener) -> None:
        self._listen = listen
        self._ids: list[int] = []
        self._place = 0
        """The number of tokens that were sampled since the request last began."""

    def begin(self) -> None:
        """Call this when an engine begins to sample the request from its first token."""
        self._place = 0

    def add(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Passes on the next tokens that the engine has sampled. Raises ListenerError, and
        StreamDivergedError if the listener has received different tokens."""
        streamed_ids = self._ids[self._place : self._place + len(ids)]
        for place, (streamed, drawn) in enumerate(
            zip(streamed_ids, ids, strict=False), start=self._place
        ):
            if streamed != drawn:
                raise StreamDivergedError(
                    f"token {place} was streamed as {streamed} by one engine and sampled as "
                    f"{drawn} by the next, which has newer weights or rounds differently: ask "
                    "again"
                )

        self._place += len(ids)
        if len(ids) > len(streamed_ids):
            new = list(ids[len(streamed_ids) :])
            self._ids += new
            tell(self._listen, new, list(logprobs[len(streamed_ids) :]))

    def finish(self, completion: Completion) -> None:
        """Passes on the missing tokens of the request's completion. Raises the errors of `add`."""
        self.begin()
        self.add(completion.ids, completion.logprobs)
        if len(self._ids) > len(completion.ids):
            raise StreamDivergedError(
                f"{len(self._ids)} tokens were streamed and the completion has "
                f"{len(completion.ids)}: another engine sampled it with newer weights: ask again"
            )
