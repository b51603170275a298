"""What a policy sees of results with images, and which images of its history it keeps."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace
from pictures import picture
from seeing_chats import SeeingEngine, seeing_chat

from agentevo.agents import Policy, ToolAgent
from agentevo.agents.history import IMAGE_LEFT_OUT, History, keep_last_images
from agentevo.agents.single_turn import conversation_of, with_system
from agentevo.agents.tool_format import NativeFormat, ReActFormat, SearchTags
from agentevo.agents.tools.result_parts import result_of_parts
from agentevo.config import tools as tool_config
from agentevo.config.agents import ContextSection, ToolAgentSection
from agentevo.config.tools import tool
from agentevo.data.images import read_image
from agentevo.inference.conversations.conversation import Conversation
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.tiny_tokenizer import byte_tokenizer
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import (
    QUERY_MESSAGES,
    ImagePart,
    Message,
    SamplingParams,
    Task,
    TextPart,
    ToolCall,
)

IMAGES = [read_image(picture(colour=(shade, 0, 0)), "x") for shade in range(5)]
PARTS = [image.part for image in IMAGES]


def say(number: int) -> str:
    return f'Action: look\nAction Input: {{"number": {number}}}'


class LookingEngine(SeeingEngine):
    """Calls the tool so often, and then ends."""

    def __init__(self, chat: ChatFormat, num: int) -> None:
        super().__init__(chat)
        texts = [*map(say, range(num)), "Final Answer: It is red."]
        self._answers = [
            [*chat.tokenizer.encode(text, add_special_tokens=False), chat.end_of_turn_id]
            for text in texts
        ]

    async def generate(self, prompt_ids: list[int], sampling: Any, **options: Any) -> Any:
        self._ids = self._answers.pop(0)
        return await super().generate(prompt_ids, sampling, **options)


@pytest.fixture(autouse=True)
def look(monkeypatch):
    monkeypatch.setattr(tool_config.tools, "_items", {})

    @tool("look")
    def look(number: int) -> Any:
        """Looks."""
        return ["See:", picture(colour=(number, 0, 0))]


def played(chat: ChatFormat, num: int, **options: Any) -> Any:
    engine: Any = LookingEngine(chat, num)
    conversation = Conversation(
        engine, chat, SamplingParams(), name="a", seed=1, context_length=9000, timeout_s=300
    )
    policy = Policy(conversation)
    section = {"tools": ("look",), "max_turns": 9, "format": "react"} | options
    agent = ToolAgent(ToolAgentSection(**section))
    outcome = run_coroutine(agent.run(Task(id="t", query="Look."), policy))
    return outcome, conversation.turns, engine, policy


def test_a_policy_that_sees_gets_the_images_of_results():
    chat = seeing_chat()
    _, turns, engine, policy = played(chat, 2)
    assert [turn.parent for turn in turns] == [None, 0, 1]
    result = turns[1].messages[0]
    assert result.content == (TextPart("Observation: See:"), PARTS[0])
    shown = [[image.file.part for image in images] for images in engine.images]
    assert shown == [[], PARTS[:1], PARTS[:2]]
    assert list(policy.images) == [part.sha256 for part in PARTS[:2]]


def test_a_policy_that_reads_text_gets_a_note():
    _, turns, _, policy = played(ChatFormat(byte_tokenizer(4096)), 1)
    seen = turns[1].messages[0].content
    assert seen == "Observation: See:\n[image, image/png, 8 x 6 pixels]"
    assert not policy.sees_images and not policy.images


def test_only_the_last_images_are_seen():
    """The older image becomes text, so each turn from then on begins a branch."""
    chat = seeing_chat()
    outcome, turns, engine, _ = played(chat, 4, history={"last_images": 2})
    shown = [[image.file.part for image in images] for images in engine.images]
    assert shown == [[], PARTS[:1], PARTS[:2], PARTS[1:3], PARTS[2:4]]
    # The last reply whose history has not changed is the parent: the task's, then the first.
    assert [turn.parent for turn in turns] == [None, 0, 1, 0, 0]
    edited = turns[3].messages[0]
    assert edited.content == f"Observation: See:{IMAGE_LEFT_OUT}"
    assert outcome.metrics["num_context_cuts"] == 0


def test_the_images_of_the_task_stay():
    history = History([Message("user", (PARTS[4],))], ContextSection(), last_images=1)
    for number, part in enumerate(PARTS[:3]):
        history.add(Message("assistant", f"{number}"), [Message("tool", ("see", part))])

    contents = [message.content for message in history.messages if message.role != "assistant"]
    assert contents[0] == (PARTS[4],)
    assert contents[1:3] == [f"see{IMAGE_LEFT_OUT}"] * 2 or all(
        isinstance(content, str) for content in contents[1:3]
    )
    assert PARTS[2] in contents[3]


def test_which_images_are_the_last():
    mixed = Message("user", (PARTS[0], TextPart("a"), PARTS[1], TextPart("b")))
    last = Message("tool", (PARTS[0],))
    text = Message("user", "c")
    assert keep_last_images([mixed, text, last], 3) == [mixed, text, last]
    assert keep_last_images([mixed, text, last], 2)[0].content == (
        TextPart(f"{IMAGE_LEFT_OUT}a"), PARTS[1], TextPart("b")
    )  # fmt: skip
    kept = keep_last_images([mixed, text, last], 1)
    assert kept == [replace(mixed, content=f"{IMAGE_LEFT_OUT}a{IMAGE_LEFT_OUT}b"), text, last]


def test_a_cut_history_shows_the_last_of_what_is_left():
    section = ContextSection(strategy="window", keep_turns=1)
    history = History([Message("user", "Look.")], section, last_images=1)
    for number, part in enumerate(PARTS[:3]):
        history.add(Message("assistant", f"{number}"), [Message("tool", (part,))])

    assert run_coroutine(history.cut(Policy(None)))  # type: ignore[arg-type]
    assert [message.content for message in history.messages] == ["Look.", "2", (PARTS[2],)]


def test_texts_around_images_keep_them():
    query = [{"role": "user", "content": [{"type": "text", "text": "a"}, _as_json(PARTS[0])]}]
    task = Task(id="t", metadata={QUERY_MESSAGES: query})
    (asked,) = conversation_of(task, system=None, instruction="Be brief.")
    assert asked.content == (TextPart("a"), PARTS[0], TextPart("\nBe brief."))
    assert with_system([Message("system", "s")], "t")[0].content == "s\n\nt"

    policy: Any = Policy(Conversation(*_made(), **_NAMED))
    schemas = [{"function": {"name": "look", "parameters": {"properties": {"q": {}}}}}]
    question = SearchTags(policy, schemas).opening([asked])[0].content
    assert question[1] == PARTS[0] and question[0].text.endswith("Question: a")

    result = result_of_parts(["See:", IMAGES[1]])
    parsed: Any = type("Parsed", (), {"calls": (), "malformed": ()})()
    (observed,) = ReActFormat(policy, schemas).answers(parsed, [result])
    assert observed.content == (TextPart("Observation: See:"), PARTS[1])
    (found,) = SearchTags(policy, schemas).answers(parsed, [result])
    assert found.content == (
        TextPart("<information>See:"), PARTS[1], TextPart("</information>")
    )  # fmt: skip
    called: Any = type("Called", (), {"calls": (ToolCall("look", "{}", "c1"),), "malformed": ()})()
    (answered,) = NativeFormat(policy, schemas).answers(called, [result])
    assert answered == Message("tool", (TextPart("See:"), PARTS[1]), (), "c1", "look")


_NAMED = {"name": "a", "seed": 1, "context_length": 99, "timeout_s": 9}


def _made() -> Any:
    return SeeingEngine(seeing_chat()), seeing_chat(), SamplingParams()


def _as_json(part: ImagePart) -> dict[str, str]:
    return json.loads(json.dumps({"type": "image", "sha256": part.sha256}))
