"""One attempt's session at the gateway: its key, its conversation, the rewards that were posted.

A session is opened and closed on the event loop of the sampler, where its conversation belongs;
the gateway's own loop finds it by its key and hands it requests.

A client names a remote model of the recipe in place of the policy: its request goes there, and
the answer comes back in the form of the client's API.
"""

from __future__ import annotations

import asyncio
import contextvars
import secrets
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar, cast

import msgspec

from agentevo.agents.gateway.answer import AnswerInProgress, OnPieces, pieces_of
from agentevo.agents.gateway.bridge import Bridge
from agentevo.agents.gateway.memory import Memory
from agentevo.agents.gateway.rate_limit import Allowance
from agentevo.agents.gateway.refusals import Refusal
from agentevo.agents.gateway.request import Delivery, ModelReply, ModelRequest, Prompt, PromptSize
from agentevo.agents.policy import AttemptSession
from agentevo.agents.posted_rewards import PostedReward, RewardSums
from agentevo.data.message_images import ImageCollector
from agentevo.data.messages import with_names
from agentevo.errors import BadRequestError
from agentevo.inference.conversations.conversation import Conversation, check_count
from agentevo.inference.conversations.plain_prompts import ScoredPrompt
from agentevo.inference.remote_models import RemoteConversations
from agentevo.inference.remote_models.conversations import POLICY
from agentevo.models.chat.answer_form import opening_after
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.chat.chat_template import TemplateValues
from agentevo.models.tool_calls import ContentDelta, Delta, ReasoningDelta
from agentevo.runtime.event_loop import gather_all
from agentevo.store.call_log import set_asker
from agentevo.types import Completion, Message, RemoteTurn, SamplingOverrides, Turn


async def completed_remotely(
    remote: RemoteConversations,
    request: ModelRequest,
    delivery: Delivery,
    on_pieces: OnPieces | None,
    *,
    model: str,
    agent: str,
) -> list[ModelReply]:
    """The answers of a remote model. `on_pieces` gets their texts and thoughts as they arrive, and
    tool calls when they are complete. `agent`: the agent that they are attributed to."""
    if (
        isinstance(request.prompt, str)
        or isinstance(request.prompt[0], int)
        or request.token_ids
        or request.logprobs
    ):
        raise Refusal(
            f"{request.model} is a remote model, whose tokens the gateway does not know: send "
            "messages, and leave out token ids and log-probs"
        )
    if request.template:
        raise Refusal(
            f"{request.model} is a remote model, whose chat template belongs to its own server: "
            "leave chat_template_kwargs out",
            param="chat_template_kwargs",
        )

    passed_on: set[tuple[int, type]] = set()

    def pass_on(number: int, delta: ContentDelta | ReasoningDelta) -> None:
        passed_on.add((number, type(delta)))
        if on_pieces is not None:
            with suppress(RuntimeError):  # the gateway has ended
                on_pieces(number, [delta])

    turns = await remote.complete(
        model,
        request.prompt,
        tools=request.tools,
        form=request.form,
        overrides=request.overrides,
        n=request.n,
        agent=agent,
        listen=None if on_pieces is None else pass_on,
    )
    delivery.remote_turns = [turn.index for turn in turns]
    delivery.prompt = PromptSize(turns[0].prompt_tokens, turns[0].cached_tokens)

    replies = [_reply(turn) for turn in turns]
    for number, reply in enumerate(replies):
        pieces = [piece for piece in pieces_of(reply) if (number, type(piece)) not in passed_on]
        if on_pieces is not None and pieces:
            on_pieces(number, pieces)

    return replies


def _reply(turn: RemoteTurn) -> ModelReply:
    answer = turn.messages[-1]
    calls = tuple(
        call if call.id else msgspec.structs.replace(call, id=f"call_{secrets.token_hex(12)}")
        for call in answer.tool_calls
    )
    return ModelReply(
        turn=Turn(
            index=turn.index,
            prompt_ids=[],
            completion_ids=[],
            logprobs=[],
            versions=[],
            finish_reason=turn.finish_reason,
        ),
        content=answer.text,
        reasoning=answer.reasoning,
        tool_calls=calls,
        prompt_ids=[],
        prompt=PromptSize(turn.prompt_tokens, turn.cached_tokens),
        num_completion_tokens=turn.completion_tokens,
        tokens=[],
    )


