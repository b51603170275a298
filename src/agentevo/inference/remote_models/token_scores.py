"""Log-probs of given tokens by OpenAI's completions: a prompt of token ids with `echo` and
`logprobs`. vLLM and SGLang compute them, and so do providers that still have this endpoint:
https://platform.openai.com/docs/api-reference/completions.

The server is asked for one new token, because some refuse to make none. It is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentevo.inference.remote_models import openai_chat
from agentevo.inference.remote_models.wire import BadAnswerError, RemoteReply
from agentevo.types import Message


def score_body(model: str, context_ids: Sequence[int], ids: Sequence[int]) -> dict[str, Any]:
    """The body of a request for the log-probs of `ids` after `context_ids`."""
    return {
        "model": model,
        "prompt": [*context_ids, *ids],
        "echo": True,
        "logprobs": 1,
        "max_tokens": 1,
        "temperature": 1.0,
    }


def scores_of(answer: Mapping[str, Any]) -> RemoteReply:
    """See Wire.reply. The reply has the log-probs of every token but the first, which nothing
    predicts."""
    try:
        logprobs = answer["choices"][0]["logprobs"]["token_logprobs"][1:]
        if not all(map(math.isfinite, logprobs)):
            raise ValueError("a log-prob is not finite")
        return RemoteReply(
            message=Message("assistant", ""),
            finish_reason="stop",
            usage=openai_chat.usage_of(answer.get("usage")),
            logprobs=[min(float(logprob), 0.0) for logprob in logprobs],
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswerError(
            f"no log-probs of the prompt's tokens ({type(error).__name__}: {error})"
        ) from error


def scores_at_end(
    logprobs: Sequence[float], context_ids: Sequence[int], ids: Sequence[int]
) -> list[float]:
    """The log-probs of `ids`, from those of all tokens but the first: [C + N - 1], or one more for
    the new token -> [N]. Raises BadAnswerError for another number."""
    first = len(context_ids) - 1
    end = first + len(ids)
    if len(logprobs) not in (end, end + 1):
        raise BadAnswerError(
            f"{len(logprobs) + 1} log-probs for {end + 1} tokens: its server must accept prompts "
            "of token ids, with echo"
        )
    return list(logprobs[first:end])


WIRE = replace(openai_chat.WIRE, path=lambda url: f"{url}/completions", reply=scores_of)
