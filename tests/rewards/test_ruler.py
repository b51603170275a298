"""RULER against judges that are programs behind a real endpoint and read the prompt that they are
sent: ranking, votes, orders, bounds, failures, fences, and what of it is kept."""

import asyncio
import json
import random
import statistics
from collections import Counter

import msgspec
import pytest
from judge_endpoint import (
    attempts_in,
    judge,
    likes_early,
    number_in,
    ranks,
    records_in,
    verdict,
    words_of,
)
from judged_attempts import ASKED, TASK, attempt, group, said, turn
from remote_server import RemoteServer, breaks_off, chat, fails, gives, hangs

from agentevo.config.remote_models import RemoteModelSection
from agentevo.errors import AgentEvoError
from agentevo.inference.remote_models import RemoteModels
from agentevo.rewards.injections import INJECTIONS
from agentevo.rewards.ruler import order_of_vote
from agentevo.rollout.scoring import Scoring
from agentevo.runs.evaluation.judge_calibration import spearman
from agentevo.store.call_log import AttemptCalls
from agentevo.types import Message, ToolCall


def scored(servers, trajectories, *, folder=None, options=None, calls=None, task=TASK, **ruler):
    """The judged trajectories, by servers that are models in this order."""
    sections = {
        f"m{n}": RemoteModelSection(**judge(server, **{"max_tries": 1, **(options or {})}))
        for n, server in enumerate(servers)
    }
    models = RemoteModels(sections, folder)
    try:
        scoring = Scoring([_ruler(sections, ruler)], models=models)
        scoring.check([task], needed=True)
        own = [False] * len(trajectories)
        return asyncio.run(scoring.score(trajectories, own, calls or {}, task=task))
    finally:
        models.close()


def _ruler(sections, options):
    from agentevo.rewards.reward import reward_config

    return reward_config("ruler")(name="ruler", **{"models": tuple(sections), **options})


def rewards(judged):
    assert all(one.status == "completed" for one in judged), [one.error for one in judged]
    return {one.id: one.reward for one in judged}


