"""The gateway: who gets in, what is refused and how, and that an answer joins what is
recorded."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path

import pytest

from agentevo.agents.gateway import anthropic_messages, chat_completions, completions, responses
from agentevo.agents.gateway.refusals import refusal_of
from agentevo.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineUnavailableError,
    StoreError,
    StoreUnavailableError,
)
from agentevo.inference.remote_models.ledger import BudgetExceededError
from agentevo.types import Completion, Message

USER = {"role": "user", "content": "left or right ?"}
ASK = {"model": "any", "messages": [USER]}


def run(work):
    return asyncio.run(work)


def test_a_history_that_comes_back_extends_the_recorded_tokens(gateway_of):
    async def talk():
        async with gateway_of(["left", "right"]) as opened:
            policy = opened.policy()
            first = (await opened.post(policy, ASK)).json()
            messages = [USER, first["choices"][0]["message"], {"role": "user", "content": "Go on."}]
            second = (await opened.post(policy, {**ASK, "messages": messages})).json()
            return first, second, policy.turns

    first, second, turns = run(talk())
    assert first["choices"][0]["message"]["content"] == "left"
    assert second["choices"][0]["finish_reason"] == "stop"
    assert [turn.parent for turn in turns] == [None, 0]

    counted = second["usage"]
    known = len(turns[0].prompt_ids) + len(turns[0].completion_ids)
    assert counted["prompt_tokens_details"]["cached_tokens"] == known
    assert counted["prompt_tokens"] == known + len(turns[1].prompt_ids)


@pytest.mark.slow
@pytest.mark.parametrize("content", ["", None, "left"])
def test_an_answer_that_comes_back_last_extends_its_turn(gateway_of, content):
    """A client goes on from an answer that is empty or was cut off."""

    async def talk():
        async with gateway_of([content or "", "right", content or "", "right"]) as opened:
            policy = opened.policy()
            await opened.post(policy, ASK)
            messages = [USER, {"role": "assistant", "content": content}]
            chat = (await opened.post(policy, {**ASK, "messages": messages})).json()

            first = (await opened.post(policy, {"input": [USER]}, "/responses")).json()
            body = {"input": [USER, *first["output"]]}
            response = (await opened.post(policy, body, "/responses")).json()
            return chat, response, policy

    chat, response, policy = run(talk())
    assert chat["choices"][0]["message"]["content"] == "right"
    assert response["output"][0]["content"][0]["text"] == "right"
    assert [turn.parent for turn in policy.turns] == [None, 0, None, 2]
    assert policy.conversation.metrics() == {}


@pytest.mark.slow
def test_it_gives_ids_logprobs_and_versions_on_request(gateway_of):
    async def talk():
        async with gateway_of(["left"]) as opened:
            policy = opened.policy()
            body = {**ASK, "logprobs": True, "return_token_ids": True}
            return (await opened.post(policy, body)).json(), policy.turns[0]

    answer, turn = run(talk())
    choice = answer["choices"][0]
    assert choice["token_ids"] == list(turn.completion_ids)
    assert choice["versions"] == list(turn.versions)
    assert answer["prompt_token_ids"] == list(turn.prompt_ids)
    assert [t["logprob"] for t in choice["logprobs"]["content"]] == list(turn.logprobs)


@pytest.mark.slow
def test_a_session_is_found_by_its_key_in_four_places(gateway_of):
    async def talk():
        async with gateway_of(["left"] * 5) as opened:
            policy = opened.policy()
            key = policy.api_key
            url = policy.base_url
            ways = [
                (url, {"Authorization": f"Bearer {key}"}),
                (url, {"x-api-key": key}),
                (url, {"X-AgentEvo-Session": key, "Authorization": "Bearer placeholder"}),
                (url.replace("/v1", f"/s/{key}/v1"), {"Authorization": "Bearer placeholder"}),
            ]
            for place, headers in ways:
                answer = await opened.http.post(
                    f"{place}/chat/completions", json=ASK, headers=headers
                )
                assert answer.status_code == 200

            return policy.turns

    assert len(run(talk())) == 4


@pytest.mark.slow
def test_nobody_gets_in_without_a_key_and_no_key_outlives_its_attempt(gateway_of):
    async def talk():
        async with gateway_of(["left", "right"]) as opened:
            policy = opened.policy("a")
            other = opened.policy("b")
            assert policy.api_key != other.api_key

            answers = [
                await opened.http.post(f"{policy.base_url}/chat/completions", json=ASK),
                await opened.http.post(
                    f"{policy.base_url}/chat/completions",
                    json=ASK,
                    headers={"Authorization": "Bearer " + policy.api_key[:-1]},
                ),
            ]
            await policy.close()
            answers.append(await opened.post(policy, ASK))
            live = await opened.post(other, ASK)
            return answers, live, other.turns

    answers, live, turns = run(talk())
    assert [answer.status_code for answer in answers] == [401, 401, 401]
    assert answers[0].json()["error"]["code"] == "invalid_api_key"
    assert live.status_code == 200 and len(turns) == 1


REFUSED = [
    ({"messages": []}, "at least one message"),
    ({"messages": "hello"}, "messages must be a list"),
    ({"messages": [{"role": "user"}]}, "content is missing"),
    ({"messages": [{"role": "king", "content": "x"}]}, "king"),
    ({"n": 0}, "n is 0"),
    ({"n": 10**400}, "n is 1"),
    ({"n": 10**9, "stream": True}, "n is 1000000000"),
    ({"n": "two"}, "whole number"),
    ({"n": True}, "whole number"),
    ({"stream": "yes"}, "true or false"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_new_tokens"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "does not read 'enable_thinking'"),
    ({"chat_template_kwargs": {"messages": []}}, "set by AgentEvo"),
    ({"reasoning_effort": 3}, "reasoning effort is 3"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"modalities": "text"}, "modalities"),
    ({"return_tokens_as_token_ids": True}, "return_token_ids"),
    ({"functions": [{"name": "f"}]}, "use tools"),
    ({"messages": [{**USER, "images": ["x"]}]}, "images"),
    ({"stop": [1]}, "stop"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"presence_penalty": -(10**400)}, "presence_penalty"),
    ({"presence_penalty": True}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "99999"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"tools": ""}, "tools is"),
    ({"tools": {}}, "tools is"),
    ({"tools": 0}, "tools is"),
    ({"tools": False}, "tools is"),
    ({"tools": ["f"]}, "tool 1"),
    ({"tools": "f", "tool_choice": "none"}, "tools is"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "the schema"),
    ({"tools": [{"name": "x"}]}, "tool 1"),
    ({"tools": [{"function": {"name": "f"}}], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [{"function": {"name": "f"}}], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": "required"}, "there are no tools"),
    ({"top_logprobs": 5}, "logprobs: true"),
    ({"top_logprobs": 21, "logprobs": True}, "0 to 20"),
    ({"wish": 1}, "wish"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, ""),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, "context"),
]
NO_OBJECTS = [b"", b"{", b"[]", b"nan", b"\xff\xfe", b"[" * 100_000]


@pytest.mark.slow
def test_what_can_not_be_asked_is_a_400_that_says_why(gateway_of):
    async def talk():
        async with gateway_of([]) as opened:
            policy = opened.policy()
            headers = {"Authorization": f"Bearer {policy.api_key}"}

            async def sent(content: bytes):
                url = f"{policy.base_url}/chat/completions"
                return await opened.http.post(url, content=content, headers=headers)

            for change, says in REFUSED:
                answer = await sent(json.dumps({**ASK, **change}).encode())
                assert answer.status_code == 400, (change, answer.text)
                assert says in answer.json()["error"]["message"], (change, answer.text)
                assert answer.json()["error"]["type"] == "invalid_request_error"

            for content in NO_OBJECTS:
                answer = await sent(content)
                assert answer.status_code == 400, answer.text
                assert "the body is not" in answer.json()["error"]["message"]

            return policy.turns

    assert not run(talk())


def test_a_body_beyond_the_limit_is_refused_while_it_comes(gateway_of):
    async def talk():
        async with gateway_of([], max_body_mb=0.25) as opened:
            policy = opened.policy()
            body = {**ASK, "user": "x" * 2**20}
            return await opened.post(policy, body)

    answer = run(talk())
    assert answer.status_code == 413
    assert "gateway.max_body_mb" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_the_client_does_not_decide_the_distribution_unless_it_is_told_to(gateway_of):
    async def talk(**section):
        async with gateway_of(["left"], **section) as opened:
            policy = opened.policy()
            await opened.post(policy, {**ASK, "temperature": 0.2, "max_tokens": 3})
            await policy.close()
            return policy.turns[0], opened.notes, opened.engine.requests[0]

    turn, notes, _ = run(talk())
    assert turn.overrides is None and turn.temperature == 0.7
    assert len(notes) == 1 and "temperature=0.2" in notes[0]

    turn, notes, _ = run(talk(distribution="client"))
    assert turn.overrides is not None and turn.temperature == 0.2
    assert not notes


@pytest.mark.slow
def test_events_of_a_stream_sum_to_the_answer(gateway_of):
    async def talk():
        async with gateway_of(["left right"]) as opened:
            policy = opened.policy()
            body = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
            answer = await opened.post(policy, body)
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            return answer, lines

    answer, lines = run(talk())
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert lines.pop() == "[DONE]"

    chunks = [json.loads(line) for line in lines]
    usage = chunks.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0

    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == "left right"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.slow
def test_a_client_that_hangs_up_gives_its_request_up(gateway_of):
    class Slow:
        version = 3
        slept_s = 0.0

        def __init__(self):
            self.begun = asyncio.Event()
            self.cancelled = asyncio.Event()

        async def generate(self, prompt_ids, sampling, **more):
            self.begun.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise

        async def release(self, session):
            return

    async def talk():
        engine = Slow()
        async with gateway_of(engine) as opened:
            policy = opened.policy()
            asking = asyncio.create_task(opened.post(policy, ASK))
            await asyncio.wait_for(engine.begun.wait(), 300)
            asking.cancel()
            await asyncio.wait_for(engine.cancelled.wait(), 300)
            return policy.turns

    assert run(talk()) == []


@pytest.mark.slow
def test_the_gateway_answers_while_the_sampler_s_loop_is_held(gateway_of):
    async def talk():
        async with gateway_of([]) as opened:
            base = opened.policy().base_url
            answers = []

            def knock():
                import httpx

                answers.append(httpx.get(base.replace("/v1", "/health"), timeout=300).status_code)

            thread = threading.Thread(target=knock)
            thread.start()
            thread.join(300)  # holds this loop, as a step of an engine does
            return answers

    assert run(talk()) == [200]


@pytest.mark.slow
def test_attempts_of_several_event_loops_share_a_gateway(gateway_of):
    """As the models of a server do, each with a loop of its own."""

    async def open_session(policy):
        return policy.session

    async def talk():
        other = asyncio.new_event_loop()
        thread = threading.Thread(target=other.run_forever)
        thread.start()
        async with gateway_of(["left"] * 5) as opened:
            here, there = opened.policy("a"), opened.policy("b")
            await asyncio.to_thread(
                asyncio.run_coroutine_threadsafe(open_session(there), other).result
            )
            answers = [await opened.post(policy, ASK) for policy in (here, there, here, there)]

            await asyncio.to_thread(asyncio.run_coroutine_threadsafe(there.close(), other).result)
            answers += [await opened.post(policy, ASK) for policy in (here, there)]

        other.call_soon_threadsafe(other.stop)
        thread.join()
        other.close()
        return [answer.status_code for answer in answers], here.turns, there.turns

    statuses, turns, other_turns = run(talk())
    assert statuses == [200] * 5 + [401]
    assert (len(turns), len(other_turns)) == (3, 2)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StoreUnavailableError("away"), 503),
        (StoreError("another task has this id"), 409),
        (ConfigError("no such key"), 400),
        (DeadlineExceededError("late"), 504),
        (TimeoutError(), 504),
        (BudgetExceededError("spent"), 424),
        (asyncio.CancelledError(), 409),
        (RuntimeError("a bug"), 500),
    ],
)
def test_a_failure_has_one_status(error, status):
    refusal = refusal_of(error)
    assert refusal.status == status
    assert str(error) in str(refusal)


@pytest.mark.slow
def test_an_engine_that_fails_is_a_server_error_and_ends_the_attempt(gateway_of):
    async def talk():
        async with gateway_of([EngineUnavailableError("no engine answers")]) as opened:
            policy = opened.policy()
            answer = await opened.post(policy, ASK)
            return answer, policy.conversation.broken

    answer, broken = run(talk())
    assert answer.status_code == 503
    assert isinstance(broken, EngineUnavailableError)


HINTS = {
    "user": "u",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "reasoning_effort": "low",
    "verbosity": "low",
    "prediction": {"type": "content", "content": "right"},
    "safety_identifier": "s",
    "client_metadata": {"x-codex-installation-id": "c"},
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "modalities": ["text"],
    "chat_template_kwargs": {},
    "seed": -1,
}


@pytest.mark.slow
def test_hints_change_nothing(gateway_of):
    """Nor do a client's own keys of messages."""

    async def talk(**more):
        async with gateway_of(["left", "right"]) as opened:
            policy = opened.policy()
            said = (await opened.post(policy, {**ASK, **more})).json()["choices"][0]["message"]
            messages = [{**USER, "extra": {"n": 1}}, {**said, "extra": {"model_type": "m"}}]
            body = {**ASK, **more, "messages": [*messages, {**USER, "uuid": "x"}]}
            answer = await opened.post(policy, body)
            assert answer.status_code == 200, answer.text
            return policy.turns

    assert run(talk(**HINTS)) == run(talk())


