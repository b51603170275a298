"""One remote model over real HTTP on loopback: what is sent and read, every way in which a server
fails, the budget, the price log, the cache."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import closing

import pytest
from remote_server import (
    RemoteServer,
    breaks_off,
    chat,
    fails,
    gives,
    hangs,
    hangs_up,
    sleeps,
    trickles,
)

from agentevo.config.remote_models import RemoteModelSection
from agentevo.errors import BadRequestError, ConfigError, UnknownNameError
from agentevo.inference.remote_models import RemoteModel, RemoteModels, model
from agentevo.inference.remote_models.http import retry_after
from agentevo.inference.remote_models.ledger import BudgetExceededError, RemoteModelError
from agentevo.types import Message, SamplingOverrides, ToolCall

KEY = "sk-very-secret-0123456789"
QUESTION = [Message("user", "How are you?")]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "x1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(model, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("REMOTE_KEY", KEY)


def section(server: RemoteServer | None, **keys) -> RemoteModelSection:
    url = {"base_url": server.base_url if server else "http://127.0.0.1:9/v1"}
    return RemoteModelSection(**{"model": "m", "api_key": "${env:REMOTE_KEY}", **url, **keys})


def asked(server: RemoteServer | None, folder=None, messages=QUESTION, *, options=None, **keys):
    """The answer to one question, and what the log says."""
    with closing(RemoteModel("teacher", section(server, **keys), folder)) as remote:
        return asyncio.run(remote.generate(messages, role="judge", **(options or {})))


def log_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "teacher.jsonl").read_text().splitlines()]


def test_a_chat_completion_is_asked_and_read(tmp_path):
    history = [
        Message("system", "Be brief."),
        Message("user", "1 + 2?"),
        Message("assistant", "", (ToolCall("add", '{"a": 1}'), ToolCall("add", "{}"))),
        Message("tool", "3"),
        Message("tool", "0"),
    ]
    answer = chat(None, tool_calls=[CALL], reasoning_content="Hm.", usage=(1000, 100, 400))
    with RemoteServer(gives(answer)) as server:
        reply = asked(
            server,
            tmp_path,
            history,
            price={"prompt": 1.0, "cached": 0.5, "completion": 10.0},
            extra={"reasoning_effort": "low"},
            options={
                "tools": [TOOL],
                "tool_choice": "add",
                "sampling": SamplingOverrides(temperature=0.5, stop_strings=("x",), seed=2**40 + 7),
            },
        )

    assert reply.message == Message(
        "assistant", "", (ToolCall("add", '{"a": 1}', "x1"),), reasoning="Hm."
    )

    (body,) = server.received
    ids = [call["id"] for call in body["messages"][2]["tool_calls"]]
    assert [m.get("tool_call_id") for m in body["messages"][3:]] == ids
    assert len(set(ids)) == 2
    assert body["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 1024, 0.5)
    assert (body["stop"], body["seed"], body["reasoning_effort"]) == (["x"], 7, "low")
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert server.paths == ["/v1/chat/completions"]
    assert reply.cost == pytest.approx((600 * 1.0 + 400 * 0.5 + 100 * 10.0) / 1e6)

    (line,) = log_of(tmp_path)
    assert (line["model"], line["role"], line["status"]) == ("teacher", "judge", 200)
    assert (line["prompt_tokens"], line["cached_tokens"], line["cost"]) == (1000, 400, reply.cost)


def test_no_proxy_sees_what_is_asked_of_this_machine(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    with RemoteServer(gives(chat("hi"))) as server:
        assert asked(server).text == "hi"


def test_anthropics_messages_are_asked_and_read():
    answer = {
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "text", "text": "I add."},
            {"type": "tool_use", "id": "x1", "name": "add", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "usage": {"input_tokens": 5, "cache_read_input_tokens": 20, "output_tokens": 7},
    }
    history = [
        Message("system", "Be brief."),
        Message("user", "1 + 2?"),
        Message("assistant", "Well.", (ToolCall("add", '{"a": 1}', "c"),)),
        Message("tool", "3", tool_call_id="c"),
        Message("user", "And?"),
    ]
    with RemoteServer(gives(answer)) as server:
        options = {"tools": [TOOL], "tool_choice": "required"}
        reply = asked(server, messages=history, api="anthropic", options=options)

    assert reply.message.text == "I add."
    assert reply.message.reasoning == "Hm."
    assert reply.message.tool_calls == (ToolCall("add", '{"a": 1}', "x1"),)
    assert (reply.usage.prompt_tokens, reply.usage.cached_tokens) == (25, 20)

    (body,) = server.received
    assert server.paths == ["/v1/messages"]
    assert server.headers[0]["x-api-key"] == KEY
    assert body["system"] == "Be brief."
    assert [turn["role"] for turn in body["messages"]] == ["user", "assistant", "user"]
    assert [block["type"] for block in body["messages"][2]["content"]] == ["tool_result", "text"]
    assert body["tool_choice"] == {"type": "any"}
    assert body["tools"][0]["input_schema"] == {"type": "object"}


def test_anthropic_gets_the_tools_that_a_history_names_where_the_request_has_none():
    """Its API refuses calls and results without a definition of tools; OpenAI's takes them."""
    history = [
        Message("user", "1 + 2?"),
        Message("assistant", "", (ToolCall("add", '{"a": 1}', "c"), ToolCall("add", "{}", "d"))),
        Message("tool", "3", tool_call_id="c"),
        Message("tool", "0", tool_call_id="d"),
    ]
    answer = {"content": [{"type": "text", "text": "3"}], "stop_reason": "end_turn"}
    with RemoteServer(gives(answer), gives(answer)) as server:
        asked(server, messages=history, api="anthropic")
        asked(server, messages=QUESTION, api="anthropic")

    called, free = server.received
    assert [tool["name"] for tool in called["tools"]] == ["add"]
    assert called["tools"][0]["input_schema"]["type"] == "object"
    assert called["tool_choice"] == {"type": "none"}
    assert not free.keys() & {"tools", "tool_choice"}


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (fails(429, retry_after_ms="30"), 429),
        (fails(500), 500),
        (fails(529, "overloaded"), 529),
        (gives(b"<html>busy</html>", 502), 502),
        (gives(b'{"choices": [{"mess'), 200),
        (gives({"choices": []}), 200),
        (gives(chat(None, tool_calls=[{"id": 1, "function": {"arguments": 3}}])), 200),
        (gives(b'{"choices": [{"message": {"content": "\\ud83d"}}]}'), 200),
        (breaks_off, 0),
        (hangs_up, 0),
        (hangs, 0),
        (trickles, 0),
    ],
    ids=lambda value: getattr(value, "__name__", value) if callable(value) else value,
)
def test_what_may_pass_is_asked_again(fault, status, tmp_path):
    with RemoteServer(fault, gives(chat("fine"))) as server:
        is_slow = fault in (hangs, trickles)
        reply = asked(server, tmp_path, timeout_s=0.5 if is_slow else 300.0, max_tries=20)
    assert reply.text == "fine"

    first, *_, last = log_of(tmp_path)
    assert (first["state"], first.get("status", 0), last["state"]) == (
        "failed",
        status,
        "completed",
    )
    assert is_slow or len(server.received) == 2


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (fails(401, f"Incorrect API key provided: {KEY}"), "refuses the key .*REMOTE_KEY"),
        (fails(403, "no access"), "refuses the key"),
        (fails(400, "no such field"), "400: no such field"),
        (fails(404, "no such model"), "404: no such model"),
        (fails(429, "no money", "insufficient_quota"), "no money"),
        (fails(307, location="http://127.0.0.1:9/"), "answered 307"),
        (fails(503, retry_after="3600"), "no answer within deadline_s=600"),
    ],
)
def test_what_does_not_pass_is_raised_at_once(fault, words, tmp_path):
    began = time.monotonic()
    with RemoteServer(fault) as server, pytest.raises(RemoteModelError, match=words) as raised:
        asked(server, tmp_path, deadline_s=600.0)
    assert len(server.received) == 1
    assert time.monotonic() - began < 300
    assert KEY not in str(raised.value)
    assert KEY not in (tmp_path / "teacher.jsonl").read_text()


