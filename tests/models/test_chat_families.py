"""Families whose templates end a message with the next role (GLM), leave an opened thought empty
(Nemotron 3) or out (MiniMax M2), or end a call at its result (Gemma 4); and DeepSeek V3.2 and V4,
whose templates AgentEvo ships."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from family_templates import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    GEMMA,
    GEMMA_THOUGHTS,
    GLM,
    MINIMAX,
    NEMOTRON,
    family_tokenizer,
)

from agentevo.agents.policy import Reply
from agentevo.data import ChatRow
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.chat.chat_template import TemplateValues, ToolSchemas
from agentevo.training.assistant_tokens import AssistantTokens
from agentevo.training.supervised import conversation_sample
from agentevo.types import Message, ToolCall

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOLS = ToolSchemas.of([TOOL])
USER = Message("user", "1+1?")
DEEPSEEK_END = "<｜end▁of▁sentence｜>"
ENDS = {GLM: "<|user|>", NEMOTRON: "<|im_end|>", GEMMA: "<turn|>", MINIMAX: "[e~["}
CALLS = (ToolCall("add", '{"a": 1, "b": "x, {y}"}', "call00001"),)
CALL = Message("assistant", "", CALLS)
RESULT = Message("tool", "2", tool_call_id="call00001", name="add")
NAMES = {
    GLM: "glm",
    NEMOTRON: "nemotron",
    GEMMA: "gemma",
    MINIMAX: "minimax",
    DEEPSEEK_V32: "v32",
    DEEPSEEK_V4: "v4",
}
CHATS = {template: ChatFormat(family_tokenizer(template)) for template in NAMES}
families = pytest.mark.parametrize("template", CHATS, ids=NAMES.values())


def text_of(chat, ids):
    return chat.tokenizer.decode(ids)


def whole(chat, *messages):
    """The template's own rendering of a history and the generation prompt."""
    mappings = [
        {"role": m.role, "content": m.content, "name": m.name}
        | (
            {
                "tool_calls": [
                    {"function": {"name": c.name, "arguments": json.loads(c.arguments)}}
                    for c in m.tool_calls
                ]
            }
            if m.tool_calls
            else {}
        )
        for m in messages
    ]
    return chat.tokenizer.apply_chat_template(
        mappings, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )


@families
def test_a_tool_loop_in_pieces_is_what_the_template_renders(template):
    chat = CHATS[template]
    prompt = chat.first_prompt([USER], TOOLS)
    drawn = chat.completion(CALL)
    assert drawn[-1] in chat.end_ids
    assert chat.has_ended(drawn[-1], [RESULT], TOOLS)

    joined = prompt + drawn + chat.continuation([RESULT], ended_with_stop=True, tools=TOOLS)
    expected = whole(chat, USER, CALL, RESULT)
    if template == NEMOTRON:  # the drawn text continues the thought that the prompt opens
        expected = expected.replace("<think></think>", "<think>\n</think>", 1)
    if template == MINIMAX:
        expected = expected.replace("]~b]ai\n", "]~b]ai\n<think>\n\n</think>\n\n", 1)
    assert text_of(chat, joined) == expected


@families
def test_a_conversation_in_pieces_is_what_the_template_renders(template):
    chat = CHATS[template]
    prompt = text_of(chat, chat.first_prompt([USER], TOOLS))
    rest = text_of(chat, chat.continuation([USER], ended_with_stop=False, tools=TOOLS))
    expected = whole(chat, USER, Message("assistant", "two"), USER)
    assert expected.startswith(prompt.removesuffix(chat.opening))
    assert expected.endswith("two" + rest)
    stopped = chat.continuation([USER], ended_with_stop=True, tools=TOOLS)
    assert stopped == chat.continuation([USER], ended_with_stop=False, tools=TOOLS)[1:]


@families
@pytest.mark.parametrize(
    "message",
    [
        Message("assistant", "two"),
        CALL,
        Message("assistant", "two", reasoning="add them"),
        Message("assistant", "", CALLS, reasoning="add them"),
    ],
)
def test_a_demonstration_is_read_back(template, message):
    chat = CHATS[template]
    text = chat.text(chat.completion(message))
    parsed = chat.parser.parse(text, opening=chat.opening, tools=[TOOL])
    assert (parsed.content, parsed.reasoning) == (message.text, message.reasoning)
    assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == [
        (c.name, json.loads(c.arguments)) for c in message.tool_calls
    ]
    assert parsed.malformed == ()


