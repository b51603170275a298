"""OpenAI's Responses API, asked with OpenAI's own client: what comes back extends what is recorded,
by items and by the id of an answer; its events sum to its answer; what has no effect is refused."""

from __future__ import annotations

import asyncio
import contextlib

import openai
import pytest
from chat_templates import QWEN3_THINKING
from hypothesis import given, settings
from hypothesis import strategies as st

from agentevo.agents.gateway import memory
from agentevo.agents.gateway.images import DecodedImages, RequestImages
from agentevo.agents.gateway.memory import Memory
from agentevo.agents.gateway.refusals import Refusal
from agentevo.agents.gateway.response_items import messages_of_items
from agentevo.agents.gateway.responses import request_of
from agentevo.errors import BadRequestError, EngineUnavailableError
from agentevo.types import Completion, Message, ToolCall
from examples import examples

TEMPLATE = QWEN3_THINKING

TOOLS = [
    {
        "type": "function",
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {}, "b": {}}},
        "strict": True,
    }
]
QUESTION = [{"role": "user", "content": [{"type": "input_text", "text": "1+1, and 2+2?"}]}]


def call(a: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"b":{a},"a": {a}}}}}\n</tool_call>'


SAID = [
    f"Both at once.</think>\n\nLet me see.\n{call(1)}\n{call(2)}",
    f"Again.</think>\n\n{call(3)}",
    "Fine.</think>\n\n2 and 4.",
]


class Spelling:
    """An engine that says each text token by token; an exception among them is raised."""

    version = 3
    slept_s = 0.0

    def __init__(self, chat, says):
        self.chat = chat
        self.says = iter(says)

    async def generate(self, prompt_ids, sampling, *, session=None, deadline_s, listen=None):
        text = next(self.says)
        failure = text if isinstance(text, Exception) else None
        cut = failure is not None or text.endswith("...")

        ids = self.chat.tokenizer.encode("Well" if failure else text.removesuffix("..."))
        ids = ids if cut else [*ids, self.chat.end_of_turn_id]
        for token in ids:
            if listen is not None:
                listen([token], [-0.5])

        if failure is not None:
            await asyncio.sleep(0.05)
            raise failure

        return Completion(
            ids=ids,
            logprobs=[-0.5] * len(ids),
            versions=[3] * len(ids),
            finish_reason="length" if cut else "stop",
        )

    async def release(self, session):
        return


def with_client(gateway_of, chat, says, work, **section):
    """What `work(client, policy)` returns, on a gateway that says so."""

    async def within():
        async with gateway_of(Spelling(chat, says), **section) as opened:
            policy = opened.policy(context_length=4096)
            async with openai.AsyncOpenAI(
                base_url=policy.base_url, api_key=policy.api_key, max_retries=0
            ) as client:
                return await work(client, policy)

    return asyncio.run(within())


async def events_of(client, **body):
    return [event async for event in await client.responses.create(stream=True, **body)]


