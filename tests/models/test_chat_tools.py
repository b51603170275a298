"""Tools, tool calls, reasoning and images by the templates of several families."""

from __future__ import annotations

import json

import pytest
from chat_templates import (
    HERMES,
    MOVES_TOOLS,
    NAMES_RESULTS,
    QWEN3,
    QWEN3_THINKING,
    QWQ,
    R1,
    R1_DISTIL,
    R1_TEXT,
    STRICT,
    tokenizer_with,
)
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from agentevo.errors import ModelError
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.chat.chat_template import NO_TOOLS, ToolSchemas
from agentevo.models.chat.model_template import template_text
from agentevo.models.tiny_tokenizer import CHAT_TEMPLATE
from agentevo.types import ImagePart, Message, TextPart, ToolCall

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}},
}
TOOLS = ToolSchemas.of([ADD])
QUESTION = Message("user", "1+1?")
CALL = Message("assistant", "", (ToolCall("add", '{"a": 1}', "call00001"),))
RESULT = Message("tool", "2", tool_call_id="call00001", name="add")


def chat_with(template: str) -> ChatFormat:
    tokenizer = tokenizer_with(template)
    eom = tokenizer.convert_tokens_to_ids("<|eom|>")
    return ChatFormat(tokenizer, GenerationConfig(eos_token_id=[eom]))


CHATS = {
    name: chat_with(template)
    for name, template in {
        "hermes": HERMES, "qwen3": QWEN3, "qwen3 thinking": QWEN3_THINKING, "qwq": QWQ, "r1": R1,
        "r1 distil": R1_DISTIL, "r1 text": R1_TEXT,
        "strict": STRICT, "names results": NAMES_RESULTS, "shipped": template_text("hermes"),
        "tiny": CHAT_TEMPLATE,
    }.items()
}  # fmt: skip
plain = st.text(st.characters(codec="utf-8", exclude_characters="<>|"), max_size=12)


def text_of(chat: ChatFormat, ids: list[int]) -> str:
    return str(chat.tokenizer.decode(ids))


def whole(chat: ChatFormat, messages: list[Message], tools: ToolSchemas) -> str:
    """The template's own rendering, asked for without this project's code."""
    mappings = [
        {"role": m.role, "content": m.content, "name": m.name, "tool_call_id": m.tool_call_id}
        | (
            {
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                    }
                    for call in m.tool_calls
                ]
            }
            if m.tool_calls
            else {}
        )
        for m in messages
    ]
    return str(
        chat.tokenizer.apply_chat_template(
            mappings,
            tools=json.loads(tools.as_json) if tools.as_json else None,
            tokenize=False,
            add_generation_prompt=True,
        )
    )


@pytest.mark.parametrize("name", ["hermes", "strict", "names results", "shipped", "tiny"])
@given(
    results=st.lists(plain, min_size=1, max_size=3),
    question=plain,
    more=st.none() | plain,
    tools=st.sampled_from([NO_TOOLS, TOOLS]),
)
def test_a_tool_loop_in_pieces_is_what_the_template_renders(
    name: str, results: list[str], question: str, more: str | None, tools: ToolSchemas
) -> None:
    chat = CHATS[name]
    start = [Message("user", question)]
    calls = tuple(ToolCall("add", '{"a": 1}', f"call{n:05d}") for n in range(len(results)))
    asked = Message("assistant", "", calls)
    new = [
        Message("tool", text, tool_call_id=f"call{n:05d}", name="add")
        for n, text in enumerate(results)
    ]
    new += [Message("user", more)] if more is not None else []
    expected = whole(chat, [*start, asked, *new], tools)
    prompt = text_of(chat, chat.first_prompt(start, tools))
    rest = text_of(chat, chat.continuation(new, ended_with_stop=False, tools=tools))
    said = expected[len(prompt) : len(expected) - len(rest)]
    assert expected == prompt + said + rest
    assert said.count("<tool_call>") == len(results) and said.endswith("</tool_call>")

    stopped = chat.continuation(new, ended_with_stop=True, tools=tools)
    assert stopped == chat.continuation(new, ended_with_stop=False, tools=tools)[1:]


