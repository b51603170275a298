"""Anthropic's own client, unmodified, against the gateway."""

from __future__ import annotations

import asyncio

import pytest
from adding_agent import ASK, SAYS, TOOL, USER, calls, results
from chat_templates import HERMES

from agentevo.errors import EngineUnavailableError

anthropic = pytest.importorskip("anthropic")

TEMPLATE = HERMES


def client_of(policy, **more):
    return anthropic.AsyncAnthropic(
        base_url=policy.session.base, api_key=policy.api_key, max_retries=0, **more
    )


def run(work):
    return asyncio.run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools(gateway_of, stream):
    async def ask(client, messages):
        body = {**ASK, "system": "Be brief.", "tools": [TOOL], "messages": messages}
        if not stream:
            return await client.messages.create(**body)

        async with client.messages.stream(**body) as events:
            said = [text async for text in events.text_stream]
            message = await events.get_final_message()

        texts = [block.text for block in message.content if block.type == "text"]
        assert "".join(said) == "".join(texts)
        return message

    async def talk():
        async with gateway_of(SAYS) as opened:
            policy = opened.policy(context_length=10_000)
            client = client_of(policy)
            messages = [USER]
            answers = []
            for _ in SAYS:
                answers.append(await ask(client, messages))
                messages = [*messages, {"role": "assistant", "content": answers[-1].content}]
                if answers[-1].stop_reason == "tool_use":
                    messages.append(results(answers[-1].to_dict()))

            return answers, policy.turns, policy.conversation.drift.branched

    answers, turns, branched = run(talk())
    assert [answer.stop_reason for answer in answers] == ["tool_use", "tool_use", "end_turn"]
    assert [block.type for block in answers[0].content][:2] == ["thinking", "text"]
    assert [turn.parent for turn in turns] == [None, 0, 1]
    assert branched == 0

    for answer, turn in zip(answers, turns, strict=True):
        assert answer.usage.input_tokens == len(turn.prompt_ids)
        assert answer.usage.output_tokens == len(turn.completion_ids)


def test_events_of_a_stream_are_its_own(gateway_of):
    async def talk():
        async with gateway_of(["left"]) as opened:
            client = client_of(opened.policy())
            return [event async for event in await client.messages.create(**ASK, stream=True)]

    events = run(talk())
    kinds = {type(event).__name__ for event in events}
    assert kinds == {
        "RawMessageStartEvent",
        "RawContentBlockStartEvent",
        "RawContentBlockDeltaEvent",
        "RawContentBlockStopEvent",
        "RawMessageDeltaEvent",
        "RawMessageStopEvent",
    }
    assert events[0].message.usage.input_tokens > 0


def test_its_runner_of_tools_goes_to_the_end(gateway_of):
    @anthropic.beta_async_tool
    async def add(a: int, b: int) -> str:
        """Adds.

        Args:
            a: One.
            b: Another.
        """
        return str(a + b)

    async def talk():
        async with gateway_of(SAYS) as opened:
            policy = opened.policy(context_length=10_000)
            runner = client_of(policy).beta.messages.tool_runner(**ASK, tools=[add])
            return await runner.until_done(), policy.turns

    last, turns = run(talk())
    assert last.content[0].text == SAYS[-1]
    assert [turn.parent for turn in turns] == [None, 0, 1]
    assert [message.text for message in turns[1].messages[:2]] == ["3", "7"]


def test_failures_are_its_exceptions(gateway_of):
    async def talk():
        async with gateway_of([EngineUnavailableError("no engine answers")] * 2) as opened:
            policy = opened.policy("a")
            ended = opened.policy("b")
            late = client_of(ended)
            await ended.close()
            client = client_of(policy)

            with pytest.raises(anthropic.AuthenticationError, match="over"):
                await late.messages.create(**ASK)

            long = [{"role": "user", "content": "word " * 500}]
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await client.messages.create(**{**ASK, "messages": long})
            with pytest.raises(anthropic.BadRequestError, match="tool_choice") as refused:
                await client.messages.create(**ASK, tools=[TOOL], tool_choice={"type": "some"})
            assert refused.value.type == "invalid_request_error"

            with pytest.raises(anthropic.InternalServerError, match="no engine") as failed:
                await client.messages.create(**ASK)

            assert failed.value.status_code == 529 and failed.value.type == "overloaded_error"

    run(talk())


def test_a_stream_that_breaks_raises_what_its_event_says(gateway_of):
    class Breaks:
        version = 3
        slept_s = 0.0

        async def generate(self, prompt_ids, sampling, *, listen=None, **more):
            listen([80, 80, 80, 80], [-0.5] * 4)
            await asyncio.sleep(0.05)
            raise EngineUnavailableError("it has gone")

        async def release(self, session):
            return

    async def talk():
        async with gateway_of(Breaks()) as opened:
            client = client_of(opened.policy())
            with pytest.raises(anthropic.APIStatusError, match="it has gone"):
                async with client.messages.stream(**ASK) as stream:
                    await stream.get_final_message()

    run(talk())


def test_the_client_that_is_not_async(gateway_of):
    async def talk():
        async with gateway_of([calls((1, 2)), "left"]) as opened:
            policy = opened.policy(context_length=10_000)
            client = anthropic.Anthropic(base_url=policy.session.base, api_key=policy.api_key)
            counted = await asyncio.to_thread(
                client.messages.count_tokens, model="any", messages=[USER]
            )
            message = await asyncio.to_thread(client.messages.create, **ASK, tools=[TOOL])
            plain = await asyncio.to_thread(client.messages.create, **ASK)
            return counted, message, plain

    counted, message, plain = run(talk())
    assert message.content[0].input == {"a": 1, "b": 2}
    assert counted.input_tokens == plain.usage.input_tokens
