"""Anthropic's Messages API: what a client sends joins what is recorded, its events sum up to its
answers, and what can't be asked is refused in the API's form."""

from __future__ import annotations

import asyncio
import copy
import json

import pytest
from adding_agent import ASK, SAYS, TOOL, USER, calls, results
from chat_templates import HERMES, NAMES_RESULTS

from agentevo.errors import EngineUnavailableError
from agentevo.types import Message

TEMPLATE = HERMES

AGENT = {**ASK, "tools": [TOOL], "system": "Be brief."}


def run(work):
    return asyncio.run(work)


async def posted(opened, policy, body, path="/messages"):
    headers = {"x-api-key": policy.api_key, "anthropic-version": "2023-06-01"}
    return await opened.http.post(policy.base_url + path, json=body, headers=headers)


async def created(opened, policy, body):
    answer = await posted(opened, policy, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def counted(opened, policy, body):
    asks = {key: body[key] for key in ("model", "messages", "system", "tools") if key in body}
    answer = await posted(opened, policy, asks, "/messages/count_tokens")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(opened, policy, body):
    """The message that the events sum up to, and the events."""
    answer = await posted(opened, policy, {**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text

    events = []
    for text in answer.text.strip().split("\n\n"):
        name, data = text.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"

    return summed(events), events


def summed(events):
    """As Anthropic's own clients put a message together."""
    message = {}
    texts = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = copy.deepcopy(event["message"])
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
            case "content_block_delta":
                delta = event["delta"]
                block = message["content"][event["index"]]
                for key in ("text", "thinking", "signature"):
                    if key in delta:
                        block[key] += delta[key]

                if "partial_json" in delta:
                    index = event["index"]
                    texts[index] = texts.get(index, "") + delta["partial_json"]
                    block["input"] = json.loads(texts[index])
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]

    return message


async def conversed(opened, policy, ask):
    """Three turns with calls and results. Returns what came, and what was counted before."""
    messages = [USER]
    answers = []
    counts = []
    for _ in SAYS:
        body = {**AGENT, "messages": messages}
        counts.append((await counted(opened, policy, body))["input_tokens"])
        answers.append(await ask(opened, policy, body))
        content = answers[-1]["content"]
        messages = [*messages, {"role": "assistant", "content": content}]
        if any(block["type"] == "tool_use" for block in content):
            messages.append(results(answers[-1]))

    return answers, counts


@pytest.mark.parametrize("stream", [False, True])
def test_turns_with_calls_and_results_extend_the_recorded_tokens(gateway_of, stream):
    async def ask(opened, policy, body):
        if stream:
            message, _ = await streamed(opened, policy, body)
            return message
        return await created(opened, policy, body)

    async def talk():
        async with gateway_of(SAYS) as opened:
            policy = opened.policy(context_length=10_000)
            answers, counts = await conversed(opened, policy, ask)
            return answers, counts, policy.turns, policy.conversation

    answers, counts, turns, conversation = run(talk())
    assert [turn.parent for turn in turns] == [None, 0, 1]
    assert [[block["type"] for block in answer["content"]] for answer in answers] == [
        ["thinking", "text", "tool_use", "tool_use"],
        ["tool_use"],
        ["text"],
    ]

    thought, text, first, second = answers[0]["content"]
    assert thought["thinking"] == "Two sums." and thought["signature"]
    assert text["text"] == "I add."
    assert [first["input"], second["input"]] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert [answer["stop_reason"] for answer in answers] == ["tool_use", "tool_use", "end_turn"]

    after = turns[1].messages
    assert [message.role for message in after] == ["tool", "tool", "user", "assistant"]
    assert [message.text for message in after[:3]] == ["sum 3", "3!", "Go on."]
    assert [message.tool_call_id for message in after[:2]] == [second["id"], first["id"]]

    for number, (answer, count, turn) in enumerate(zip(answers, counts, turns, strict=True)):
        used = answer["usage"]
        prompt = conversation.prompt_ids(number)
        assert count == len(prompt)
        assert used["input_tokens"] == len(turn.prompt_ids)
        assert used["cache_read_input_tokens"] == len(prompt) - len(turn.prompt_ids)
        assert used["output_tokens"] == len(turn.completion_ids)

    assert conversation.drift.branched == 0 and conversation.drift.extended == 2


def test_the_same_agent_through_chat_completions_gets_the_same_tokens(gateway_of):
    """The conversion adds nothing of its own."""

    async def in_chat(opened, policy):
        tool = {key: TOOL[key] for key in ("name", "description")}
        tools = [{"type": "function", "function": {**tool, "parameters": TOOL["input_schema"]}}]
        messages = [{"role": "system", "content": "Be brief."}, USER]
        for number in range(len(SAYS)):
            body = {"model": "any", "max_tokens": 500, "messages": messages, "tools": tools}
            said = (await opened.post(policy, body)).json()["choices"][0]["message"]
            ids = [call["id"] for call in said.get("tool_calls", ())]
            texts = {2: ["3!", "sum 3"], 1: ["3!"]}.get(len(ids), [])
            done = [
                {"role": "tool", "tool_call_id": call, "content": text}
                for call, text in zip(ids, texts, strict=True)
            ]
            messages = [*messages, said, *done[::-1], {"role": "user", "content": "Go on."}]
            assert len(policy.turns) == number + 1

    async def talk():
        async with gateway_of(SAYS * 2) as opened:
            one, other = (opened.policy(name, context_length=10_000) for name in "ab")
            await conversed(opened, one, created)
            await in_chat(opened, other)
            return one.turns, other.turns

    one, other = run(talk())
    assert [turn.prompt_ids for turn in one] == [turn.prompt_ids for turn in other]


def test_a_stream_sums_to_the_answer(gateway_of):
    async def talk():
        async with gateway_of([SAYS[0]] * 2) as opened:
            bodies = [opened.policy(name, context_length=10_000) for name in "ab"]
            whole = await created(opened, bodies[0], AGENT)
            return whole, *await streamed(opened, bodies[1], AGENT)

    whole, message, events = run(talk())
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4

    start = events[0]["message"]["usage"]
    assert start["input_tokens"] == whole["usage"]["input_tokens"] > 0, "known before it begins"
    for one in (whole, message):
        assert one.pop("id").startswith("msg_")
        for block in one["content"]:
            block.pop("id", None)

    assert message == whole


@pytest.mark.slow
def test_it_says_why_it_stopped(gateway_of):
    says = ["left and right", "left and right...", "left and right", "left and right"]
    asks = [{}, {"max_tokens": 3}, {"stop_sequences": ["right", "d r"]}, {"stop_sequences": ["x"]}]

    async def talk(ask):
        async with gateway_of(says) as opened:
            policy = opened.policy()
            return [await ask(opened, policy, {**ASK, **more}) for more in asks]

    for ask in (created, streamed):
        answers = run(talk(ask))
        if ask is streamed:
            answers = [message for message, _ in answers]

        assert [(answer["stop_reason"], answer["stop_sequence"]) for answer in answers] == [
            ("end_turn", None),
            ("max_tokens", None),
            ("stop_sequence", "d r"),
            ("end_turn", None),
        ]
        assert answers[2]["content"] == [{"type": "text", "text": "left an"}]


def test_a_tool_whose_loading_is_deferred_is_in_no_prompt(gateway_of):
    """Claude Code's DeferredToolPlaceholder."""
    later = {"name": "later", "input_schema": {}, "defer_loading": True}

    async def talk():
        async with gateway_of(["left"]) as opened:
            policy = opened.policy(context_length=10_000)
            await created(opened, policy, {**AGENT, "tools": [later, TOOL]})
            shown = await counted(opened, policy, {**AGENT, "tools": [later, TOOL]})
            return shown, await counted(opened, policy, AGENT), policy.turns

    shown, expected, turns = run(talk())
    assert shown == expected
    assert len(turns[0].prompt_ids) == expected["input_tokens"]


@pytest.mark.parametrize("loaded", [NAMES_RESULTS], indirect=True)
def test_results_that_are_errors_say_so_and_templates_get_the_tool_s_name(gateway_of):
    async def talk():
        async with gateway_of([calls((1, 2)), "3"]) as opened:
            policy = opened.policy(context_length=10_000)
            first = await created(opened, policy, AGENT)
            result = {"type": "tool_result", "tool_use_id": first["content"][0]["id"]}
            result |= {"content": "no such tool", "is_error": True}
            messages = [
                USER,
                {"role": "assistant", "content": first["content"]},
                {"role": "user", "content": [result]},
            ]
            await created(opened, policy, {**AGENT, "messages": messages})
            return policy.turns

    turns = run(talk())
    assert turns[1].parent == 0

    (result, _) = turns[1].messages
    assert result.text == "Error: no such tool" and result.name == "add"


REFUSED = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": "many"}, "whole number"),
    ({"messages": []}, "at least one message"),
    ({"messages": [{"role": "user"}]}, "messages.0.content is missing"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content is empty"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0 has the role 'king'"),
    ({"messages": [USER, {"role": "assistant", "content": "It is"}]}, "assistant's"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text is None"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "an object with a type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "x"},
                        {"type": "tool_result", "tool_use_id": "1"},
                    ],
                }
            ]
        },
        "messages.0.content.1: results of tools come before",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}, USER]},
        "messages.0.content.0",
    ),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system.0"),
    ({"tools": "f"}, "tools is 'f'"),
    ({"tools": [{"input_schema": {}}]}, "tools.0 has no name"),
    ({"tools": [{"name": "f"}]}, "input_schema"),
    ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "bash_20250124"),
    ({"tools": [{**TOOL, "defer_loading": "yes"}]}, "defer_loading"),
    ({"tools": [{**TOOL, "input_examples": [{}]}]}, "input_examples"),
    (
        {"tools": [{**TOOL, "defer_loading": True}], "tool_choice": {"type": "any"}},
        "there are no tools",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"tool_choice": "auto"}, "tool_choice is 'auto': give an object"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [1]}, "stop"),
    ({"temperature": "hot"}, "temperature"),
    ({"stream": "yes"}, "true or false"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "clear_tool"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"output_config": {"task_budget": 5}}, "output_config.task_budget"),
    ({"thread": {"type": "create"}}, "threads are not supported"),
]
NESTED = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, '
NESTED += b'"tools": [{"name": "f", "input_schema": {"a": %b}}]}'


