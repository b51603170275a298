"""OpenAI's legacy completions: https://platform.openai.com/docs/api-reference/completions, with
vLLM's `return_token_ids`. Prompts are texts and token ids as they are, without the chat template,
and an answer is its text as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from agentevo.agents.gateway import chat_completions, fields
from agentevo.agents.gateway.api import Api, Event
from agentevo.agents.gateway.chat_completions import encode_event, error, head, usage
from agentevo.agents.gateway.images import RequestImages
from agentevo.agents.gateway.memory import Memory
from agentevo.agents.gateway.refusals import Refusal
from agentevo.agents.gateway.request import ModelReply, ModelRequest, PromptSize
from agentevo.errors import BadRequestError, shown
from agentevo.models.chat.text_stream import UNDECODED
from agentevo.models.chat.token_texts import TokenText
from agentevo.models.tool_calls import ContentDelta, Delta

MAX_PROMPTS = 256
"""The number of prompts of one request."""
_KNOWN = fields.SAMPLING_KEYS | fields.keys_of(
    "prompt n best_of echo suffix logprobs stream_options max_tokens return_token_ids user"
)


def request_of(body: Mapping[str, Any], memory: Memory, images: RequestImages) -> ModelRequest:
    """See Api. Keeps nothing, and a plain prompt has no images."""
    fields.check_known(body, _KNOWN, "completion")
    fields.no_other_service(body)
    n = fields.whole_number(body, "n", 1)
    if body.get("suffix"):
        raise Refusal("suffix is not supported: the policy only continues its prompt")
    if fields.whole_number(body, "best_of", n) != n:
        raise Refusal("best_of is not supported: leave it out, and choose among n yourself")

    logprobs = fields.top_logprobs_of(body, "logprobs", -1)
    echo = fields.boolean(body, "echo")
    prompt_logprobs = logprobs >= 0 and echo
    if prompt_logprobs and (logprobs > 1 or fields.boolean(body, "stream")):
        raise Refusal(
            "logprobs with echo gives the log-probs of the prompt's own tokens, in one answer: "
            "set logprobs to 0 or 1, and stream to false"
        )

    samples = not prompt_logprobs or fields.whole_number(body, "max_tokens", -1) != 0
    sampled_body = body if samples else {**body, "max_tokens": None}
    prompt, *more_prompts = prompts_of(body.get("prompt"))
    return ModelRequest(
        prompt=prompt,
        more_prompts=tuple(more_prompts),
        is_plain=True,
        echo=echo,
        prompt_logprobs=prompt_logprobs,
        samples=samples,
        overrides=fields.sampling_of(sampled_body, max_tokens=("max_tokens",), stop="stop"),
        logprobs=logprobs >= 0,
        top_logprobs=max(logprobs, 0),
        **fields.of_completions(body),
    )


def prompts_of(value: Any) -> list[str | list[int]]:
    """A text, several, a prompt's token ids, or those of several prompts."""
    if isinstance(value, str):
        return [value]

    if isinstance(value, list) and value:
        if all(map(_is_id, value)):
            return [value]
        if len(value) > MAX_PROMPTS:
            raise Refusal(f"{len(value)} prompts in one request: send at most {MAX_PROMPTS}")

        if all(isinstance(prompt, str) for prompt in value) or all(
            isinstance(prompt, list) and prompt and all(map(_is_id, prompt)) for prompt in value
        ):
            return value

    raise BadRequestError(
        f"prompt is {shown(value)}: give a text, a list of texts, token ids, or a list of lists of "
        "token ids, none of them empty"
    )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def answer(request: ModelRequest, replies: Sequence[ModelReply]) -> dict[str, Any]:
    choices = [
        _choice(request, number, reply.content, reply) for number, reply in enumerate(replies)
    ]
    return {**_head(request), "choices": choices, "usage": usage(replies)}


class CompletionStream(chat_completions.ChatCompletionStream):
    """See api.AnswerStream. The last event is "[DONE]"."""

    def __init__(self, request: ModelRequest) -> None:
        super().__init__(request)
        self._head = _head(request)

    def begin(self, prompt: PromptSize) -> list[Event]:
        return []

    def pieces(self, number: int, pieces: Sequence[Delta]) -> list[Event]:
        """The event for a completion's next pieces."""
        return [
            {**self._head, "choices": [_choice(self._request, number, piece.text)]}
            for piece in pieces
            if isinstance(piece, ContentDelta)
        ]

    def _last(self, number: int, reply: ModelReply) -> Event:
        return {**self._head, "choices": [_choice(self._request, number, "", reply)]}


def _head(request: ModelRequest) -> dict[str, Any]:
    return head(request, "cmpl", "text_completion")


def _choice(
    request: ModelRequest, number: int, text: str, reply: ModelReply | None = None
) -> dict[str, Any]:
    """`reply`: the whole answer, if this is its end."""
    choice: dict[str, Any] = {
        "index": number,
        "text": text,
        "logprobs": None,
        "finish_reason": None if reply is None else reply.finish_reason,
    }
    if reply is not None and request.logprobs:
        choice["logprobs"] = _logprobs(request, reply)

    if reply is not None and request.token_ids:
        choice |= {
            "token_ids": list(reply.turn.completion_ids),
            "versions": list(reply.turn.versions),
            "prompt_token_ids": reply.prompt_ids,
        }

    return choice


def _logprobs(request: ModelRequest, reply: ModelReply) -> dict[str, Any]:
    """The log-probs of all sampled tokens, after those of the prompt if the request asks for them,
    in this API's columns; offsets count characters of these tokens. The sampled token is always
    among the likeliest, as the API defines it. A token of the prompt is alone there."""
    tokens = [*reply.prompt_tokens, *(drawn.token for drawn in reply.tokens)]
    names = list(map(_name, tokens))
    first: list[None] = [None] if reply.prompt_tokens else []  # nothing predicts it
    top: list[dict[str, float] | None] = [
        *first,
        *({name: logprob} for name, logprob in zip(names[1:], reply.prompt_logprobs, strict=False)),
    ]
    for drawn in reply.tokens:
        likeliest: dict[str, float] = {}
        for candidate in (*drawn.alternatives, drawn):  # of two with one name the likelier
            likeliest.setdefault(_name(candidate.token), candidate.logprob)
        top.append(likeliest)

    sampled = [drawn.logprob for drawn in reply.tokens]
    return {
        "tokens": names,
        "token_logprobs": [*first, *reply.prompt_logprobs, *sampled],
        "top_logprobs": top if request.top_logprobs else None,
        "text_offset": list(accumulate((len(token.text) for token in tokens[:-1]), initial=0)),
    }


def _name(token: TokenText) -> str:
    """A part of a character by its bytes, as the API has it."""
    text, octets = token
    return "bytes:" + "".join(f"\\x{octet:02x}" for octet in octets) if UNDECODED in text else text


API = Api(
    path="/completions",
    request_of=request_of,
    answer=answer,
    stream=CompletionStream,
    error=error,
    encode=encode_event,
)
