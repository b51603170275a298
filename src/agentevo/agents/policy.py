"""The policy as an agent sees it: a history goes in and a reply comes out. Every token is recorded
exactly as the engine sampled it (inference/conversations/conversation.py). One `Policy` serves one
attempt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, Unpack, cast, overload

import msgspec

from agentevo.agents.named_texts import Texts
from agentevo.agents.posted_rewards import PostedReward
from agentevo.data.message_images import ImageCollector
from agentevo.data.messages import messages_of, tools_of
from agentevo.errors import BadRequestError, UnknownNameError, shown
from agentevo.inference.remote_models.conversations import RemoteConversations
from agentevo.models.chat.answer_form import AnswerForm
from agentevo.models.tool_calls.parser import THOUGHTS
from agentevo.store.call_log import Attribute, RunningCall
from agentevo.store.files import check_files
from agentevo.types import (
    LARGEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    MAX_STOP_STRING,
    MAX_STOP_STRINGS,
    ImagePart,
    Message,
    SamplingOverrides,
    Turn,
)
from agentevo.types.copies import copy_of_turn
from agentevo.types.images import ImageFile

if TYPE_CHECKING:
    from agentevo.inference.conversations.conversation import Conversation

_LARGEST = {"temperature": LARGEST_TEMPERATURE, "top_k": 2**31 - 1, "seed": 2**63 - 1}

Messages = Sequence[Message | Mapping[str, Any]]
Prompt = Messages | Sequence[int]
"""A complete history as messages or as mappings in OpenAI's format (data/messages.py), or token
ids."""


class CallOptions(TypedDict, total=False):
    """The options of Policy.generate, which explains them."""

    tools: Sequence[Mapping[str, Any]] | None
    sampling: SamplingOverrides | Mapping[str, Any] | None
    stop: str | Sequence[str] | None
    form: AnswerForm | None


class RemoteCallOptions(CallOptions, total=False):
    """The options of RemoteHandle.generate."""

    tool_choice: str


@dataclass(frozen=True)
class Reply:
    text: str
    """The completion, without its end token."""
    complete: bool
    """False if the token limit cut the completion off."""
    turn: int
    """Index of the recorded turn."""
    message: Message
    """The reply as a message, to append to the history."""
    opening: str = ""
    """The start of the reply that the chat template wrote, such as "<think>\\n"; `text` continues
    it."""

    @property
    def answer(self) -> str:
        """The text after the reasoning block that the chat template opened, or an empty string if
        the block is not closed. Without such a block, the whole text."""
        end = next((end for begin, end in THOUGHTS.items() if begin in self.opening), None)
        if end is None:
            return self.text
        _, closed, answer = (self.opening + self.text).rpartition(end)
        return answer if closed else ""


class AttemptSession:
    """Access to the policy for an API client of one attempt."""

    def __init__(self, base: str, key: str) -> None:
        self.base = base
        """The common prefix of all URLs: the gateway's URL without a path."""
        self.key = key
        self.posted: list[PostedReward] = []
        """The rewards posted so far, in order."""

    @property
    def base_url(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.base}/v1"

    @property
    def reward_url(self) -> str:
        return f"{self.base}/s/{self.key}/reward"


class PolicyGateway(Protocol):
    """Opens sessions for clients of other APIs, such as OpenAI's (agents/gateway/gateway.py)."""

    def open(
        self,
        conversations: Mapping[str, Conversation],
        remote: RemoteConversations | None,
        remote_agents: Mapping[str, str],
    ) -> AttemptSession:
        """Opens a session. `conversations` has the conversation of each agent by name; a client
        chooses an agent through the model name of its request. `remote_agents` maps the other
        agents to the remote models that play them."""
        ...

    def end(self, session: Any) -> None: ...


