"""gateway.requests_per_s: what is beyond it is a 429 in the words of its API, for one key alone."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo.agents.gateway.rate_limit import MAX_ADDRESSES, Allowance, RateLimit
from agentevo.agents.gateway.refusals import Refusal

USER = {"role": "user", "content": "left or right ?"}
BODIES = {
    "/chat/completions": {"messages": [USER]},
    "/completions": {"prompt": "left"},
    "/responses": {"input": "left or right ?"},
    "/messages": {"messages": [USER], "max_tokens": 3},
}


def taken(limit, allowance):
    try:
        limit.take(allowance)
    except Refusal as refusal:
        return refusal.retry_after_s if refusal.status == 429 else None
    return None


@given(
    st.floats(0.1, 1000),
    st.lists(st.one_of(st.just(0.0), st.floats(0, 5)), min_size=1, max_size=60),
)
def test_no_stretch_of_time_has_more_than_its_share(per_s, pauses):
    """Whoever waits as long as he is told is let in, and nobody sooner."""
    now = [100.0]
    limit = RateLimit(per_s, lambda: now[0])
    allowance = Allowance()
    let_in = []
    for pause in pauses:
        now[0] += pause
        wait_s = taken(limit, allowance)
        if wait_s is not None:
            now[0] += wait_s * 0.9
            assert taken(limit, allowance) is not None
            now[0] += wait_s * 0.1 + 1e-6
            assert taken(limit, allowance) is None

        let_in.append(now[0])

    for first in range(len(let_in)):
        for last in range(first, len(let_in)):
            allowed = max(1.0, per_s) + per_s * (let_in[last] - let_in[first])
            assert last - first + 1 <= allowed + 0.01


def test_a_second_s_worth_may_come_at_once():
    limit = RateLimit(5.0, lambda: 0.0)
    allowance = Allowance()
    assert [taken(limit, allowance) is None for _ in range(7)] == [True] * 5 + [False] * 2
    assert taken(limit, Allowance()) is None


def test_the_table_of_addresses_is_bounded_and_forgets_the_quiet_ones():
    limit = RateLimit(1.0, lambda: 0.0)
    limit.take_wrong_key("loud")
    for number in range(3 * MAX_ADDRESSES):
        limit.take_wrong_key(f"10.0.{number}")
        if not number % 100:
            with pytest.raises(Refusal):
                limit.take_wrong_key("loud")

    assert len(limit._addresses) == MAX_ADDRESSES


@pytest.mark.parametrize("path", BODIES)
def test_each_api_says_it_in_its_own_words(gateway_of, path):
    async def talk():
        async with gateway_of(["left"] * 9, requests_per_s=0.01) as opened:
            mine = opened.policy("a")
            other = opened.policy("b")
            answers = [await opened.post(mine, BODIES[path], path) for _ in range(2)]
            kept = await opened.http.get(
                f"{mine.base_url}/models", headers={"Authorization": f"Bearer {mine.api_key}"}
            )
            beside = await opened.post(other, BODIES[path], path)
            return [*answers, kept, beside], mine.turns

    (first, second, kept, beside), turns = asyncio.run(talk())
    assert [one.status_code for one in (first, second, kept, beside)] == [200, 429, 429, 200]
    assert 90 < int(second.headers["retry-after"]) <= 100
    assert 90_000 < int(second.headers["retry-after-ms"]) <= 100_000

    told = second.json()
    assert told["error"]["type"] == "rate_limit_error"
    assert (told.get("type") == "error") == (path == "/messages")
    assert "gateway.requests_per_s=0.01" in told["error"]["message"]
    assert len(turns) == 1


def test_wrong_keys_are_limited_and_keep_no_right_one_out(gateway_of):
    async def talk():
        async with gateway_of(["left"], requests_per_s=2.0) as opened:
            policy = opened.policy()
            wrong = {"Authorization": "Bearer nobody"}
            url = policy.base_url + "/chat/completions"
            answers = [
                (await opened.http.post(url, json={}, headers=wrong)).status_code for _ in range(12)
            ]
            free = await opened.http.get(policy.session.base + "/health")
            return answers, await opened.post(policy, BODIES["/chat/completions"]), free

    answers, right, free = asyncio.run(talk())
    assert answers[:2] == [401, 401] and 429 in answers
    assert (right.status_code, free.status_code) == (200, 200)


@pytest.mark.slow
def test_there_is_no_limit_unless_one_is_set(gateway_of):
    async def talk():
        async with gateway_of([]) as opened:
            policy = opened.policy()
            url = f"{policy.base_url}/models"
            key = {"x-api-key": policy.api_key}
            answers = [await opened.http.get(url, headers=key) for _ in range(50)]
            return {answer.status_code for answer in answers}

    assert asyncio.run(talk()) == {200}