@pytest.mark.slow
def test_what_can_not_be_asked_is_a_400_in_the_api_s_form(gateway_of):
    async def talk():
        async with gateway_of([]) as opened:
            policy = opened.policy()
            for change, says in REFUSED:
                answer = await posted(opened, policy, {**ASK, **change})
                assert answer.status_code == 400, (change, answer.text)
                said = answer.json()
                assert said["type"] == "error"
                assert said["error"]["type"] == "invalid_request_error"
                assert says in said["error"]["message"], (change, answer.text)

            for depth in range(920, 1000):  # in between, the body can be read and the tool can't
                answer = await opened.http.post(
                    policy.base_url + "/messages",
                    content=NESTED % (b"[" * depth + b"]" * depth),
                    headers={"x-api-key": policy.api_key},
                )
                assert answer.status_code == 400, answer.text

            return policy.turns

    assert not run(talk())


TAKEN = {
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "metadata": {"user_id": "x"},
    "service_tier": "auto",
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "temperature": 0.3,
    "top_k": 5,
    "tool_choice": {"type": "none"},
    "tools": [TOOL],
}


def test_what_has_no_effect_is_taken_and_the_recipe_s_distribution_stays(gateway_of):
    async def talk():
        async with gateway_of([calls((1, 2))]) as opened:
            policy = opened.policy()
            return await created(opened, policy, {**ASK, **TAKEN}), policy.turns[0]

    answer, turn = run(talk())
    assert answer["stop_reason"] == "end_turn"
    assert answer["content"] == [{"type": "text", "text": calls((1, 2))}], "no call without tools"
    assert turn.overrides is None and turn.temperature == 0.7
    assert [message.role for message in turn.messages] == ["system", "user", "assistant"]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/messages", "/messages/count_tokens"])
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "word " * 2**18}],
        [{"role": "user", "content": [{"type": "text", "text": "word " * 2**10}] * 2**8}],
        [{"role": "user", "content": ""}] * 2**16,
        [{"role": "assistant", "content": "x" * 2**20}, USER],
    ],
)
def test_what_is_far_too_long_is_not_encoded(gateway_of, chat, monkeypatch, path, messages):
    def encoded(*_, **__):
        raise AssertionError("it takes seconds, and memory that stays")

    async def talk():
        async with gateway_of([]) as opened:
            policy = opened.policy(context_length=10_000)
            monkeypatch.setattr(chat, "_encode", encoded)
            asks = {"messages": messages}
            return await posted(
                opened, policy, asks | ({} if "count" in path else {"max_tokens": 1}), path
            )

    answer = run(talk())
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith("prompt is too long: ")