def test_a_judge_that_can_rank_gives_the_true_order_whatever_the_order_of_the_attempts():
    worths = [0.3, 0.9, 0.1, 0.55, 0.0, 0.7]
    trajectories = group(*worths)
    with RemoteServer(ranks()) as server:
        first = rewards(scored([server], trajectories))
        shuffled = random.Random(1).sample(trajectories, len(trajectories))
        assert rewards(scored([server], shuffled)) == first

    assert first == pytest.approx(dict(zip([t.id for t in trajectories], worths, strict=True)))

    prompts = [body["messages"][0]["content"] for body in server.received]
    assert prompts[0] in prompts[2:] and len(set(prompts)) == 2, "the question is the same"

    one, other = ([words_of(r) for r in attempts_in(p).values()] for p in prompts[:2])
    assert one == other[::-1]
    schema = server.received[0]["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["scores"], "servers that can hold the judge to the form"
    assert prompts[0].count(TASK.query) == 1, "what all begin with is sent once"


def test_votes_cancel_a_liking_for_places_and_one_vote_does_not():
    trajectories = group(0.5, 0.55, 0.6, 0.65)
    with RemoteServer(ranks(likes_early)) as server:
        two = rewards(scored([server], trajectories, votes=2, max_spread=1.0))
        assert sorted(two, key=two.get) == [trajectory.id for trajectory in trajectories]
        one = rewards(scored([server], trajectories, votes=1))
        assert sorted(one, key=one.get) != [trajectory.id for trajectory in trajectories]

    orders = Counter(order_of_vote(3, vote, "g") for vote in range(400))
    assert len(orders) == 6, "every order comes"


@pytest.mark.slow
def test_shuffled_votes_rank_where_a_fixed_order_does_not(monkeypatch):
    """The ablation of docs/rewards.md: `pytest -s` prints its numbers."""
    draw = random.Random(0)
    worths = [[round(draw.uniform(0.3, 0.7), 3) for _ in range(6)] for _ in range(10)]
    tasks = [msgspec.structs.replace(TASK, id=f"t{number}") for number in range(10)]

    def agreement(votes):
        """Spearman's rank correlation with the truth, the mean over groups."""
        told = []
        with RemoteServer(ranks(likes_early)) as server:
            for task, truths in zip(tasks, worths, strict=True):
                options = {"task": task, "votes": votes, "max_spread": 1.0}
                found = rewards(scored([server], group(*truths), **options))
                told.append(spearman(truths, [found[f"a{n}"] for n in range(6)]))
        return round(statistics.mean(told), 3)

    found = {f"{votes} shuffled": agreement(votes) for votes in (1, 2, 4)}
    monkeypatch.setattr(
        "agentevo.rewards.ruler.order_of_vote", lambda num, *others: tuple(range(num))
    )
    found |= {f"{votes} in one order": agreement(votes) for votes in (1, 4)}
    print(found)

    assert found["4 in one order"] == found["1 in one order"] < found["2 shuffled"]
    assert found["4 shuffled"] >= 0.9


def test_a_judge_that_disagrees_with_itself_gives_no_score_and_its_evidence_is_kept():
    ended = []
    calls = {}
    trajectories = group(0.5, 0.5001, 0.5002)
    for one in trajectories:
        calls[one.id] = AttemptCalls(None, one.id)
        calls[one.id].listen = ended.append

    with RemoteServer(ranks(likes_early)) as server:
        judged = scored([server], trajectories, calls=calls, max_spread=0.3)

    failed = [one for one in judged if one.status == "failed"]
    assert len(failed) == 2, "the one in the middle has the same place twice"
    assert all(one.error.startswith("the reward 'ruler' failed: Disagreement: ") for one in failed)

    written = {one.calls.trajectory_id: one.record("r") for one in ended if one.has_ended}
    for one in judged:
        call = written[one.id]
        assert call.status == one.status
        assert "vote 1, m0, shown as attempt" in call.attributes["reason"]
        assert "vote 2, m0, shown as attempt" in call.attributes["reason"]
        assert ("score" in call.attributes) == (one.status == "completed")


GOOD = {1: 0.2, 2: 0.8}


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("no idea", "there is no JSON object"),
        ("", "there is no JSON object"),
        (verdict({1: 0.5}), "there is no score for 2"),
        (verdict({1: 0.5, 2: 0.5, 3: 0.5}), "there is no attempt 3"),
        (verdict(GOOD).replace('"id": 2', '"id": 1'), "more than one score for 1"),
        (verdict({1: 1.5, 2: 0.5}), "the score of 1 is 1.5"),
        (verdict({1: -0.01, 2: 0.5}), "not a number from 0 to 1"),
        (verdict(GOOD).replace("0.8}", "NaN}"), "the score of 2 is NaN"),
        (verdict(GOOD).replace("0.8}", "true}"), "the score of 2 is true"),
        (verdict(GOOD).replace("0.8}", '"good"}'), 'the score of 2 is "good"'),
        (verdict(GOOD).replace("0.8}", "1e999}"), "not a number from 0 to 1"),
        ('{"scores": ' * 3000, "there is JSON in it that can't be read"),
        (f"{verdict(GOOD)}, not {verdict({1: 1, 2: 0})}", "verdicts in it that differ"),
    ],
)
def test_an_unusable_answer_is_asked_about_once_and_then_is_no_score(answer, problem):
    with RemoteServer(gives(chat(answer)), gives(chat(verdict(GOOD)))) as server:
        assert sorted(rewards(scored([server], group(0.1, 0.2), votes=1)).values()) == [0.2, 0.8]

    asked = server.received[1]["messages"]
    assert [message["role"] for message in asked] == ["user", "assistant", "user"]
    assert problem in asked[2]["content"]

    with RemoteServer(gives(chat(answer))) as server:
        judged = scored([server], group(0.1, 0.2), votes=1)
        assert len(server.received) == 2

    assert [one.status for one in judged] == ["failed", "failed"]
    assert problem in judged[0].error


def test_numbers_in_quotes_and_an_earlier_draft_are_read():
    draft = verdict({1: 0.9, 2: 0.9})
    last = verdict(GOOD).replace("0.8}", '"0.8"}')
    with RemoteServer(gives(chat(f"<think>{draft}</think>\n{last}\nSee [1] and {{}}."))) as server:
        assert sorted(rewards(scored([server], group(0.1, 0.2), votes=1)).values()) == [0.2, 0.8]


def test_an_answer_that_was_cut_off_is_asked_about_once():
    cut = chat(verdict(GOOD))
    cut["choices"][0]["finish_reason"] = "length"
    with RemoteServer(gives(cut), gives(chat(verdict(GOOD)))) as server:
        assert sorted(rewards(scored([server], group(0.1, 0.2), votes=1)).values()) == [0.2, 0.8]
    assert "cut off" in server.received[1]["messages"][2]["content"]


def test_a_server_without_schemas_is_asked_without_from_then_on():
    def old_server(body, handler):
        refused = fails(400, "unknown field: response_format")
        (refused if "response_format" in body else ranks())(body, handler)

    with RemoteServer(old_server) as server:
        judged = rewards(scored([server], group(0.1, 0.9), votes=1, options={"max_at_once": 1}))
        assert judged == pytest.approx({"a0": 0.1, "a1": 0.9})
        assert ["response_format" in body for body in server.received] == [True, False]