def test_a_server_that_only_fails_is_given_up_after_max_tries(tmp_path):
    with RemoteServer(fails(500, "out of order")) as server:
        with pytest.raises(
            RemoteModelError, match=r"no usable answer after 3 .*out of order"
        ) as raised:
            asked(server, tmp_path, max_tries=3)
        assert len(server.received) == 3
    assert raised.value.status == 500
    with pytest.raises(RemoteModelError, match="can't be reached"):
        asked(None, max_tries=2)


def test_a_retry_after_holds_the_other_calls_back_too():
    async def both(remote):
        await asyncio.gather(*(remote.generate(QUESTION) for _ in range(2)))

    with (
        RemoteServer(fails(429, retry_after_ms="400"), gives(chat())) as server,
        closing(RemoteModel("teacher", section(server, max_at_once=1))) as remote,
    ):
        asyncio.run(both(remote))

    assert server.times[1] - server.times[0] >= 0.4


@pytest.mark.slow
def test_no_call_outlives_its_deadline_and_no_more_than_max_at_once_are_under_way():
    async def many(remote):
        calls = (remote.generate(QUESTION) for _ in range(12))
        return await asyncio.gather(*calls, return_exceptions=True)

    with RemoteServer(sleeps(0.1)) as server:
        with closing(RemoteModel("teacher", section(server, max_at_once=3))) as remote:
            replies = asyncio.run(many(remote))
        assert server.most_at_once == 3

    assert {reply.text for reply in replies} == {"hello"}

    with (
        RemoteServer(sleeps(0.4)) as server,
        closing(RemoteModel("t", section(server, max_at_once=1, deadline_s=0.6))) as remote,
    ):
        late = asyncio.run(many(remote))

    assert {type(one) for one in late[1:]} == {RemoteModelError}
    assert len(server.received) < 6, "the others were late before they were sent"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "3"}, 3.0),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "Thu, 01 Jan 1970 00:01:40 GMT"}, 10.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "-5"}, 0.0),
        ({}, None),
    ],
)
def test_retry_after_is_read_in_all_its_forms(headers, seconds):
    assert retry_after(headers, now=90.0) == seconds