BILLING = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize("form", ["block", "text"])
def test_a_header_that_changes_with_every_request_is_no_part_of_the_prompt(gateway_of, form):
    def system(number):
        header = BILLING.format(number)
        if form == "text":
            return f"{header}\nBe brief."
        blocks = [header, "Be ", "brief."]
        return [{"type": "text", "text": text} for text in blocks]

    async def talk():
        async with gateway_of(["left", "right"]) as opened:
            policy = opened.policy()
            first = await created(opened, policy, {**ASK, "system": system(1)})
            said = {"role": "assistant", "content": first["content"]}
            messages = [*ASK["messages"], said, *ASK["messages"]]
            await created(opened, policy, {**ASK, "messages": messages, "system": system(2)})
            return policy.turns

    turns = run(talk())
    assert [turn.parent for turn in turns] == [None, 0]
    assert turns[0].messages[0] == Message("system", "Be brief.")


def test_failures_have_the_api_s_names_and_statuses(gateway_of):
    async def talk():
        says = [EngineUnavailableError("no engine answers")]
        async with gateway_of(says, max_body_mb=0.25) as opened:
            policy = opened.policy("a")
            ended = opened.policy("b")
            assert ended.api_key

            await ended.close()
            long = {**ASK, "messages": [{"role": "user", "content": "word " * 500}]}
            vast = {**ASK, "messages": [{"role": "user", "content": "word " * 2**17}]}
            return [
                await posted(opened, ended, ASK),
                await posted(opened, ended, ASK, "/messages/count_tokens"),
                await posted(opened, policy, long),
                await posted(opened, policy, vast),
                await posted(opened, policy, ASK),
            ]

    answers = run(talk())
    assert [(answer.status_code, answer.json()["error"]["type"]) for answer in answers] == [
        (401, "authentication_error"),
        (401, "authentication_error"),
        (400, "invalid_request_error"),
        (413, "request_too_large"),
        (529, "overloaded_error"),
    ]
    assert answers[2].json()["error"]["message"].startswith("prompt is too long: ")