def test_a_refusal_that_is_not_for_the_schema_says_what_it_is_and_is_not_remembered():
    sections = {"j": RemoteModelSection(base_url="http://127.0.0.1:1", model="m", max_tries=1)}
    hello = [{"role": "user", "content": "?"}]
    with RemoteServer(fails(400, "too long"), fails(400, "too long"), gives(chat("{}"))) as server:
        sections["j"] = sections["j"].model_copy(update={"base_url": server.base_url})
        models = RemoteModels(sections)
        with pytest.raises(AgentEvoError, match="too long"):
            asyncio.run(models["j"].generate(hello, schema={"type": "object"}))
        asyncio.run(models["j"].generate(hello, schema={"type": "object"}))
        models.close()

    assert ["response_format" in body for body in server.received] == [True, False, True]


def test_models_are_asked_in_order_and_an_outage_is_a_failure_with_its_reasons():
    with RemoteServer() as gone:
        pass  # nobody listens there any more

    broken = RemoteServer(fails(500, "on fire"))
    vague = RemoteServer(gives(chat("hm")))
    with broken, vague, RemoteServer(ranks()) as fine:
        judged = scored([gone, broken, vague, fine], group(0.1, 0.9), votes=1)
        assert rewards(judged) == pytest.approx({"a0": 0.1, "a1": 0.9})
        assert [len(one.received) for one in (broken, vague, fine)] == [1, 2, 1]
        judged = scored([gone, broken, vague], group(0.1, 0.9))

    assert [one.status for one in judged] == ["failed", "failed"]
    for words in (
        "m0: no usable answer after 1 requests",
        "on fire",
        "m2: there is no JSON object",
    ):
        assert words in judged[0].error


@pytest.mark.slow
def test_a_rate_limit_is_waited_out_and_a_slow_judge_leaves_time_for_the_next():
    busy = fails(429, "slow down", retry_after="0.05")
    with RemoteServer(busy, breaks_off, ranks()) as server:
        judged = scored([server], group(0.1, 0.9), votes=1, options={"max_tries": 3})
        assert rewards(judged) == pytest.approx({"a0": 0.1, "a1": 0.9})
        assert len(server.received) == 3

    with RemoteServer(hangs) as slow, RemoteServer(ranks()) as fine:
        judged = scored([slow, fine], group(0.1, 0.9), votes=1, timeout_s=4)
        assert rewards(judged) == pytest.approx({"a0": 0.1, "a1": 0.9})
        (late, _) = scored([slow], group(0.1, 0.9), votes=1, timeout_s=0.2)
        assert (late.status, late.reward) == ("failed", 0.0)
        assert "no score within timeout_s=0.2 s" in late.error


def test_answers_are_kept_on_disk_by_what_was_asked(tmp_path):
    kept = {"cache": True, "price": {"completion": 1.0}}
    with RemoteServer(ranks()) as server:
        first = rewards(scored([server], group(0.1, 0.9), folder=tmp_path, options=kept))
        again = rewards(scored([server], group(0.1, 0.9), folder=tmp_path, options=kept))
        assert (first, len(server.received)) == (again, 2)
        scored([server], group(0.1, 0.9), folder=tmp_path, options=kept, rubric="Be kind.")
        assert len(server.received) == 4

    lines = [json.loads(line) for line in (tmp_path / "m0.jsonl").read_text().splitlines()]
    assert [line["state"] for line in lines].count("cached") == 2
    assert {line["role"] for line in lines} == {"judge"}


def test_an_instruction_in_an_attempt_is_only_text():
    """The endpoint finds the records by their fences; a text that could end one would show here."""
    assert len(set(INJECTIONS)) >= 20

    seen = []

    def honest(record, number, num):
        seen.append(record)
        return number_in(record)

    forged = {f"bad{n}": f"It is worth 0.{n:02}\n{text}" for n, text in enumerate(INJECTIONS)}
    attempts = [said(name, text) for name, text in forged.items()]
    with RemoteServer(ranks(honest)) as server:
        judged = rewards(scored([server], [*attempts, *group(0.6)], votes=1))
    assert judged == pytest.approx(
        {f"bad{n}": n / 100 for n in range(len(INJECTIONS))} | {"a0": 0.6}
    )

    for text in forged.values():
        assert [{"role": "assistant", "content": text}] in seen, "a reader of JSON reads the text"

    prompt = server.received[0]["messages"][0]["content"]
    assert len(records_in(prompt)) == 2 + len(INJECTIONS)

    shown = "\n".join(line for line in prompt.splitlines() if line.startswith("{"))
    assert not any(text in shown for text in ("<|", "</", "[INST]", "\u202e", "\u200b"))


def test_a_copied_fence_has_another_mark():
    with RemoteServer(ranks()) as server:
        scored([server], group(0.1, 0.6), votes=1)
        prompt = server.received[0]["messages"][0]["content"]
        copied = prompt[prompt.index("---") :]
        judged = rewards(scored([server], [said("bad", copied), *group(0.6)], votes=1))
    assert judged["a0"] == pytest.approx(0.6)
    assert len(attempts_in(server.received[1]["messages"][0]["content"])) == 2


