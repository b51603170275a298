"""The content of a request to the gateway and of its answer, whichever API it came through."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from agentevo.inference.conversations.conversation import Conversation
from agentevo.models.chat.answer_form import AnswerForm
from agentevo.models.chat.token_texts import TokenText
from agentevo.runtime.trace_header import HEADER
from agentevo.store.trace_context import Asker, TracePlace
from agentevo.types import Message, SamplingOverrides, ToolCall, Turn
from agentevo.types.images import ImageFile

EFFORT = "reasoning_effort"
Prompt = list[Message] | list[int] | str
"""A whole history, token ids, or a text without a chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    prompt: Prompt
    more_prompts: tuple[str | list[int], ...] = ()
    """Further prompts, each with `n` completions. Completions are numbered across all prompts."""
    is_plain: bool = False
    """Whether an answer is its plain text: tool calls and thoughts are not parsed."""
    echo: bool = False
    """Whether an answer begins with its prompt."""
    prompt_logprobs: bool = False
    """Whether an answer has the log-probs of its prompt's tokens."""
    samples: bool = True
    """Whether tokens are sampled. If not, an answer is about its prompt alone."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas in the form of OpenAI's chat API."""
    form: AnswerForm | None = None
    """The required form of the answer; None for any text."""
    overrides: SamplingOverrides | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    """Values of the chat template's variables."""
    effort: str | None = None
    """The value of the template's variable `reasoning_effort`, if it has one."""
    n: int = 1
    """How many completions of each prompt."""
    model: str
    """The model name that the client sent."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with a count of its tokens."""
    logprobs: bool = False
    top_logprobs: int = 0
    """How many of the likeliest tokens are listed with each sampled one."""
    token_ids: bool = False
    """Whether the answer holds token ids and versions of the weights."""
    images: tuple[ImageFile, ...] = ()
    """The images of the prompt, each once."""

    @property
    def may_call(self) -> bool:
        """Whether tool calls are parsed from an answer."""
        return bool(self.tools) and (self.form is None or self.form.calls != "none")

    def template_values(self, variables: Container[str]) -> dict[str, Any]:
        """The values for a template that reads these variables."""
        has_effort = self.effort is not None and EFFORT in variables
        return {**({EFFORT: self.effort} if has_effort else {}), **self.template}

    @property
    def has_messages(self) -> bool:
        """Whether the request is a chat."""
        return not isinstance(self.prompt, str) and not isinstance(self.prompt[0], int)


@dataclass(frozen=True, slots=True)
class PromptSize:
    """The size of a request, known before its first token is sampled."""

    num_tokens: int = 0
    """The tokens of the whole context. This number and the next are sums if there are several
    prompts."""
    num_cached: int = 0
    """How many of them the conversation already had."""


@dataclass(slots=True)
class Delivery:
    """The recorded turns of a request, until its client has them."""

    conversation: Conversation | None = None
    turns: list[int] = field(default_factory=list)
    remote_turns: list[int] = field(default_factory=list)
    prompt: PromptSize = field(default_factory=PromptSize)
    """Known before the first piece of an answer arrives."""
    place: TracePlace | None = None
    """The place in a trace, as the request named it."""
    asker: Asker | None = None
    """The calling agent, once the request has reached the attempt."""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of this answer, in addition to those of every answer."""
        answer_header = None if self.asker is None else self.asker.answer
        return {} if answer_header is None else {HEADER: answer_header}


class TokenLogprob(NamedTuple):
    """A sampled token, or an alternative."""

    token: TokenText
    logprob: float
    alternatives: list[TokenLogprob]
    """The likeliest tokens in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """One completion, with its text parsed."""

    turn: Turn
    """The turn of a remote model has no token ids."""
    content: str
    """The text without tool calls and reasoning."""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    """Each has an id that the gateway made."""
    prompt: PromptSize
    num_completion_tokens: int
    prompt_ids: list[int]
    """The whole context before the completion; empty unless the request asks for token ids."""
    stop_string: str | None = None
    """The stop string of the request that ended the completion."""
    tokens: list[TokenLogprob]
    """The log-probs of the completion's tokens, if the request asks for them."""
    prompt_tokens: Sequence[TokenText] = ()
    """The tokens of the prompt, if the request asks for their log-probs."""
    prompt_logprobs: Sequence[float] = ()
    """The log-probs of these tokens at temperature 1, except the first, which nothing predicts."""

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """`length` also if the limit cut off a turn with tool calls."""
        if self.turn.finish_reason == "stop" and self.tool_calls:
            return "tool_calls"
        return self.turn.finish_reason