def test_a_seed_below_zero_is_one_like_any_other(gateway_of):
    async def seeds(*asked):
        async with gateway_of(["left"] * 5) as opened:
            policy = opened.policy()
            for seed in asked:
                answer = await opened.post(policy, {**ASK, "seed": seed})
                assert answer.status_code == 200, answer.text
            return [turn.seed for turn in policy.turns]

    first, same, other, lowest = run(seeds(-7, -7, -8, -(2**63)))
    assert first == same != other
    assert min(first, other, lowest) >= 0


@pytest.mark.slow
def test_a_model_is_found_by_its_name_and_an_unknown_route_is_refused_in_the_api_s_form(gateway_of):
    async def talk():
        async with gateway_of([]) as opened:
            policy = opened.policy()
            key = {"Authorization": f"Bearer {policy.api_key}"}
            anthropic = {**key, "anthropic-version": "2023-06-01"}

            async def got(path, headers=key):
                answer = await opened.http.get(policy.base_url + path, headers=headers)
                return answer.status_code, answer.json()

            return [
                await got("/models/tiny"),
                await got("/models/org/other"),
                await got("/embeddings"),
                await got("/chat/completions"),
                await got("/messages/batches"),
                await got("/organizations", anthropic),
            ]

    model, missing, *openai, batches, other = run(talk())
    assert model[0] == 200 and model[1]["id"] == "tiny"
    assert missing[0] == 404 and missing[1]["error"]["code"] == "model_not_found"
    assert [status for status, _ in openai] == [404, 405]
    for _, body in openai:
        assert body["error"]["type"] == "invalid_request_error" and body["error"]["message"]
    for status, body in (batches, other):
        assert status == 404 and body["type"] == "error"
        assert body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("api", [chat_completions, completions, responses, anthropic_messages])