def test_the_role_of_the_next_message_ends_an_answer_of_glm():
    chat = CHATS[GLM]
    user, observation, end = chat.tokenizer.convert_tokens_to_ids(
        ["<|user|>", "<|observation|>", "<|endoftext|>"]
    )
    assert chat.end_ids == tuple(sorted([user, observation, end]))
    assert chat.completion(Message("assistant", "two"))[-1] == user
    assert chat.completion(Message("assistant", "two", reasoning="so"))[-1] == user
    assert chat.completion(CALL)[-1] == observation

    # The role is in the history once, also where another one was drawn.
    assert chat.has_ended(user, [USER]) and not chat.has_ended(observation, [USER])
    assert chat.has_ended(observation, [RESULT]) and not chat.has_ended(user, [RESULT])
    assert not chat.has_ended(end, [USER])


@pytest.mark.parametrize("role", ["assistant", "system"])
def test_glm_goes_on_before_a_message_of_any_role(role):
    chat = CHATS[GLM]
    messages = [] if role == "assistant" else [Message(role, "Be brief.")]
    said = [USER, Message("assistant", "two")]
    for last in chat.end_ids:
        assert not chat.has_ended(last, messages, TOOLS)
    rest = text_of(chat, chat.continuation(messages, ended_with_stop=False, tools=TOOLS))
    assert whole(chat, *said, *messages).endswith("two" + rest)


def test_the_opening_of_an_answer_depends_on_the_message_before_it():
    chat = ChatFormat(family_tokenizer(GEMMA_THOUGHTS))
    thinks = chat.with_values(TemplateValues.of({"enable_thinking": True}))
    empty = "<|channel>thought\n<channel|>"
    for chosen, first, later in ((chat, empty, ""), (thinks, "", "<|channel>thought\n")):
        assert chosen.opening_after([USER]) == first
        assert chosen.opening_after([USER, CALL, RESULT]) == later
        ids = chosen.continuation([RESULT], ended_with_stop=True)
        assert chosen.opening_of(ids) == later

    reply = Reply("two", True, 0, Message("assistant", "two"), opening=empty)
    assert reply.answer == "two"
    thought = Reply("so\n<channel|>two", True, 0, Message("assistant", ""), opening=later)
    assert thought.answer == "two"
    assert replace(thought, text="so").answer == ""


def test_values_change_what_opens_an_answer():
    glm = CHATS[GLM].with_values(TemplateValues.of({"enable_thinking": False}))
    assert text_of(glm, glm.first_prompt([USER])).endswith("<|assistant|>\n<think></think>")
    assert text_of(glm, glm.completion(Message("assistant", "two"))) == "\ntwo<|user|>"
    nemotron = CHATS[NEMOTRON]
    assert nemotron.opening == "<think>\n"
    without = nemotron.with_values(TemplateValues.of({"enable_thinking": False}))
    assert text_of(without, without.first_prompt([USER])).endswith("assistant\n<think></think>")


@families
@pytest.mark.parametrize("calls", [False, True])
def test_rows_of_data_train_what_the_policy_has_to_say(template, calls):
    chat = CHATS[template]
    answer = {"role": "assistant", "content": "two"}
    asks = {"role": "user", "content": "1+1?"}
    messages = [asks, answer, asks, answer]
    if calls:
        call = {"name": "add", "arguments": {"a": 1}}
        asked = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
        messages = [asks, asked, {"role": "tool", "name": "add", "content": "2"}, answer]

    rows, _ = AssistantTokens(chat.tokenizer, max_tokens=2000).encode(
        ChatRow("a", messages, [TOOL] if calls else None)
    )
    ends = [
        int(token)
        for row in rows
        for token, trained, after in zip(row.ids, row.mask, [*row.mask[1:], False], strict=True)
        if trained and not after
    ]
    names = chat.tokenizer.convert_ids_to_tokens(ends)
    last = ENDS.get(template, DEEPSEEK_END)
    first = {GLM: "<|observation|>", GEMMA: "<|tool_response>"}.get(template, last)
    assert names == [first if calls else last, last]