T = TypeVar("T")

MAX_AT_ONCE = 256
"""Requests of one session that may be under way."""
MAX_POSTED = 10_000
"""Rewards that one session takes."""
DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p")
"""The settings that decide the sampling distribution."""


class Listening:
    """Passes the tokens of a request's completions on as pieces. The tokens that one event of the
    sampler's loop brings, such as a step of the engine, are one batch: they are decoded together,
    right after it."""

    def __init__(self, answers: Sequence[AnswerInProgress], on_pieces: OnPieces) -> None:
        self._answers = answers
        self._hear = on_pieces
        self._new: dict[int, list[int]] = {}
        """Completion -> its tokens that have not been passed on."""
        self._loop = asyncio.get_running_loop()

    def listen(self, number: int, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        if not self._new:
            self._loop.call_soon(self._pass_on)
        self._new.setdefault(number, []).extend(ids)

    def close(self) -> None:
        """Ends the passing on; finishing the answers gives the remaining pieces."""
        self._new = {}

    def tell(self, number: int, pieces: list[Delta]) -> None:
        if pieces:
            self._hear(number, pieces)

    def _pass_on(self) -> None:
        new = self._new
        self._new = {}
        for number, ids in new.items():
            self.tell(number, self._answers[number].add(ids))


class GatewaySession(AttemptSession):
    """See the module."""

    def __init__(
        self,
        conversations: Mapping[str, Conversation],
        base: str,
        *,
        follows_client: bool,
        whole_calls: bool = False,
        max_image_bytes: int | None = None,
        key: str | None = None,
        remote: RemoteConversations | None = None,
        remote_agents: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`conversations`: of each agent by its name; the name of a single one does not matter.
        `follows_client`: the client, not the recipe, decides the sampling distribution of its
        completions. `whole_calls`: streams send a call only when it is complete. `max_image_bytes`:
        the most bytes of the client's images; None: any number. `key` is random by default.
        `remote`: the models that a client may name instead of the policy; `remote_agents`: the
        agents that such a model plays, with its name; the empty name is the policy."""
        super().__init__(base, secrets.token_urlsafe(32) if key is None else key)
        self.remote = remote
        self.remote_agents = remote_agents
        self.conversations = conversations
        self._sums = RewardSums()
        self.ignored: dict[str, float] = {}
        """The client's sampling settings that were ignored."""
        self.memory = Memory()
        """The answers that the APIs keep."""
        self.allowance = Allowance()
        """The session's allowance of requests."""
        self._follows_client = follows_client
        self._whole_calls = whole_calls
        self._max_image_bytes = max_image_bytes
        self._client_image_bytes = 0
        """Of the client's images, each once."""
        self._under_way = 0
        self.bridge: Bridge | None = None
        """Between the gateway's loop and the attempt's, once the gateway has the session."""
        self._context = contextvars.copy_context()
        """The context of the attempt: its calls are the parents of the session's."""

    def submit(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Runs something in the attempt, from the gateway's loop. Cancelling the future cancels
        it."""
        try:
            return self._bridge_across().submit(work, self._context.copy())
        except RuntimeError as error:  # the sampler's loop has ended
            raise refuse_key() from error

    def bridge_pieces(self, on_pieces: OnPieces) -> OnPieces:
        """A callback for `complete` that passes its pieces on to `on_pieces` on the gateway's
        loop."""
        return partial(self._bridge_across().tell, on_pieces)

    def _bridge_across(self) -> Bridge:
        assert self.bridge is not None, "Gateway.add has not been called"
        return self.bridge

    async def complete(
        self, request: ModelRequest, delivery: Delivery, on_pieces: OnPieces | None = None
    ) -> list[ModelReply]:
        """The answers to a request, on the sampler's loop. `on_pieces` gets their pieces as they
        come, and has all of them when this returns."""
        check_count(request.n)
        if request.prompt_logprobs and not self._follows_client:
            raise Refusal(
                "logprobs with echo is not supported while the policy is trained: ask for one of "
                "the two. A model that `agentevo serve RUN --openai` serves gives the log-probs of "
                "a prompt"
            )

        delivery.asker = set_asker(delivery.place)
        if (model := self.remote_name(request.model)) and self.remote is not None:
            agent = self._agent_of(request.model)
            if self.remote.sees_images(model):
                self._keep_images(request, self.remote.images)
            with self._count_request():
                return await completed_remotely(
                    self.remote, request, delivery, on_pieces, model=model, agent=agent
                )

        conversation = delivery.conversation = self.conversation_of(request.model)
        prompts = (request.prompt, *request.more_prompts)
        check_count(request.n * len(prompts))
        if conversation.sees_images:
            self._keep_images(request, conversation.images)

        with self._count_request():
            try:
                if len(prompts) == 1:
                    return await self._answer_prompt(
                        request, request.prompt, conversation, delivery, on_pieces
                    )

                if on_pieces is not None:  # nothing is streamed before all can be asked
                    for prompt in prompts:
                        await conversation.check(prompt)

                works = [
                    self._answer_prompt(
                        request,
                        prompt,
                        conversation,
                        delivery,
                        _renumber(on_pieces, place * request.n),
                    )
                    for place, prompt in enumerate(prompts)
                ]
                groups = await gather_all(works)
            except BaseException:
                for turn in delivery.turns:  # no client receives them
                    conversation.discard(turn)
                raise

        return [replace(reply, prompt=delivery.prompt) for group in groups for reply in group]

    async def _answer_prompt(
        self,
        request: ModelRequest,
        prompt: Prompt,
        conversation: Conversation,
        delivery: Delivery,
        on_pieces: OnPieces | None,
    ) -> list[ModelReply]:
        """The answers to one of the request's prompts."""
        template = (
            request.template_values(conversation.chat.variables) if request.has_messages else {}
        )
        chat = conversation.chat.with_values(TemplateValues.of(template))
        opening = "" if request.is_plain else opening_after(chat, prompt)
        echo = _text_of(prompt, chat) if request.echo else ""
        answers = [
            AnswerInProgress(request, chat, opening, echo=echo, whole_calls=self._whole_calls)
            for _ in range(request.n)
        ]
        listening = None if on_pieces is None else Listening(answers, on_pieces)
        completions: list[Completion] = []

        def note_prompt_size(num_tokens: int, num_cached: int) -> None:
            before = delivery.prompt
            delivery.prompt = PromptSize(
                before.num_tokens + num_tokens, before.num_cached + num_cached
            )

        scored = None
        if request.prompt_logprobs:
            scored = await conversation.score(cast("str | list[int]", prompt))
        if scored is not None and not request.samples:
            note_prompt_size(len(scored.ids), 0)
            turn = _empty_turn(scored.ids)
            for answer in answers:
                answer.finish(turn)
            ids = scored.ids if request.token_ids else []
            return [
                _with_prompt(answer.reply(turn, delivery.prompt, ids), scored, chat)
                for answer in answers
            ]

        turns = await conversation.complete(
            with_names(cast("list[Message]", prompt)) if request.has_messages else prompt,
            tools=request.tools,
            overrides=self._admitted_overrides(request.overrides),
            form=request.form,
            template=template,
            n=request.n,
            listen=None if listening is None else listening.listen,
            sized=note_prompt_size,
            top_logprobs=request.top_logprobs,
            drawn=completions.extend,
        )
        if listening is not None:
            listening.close()

        delivery.turns += [turn.index for turn in turns]
        for number, (answer, turn) in enumerate(zip(answers, turns, strict=True)):
            pieces = answer.finish(turn)
            if listening is not None:
                listening.tell(number, pieces)
            if answer.num_malformed:
                conversation.note_malformed(turn.index, answer.num_malformed)

            if request.has_messages:
                conversation.recognise(turn.index, answer.message)
                if listening is not None and answer.num_malformed:
                    conversation.recognise(turn.index, answer.told_message)

        prompt_ids = conversation.prompt_ids(turns[0].index) if request.token_ids else []
        replies = [
            answer.reply(turn, delivery.prompt, prompt_ids, completion.top_logprobs)
            for answer, turn, completion in zip(answers, turns, completions, strict=True)
        ]
        if scored is None:
            return replies
        return [_with_prompt(reply, scored, chat) for reply in replies]

    def remote_name(self, model_name: str | None) -> str:
        """The remote model that a client's model name selects; empty if it selects none."""
        model = self.remote_agents.get(model_name or "", model_name or "")
        if self.remote is None:
            return ""
        return model if model in self.remote.models else self.remote_agents.get("", "")

    def _agent_of(self, model_name: str | None) -> str:
        """The agent that a remote model's answer belongs to: the agent of that name; none if the
        client named the model itself; else the policy, which it plays."""
        if model_name and model_name in self.remote_agents:
            return model_name
        return "" if self.remote is not None and model_name in self.remote.models else POLICY

    def wait_of(self, model_name: str | None, own_s: float) -> tuple[str, float]:
        """The side that answers a request for a model, in words, and how long to wait for it:
        `own_s` for a policy."""
        model = self.remote_name(model_name)
        if not model or self.remote is None:
            return "the policy", own_s
        return f"the remote model {model}", self.remote.within_s(model)

    async def count_tokens(self, request: ModelRequest) -> int:
        """The number of tokens of the request's prompt, on the sampler's loop. Records nothing."""
        if self.remote_name(request.model):
            raise Refusal(
                f"{request.model} is a remote model, whose tokens the gateway can't count: ask "
                "its own server"
            )

        with self._count_request():
            messages = with_names(cast("list[Message]", request.prompt))
            conversation = self.conversation_of(request.model)
            if conversation.sees_images:
                self._keep_images(request, conversation.images)
            return await conversation.count_tokens(
                messages,
                tools=request.tools,
                template=request.template_values(conversation.chat.variables),
            )

    async def close(self) -> None:
        """Ends its conversations."""
        for conversation in self.conversations.values():
            await conversation.close()

    @property
    def sees_images(self) -> bool:
        """Whether any model of the session sees."""
        remote = self.remote
        return any(c.sees_images for c in self.conversations.values()) or (
            remote is not None and any(map(remote.sees_images, remote.models))
        )

    def conversation_of(self, agent: str | None) -> Conversation:
        """The conversation of a request: the only one, or that of the named agent. Raises
        Refusal."""
        if len(self.conversations) == 1:
            return next(iter(self.conversations.values()))

        if agent is None or agent not in self.conversations:
            agent_names = ", ".join([*self.conversations, *self.remote_agents])
            raise Refusal(
                f"there is no agent {agent!r}: this rollout has {agent_names}, and the model's "
                "name must select one of them",
                status=404,
                code="model_not_found",
                param="model",
            )

        return self.conversations[agent]

    @contextmanager
    def _count_request(self) -> Iterator[None]:
        """Counts a request while it is in progress. Raises Refusal if there are too many."""
        if self._under_way >= MAX_AT_ONCE:
            raise Refusal(
                f"{MAX_AT_ONCE} requests of this session are under way: wait for one of them",
                status=429,
                kind="rate_limit_error",
            )

        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    def lose(self, delivery: Delivery) -> None:
        """The client is gone without its answer: discards the turns, which no client has
        received."""

        def discard() -> None:
            for turn in delivery.turns:
                if delivery.conversation is not None:
                    delivery.conversation.discard(turn)
            for turn in delivery.remote_turns:
                if self.remote is not None:
                    self.remote.discard(turn)

        with suppress(RuntimeError):  # the attempt's loop has ended
            self._bridge_across().send(discard)

    def post(self, *rewards: PostedReward) -> None:
        """Accepts all of the rewards, or none."""
        if len(self.posted) + len(rewards) > MAX_POSTED:
            raise Refusal(f"a session takes {MAX_POSTED} rewards", status=429)

        for reward in rewards:
            self._check(reward)

        try:
            self._sums.add(rewards)
        except (TypeError, ValueError) as error:
            raise BadRequestError(str(error)) from error

        self.posted += rewards

    def _check(self, reward: PostedReward) -> None:
        """Checks that the agent and the turn of the reward exist. Raises BadRequestError."""
        if reward.agent is not None and (
            not reward.agent or reward.agent not in self.conversations
        ):
            agent_names = ", ".join(filter(None, self.conversations)) or "this rollout names none"
            raise BadRequestError(f"there is no agent {reward.agent!r} ({agent_names})")

        if reward.turn is not None:
            if reward.agent is None and "" not in self.conversations:
                raise BadRequestError(
                    f"name the agent of turn {reward.turn}: this rollout has several agents"
                )
            turns = len(self.conversation_of(reward.agent).received)
            if not 0 <= reward.turn < turns:
                raise BadRequestError(f"there is no turn {reward.turn}: the session has {turns}")

    def _keep_images(self, request: ModelRequest, images: ImageCollector) -> None:
        """Keeps the request's images for the attempt, each once. Raises Refusal, and keeps none, if
        the attempt's images are too many bytes."""
        new = [image for image in request.images if image.part.sha256 not in images.files]
        num_bytes = self._client_image_bytes + sum(len(image.data) for image in new)
        if self._max_image_bytes is not None and num_bytes > self._max_image_bytes:
            raise Refusal(
                f"the different images of this attempt have {num_bytes:,} bytes, and "
                f"{self._max_image_bytes:,} are the most (gateway.max_attempt_images_mb): send "
                "fewer, or smaller ones",
                status=413,
            )

        self._client_image_bytes = num_bytes
        for image in new:
            images.add(image)

    def _admitted_overrides(self, overrides: SamplingOverrides | None) -> SamplingOverrides | None:
        """The settings that a request may change: the distribution only if the client decides
        it."""
        if overrides is None or self._follows_client:
            return overrides
        ignored = {name: value for name, value in overrides.given().items() if name in DISTRIBUTION}
        self.ignored |= ignored
        return (
            msgspec.structs.replace(overrides, **dict.fromkeys(ignored)) if ignored else overrides
        )


def _renumber(on_pieces: OnPieces | None, first: int) -> OnPieces | None:
    """A callback for completions whose numbers begin at 0 instead of `first`."""
    if on_pieces is None or not first:
        return on_pieces
    return lambda number, pieces: on_pieces(first + number, pieces)


def _empty_turn(prompt_ids: list[int]) -> Turn:
    """The turn of an answer without a sampled token, which is not recorded."""
    return Turn(
        index=0,
        prompt_ids=prompt_ids,
        completion_ids=[],
        logprobs=[],
        versions=[],
        finish_reason="length",
        messages=[Message("assistant", "")],
    )


def _with_prompt(reply: ModelReply, scored: ScoredPrompt, chat: ChatFormat) -> ModelReply:
    tokens = chat.token_texts(scored.ids)
    return replace(reply, prompt_tokens=tokens, prompt_logprobs=scored.logprobs)


def _text_of(prompt: Prompt, chat: ChatFormat) -> str:
    if isinstance(prompt, str):
        return prompt
    return str(chat.tokenizer.decode(cast("list[int]", prompt), skip_special_tokens=False))


def refuse_key() -> Refusal:
    """The refusal for a wrong key, and for a session that has ended."""
    return Refusal(
        "the API key is not valid for an open session: it is wrong, or the attempt it belongs to "
        "has ended",
        status=401,
        kind="authentication_error",
        code="invalid_api_key",
    )