def test_every_field_that_is_taken_is_on_the_page(api):
    page = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text()
    fields = api._KNOWN - {"frequency_penalty", "presence_penalty", "repetition_penalty"}
    assert {f for f in fields if not re.search(rf"[`(]{f}\b", page)} == set()


@pytest.mark.slow
def test_models_are_listed_for_those_who_have_a_key(gateway_of):
    async def talk():
        async with gateway_of([]) as opened:
            policy = opened.policy()
            key = {"Authorization": f"Bearer {policy.api_key}"}
            known = await opened.http.get(policy.base_url + "/models", headers=key)
            stranger = await opened.http.get(policy.base_url + "/models")
            return known, stranger

    known, stranger = run(talk())
    assert [model["id"] for model in known.json()["data"]] == ["tiny"]
    assert stranger.status_code == 401


def test_policy_generate_and_the_gateway_share_one_conversation(gateway_of):
    async def talk():
        async with gateway_of(["left", "right"]) as opened:
            policy = opened.policy()
            reply = await policy.generate([Message("user", USER["content"])])
            messages = [
                USER,
                {"role": "assistant", "content": reply.text},
                {"role": "user", "content": "Go on."},
            ]
            await opened.post(policy, {**ASK, "messages": messages})
            return policy.turns

    assert [turn.parent for turn in run(talk())] == [None, 0]