@pytest.mark.slow
def test_a_budget_is_never_exceeded_however_many_ask_at_once(tmp_path):
    budget = {"tokens": 4000, "requests": 100}

    async def many(remote):
        calls = (remote.generate(QUESTION) for _ in range(40))
        return await asyncio.gather(*calls, return_exceptions=True)

    with RemoteServer(gives(chat(usage=(100, 20)))) as server:
        settings = section(server, budget=budget, max_new_tokens=200)
        with closing(RemoteModel("teacher", settings, tmp_path)) as remote:
            first = asyncio.run(many(remote))
        with closing(RemoteModel("teacher", settings, tmp_path)) as remote:  # the run goes on
            second = asyncio.run(many(remote))

    answered = [one for one in first if not isinstance(one, Exception)]
    refused = [one for one in first if isinstance(one, BudgetExceededError)]
    assert len(answered) + len(refused) == 40
    assert len(answered) * 120 <= 4000 < len(answered) * 120 + 200 + 500
    assert {type(one) for one in second} == {BudgetExceededError}
    assert len(server.received) == len(answered)
    assert "budget.tokens=4000" in str(refused[0])


@pytest.mark.parametrize(
    ("budget", "num"), [({"requests": 3}, 3), ({"cost": 0.005}, 1)], ids=["requests", "cost"]
)
def test_requests_and_money_end_too_and_repeated_requests_count(budget, num, tmp_path):
    price = {"prompt": 1.0, "completion": 2.0}
    with RemoteServer(fails(500)) as server:
        if "cost" in budget:
            server.answers = [gives(chat(usage=(1000, 1000)))]  # 0.003 each

        settings = section(server, budget=budget, price=price, max_tries=9, max_new_tokens=1000)

        async def several(remote):
            for _ in range(9):
                await remote.generate(QUESTION)

        with closing(RemoteModel("teacher", settings, tmp_path)) as remote:
            work = several(remote)
            with pytest.raises(BudgetExceededError, match=r"raise remote_models\.teacher\.budget"):
                asyncio.run(work)

    assert len(server.received) == num


def test_a_request_that_broke_off_or_was_killed_counts_with_the_most_that_it_can_have_cost(
    tmp_path,
):
    with RemoteServer(breaks_off, gives(chat())) as server:
        asked(server, tmp_path, budget={"tokens": 10_000}, max_new_tokens=100)

    begun, broken, *_ = log_of(tmp_path)
    assert begun["state"] == "begun"
    assert broken["tokens"] == begun["tokens"] > 100
    assert broken["is_estimated"]

    path = tmp_path / "teacher.jsonl"
    orphan = {**begun, "id": "of a killed process", "tokens": 9_800}
    path.write_text(path.read_text() + json.dumps(orphan) + "\n" + '{"half a li')

    with RemoteServer() as server, pytest.raises(BudgetExceededError):
        asked(server, tmp_path, budget={"tokens": 10_000}, max_new_tokens=100)

    assert server.received == []
    assert path.read_text().endswith('{"half a li')
    with RemoteServer() as server:
        asked(server, tmp_path, budget={"tokens": 20_000}, max_new_tokens=100)

    assert json.loads(path.read_text().splitlines()[-1])["state"] == "completed"


