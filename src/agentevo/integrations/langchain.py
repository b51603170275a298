"""LangChain and LangGraph: the policy as a chat model, and a LangGraph agent by class.

    model = ChatPolicy(policy)                       # in an agent `run(task, policy)`
    create_agent(model, tools).ainvoke(...)          # LangChain's agents, or a graph of your own

`ChatPolicy` calls the policy in this process, without the gateway. It parses tool calls and
reasoning from the policy's text, and messages that are sent back match the recorded turns. It needs
the package langchain, which includes LangGraph.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from agentevo.agents import Policy
from agentevo.agents.gateway.answer import AnswerInProgress
from agentevo.agents.gateway.request import ModelRequest
from agentevo.agents.rollout_thread import BlockingPolicy
from agentevo.config import AgentSection
from agentevo.data.messages import messages_of, tools_of
from agentevo.errors import BadRequestError, MissingExtraError
from agentevo.types import Message, Task, Turn

try:
    from langchain.agents import create_agent
    from langchain_core.language_models.chat_models import BaseChatModel
    from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
    from langchain_core.outputs import ChatGeneration, ChatResult
    from langchain_core.utils.function_calling import convert_to_openai_tool
    from langgraph.errors import GraphRecursionError
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"agentevo.integrations.langchain needs the package {error.name!r}: pip install "
        "'agentevo[langchain]'"
    ) from error


class ChatPolicy(BaseChatModel):
    """The policy of one attempt as a LangChain chat model. `sampling` replaces the recipe's for
    every call (fields of types.SamplingOverrides)."""

    policy: Any
    sampling: dict[str, Any] | None = None

    def __init__(self, policy: Any, **options: Any) -> None:
        super().__init__(policy=policy, **options)

    @property
    def _llm_type(self) -> str:
        return "agentevo"

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: str | None = None, **options: Any
    ) -> Any:
        """See BaseChatModel.bind_tools. Raises BadRequestError for a tool_choice that forces a
        call."""
        if tool_choice not in (None, "auto", "none"):
            raise BadRequestError(
                f"tool_choice is {tool_choice!r}, and the policy can't be forced to call a tool: "
                "leave it out, or ask for a call in the prompt"
            )
        schemas = [convert_to_openai_tool(tool) for tool in tools]
        return self.bind(tools=schemas if tool_choice != "none" else None)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **options: Any,
    ) -> ChatResult:
        reply = self._ask(messages, stop, options)
        if not isinstance(reply, ChatResult):
            reply.close()
            raise BadRequestError(
                "invoke was called in a coroutine of the sampler: call ainvoke, or make the "
                "agent a "
                "plain function, which runs in its own thread"
            )

        return reply

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **options: Any,
    ) -> ChatResult:
        result: ChatResult = await self._ask(messages, stop, options)
        return result

    def _ask(
        self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> Any:
        """The reply, or an awaitable of it."""
        unknown = sorted(options.keys() - {"tools", "stream"})
        if unknown:
            raise BadRequestError(
                f"the model is called with {', '.join(unknown)}, which the policy does not "
                "support: "
                "leave it out; ChatPolicy(policy, sampling={...}) changes how tokens are sampled"
            )

        prompt = convert_to_openai_messages(messages)
        tools = options.get("tools")

        def question(policy: Policy) -> Coroutine[Any, Any, ChatResult]:
            return _reply(policy, prompt, tools, self.sampling, stop)

        if isinstance(self.policy, BlockingPolicy):
            return self.policy.ask(question)

        return question(self.policy)


async def _reply(
    policy: Policy,
    prompt: Any,
    tools: Sequence[Mapping[str, Any]] | None,
    sampling: Mapping[str, Any] | None,
    stop: list[str] | None,
) -> ChatResult:
    messages = messages_of(prompt)
    reply = await policy.generate(messages, tools=tools, sampling=sampling, stop=stop)
    conversation = policy.conversation
    turn = conversation.turns[reply.turn]
    if policy.remote_model is not None:
        return _result(reply.message, turn, policy.num_tokens(reply.turn))

    tool_schemas = tools_of(tools) if tools else None
    answer = AnswerInProgress(
        ModelRequest(prompt=messages, tools=tool_schemas, model="policy"),
        conversation.chat,
        reply.opening,
    )
    answer.finish(turn)
    conversation.recognise(reply.turn, answer.message)

    return _result(answer.message, turn, policy.num_tokens(reply.turn))


def _result(reply: Message, turn: Turn, size: tuple[int, int]) -> ChatResult:
    calls = [
        {"name": call.name, "args": json.loads(call.arguments or "{}"), "id": call.id}
        for call in reply.tool_calls
    ]
    num_prompt, num_said = size
    message = AIMessage(
        content=reply.text,
        tool_calls=calls,
        additional_kwargs={"reasoning_content": reply.reasoning} if reply.reasoning else {},
        response_metadata={"finish_reason": turn.finish_reason, "turn": turn.index},
        usage_metadata={
            "input_tokens": num_prompt,
            "output_tokens": num_said,
            "total_tokens": num_prompt + num_said,
        },
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


class ReactAgentSection(AgentSection):
    """Options of `ReactAgent`."""

    system_prompt: str | None = None
    """System message. Default: none."""


class ReactAgent:
    """A LangGraph agent that calls tools until it answers. Register a subclass with
    `@agentevo.agent(NAME)`: `tools` gives the tools of a task, `reward` scores an attempt,
    and `run` can be any other graph over `ChatPolicy(policy)`."""

    Config = ReactAgentSection

    def __init__(self, config: ReactAgentSection) -> None:
        self.config = config

    def tools(self, task: Task) -> Sequence[Any]:
        """Functions or LangChain tools, made for one attempt."""
        return ()

    async def reward(self, task: Task, state: Mapping[str, Any]) -> Any:
        """The return value of `run`, from the graph's last state (docs/agents.md); None leaves it
        to the recipe's rewards."""
        return None

    async def run(self, task: Task, policy: Policy) -> Any:
        """One attempt. An attempt with more than `max_turns` calls of the policy gets what `reward`
        gives for the messages so far."""
        graph = create_agent(
            ChatPolicy(policy), list(self.tools(task)), system_prompt=self.config.system_prompt
        )
        input_state = {"messages": [{"role": "user", "content": task.query}]}
        state: Mapping[str, Any] = input_state
        limit = {"recursion_limit": 2 * self.config.max_turns}
        try:
            async for values in graph.astream(input_state, limit, stream_mode="values"):
                state = values
        except GraphRecursionError:
            pass

        return await self.reward(task, state)