class TokenByToken:
    """An engine that draws the next token when it is told to."""

    version = 3
    slept_s = 0.0

    def __init__(self, ids):
        self.ids = ids
        self.go = asyncio.Semaphore(0)
        self.cancelled = asyncio.Event()

    async def generate(self, prompt_ids, sampling, *, session=None, deadline_s, listen=None):
        try:
            for token in self.ids:
                await self.go.acquire()
                if listen is not None:
                    listen([token], [-0.5])
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

        return Completion(
            ids=self.ids,
            logprobs=[-0.5] * len(self.ids),
            versions=[3] * len(self.ids),
            finish_reason="stop",
        )

    async def release(self, session):
        return


@pytest.mark.slow
def test_a_stream_says_each_token_before_the_next_is_drawn(gateway_of, loaded, chat):
    ids = loaded.tokenizer.encode("left right left", add_special_tokens=False)

    async def talk():
        engine = TokenByToken([*ids, chat.end_of_turn_id])
        async with gateway_of(engine) as opened:
            policy = opened.policy()
            key = {"Authorization": f"Bearer {policy.api_key}"}
            url = f"{policy.base_url}/chat/completions"
            body = {**ASK, "stream": True}
            said = []
            engine.go.release()

            async with opened.http.stream("POST", url, json=body, headers=key) as answer:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue

                    choice = json.loads(line[6:])["choices"][0]
                    if text := choice["delta"].get("content"):
                        said.append((text, len(policy.turns)))
                        engine.go.release()

                    if len(said) == len(ids):
                        engine.go.release()

            return said, policy.turns

    said, turns = run(talk())
    assert [text.strip() for text, _ in said] == ["left", "right", "left"]
    assert all(recorded == 0 for _, recorded in said), "none waited for the whole"
    assert len(turns) == 1


