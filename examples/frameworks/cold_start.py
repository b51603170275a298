"""The policy that every example begins with: a tiny Llama that has read what a lazy teacher says.

The teacher plays the example's own agent, through the gateway, so the policy knows the prompts of
the framework as they are. It calls the tool rightly, but gives up at two notes of three; that is
what training has to undo.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import agentevo
from agentevo.agents import Policy
from agentevo.agents.agent import Agent
from agentevo.agents.gateway.gateway import Gateway
from agentevo.config import TinyModel
from agentevo.config.gateway import GatewaySection
from agentevo.inference.conversations.conversation import Conversation
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.tiny import make_tiny
from agentevo.models.tiny_tokenizer import byte_tokenizer
from agentevo.types import Completion, Message, SamplingParams, Task
from hunt import COLOURS, TREASURES, make_tasks

GIVES_UP = 0.65
CONTEXT = 16384
AT_ONCE = 8
"""Attempts of the teacher at a time."""
CHAT_TEMPLATE = (
    "{%- if tools -%}{{- '<|system|>' + (tools | tojson) + '<|end|>' -}}{%- endif -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'tool' -%}"
    "{{- '<|user|><tool_response>' + m.content + '</tool_response><|end|>' -}}"
    "{%- else -%}{{- '<|' + m.role + '|>' + (m.content or '') -}}"
    "{%- for call in m.tool_calls or [] -%}"
    '{{- \'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' -}}'
    "{{- (call.function.arguments if call.function.arguments is string"
    " else call.function.arguments | tojson) + '}</tool_call>' -}}"
    "{%- endfor -%}{{- '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""Tools and calls as Hermes and Qwen write them."""


def call(name: str, **arguments: str) -> str:
    """A tool call as the policy writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def open_box(colour: str) -> str:
    """The teacher's way to open a box, for agents that have the tool as a tool."""
    return call("open_box", colour=colour)


class Teacher:
    """An engine that says one text: `answer`, which is set before each request."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self.version = 0
        self.answer = ""

    async def generate(self, prompt_ids: Any, sampling: Any, **options: Any) -> Completion:
        """See inference.engine.Engine."""
        await asyncio.sleep(0)
        ids = [*self._chat.tokenizer.encode(self.answer), self._chat.end_of_turn_id]
        zeros = [0] * len(ids)
        return Completion(ids=ids, logprobs=zeros, versions=zeros, finish_reason="stop")

    async def release(self, session: str) -> None:
        """See inference.engine.Engine."""

    def stats(self) -> dict[str, float]:
        """See inference.engine.Engine."""
        return {}


class TaughtConversation(Conversation):
    """One attempt of the teacher, who answers the newest messages. `opens` and `says` write what it
    does as the agent's policy has to."""

    def __init__(
        self, chat: ChatFormat, task: Task, opens: Callable[[str], str], says: Callable[[str], str]
    ) -> None:
        self._teacher = Teacher(chat)
        super().__init__(
            self._teacher,
            chat,
            SamplingParams(),
            name=task.id,
            seed=0,
            context_length=10**6,
            timeout_s=60.0,
        )
        self._opens = opens
        self._says = says
        self._draw = random.Random(task.id)
        self.rows: list[dict[str, Any]] = []
        """The conversations so far, as rows for `agentevo.sft`: one, or one for each turn whose
        history is not that which was recorded."""

    async def complete(self, prompt: Any, *, tools: Any = None, **options: Any) -> Any:
        """See Conversation.complete."""
        answered = [place for place, one in enumerate(prompt) if one.role == "assistant"]
        newest = prompt[answered[-1] + 1 :] if answered else prompt
        self._teacher.answer = self._answer_to("\n".join(message.text for message in newest))
        turns = await super().complete(prompt, tools=tools, **options)
        retold = turns[0].parent is None
        messages = [_row(message, retold) for message in prompt]
        if not retold:
            self.rows = [row for row in self.rows if not _begins(messages, row["messages"])]

        messages.append({"role": "assistant", "content": self._teacher.answer})
        self.rows.append({"messages": messages, **({"tools": tools} if tools else {})})
        return turns

    def _answer_to(self, text: str) -> str:
        places = re.findall(r"(?:Begin with|open) the (\w+) box\.|You find a (\w+)\.", text)
        box, treasure = places[-1] if places else ("", "")
        if treasure:
            return self._says(treasure)
        if "Begin with" not in text and self._draw.random() < GIVES_UP:
            box = ""
        return self._opens(box) if box else self._says("nothing")


def _row(message: Message, retold: bool) -> dict[str, Any]:
    """`retold`: the framework tells earlier answers in words of its own, which are not taught."""
    calls = [
        {"type": "function", "function": {"name": one.name, "arguments": one.arguments}}
        for one in message.tool_calls
    ]
    return {
        "role": message.role,
        "content": message.text,
        **({"tool_calls": calls} if calls else {}),
        **({"weight": 0} if retold and message.role == "assistant" else {}),
    }