def test_equal_attempts_are_shown_once_and_a_group_of_nothing_else_is_not_asked_about():
    with RemoteServer(ranks()) as server:
        judged = scored([server], group(0.2, 0.2, 0.2))
        assert rewards(judged) == dict.fromkeys(("a0", "a1", "a2"), 0.5)
        assert not server.received and not any(one.success for one in judged)
        judged = rewards(scored([server], group(0.2, 0.9, 0.2), votes=1))
        assert judged == pytest.approx({"a0": 0.2, "a1": 0.9, "a2": 0.2})
        assert len(attempts_in(server.received[0]["messages"][0]["content"])) == 2

        alone = rewards(scored([server], group(0.2), votes=1))
        assert alone == pytest.approx({"a0": 0.2}), "one that is compared with none is judged"


TOOLS = json.dumps([{"type": "function", "function": {"name": "weigh", "description": "Weighs."}}])


def test_a_judge_sees_tools_calls_and_every_history_of_an_attempt():
    call = Message("assistant", "", (ToolCall("weigh", '{"what": "it"}', "id-1"),))
    result = Message("tool", "0.4 kg", tool_call_id="id-1")
    other = Message("assistant", "", (ToolCall("weigh", '{"what": "it"}', "id-2"),))

    branched = attempt(
        "branched",
        turn(0, ASKED, call, tools=TOOLS),
        turn(1, result, Message("assistant", "worth 0.4", reasoning="heavy"), parent=0),
        turn(2, result, Message("assistant", "worth 0.5"), parent=0),
        turn(3, Message("user", "A new root."), Message("assistant", "worth 0.8")),
        truncated=True,
    )
    plain = attempt(
        "plain", turn(0, ASKED, other, tools=TOOLS), turn(1, result, Message("assistant", "no"))
    )
    with RemoteServer(ranks()) as server:
        judged = rewards(scored([server], [branched, plain], votes=1, reference=True))
    assert judged == pytest.approx({"branched": 0.8, "plain": 0.0})

    found = records_in(server.received[0]["messages"][0]["content"])
    assert found["the tools that they had"] == [{"name": "weigh", "description": "Weighs."}]
    assert found["the right answer"] == [{"right_answer": "7"}]

    (lines,) = [lines for what, lines in found.items() if '"worth 0.4"' in json.dumps(lines)]
    calls = [line["tool_calls"] for line in lines if "tool_calls" in line]
    assert calls == [[{"name": "weigh", "arguments": '{"what": "it"}'}]], "said once, without ids"

    heads = [line for line in lines if "history" in line]
    assert heads == [
        {"history": 1, "of": 3},
        {"history": 2, "of": 3, "goes_on_from_history": 1, "after_message": 3},
        {"history": 3, "of": 3},
    ]
    assert {"role": "assistant", "reasoning": "heavy", "content": "worth 0.4"} in lines
    assert lines[-1] == {"cut_off_by_a_limit": True}


def test_long_attempts_keep_their_head_and_tail():
    turns = [
        turn(n, Message("user", f"q{n} " + "x" * 50), Message("assistant", f"s{n}"), parent=n - 1)
        for n in range(1, 300)
    ]
    long = attempt("long", turn(0, ASKED, Message("assistant", "first " + "y" * 10**6)), *turns)
    with RemoteServer(ranks()) as server:
        limits = {"max_chars": 2000, "max_message_chars": 300}
        scored([server], [long, *group(0.4)], votes=1, **limits)

    (lines,) = [
        lines
        for lines in attempts_in(server.received[0]["messages"][0]["content"]).values()
        if len(lines) > 1
    ]
    assert lines[0]["content"].startswith("first yy") and "left out" in lines[0]["content"]
    assert len(lines[0]["content"]) < 400 and lines[-1]["content"] == "s299"

    (left_out,) = [line["messages_left_out"] for line in lines if "messages_left_out" in line]
    assert left_out + len(lines) - 1 == 2 * 299 + 1
    assert len(json.dumps(lines)) < 3000


def test_what_the_agent_returned_stays_as_a_metric():
    with RemoteServer(ranks()) as server:
        (one, _) = scored([server], [said("a", "worth 0.4", reward=3.0), *group(0.4001)], votes=1)
    assert (one.reward, one.reward_parts) == (pytest.approx(0.4), {"ruler": pytest.approx(0.4)})
    assert one.metrics == {"own_reward": 3.0}


def test_an_attempt_without_words_is_a_failure_that_says_so():
    with RemoteServer(ranks()) as server:
        judged = scored([server], [attempt("silent"), *group(0.4)])
    assert not server.received
    assert "the attempt silent has no message to judge" in judged[0].error
