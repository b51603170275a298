"""The simplest agent: one question, one reply. Scorers give the reward."""

from __future__ import annotations

from agentevo.agents.named_texts import Texts
from agentevo.agents.policy import Policy
from agentevo.config.agents import SingleTurnSection, agents
from agentevo.data.messages import messages_of
from agentevo.types import QUERY_MESSAGES, Message, Task
from agentevo.types.content import content_of, parts_of


@agents.register("single_turn")
class SingleTurnAgent:
    """Sends the task's query to the policy once; the recipe's `rewards` judge the reply."""

    Config = SingleTurnSection
    needs_scorer = True

    def __init__(self, section: SingleTurnSection) -> None:
        self._section = section

    async def run(self, task: Task, policy: Policy) -> None:
        await policy.generate(
            opening_of(task, policy.texts, self._section.system_prompt, self._section.instruction)
        )


def opening_of(
    task: Task, texts: Texts, system: str | None, instruction: str | None
) -> list[Message]:
    """`conversation_of` with the texts `system` and `instruction`, and the examples after the
    system message."""
    chat = conversation_of(
        task,
        system=texts.replacing("system", system),
        instruction=texts.replacing("instruction", instruction),
    )
    return with_examples(chat, texts)


def with_examples(chat: list[Message], texts: Texts) -> list[Message]:
    """The chat with the text `examples` at its start, after a system message."""
    place = int(chat[0].role == "system")
    return [*chat[:place], *texts.examples(), *chat[place:]]


def with_system(chat: list[Message], text: str) -> list[Message]:
    """The chat with the text as its system message, or appended to the existing one."""
    if not text:
        return chat
    if chat and chat[0].role == "system":
        content = content_of([*parts_of(chat[0]), f"\n\n{text}"])
        return [Message("system", content), *chat[1:]]
    return [Message("system", text), *chat]


def conversation_of(task: Task, *, system: str | None, instruction: str | None) -> list[Message]:
    """The conversation up to the first reply: the task's query followed by `instruction`, or the
    chat of its row. If it has no system message, it gets `system`."""
    query_messages = task.metadata.get(QUERY_MESSAGES)
    chat = messages_of(query_messages) if query_messages else [Message("user", task.query or "")]
    if instruction is not None and chat[-1].role == "user":
        chat[-1] = Message("user", content_of([*parts_of(chat[-1]), f"\n{instruction}"]))
    if system is not None and chat[0].role != "system":
        chat.insert(0, Message("system", system))
    return chat