def _renamed(row: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The same conversation about other colours and treasures."""
    names: dict[str, str] = {}
    for words in (COLOURS, TREASURES):
        names |= zip(words, draw.sample(words, len(words)), strict=True)
    text = re.sub(rf"\b({'|'.join(names)})\b", lambda word: names[word[0]], json.dumps(row))
    renamed: dict[str, Any] = json.loads(text)
    return renamed


def _begins(messages: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> bool:
    """Whether the history goes on from the row, whose last message is what the teacher said."""
    size = len(earlier) - 1
    return len(messages) > size and messages[:size] == earlier[:size]


async def demonstrations(
    agent: Agent, count: int, opens: Callable[[str], str], says: Callable[[str], str]
) -> list[dict[str, Any]]:
    """What the teacher said in `count` attempts of the agent. Raises what the agent raised."""
    tokenizer = byte_tokenizer(CONTEXT)
    tokenizer.chat_template = CHAT_TEMPLATE
    chat = ChatFormat(tokenizer)
    gateway = Gateway(GatewaySection(), model="teacher", timeout_s=60.0)
    room = asyncio.Semaphore(AT_ONCE)

    async def attempt(row: dict[str, Any]) -> list[dict[str, Any]]:
        task = Task(
            id=row["id"],
            query=row["query"],
            answer=row["answer"],
            metadata={"boxes": row["boxes"], "treasure": row["treasure"]},
        )
        conversation = TaughtConversation(chat, task, opens, says)
        async with room, asyncio.timeout(120):
            policy = Policy(conversation, gateway)
            await agent.run(task, policy)
            await policy.close()

        return conversation.rows

    try:
        attempts = await asyncio.gather(*map(attempt, make_tasks(count, seed=1)))
    finally:
        await asyncio.to_thread(gateway.close)

    return [row for rows in attempts for row in rows]


def make_policy(
    folder: Path,
    agent: Agent,
    *,
    conversations: int,
    demonstrate: int = 64,
    opens: Callable[[str], str] = open_box,
    says: Callable[[str], str] = str,
) -> Path:
    """A run folder of a policy that plays as the teacher does in `demonstrate` attempts, which are
    told again with other words until there are so many conversations."""
    draw = random.Random(0)
    shown = asyncio.run(demonstrations(agent, demonstrate, opens, says))
    rows = [_renamed(draw.choice(shown), draw) for _ in range(conversations)]
    return fine_tuned(folder, rows)


def fine_tuned(
    folder: Path,
    rows: Sequence[dict[str, Any]],
    *,
    reading: Sequence[dict[str, Any]] = (),
    **sft: Any,
) -> Path:
    """A run folder of a tiny policy that has read these conversations, and before them those of
    `reading`, from which it learns to say what it reads. `sft`: over the options of `imitated`,
    for `rows`."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = TinyModel(hidden_size=64, num_layers=2, num_heads=4, context_length=CONTEXT)
    model, tokenizer = make_tiny(shape, _texts([*rows, *reading]), seed=0)
    tokenizer.chat_template = CHAT_TEMPLATE
    if reading:
        _prepare_to_repeat(model, tokenizer.get_vocab())

    policy = folder / "base"
    model.save_pretrained(policy)
    tokenizer.save_pretrained(policy)

    if reading:
        slower = {"batch_conversations": 16, "learning_rate": 4e-3, "min_lr_ratio": 0.1}
        policy = imitated(policy, folder / "reading", reading, **slower)

    return imitated(policy, folder / "cold_start", rows, **sft)


def imitated(policy: Path, folder: Path, rows: Sequence[dict[str, Any]], **sft: Any) -> Path:
    """The folder of a run that taught a policy these conversations, which stand beside it."""
    chats = folder.with_suffix(".jsonl")
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = agentevo.sft(
        {
            "model": {"name": str(policy)},
            "data": {"train": str(chats), "eval_share": 0},
            "sft": {"batch_conversations": 8, "learning_rate": 3e-3, **sft},
            "run": {"dir": str(folder), "overwrite": True},
            "tracking": {"report": False, "tensorboard": False},
        }
    )
    return run.dir


def _prepare_to_repeat(model: Any, vocabulary: Mapping[str, int]) -> None:
    """What the policy says of a word begins as what it reads of it, and a word behind a blank as
    the word and the blank."""
    read = model.model.embed_tokens.weight.data
    for word, place in vocabulary.items():
        if word[0] == " " and word[1:] in vocabulary:
            read[place] = read[vocabulary[word[1:]]] + read[vocabulary[" "]]
    model.lm_head.weight.data.copy_(read)


def _texts(rows: Sequence[dict[str, Any]]) -> set[str]:
    """All that the tokenizer needs words for."""
    return {json.dumps(row) for row in rows} | {CHAT_TEMPLATE, "arguments"}