def test_rows_are_trained_after_the_empty_thought_of_their_prompts():
    tokenizer = family_tokenizer(GEMMA_THOUGHTS)
    answer = {"role": "assistant", "content": "two"}
    asks = {"role": "user", "content": "1+1?"}
    row = ChatRow("a", [asks, answer, asks, answer], None)
    rows, _ = AssistantTokens(tokenizer, max_tokens=2000).encode(row)
    for sample in rows:  # the history of the second has no such thought
        said = tokenizer.decode(sample.ids[sample.mask].tolist())
        before = tokenizer.decode(sample.ids[~sample.mask].tolist())
        assert said == "two<turn|>"
        assert before.endswith("<|turn>model\n<|channel>thought\n<channel|>")
        assert before.count("<|channel>") == 1
    assert len(rows) == 2


def test_a_demonstration_in_glm_goes_on_with_the_role_of_the_next_message():
    chat = CHATS[GLM]
    answer = Message("assistant", "two")
    rule = Message("system", "Be brief.")
    sample = conversation_sample([USER, answer, rule, USER, answer, answer], chat, "a")
    text = chat.tokenizer.decode(sample.ids.tolist())
    assert "two<|user|><|system|>\nBe brief.<|user|>\n1+1?<|assistant|>" in text
    assert "two<|user|><|assistant|>\n<think></think>\ntwo<|user|>" in text


@pytest.mark.parametrize("template", [DEEPSEEK_V32, DEEPSEEK_V4], ids=["v32", "v4"])
def test_thoughts_of_deepseek_are_in_the_prompt_and_the_history(template):
    chat = CHATS[template]
    assert chat.opening == "<think>" and chat.parser.name == "dsml"
    for message, text in (
        (Message("assistant", "two", reasoning="so"), "so</think>two"),
        (Message("assistant", "two"), "</think>two"),
    ):
        ids = chat.completion(message)
        assert text_of(chat, ids) == text + DEEPSEEK_END
        joined = chat.first_prompt([USER]) + ids + chat.continuation([USER], ended_with_stop=True)
        mapping = {"role": "assistant", "content": "two", "reasoning_content": message.reasoning}
        user = {"role": "user", "content": USER.text}
        assert text_of(chat, joined) == chat.tokenizer.apply_chat_template(
            [user, mapping, user], tokenize=False, add_generation_prompt=True
        )

    plain = chat.with_values(TemplateValues.of({"enable_thinking": False}))
    assert plain.opening == "" and text_of(chat, plain.first_prompt([USER])).endswith("</think>")
    assert text_of(chat, plain.completion(Message("assistant", "two"))).startswith("two<")


@pytest.mark.parametrize("template", [DEEPSEEK_V32, DEEPSEEK_V4], ids=["v32", "v4"])
@pytest.mark.parametrize("rest", [[], [USER]], ids=["alone", "before a question"])
def test_a_developers_rules_are_those_of_a_system_message(template, rest):
    chat = CHATS[template]
    prompts = [
        text_of(chat, chat.first_prompt([Message(role, "Be brief."), *rest]))
        for role in ("system", "developer")
    ]
    assert "Be brief." in prompts[0] and prompts[0] == prompts[1]


def test_the_notations_of_deepseek_are_those_of_its_encoders():
    """The texts are those of encoding_dsv32.py and encoding_dsv4.py."""
    first, second = (ToolCall("add", '{"a": 1, "b": "x, {y}"}', "1"), ToolCall("add", "{}", "2"))
    call = Message("assistant", "Wait.", (first, second), reasoning="so")
    results = [Message("tool", "2", tool_call_id="1"), Message("tool", "3", tool_call_id="2")]
    invocations = (
        '<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="true">x, {y}</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="add">\n\n</｜DSML｜invoke>\n'
    )
    for template, block, after in (
        (
            DEEPSEEK_V32,
            "function_calls",
            "\n\n<function_results>\n<result>2</result>\n<result>3</result>\n</function_results>"
            "\n\n<think>",
        ),
        (
            DEEPSEEK_V4,
            "tool_calls",
            "<｜User｜><tool_result>2</tool_result>\n\n<tool_result>3</tool_result>"
            "<｜Assistant｜><think>",
        ),
    ):
        chat = CHATS[template]
        assert text_of(chat, chat.completion(call)) == (
            f"so</think>Wait.\n\n<｜DSML｜{block}>\n{invocations}</｜DSML｜{block}>" + DEEPSEEK_END
        )
        assert text_of(chat, chat.continuation(results, ended_with_stop=True)) == after