def test_results_of_tools_share_a_message_where_the_template_joins_them() -> None:
    new = [Message("tool", "2"), Message("tool", "3")]
    assert text_of(CHATS["hermes"], CHATS["hermes"].continuation(new, ended_with_stop=True)) == (
        "\n<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_message_of_calls_may_end_in_a_token_of_its_own() -> None:
    chat = CHATS["strict"]
    text = text_of(chat, chat.continuation([RESULT], ended_with_stop=False))
    assert text == ("<|eom|>\n<|im_start|>tool call00001\n2<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(ModelError, match="a tool has nothing to answer"):
        chat.first_prompt([QUESTION, Message("assistant", "two"), RESULT])


def test_after_a_result_some_templates_let_the_model_go_on_at_once() -> None:
    chat = CHATS["r1"]
    assert text_of(chat, chat.continuation([RESULT], ended_with_stop=True)) == "<result>2</result>"
    again = chat.continuation([RESULT, Message("user", "why?")], ended_with_stop=True)
    assert text_of(chat, again) == "<result>2</result><|User|>why?<|Assistant|><think>\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("r1 distil", '<call>add {"a":1}</call>'),
        ("r1 text", '<calls><call>function<sep>add\n{"a":1}</call></calls>'),
    ],
)
def test_arguments_stay_the_text_that_was_written_where_the_template_takes_a_text(
    name: str, said: str
) -> None:
    chat = CHATS[name]
    call = Message("assistant", "", (ToolCall("add", '{"a":1}'),))
    history = [QUESTION, call, RESULT]
    prompt = text_of(chat, chat.first_prompt(history))
    assert prompt == f"<|begin|><|User|>1+1?<|Assistant|>{said}<|im_end|><result>2</result>"
    assert text_of(chat, chat.completion(call)) == f"\n</think>\n\n{said}<|im_end|>"

    rest = chat.continuation([RESULT, QUESTION], ended_with_stop=True)
    assert text_of(chat, rest) == "<result>2</result><|User|>1+1?<|Assistant|><think>\n"


def test_calls_beside_a_text_are_not_left_out_unseen() -> None:
    both = [QUESTION, Message("assistant", "Let me see.", CALL.tool_calls), RESULT]
    assert "Let me see.<calls>" in text_of(CHATS["r1 text"], CHATS["r1 text"].first_prompt(both))
    for name in ("r1", "r1 distil"):
        with pytest.raises(ModelError, match="leaves out tool_calls of a message that has content"):
            CHATS[name].first_prompt(both)


def test_a_template_that_names_results_needs_the_name() -> None:
    chat = CHATS["names results"]
    with pytest.raises(ModelError, match="writes the name of the tool with its result"):
        chat.continuation([Message("tool", "2")], ended_with_stop=True)
    assert "<|im_start|>tool add\n2" in text_of(
        chat, chat.continuation([RESULT], ended_with_stop=True)
    )


