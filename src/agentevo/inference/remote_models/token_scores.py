"""Log-probs of given tokens by OpenAI's completions: a prompt of token ids with `echo` and
`logprobs`. vLLM and SGLang compute them, and so do providers that still have this endpoint:
https://platform.openai.com/docs/api-reference/completions.

The server is asked for one new token, because some refuse to make none. It is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from agentevo.inference.remote_models import openai_chat
from agentevo.inference.remote_models.wire import BadAnswerError, RemoteReply, Wire
from agentevo.types import Message

ROUNDING = 0.01
"""How far a server's rounding may lift a log-prob above 0, in nats."""
_SMALLEST = float(np.finfo(np.float32).min)
"""The smallest log-prob that a turn can hold."""


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


def wire_of(num_tokens: int) -> Wire:
    """The API for one request about a prompt of `num_tokens` tokens."""
    return replace(
        openai_chat.WIRE,
        path=lambda url: f"{url}/completions",
        reply=partial(scores_of, num_tokens=num_tokens),
    )


def scores_of(answer: Mapping[str, Any], *, num_tokens: int) -> RemoteReply:
    """See Wire.reply. The reply has the log-probs of every token of the prompt but the first, which
    nothing predicts."""
    try:
        logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
        num_logprobs = len(logprobs)
        if num_logprobs not in (num_tokens, num_tokens + 1):  # with the new token or without it
            raise BadAnswerError(
                f"{num_logprobs} log-probs for {num_tokens} tokens: its server must accept prompts "
                "of token ids, with echo"
            )
        usage = openai_chat.usage_of(answer.get("usage"))
        if usage is not None and usage.prompt_tokens != num_tokens:  # it has added a first token
            raise BadAnswerError(
                f"its server counts {usage.prompt_tokens} tokens in a prompt of {num_tokens}: it "
                "must add none to prompts of token ids"
            )
        return RemoteReply(
            message=Message("assistant", ""),
            finish_reason="stop",
            usage=usage,
            logprobs=check_scores(logprobs[1:num_tokens]),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswerError(
            f"no log-probs of the prompt's tokens ({type(error).__name__}: {error})"
        ) from error


def check_scores(logprobs: Sequence[Any]) -> list[float]:
    """The log-probs, none above 0. Raises BadAnswerError for what is no log-prob, such as a
    probability, and for one that no float32 can hold."""
    for logprob in logprobs:
        is_number = isinstance(logprob, int | float) and not isinstance(logprob, bool)
        if not is_number or not _SMALLEST <= logprob <= ROUNDING:
            raise BadAnswerError(
                f"no log-probs of the prompt's tokens: {str(logprob)[:40]} is none (a log-prob is "
                "a finite number, and not above 0)"
            )
    return [min(float(logprob), 0.0) for logprob in logprobs]