@pytest.mark.slow
def test_tokens_of_one_step_are_one_event(gateway_of, loaded, chat):
    ids = loaded.tokenizer.encode("left right left right left", add_special_tokens=False)

    class TwoSteps(TokenByToken):
        async def generate(self, prompt_ids, sampling, *, listen=None, **more):
            for step in (ids, [chat.end_of_turn_id]):
                await self.go.acquire()
                for token in step:
                    listen([token], [-0.5])

            every = [*ids, chat.end_of_turn_id]
            logprobs = [-0.5] * len(every)
            versions = [3] * len(every)
            return Completion(ids=every, logprobs=logprobs, versions=versions, finish_reason="stop")

    async def talk():
        engine = TwoSteps(ids)
        async with gateway_of(engine) as opened:
            policy = opened.policy()
            key = {"Authorization": f"Bearer {policy.api_key}"}
            url = f"{policy.base_url}/chat/completions"
            body = {**ASK, "stream": True}
            said = []
            engine.go.release()

            async with opened.http.stream("POST", url, json=body, headers=key) as answer:
                async for line in answer.aiter_lines():
                    if '"content":"left' in line:
                        said.append((json.loads(line[6:]), len(policy.turns)))
                        engine.go.release()

            return said, policy.turns

    said, turns = run(talk())
    ((event, recorded),) = said
    assert event["choices"][0]["delta"]["content"] == "left right left right left"
    assert recorded == 0, "it did not wait for the next step"
    assert len(turns) == 1


@pytest.mark.slow
def test_a_reply_has_no_copy_of_the_ids_unless_it_is_asked_for(gateway_of):
    async def talk(**more):
        async with gateway_of(["left"]) as opened:
            policy = opened.policy()
            copies = []
            whole = policy.conversation.prompt_ids
            policy.conversation.prompt_ids = lambda turn: copies.append(turn) or whole(turn)
            answer = await opened.post(policy, {**ASK, **more})
            return copies, answer.json()["usage"]["prompt_tokens"]

    without, size = run(talk())
    with_ids, same_size = run(talk(return_token_ids=True, n=1))
    assert without == [] and with_ids == [0]
    assert size == same_size > 0


@pytest.mark.slow
def test_a_client_that_leaves_a_stream_ends_its_request(gateway_of, loaded, chat):
    ids = loaded.tokenizer.encode("left right left", add_special_tokens=False)

    async def talk():
        engine = TokenByToken([*ids, chat.end_of_turn_id])
        async with gateway_of(engine) as opened:
            policy = opened.policy()
            key = {"Authorization": f"Bearer {policy.api_key}"}
            url = f"{policy.base_url}/chat/completions"
            body = {**ASK, "stream": True}
            engine.go.release()

            async with opened.http.stream("POST", url, json=body, headers=key) as answer:
                async for line in answer.aiter_lines():
                    if "left" in line:
                        break

            await asyncio.wait_for(engine.cancelled.wait(), 300)
            return policy.conversation.turns_to_record({})

    assert run(talk()) == []


@pytest.mark.slow
def test_a_stream_that_fails_says_why_where_it_ends(gateway_of, loaded):
    class Breaks(TokenByToken):
        async def generate(self, prompt_ids, sampling, *, listen=None, **more):
            listen(self.ids, [-0.5] * len(self.ids))
            await asyncio.sleep(0.05)
            raise EngineUnavailableError("it has gone")

    ids = loaded.tokenizer.encode("left", add_special_tokens=False)

    async def talk():
        async with gateway_of(Breaks(ids)) as opened:
            policy = opened.policy()
            answer = await opened.post(policy, {**ASK, "stream": True})
            return answer, policy.conversation.turns_to_record({})

    answer, recorded = run(talk())
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data")]
    assert answer.status_code == 200
    assert events[-1]["error"]["message"] == "it has gone"
    assert not recorded