def test_tools_stand_in_the_prompt_or_are_refused() -> None:
    chat = CHATS["hermes"]
    prompt = text_of(chat, chat.first_prompt([QUESTION], TOOLS))
    assert prompt == (
        f"<|im_start|>system\n{json.dumps([ADD])}<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )

    with pytest.raises(ModelError, match="leaves out tools"):
        CHATS["r1"].first_prompt([QUESTION], TOOLS)

    moves = chat_with(MOVES_TOOLS)
    assert moves.first_prompt([QUESTION])
    with pytest.raises(ModelError, match="with tools: the chat template can't be continued"):
        moves.first_prompt([QUESTION], TOOLS)


def test_arguments_are_rendered_as_json_or_as_they_were_written() -> None:
    chat = CHATS["hermes"]
    for written, shown in (('{"b":2,"a":"ü"}', '{"b": 2, "a": "ü"}'), ("{broken", "{broken")):
        said = Message("assistant", "well", (ToolCall("add", written),))
        prompt = text_of(chat, chat.first_prompt([QUESTION, said, RESULT]))
        assert f'well\n<tool_call>\n{{"name": "add", "arguments": {shown}}}' in prompt
    with pytest.raises(ModelError, match="leaves out tool_calls"):
        chat_with(MOVES_TOOLS).first_prompt([QUESTION, CALL, RESULT])


def test_images_are_refused_and_parts_of_text_are_one_text() -> None:
    chat = CHATS["hermes"]
    parts = Message("user", (TextPart("1+"), TextPart("1?")))
    assert chat.first_prompt([parts]) == chat.first_prompt([QUESTION])

    image = Message("user", (TextPart("see"), ImagePart("ab" * 32, "image/jpeg")))
    with pytest.raises(ModelError, match=r"image \(image/jpeg, SHA-256 abababababab"):
        chat.first_prompt([image])
    with pytest.raises(ModelError, match="holds an image"):
        chat.continuation([image], ended_with_stop=True)


@pytest.mark.parametrize(
    ("name", "opening"),
    [("hermes", ""), ("qwen3", ""), ("qwen3 thinking", "<think>\n"), ("qwq", "<think>\n"),
     ("r1", "<think>\n")],
)  # fmt: skip
def test_the_opening_of_a_thought_is_known(name: str, opening: str) -> None:
    chat = CHATS[name]
    assert chat.opening == chat.opening_of(chat.first_prompt([QUESTION])) == opening
    after = chat.continuation([RESULT], ended_with_stop=True)
    assert chat.opening_of(after) == ("" if name == "r1" else opening)


THOUGHT = Message("assistant", "two", reasoning="add them")


@pytest.mark.parametrize(
    ("name", "message", "said"),
    [
        ("hermes", Message("assistant", "two"), "two"),
        ("hermes", CALL, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
        ("qwen3", Message("assistant", "two"), "two"),
        ("qwen3", THOUGHT, "<think>\nadd them\n</think>\n\ntwo"),
        ("qwen3 thinking", THOUGHT, "add them\n</think>\n\ntwo"),
        ("qwq", THOUGHT, "add them\n</think>\n\ntwo"),
        ("qwq", Message("assistant", "two"), "\n</think>\n\ntwo"),
        ("qwq", Message("assistant", "<think>hm</think>two"), "hm</think>two"),
        ("qwq", Message("assistant", "<think>\nhm\n</think>\n\ntwo"), "hm\n</think>\n\ntwo"),
        (
            "qwq",
            Message("assistant", "", CALL.tool_calls, reasoning="hm"),
            'hm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        ),
        ("r1", THOUGHT, "add them\n</think>\n\ntwo"),
        ("r1", Message("assistant", "two"), "\n</think>\n\ntwo"),
    ],
)
def test_a_demonstration_is_what_the_policy_would_have_to_say(
    name: str, message: Message, said: str
) -> None:
    chat = CHATS[name]
    assert text_of(chat, chat.completion(message)) == said + "<|im_end|>"


def test_reasoning_without_a_place_is_refused_in_demonstrations_alone() -> None:
    with pytest.raises(ModelError, match="leaves out the reasoning"):
        CHATS["hermes"].completion(THOUGHT)
    assert "add them" not in text_of(
        CHATS["hermes"], CHATS["hermes"].first_prompt([QUESTION, THOUGHT, QUESTION])
    )


def test_old_thoughts_stay_in_what_the_policy_sees() -> None:
    """The template would strip it; what the model said is not rendered."""
    chat = CHATS["qwen3 thinking"]
    ids = chat.first_prompt([QUESTION]) + chat.completion(THOUGHT)
    ids += chat.continuation([Message("user", "sure?")], ended_with_stop=True)
    assert text_of(chat, ids) == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n<think>\nadd them\n</think>\n\n"
        "two<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    fresh = text_of(chat, chat.first_prompt([QUESTION, THOUGHT, Message("user", "sure?")]))
    assert "add them" not in fresh, "a history that the policy did not say is rendered"
