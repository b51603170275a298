"""The simplest agent: one question, one reply. Scorers decide what the reply is worth."""

from __future__ import annotations

from agentevo.agents.policy import Policy
from agentevo.config.agents import SingleTurnSection, agents
from agentevo.data.messages import messages_of
from agentevo.types import QUERY_MESSAGES, Message, Task


@agents.register("single_turn")
class SingleTurnAgent:
    """Asks the policy a task's query once; the recipe's `rewards` judge the reply."""

    Config = SingleTurnSection

    def __init__(self, section: SingleTurnSection) -> None:
        self._section = section

    async def run(self, task: Task, policy: Policy) -> None:
        """See Agent.run."""
        await policy.generate(self._messages(task))

    def _messages(self, task: Task) -> list[Message]:
        """The conversation up to the reply: the query, or the chat that the row gave."""
        given = task.metadata.get(QUERY_MESSAGES)
        chat = messages_of(given) if given else [Message("user", task.query or "")]
        if self._section.instruction is not None and chat[-1].role == "user":
            chat[-1] = Message("user", f"{chat[-1].content}\n{self._section.instruction}")
        if self._section.system_prompt is not None and chat[0].role != "system":
            chat.insert(0, Message("system", self._section.system_prompt))
        return chat