def test_a_stream_that_fails_ends_with_an_event_of_the_api_s(gateway_of, loaded):
    class Breaks:
        version = 3
        slept_s = 0.0

        async def generate(self, prompt_ids, sampling, *, listen=None, **more):
            listen(loaded.tokenizer.encode("left", add_special_tokens=False), [-0.5] * 4)
            await asyncio.sleep(0.05)
            raise EngineUnavailableError("it has gone")

        async def release(self, session):
            return

    async def talk():
        async with gateway_of(Breaks()) as opened:
            policy = opened.policy()
            _, events = await streamed(opened, policy, ASK)
            return events, policy.conversation.turns_to_record({})

    events, recorded = run(talk())
    assert events[-1]["type"] == "error"
    assert events[-1]["error"] == {"type": "overloaded_error", "message": "it has gone"}
    assert not recorded


@pytest.mark.slow
def test_counting_records_nothing_and_goes_beyond_the_context(gateway_of):
    async def talk():
        async with gateway_of(["left", "right"] * 2) as opened:
            policy = opened.policy("a")
            other = opened.policy("b")
            counts = []
            for one in (other, policy):
                said = {
                    "role": "assistant",
                    "content": (await created(opened, one, ASK))["content"],
                }
                if one is policy:
                    histories = [[USER, said, USER], [USER, said, LONG], [USER, EDITED, USER]]
                    before = tree(policy)
                    for messages in histories:
                        counts.append(await counted(opened, one, {**ASK, "messages": messages}))
                    counts.append(await counted(opened, one, AGENT))
                    assert tree(policy) == before and not policy.conversation.drift.counts

                await created(opened, one, {**ASK, "messages": [USER, said, USER]})

            return [count["input_tokens"] for count in counts], policy.turns, opened.engine.requests

    counts, turns, requests = run(talk())
    assert [turn.parent for turn in turns] == [None, 0]
    assert counts[0] == len(requests[3][0])
    assert counts[1] > 5000, "the context is 256"
    assert counts[2] not in (0, counts[0])
    assert counts[3] > len(requests[2][0]), "the system message and the tool count"

    seeds = [sampling.seed for _, sampling, _ in requests]
    assert seeds[:2] == seeds[2:], "a count is no request"


LONG = {"role": "user", "content": "word " * 1000}
EDITED = {"role": "assistant", "content": "What it has not said."}


def tree(policy):
    def below(node):
        return [(child.forms, below(child)) for child in node.children]

    roots = policy.conversation._histories.roots
    return [(tools, below(root)) for tools, root in roots.items()]