class Policy:
    """The handle through which an agent queries the model. Calls can run concurrently. In a rollout
    of several agents, `policy["NAME"]` is the policy of the agent NAME."""

    def __init__(
        self,
        conversation: Conversation,
        gateway: PolicyGateway | None = None,
        remote: RemoteConversations | None = None,
        agents: Mapping[str, Conversation] = MappingProxyType({}),
        remote_agents: Mapping[str, str] = MappingProxyType({}),
        texts: Texts | None = None,
    ) -> None:
        """`texts` replace the agent's default texts. `remote` has the attempt's conversations with
        remote models, if the recipe names any. `agents` has the conversation of each of several
        agents by name. `conversation` then represents the whole attempt. `remote_agents` maps
        further agents to the remote models that play them."""
        self.conversation = conversation
        self.remote = remote
        self.texts = Texts() if texts is None else texts
        """The named texts of the attempt, shared by all its agents."""
        self._agents: dict[str, Policy | RemoteHandle] = {
            name: Policy(agent, gateway, texts=self.texts) for name, agent in agents.items()
        }
        self._remote_agents = remote_agents

        for name, model in remote_agents.items():
            self._agents[name] = self.model(model, name)

        self.files: dict[str, bytes] = {}
        """The files of the last `keep_files`, by path."""
        self._gateway = gateway
        self._session: AttemptSession | None = None
        self._has_replied = False
        self._waited_s = 0.0
        self._waits_since: float | None = None

    @property
    def session(self) -> AttemptSession:
        """The gateway session of this attempt, opened on first use."""
        if self._session is None:
            if self._gateway is None:
                raise BadRequestError("there is no gateway here for clients of other APIs")
            self._session = self._gateway.open(self.conversations, self.remote, self._remote_agents)
        return self._session

    def model(self, name: str, agent: str = "") -> RemoteHandle:
        """A remote model of the recipe: `await policy.model("teacher").generate(messages)`. Its
        replies are recorded and never trained on. `agent` names the agent that speaks through it,
        in an attempt of several agents. Raises UnknownNameError for an unknown model."""
        if self.remote is None:
            raise UnknownNameError(
                f"there is no remote model {shown(name)}: add it to the section remote_models"
            )
        self.remote.models[name]
        return RemoteHandle(self.remote, name, agent)

    @property
    def was_asked(self) -> bool:
        """Whether the policy or a remote model has replied."""
        has_turns = any(conversation.turns for conversation in self.conversations.values())
        return bool(has_turns or (self.remote and self.remote.turns))

    @property
    def posted(self) -> Sequence[PostedReward]:
        """The rewards posted to the gateway, in order."""
        return () if self._session is None else self._session.posted

    @property
    def received(self) -> dict[str, Sequence[int]]:
        """The indices of the received turns, in order, by agent."""
        return {name: conversation.received for name, conversation in self.conversations.items()}

    @property
    def has_replied(self) -> bool:
        """Whether `generate` was called, so that the agent knows turn indices (`Reply.turn`)."""
        policies = [agent for agent in self._agents.values() if isinstance(agent, Policy)]
        return self._has_replied or any(policy.has_replied for policy in policies)

    @property
    def agents(self) -> tuple[str, ...]:
        """The names of the agents in a rollout of several, else empty."""
        return tuple(self._agents)

    @property
    def rewarded(self) -> tuple[str, ...]:
        """The agents that receive rewards: all but those that a remote model plays."""
        return tuple(name for name in self._agents if name not in self._remote_agents)

    @property
    def conversations(self) -> dict[str, Conversation]:
        """The conversation of each agent by name. A single agent has an empty name."""
        if not self._agents:
            return {"": self.conversation}
        return {
            name: agent.conversation
            for name, agent in self._agents.items()
            if isinstance(agent, Policy)
        }

    def __getitem__(self, name: str) -> Any:
        """The policy or remote model of the agent `name`. Raises BadRequestError for an unknown
        name."""
        if name not in self._agents:
            agent_names = (
                ", ".join(self._agents) or "none: name them in the recipe's section agents"
            )
            raise BadRequestError(f"there is no agent {name!r} (known: {agent_names})")
        return self._agents[name]

    def _single(self) -> Conversation:
        """Raises BadRequestError in a rollout of several agents."""
        if self._agents:
            names = ", ".join(f'policy["{name}"]' for name in self._agents)
            raise BadRequestError(f"this rollout has several agents: ask one of them, {names}")
        return self.conversation

    @property
    def base_url(self) -> str:
        """The base URL for an OpenAI client:
        `OpenAI(base_url=policy.base_url, api_key=policy.api_key)`. Requests through it are recorded
        like calls of `generate`."""
        return self.session.base_url

    @property
    def api_key(self) -> str:
        """The API key for `base_url`. It is valid until the attempt ends."""
        return self.session.key

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A block in which the attempt waits for capacity. The wait does not count towards its time
        limit."""
        started = time.monotonic()
        before = self._waited_s
        self._waits_since = started
        try:
            yield
        finally:
            self._waits_since = None
            self._waited_s = before + time.monotonic() - started

    @property
    def waited_s(self) -> float:
        """Seconds spent in `waiting`."""
        since = self._waits_since
        return self._waited_s + (0.0 if since is None else time.monotonic() - since)

    async def settle(self) -> None:
        """Waits until this process has received all of the attempt's gateway requests. Returns
        immediately if the gateway runs in this process."""

    async def close(self) -> None:
        """Ends the session and the conversation. Later calls fail."""
        if self._session is not None and self._gateway is not None:
            self._gateway.end(self._session)
        for agent in self._agents.values():
            if isinstance(agent, Policy):
                await agent.close()
        if not self._agents:
            await self.conversation.close()

    @property
    def name(self) -> str:
        """The id of the trajectory, unique for each attempt."""
        return self.conversation.name

    remote_model: str | None = None
    """The remote model that replaces the policy, if any (agents/remote_policy.py)."""

    def num_tokens(self, turn: int) -> tuple[int, int]:
        """The number of prompt tokens and of completion tokens of a turn."""
        conversation = self._single()
        return len(conversation.prompt_ids(turn)), len(conversation.turns[turn].completion_ids)

    @property
    def turns(self) -> list[Turn]:
        """Copies of the turns recorded so far, without rewards."""
        return [copy_of_turn(turn) for turn in self._single().turns]

    @overload
    async def generate(self, prompt: Prompt, **options: Unpack[CallOptions]) -> Reply: ...

    @overload
    async def generate(
        self, prompt: Prompt, *, n: int, **options: Unpack[CallOptions]
    ) -> list[Reply]: ...

    async def generate(
        self,
        prompt: Prompt,
        *,
        n: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: SamplingOverrides | Mapping[str, Any] | None = None,
        stop: str | Sequence[str] | None = None,
        form: AnswerForm | None = None,
    ) -> Reply | list[Reply]:
        """Returns the policy's reply to a complete history or to token ids. With `n`, returns a
        list of `n` replies, which are turns with the same parent.

        The history ends with a message that is not the assistant's. `tools` are JSON schemas in
        OpenAI's format; the chat template writes them into the prompt, and the reply's text has
        tool calls in the model's notation. `sampling` (fields of `types.SamplingOverrides`) and
        `stop` override the recipe's values for this call. `form` constrains sampling to a grammar;
        training uses the same constraint (docs/messages.md).

        Raises BadRequestError for an invalid argument, GrammarError for a form that cannot be
        followed, RequestTooLongError if the context is full, and DeadlineExceededError if the
        engine does not answer in time.
        """
        conversation = self._single()
        checked_prompt = _check_prompt(prompt, conversation.images)
        self._has_replied = True
        turns = await conversation.complete(
            checked_prompt,
            tools=None if tools is None else tools_of(tools),
            overrides=overrides_of(sampling, stop),
            form=form,
            n=1 if n is None else n,
        )
        replies = [self._reply(turn) for turn in turns]
        return replies[0] if n is None else replies

    def _reply(self, turn: Turn) -> Reply:
        message = turn.messages[-1]
        return Reply(
            message.text,
            turn.finish_reason == "stop",
            turn.index,
            message,
            self.conversation.opening(turn),
        )

    def text(self, name: str, default: str = "") -> str:
        """The text `name` from the recipe (`agent.texts`) or from `agentevo optimize`, else
        `default`. Use it for prompts, rules and descriptions that you may want to improve. Raises
        BadRequestError for an invalid text (agents/named_texts.py)."""
        return self.texts.text(name, default)

    def examples(self, name: str = "examples") -> list[Message]:
        """Example messages from the recipe or from `agentevo optimize`, to put before the task's
        messages. Empty by default. Raises BadRequestError for malformed examples."""
        return self.texts.examples(name)

    def keep_files(self, files: Mapping[str, bytes]) -> None:
        """Stores files with the trajectory, also if the attempt fails. They replace the files of an
        earlier call. Raises BadRequestError for a path that leaves its folder, or more than 8 MiB
        in total."""
        self._single()
        try:
            self.files = check_files(files)
        except (TypeError, ValueError) as error:
            raise BadRequestError(f"keep_files: {error}") from error

    def files_of(self, agent: str) -> dict[str, bytes]:
        """The files that the agent `agent`, or the only agent, has kept."""
        agent_policy = self._agents.get(agent, self)
        return agent_policy.files if isinstance(agent_policy, Policy) else {}

    @property
    def sees_images(self) -> bool:
        """Whether the model reads images. If not, a message with an image is refused."""
        return self.conversation.sees_images

    @property
    def images(self) -> Mapping[str, ImageFile]:
        """The images that messages may name, by digest: those of the task, and those that
        `add_image` or a message has given."""
        return MappingProxyType(self.conversation.images.files)

    def add_image(self, source: Any, where: str = "an image") -> ImagePart:
        """Reads an image in any form of data/images.py (bytes, a data URL, a Path, a PIL image, an
        array [H, W, 3] of uint8) and returns the part that shows it in a message:
        `Message("user", (policy.add_image(screen), TextPart("What do you see?")))`. Its bytes are
        kept once, and stored with the attempt if a message shows it. `where` names its place in
        errors. Raises ImageError."""
        return self.conversation.images.read(source, where)

    def call(self, kind: str, name: str, **attributes: Attribute) -> RunningCall:
        """Records another operation of the agent, so that it appears in traces:
        `async with policy.call("tool", "search"): ...`."""
        return self.conversation.calls.call(kind, name, **attributes)


class RemoteHandle:
    """A remote model as an agent sees it. Calls may overlap."""

    def __init__(self, remote: RemoteConversations, name: str, agent: str) -> None:
        self._remote = remote
        self.name = name
        self.agent = agent

    @overload
    async def generate(self, prompt: Messages, **options: Unpack[RemoteCallOptions]) -> Reply: ...

    @overload
    async def generate(
        self, prompt: Messages, *, n: int, **options: Unpack[RemoteCallOptions]
    ) -> list[Reply]: ...

    async def generate(
        self,
        prompt: Messages,
        *,
        n: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        form: AnswerForm | None = None,
        sampling: SamplingOverrides | Mapping[str, Any] | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> Reply | list[Reply]:
        """The same as Policy.generate, with messages only. Tool calls are in
        `reply.message.tool_calls`, and `reply.turn` is an index among the attempt's remote turns.
        Raises RemoteModelError if no answer comes, and BudgetExceededError if the budget allows
        no further request."""
        turns = await self._remote.complete(
            self.name,
            messages_of(prompt, self._remote.images),
            tools=None if tools is None else tools_of(tools),
            tool_choice=tool_choice,
            form=form,
            overrides=overrides_of(sampling, stop),
            n=1 if n is None else n,
            agent=self.agent,
        )
        replies = [
            Reply(
                turn.messages[-1].text,
                turn.finish_reason == "stop",
                turn.index,
                turn.messages[-1],
            )
            for turn in turns
        ]
        return replies[0] if n is None else replies


def _check_prompt(prompt: Prompt, images: ImageCollector) -> list[Message] | list[int]:
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], int):
        return cast("list[int]", prompt)
    return messages_of(prompt, images)


def overrides_of(
    sampling: SamplingOverrides | Mapping[str, Any] | None, stop: str | Sequence[str] | None
) -> SamplingOverrides | None:
    """The sampling overrides of a call, or None. Raises BadRequestError for values that no engine
    can use."""
    values = sampling.given() if isinstance(sampling, SamplingOverrides) else dict(sampling or {})
    if stop is not None:
        values["stop_strings"] = [stop] if isinstance(stop, str) else stop

    try:
        overrides = msgspec.convert(values, SamplingOverrides) if values else None
        for name, value in (overrides.given() if overrides is not None else {}).items():
            _check_override(name, value)
        return overrides
    except (msgspec.ValidationError, ValueError) as error:
        fields = ", ".join(SamplingOverrides.__struct_fields__)
        raise BadRequestError(f"sampling of this call: {error}; it takes {fields}") from error


def _check_override(name: str, value: Any) -> None:
    """Raises ValueError for values that the types of SamplingOverrides allow and no engine can
    use."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}: give a finite number")
    if name in _LARGEST and not value <= _LARGEST[name]:
        raise ValueError(f"{name} is {shown(value)}: give at most {_LARGEST[name]:g}")
    if name == "temperature" and 0 < value < LOWEST_TEMPERATURE:
        raise ValueError(f"temperature is {value}: give {LOWEST_TEMPERATURE:g} or more, or 0")

    if name == "stop_strings":
        if len(value) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_STRING for text in value):
            raise ValueError(
                f"stop has {len(value)} texts, the longest of {max(map(len, value))} characters: "
                f"give at most {MAX_STOP_STRINGS} of {MAX_STOP_STRING}"
            )
        for text in value:
            text.encode()  # a UnicodeEncodeError for half of a surrogate pair