def summed(events):
    """The answer that the events of a stream tell, checked for their order."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]

    items = {}
    for event in events[2:-1]:
        at = event.output_index
        if event.type == "response.output_item.added":
            assert at == len(items) and event.item.status == "in_progress"
            items[at] = [event.item.id, "", None]
            continue

        name, text, done = items[at]
        assert done is None, "nothing comes after an item is done"
        if event.type == "response.output_item.done":
            assert event.item.id == name
            items[at][2] = event.item
            if event.item.type == "function_call":
                assert event.item.arguments == text
            else:
                assert event.item.content[0].text == text
            continue

        assert event.item_id == name
        if event.type.endswith(".delta"):
            items[at][1] += event.delta
        elif event.type.endswith("_text.done"):
            assert event.text == text
        elif event.type.endswith("arguments.done"):
            assert event.arguments == text
        else:
            assert event.type.startswith("response.content_part.")

    response = events[-1].response
    assert [item for _, _, item in items.values()] == response.output
    return response


def results(response):
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"{n}"}
        for n, item in enumerate(response.output)
        if item.type == "function_call"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("by_id", [False, True], ids=["items", "previous_response_id"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_three_turns_with_tools_are_one_chain(gateway_of, chat, by_id, streamed):
    async def work(client, policy):
        items = list(QUESTION)
        more = {}
        answers = []
        for _ in SAID:
            body = {"model": "m", "input": items, "tools": TOOLS, "instructions": "Add.", **more}
            if streamed:
                answer = summed(await events_of(client, **body))
            else:
                answer = await client.responses.create(**body)

            answers.append(answer)
            if by_id:
                items = results(answer)
                more = {"previous_response_id": answer.id}
            else:
                items = [*items, *answer.output, *results(answer)]

        return answers, policy.turns, policy.conversation.metrics()

    answers, turns, metrics = with_client(gateway_of, chat, SAID, work)
    assert [turn.parent for turn in turns] == [None, 0, 1]
    assert not metrics, "nothing drifted"

    kinds = [[item.type for item in answer.output] for answer in answers]
    assert kinds[0] == ["reasoning", "message", "function_call", "function_call"]
    assert kinds[1:] == [["reasoning", "function_call"], ["reasoning", "message"]]
    assert answers[0].output[0].content[0].text == "Both at once."
    assert answers[0].output[2].arguments == '{"b":1,"a": 1}'
    assert answers[2].output_text.strip() == "2 and 4."

    known = len(turns[0].prompt_ids) + len(turns[0].completion_ids)
    assert answers[1].usage.input_tokens_details.cached_tokens == known
    assert answers[1].usage.input_tokens == known + len(turns[1].prompt_ids)
    assert answers[0].instructions == "Add." and answers[0].tools[0].name == "add"


@pytest.mark.slow
def test_items_without_ids_and_between_results_are_still_the_answer(gateway_of, chat):
    """Clients keep calls beside their results, and drop ids, thoughts and spaces."""

    async def work(client, policy):
        first = await client.responses.create(model="m", input=QUESTION, tools=TOOLS)
        thought, text, one, two = [item.model_dump(exclude_none=True) for item in first.output]
        outputs = results(first)
        ways = [
            [thought, text, one, outputs[0], two, outputs[1]],
            [text, one, two, *outputs],
            [{"type": "item_reference", "id": item.id} for item in first.output] + outputs,
            [
                {"role": "assistant", "content": "Let me see."},
                *({k: v for k, v in item.items() if k not in ("id", "status")} for item in (one,)),
                {**two, "arguments": '{"a": 2, "b": 2}'},
                *outputs,
            ],
        ]
        for way in ways:
            await client.responses.create(model="m", input=[*QUESTION, *way], tools=TOOLS)

        return policy.turns

    turns = with_client(gateway_of, chat, [SAID[0], *["Fine.</think>2"] * 4], work)
    assert [turn.parent for turn in turns] == [None, 0, 0, 0, 0]
    assert len({tuple(turn.prompt_ids) for turn in turns[1:]}) == 1


def test_two_answers_in_a_row_stay_two():
    items = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "One."},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Two."}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""},
        {"type": "function_call_output", "call_id": "c", "output": [
            {"type": "input_text", "text": "3"}
        ]},
    ]  # fmt: skip
    assert messages_of_items(items, Memory(), RequestImages(DecodedImages())) == [
        Message("user", "Go."),
        Message("assistant", "One."),
        Message("assistant", "Two.", (ToolCall("f", "", "c"),)),
        Message("tool", "3", tool_call_id="c"),
    ]


@pytest.mark.slow
def test_an_answer_that_the_limit_cut_is_incomplete(gateway_of, chat):
    async def work(client, policy):
        body = {"model": "m", "input": "Go.", "max_output_tokens": 7}
        return await client.responses.create(**body), await events_of(client, **body)

    says = ["Hm</think>left...", "Hm..."]
    whole, events = with_client(gateway_of, chat, says, work)
    assert whole.status == "incomplete" and whole.output[1].status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert events[-1].type == "response.incomplete"

    cut = summed(events)
    assert [(item.type, item.status) for item in cut.output] == [("reasoning", "incomplete")]


@pytest.mark.slow
def test_it_gives_ids_logprobs_and_versions_on_request(gateway_of, chat):
    async def work(client, policy):
        answer = await client.responses.create(
            model="m",
            input="Go.",
            include=["message.output_text.logprobs"],
            extra_body={"return_token_ids": True},
        )
        return answer, policy.turns[0]

    answer, turn = with_client(gateway_of, chat, ["Hm</think>left"], work)
    assert answer.token_ids == list(turn.completion_ids)
    assert answer.prompt_token_ids == list(turn.prompt_ids)
    assert answer.versions == list(turn.versions)

    logprobs = answer.output[-1].content[0].logprobs
    assert [token.logprob for token in logprobs] == list(turn.logprobs)
    assert answer.temperature == turn.temperature


@pytest.mark.slow
def test_what_is_not_kept_is_not_found(gateway_of, chat, monkeypatch):
    async def work(client, policy):
        unkept = await client.responses.create(model="m", input="Go.", store=False)
        kept = await client.responses.create(model="m", input="Go.")
        refused = []
        for name in (unkept.id, "resp_none", kept.output[0].id):
            with pytest.raises(openai.NotFoundError) as caught:
                await client.responses.create(model="m", input="?", previous_response_id=name)
            refused.append(caught.value)

        for _ in range(4):  # more than are kept
            await client.responses.create(model="m", input="Go.")

        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="m", input="?", previous_response_id=kept.id)

        return refused

    monkeypatch.setattr(memory, "MAX_KEPT", 6)
    refused = with_client(gateway_of, chat, ["Hm</think>left"] * 6, work)
    for error in refused:
        assert error.code == "previous_response_not_found"
        assert error.param == "previous_response_id"


@pytest.mark.slow
def test_an_answer_that_is_kept_is_given_and_forgotten(gateway_of, chat):
    asked = [{"role": "user", "content": text} for text in ("Go.", "On.", "Up.")]

    async def work(client, policy):
        answer = await client.responses.create(model="m", input=asked, instructions="Be quick.")
        given = await client.responses.retrieve(answer.id)

        pages = []
        for order in ("asc", "desc"):
            page = await client.responses.input_items.list(answer.id, order=order, limit=2)
            pages.append([item.content for item in page.data])
            last = page.data[-1].id
            more = await client.responses.input_items.list(answer.id, order=order, after=last)
            pages[-1] += [item.content for item in more.data]

        await client.responses.delete(answer.id)
        unkept = await client.responses.create(model="m", input="Go.", store=False)
        calls = [
            client.responses.retrieve(answer.id),
            client.responses.delete(answer.id),
            client.responses.input_items.list(answer.id),
            client.responses.retrieve(unkept.id),
            client.responses.retrieve(answer.output[-1].id),
            client.responses.create(model="m", input="?", previous_response_id=answer.id),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                await call

        with pytest.raises(openai.BadRequestError):
            await client.responses.input_items.list(unkept.id, limit=0)

        return answer, given, pages, policy.turns

    answer, given, pages, turns = with_client(gateway_of, chat, ["Hm</think>left"] * 3, work)
    assert given == answer and len(turns) == 2
    assert pages == [["Go.", "On.", "Up."], ["Up.", "On.", "Go."]]


def test_no_session_finds_the_answers_of_another(gateway_of, chat):
    async def talk():
        async with gateway_of(Spelling(chat, ["Hm</think>left"] * 2)) as opened:
            one, two = (opened.policy(name, context_length=4096) for name in "ab")
            body = {"model": "m", "input": "Go."}
            first = (await opened.post(one, body, "/responses")).json()
            body["previous_response_id"] = first["id"]
            stolen = await opened.post(two, body, "/responses")
            own = await opened.post(one, body, "/responses")
            return stolen.status_code, own.status_code

    assert asyncio.run(talk()) == (404, 200)


def test_the_memory_is_bounded_by_what_it_holds(monkeypatch):
    monkeypatch.setattr(memory, "MAX_CHARACTERS", 10)
    kept = Memory()
    for number in range(5):
        kept.keep(str(number), number, 4)
    assert [kept.find(str(number)) for number in range(5)] == [None, None, None, 3, 4]
    kept.keep("large", "large", 11)
    assert kept.find("large") is None


@pytest.mark.slow
def test_a_stream_that_fails_says_why_where_it_ends(gateway_of, chat):
    async def work(client, policy):
        return await events_of(client, model="m", input="Go.")

    events = with_client(gateway_of, chat, [EngineUnavailableError("it has gone")], work)
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.message == "it has gone"


@pytest.mark.slow
def test_openai_s_own_sum_of_a_stream_is_the_answer(gateway_of, chat):
    async def work(client, policy):
        async with client.responses.stream(model="m", input=QUESTION, tools=TOOLS) as stream:
            return await stream.get_final_response()

    answer = with_client(gateway_of, chat, SAID[:1], work)
    assert [item.type for item in answer.output[1:]] == ["message", *["function_call"] * 2]
    assert answer.output_text.strip() == "Let me see."


REFUSED = [
    ({"input": None}, "input"),
    ({"input": []}, "input is empty"),
    ({"input": 5}, "a text or a list"),
    ({"input": ["x"]}, "item 1"),
    ({"input": [{"role": "king", "content": "x"}]}, "king"),
    ({"input": [{"role": ["user"], "content": "x"}]}, "role"),
    ({"input": [{"type": "computer_call"}]}, "computer_call"),
    ({"input": [{"type": ["message"]}]}, "item 1"),
    ({"input": [{"role": "user"}]}, "no content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "image_url"),
    ({"input": [{"type": "function_call", "call_id": "c"}]}, "no name"),
    ({"input": [{"type": "function_call", "call_id": 1, "name": "f"}]}, "call_id"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "encrypted_content"),
    ({"input": "x", "instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_new_tokens"),
    ({"stream": "yes"}, "true or false"),
    ({"store": "yes"}, "true or false"),
    ({"temperature": "hot"}, "temperature"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ({"text": "json"}, "text"),
    ({"metadata": [1]}, "metadata"),
    ({"tools": [{"type": "web_search"}]}, "web_search"),
    ({"tools": [{"type": "function"}]}, "no name"),
    ({"tools": [{"type": "namespace", "name": "a"}]}, "tool 1: a namespace must have"),
    ({"tools": [{"type": "namespace", "tools": TOOLS}]}, "tool 1: a namespace must have"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "custom"}]}]}, "tool 1.1"),
    (
        {
            "tools": [
                {**TOOLS[0], "name": "a__add"},
                {"type": "namespace", "name": "a", "tools": TOOLS},
            ]
        },
        "'a__add'",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "namespace": 1}]},
        "namespace is 1",
    ),
    ({"tools": "add"}, "tools is 'add': give a list"),
    ({"tools": ""}, "tools is"),
    ({"tools": {}}, "tools is"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "gone"}}, "'gone'"),
    ({"include": ["file_search_call.results"]}, "file_search_call"),
    ({"include": "reasoning.encrypted_content"}, "a list"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"input": "word " * 30_000}, "context"),
]


@pytest.mark.slow
def test_what_can_not_be_asked_is_a_400_that_says_why(gateway_of, chat):
    async def talk():
        async with gateway_of(Spelling(chat, [])) as opened:
            policy = opened.policy()
            for change, says in REFUSED:
                body = {"model": "m", "input": "Go.", **change}
                answer = await opened.post(policy, body, "/responses")
                assert answer.status_code == 400, (change, answer.text)
                assert says in answer.json()["error"]["message"], (change, answer.text)

            body = {"input": [{"type": "item_reference", "id": "msg_none"}]}
            answer = await opened.post(policy, body, "/responses")
            assert answer.status_code == 404 and "item itself" in answer.text

            stranger = await opened.http.post(policy.base_url + "/responses", json=body)
            assert stranger.status_code == 401
            assert stranger.json()["error"]["code"] == "invalid_api_key"
            return policy.turns

    assert not asyncio.run(talk())


KEYS = [
    "type",
    "role",
    "content",
    "id",
    "call_id",
    "name",
    "arguments",
    "output",
    "summary",
    "input",
    "tools",
    "text",
    "format",
    "include",
    "metadata",
    "store",
    "instructions",
]
WORDS = [
    "message",
    "user",
    "assistant",
    "function_call",
    "function_call_output",
    "reasoning",
    "add",
    "output_text",
    "input_text",
    "reasoning_text",
    "function",
    "item_reference",
    f"msg_{'0' * 48}_0",
    f"fc_{'1' * 48}_1",
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.sampled_from(WORDS) | st.text(max_size=3),
    lambda values: (
        st.lists(values, max_size=4) | st.dictionaries(st.sampled_from(KEYS), values, max_size=5)
    ),
    max_leaves=12,
)


@settings(max_examples=examples(40))
@given(st.dictionaries(st.sampled_from(KEYS), json_values), st.lists(json_values, max_size=5))
def test_whatever_is_asked_is_read_or_refused(body, items):
    for asked in (body, {**body, "input": items}, {"input": items}):
        with contextlib.suppress(BadRequestError, Refusal):
            assert request_of(asked, Memory(), RequestImages(DecodedImages())).prompt


@pytest.mark.slow
def test_items_stand_in_the_order_in_which_the_model_wrote(gateway_of, chat):
    says = [f"Hm.</think>{call(1)}\n\nNow:\n{call(2)} ", "Fine.</think>2"]

    async def work(client, policy):
        answer = summed(await events_of(client, model="m", input=QUESTION, tools=TOOLS))
        items = [*QUESTION, *answer.output, *results(answer)]
        await client.responses.create(model="m", input=items, tools=TOOLS)
        return answer, policy.turns

    answer, turns = with_client(gateway_of, chat, says, work)
    kinds = [item.type for item in answer.output]
    assert kinds == ["reasoning", "function_call", "message", "function_call"]
    assert [turn.parent for turn in turns] == [None, 0]