def test_an_answer_without_a_count_costs_the_most_that_it_can(tmp_path):
    with RemoteServer(gives(chat(usage=None))) as server:
        reply = asked(server, tmp_path, price={"completion": 1.0}, max_new_tokens=500)
    assert reply.cost == pytest.approx(500 / 1e6)
    assert log_of(tmp_path)[0]["is_estimated"]


def test_the_cache_answers_what_was_asked_before_by_its_seed(tmp_path):
    def ask(server, seed):
        return asked(server, tmp_path, cache=True, options={"seed": seed})

    with RemoteServer(gives(chat("one")), gives(chat("two"))) as server:
        first = ask(server, 1)
        again = ask(server, 1)
        other = ask(server, 2)
        assert len(server.received) == 2

    assert (first.text, again.text, other.text) == ("one", "one", "two")
    assert again.is_cached
    assert again.cost == 0.0
    assert all(KEY not in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


def test_totals_are_by_model_and_role(tmp_path):
    with RemoteServer(gives(chat(usage=(10, 4)))) as server:
        keys = {"price": {"completion": 1e6}, "budget": {"tokens": 200}, "max_new_tokens": 4}
        models = RemoteModels({"teacher": section(server, **keys)}, tmp_path)
        with closing(models):
            for role in ("judge", "judge", "teacher"):
                asyncio.run(models["teacher"].generate(QUESTION, role=role))

            rows = {row["role"]: row for row in models.totals()}
            with pytest.raises(UnknownNameError, match="did you mean 'teacher'"):
                models["techer"]

            assert models.account() == [
                "remote model teacher, asked by judge: 2 answers (0 from the cache), 0 failed "
                "requests, 28 tokens, cost 8",
                "remote model teacher, asked by teacher: 1 answers (0 from the cache), 0 failed "
                "requests, 14 tokens, cost 4",
                "remote model teacher: left of its budget: 158 tokens",
            ]

    assert RemoteModels({"other": section(None)}, tmp_path / "none").account() == []
    assert not (tmp_path / "none").exists()
    assert rows["judge"]["requests"] == 2
    assert rows["judge"]["cost"] == pytest.approx(8.0)
    assert rows["teacher"]["completion_tokens"] == 4


def test_a_key_that_is_not_there_and_what_cannot_be_asked_are_refused(monkeypatch):
    with RemoteServer() as server:
        with pytest.raises(BadRequestError, match="at least one"):
            asked(server, messages=[])
        with pytest.raises(BadRequestError, match="min_p"):
            asked(server, api="anthropic", options={"sampling": SamplingOverrides(min_p=0.1)})

        monkeypatch.delenv("REMOTE_KEY")
        with pytest.raises(ConfigError, match="REMOTE_KEY is not set"):
            asked(server)

        assert server.received == []


@pytest.mark.parametrize("key", ["sk-abc\ndef", "sk-\u00e9t\u00e9"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(key, monkeypatch):
    monkeypatch.setenv("REMOTE_KEY", key)
    with pytest.raises(ConfigError, match="REMOTE_KEY holds a line break or") as refused:
        asked(None)
    assert "sk-" not in str(refused.value)


def test_names_that_differ_have_a_log_and_a_budget_each(tmp_path):
    budget = {"requests": 1}
    with RemoteServer(gives(chat(usage=(1, 1)))) as server:
        for name in ("a/b", "a_b", "a:b"):
            with closing(RemoteModel(name, section(server, budget=budget), tmp_path)) as remote:
                asyncio.run(remote.generate(QUESTION))
                assert [row["model"] for row in remote.ledger.totals()] == [name]
        assert len(server.received) == 3


def test_a_count_that_no_answer_has_is_no_answer(tmp_path):
    with (
        RemoteServer(gives(chat(usage=(10**400, 1)))) as server,
        pytest.raises(RemoteModelError, match="reports more than 1000000000 tokens"),
    ):
        asked(server, tmp_path, max_tries=1)


def test_a_call_that_is_given_up_is_accounted_for(tmp_path):
    async def give_up(remote):
        call = asyncio.create_task(remote.generate(QUESTION))
        await asyncio.sleep(0.1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.sleep(0.4)

    with (
        RemoteServer(sleeps(0.2)) as server,
        closing(RemoteModel("teacher", section(server), tmp_path)) as remote,
    ):
        asyncio.run(give_up(remote))

    (line,) = log_of(tmp_path)
    assert line["completion_tokens"] == 4
