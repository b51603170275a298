"""The reward `rlpr`: which tokens are asked about, behind which ones, and what is made of the
answers. The policy here is a table; tests/rollout/test_policy_scores.py has a real engine."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo.errors import ConfigError
from agentevo.rewards import make_reward
from agentevo.rewards.answer_texts import find_opening, opening_text
from agentevo.rewards.baselines import Baseline, BaselineScorers
from agentevo.rewards.probability import measure_logprobs, split
from agentevo.rewards.reward import reward_config
from agentevo.types import Task, Trajectory, Turn

LN2 = math.log(2)


class TablePolicy:
    """Words with the blank before them, `>`s with the character behind them, single characters
    else; a character of two bytes is two tokens. Each token has the probability that `chance` says
    of its text, and 1/2 otherwise."""

    agent = ""

    def __init__(self, chance=(), prompts=(), path=None):
        self.chance = dict(chance)
        self.prompts = dict(prompts)
        self.baselines = BaselineScorers(path)
        self.pieces: list[str] = []
        self.asked: list[tuple[str, list[str]]] = []

    def id_of(self, piece: str) -> int:
        if piece not in self.pieces:
            self.pieces.append(piece)
        return self.pieces.index(piece)

    def encode(self, text):
        found = re.findall(r"é| ?[A-Za-z0-9]+|>[^\s<]|.", text, re.DOTALL)
        halves = [half for piece in found for half in (["é1", "é2"] if piece == "é" else [piece])]
        return [self.id_of(piece) for piece in halves]

    def text(self, ids):
        text = "".join(self.pieces[one] for one in ids)
        return re.sub("é1$", "\ufffd", text.replace("é1é2", "é"))

    async def score(self, context_ids, ids):
        told = [self.pieces[one] for one in ids]
        self.asked.append((self.text(context_ids), told))
        return [math.log(self.chance.get(piece, 0.5)) for piece in told], 7

    def first_prompt(self, task):
        return self.prompts.get(task.id) and self.encode(self.prompts[task.id])


def attempt(policy, *texts, prompt="Q: "):
    """A trajectory of turns, each the context of the next; what the environment says is `!`."""
    turns = [
        Turn(
            index=index,
            parent=index - 1 if index else None,
            prompt_ids=policy.encode("!" if index else prompt),
            completion_ids=(ids := policy.encode(text)),
            logprobs=[-1.0] * len(ids),
            versions=[0] * len(ids),
            finish_reason="stop",
        )
        for index, text in enumerate(texts)
    ]
    return Trajectory(id="a", task_id="t", group_id="g", turns=turns)


def scored(policy, trajectory, answer="42", metadata=None, **options):
    scorer = make_reward(
        reward_config("rlpr")(**{"name": "rlpr", "format_weight": 0.0, "debias": False} | options)
    )
    task = Task(id="t", query="?", answer=answer, metadata=metadata or {})
    return asyncio.run(scorer.score(trajectory, task, policy))


@pytest.mark.parametrize(
    ("reply", "place", "context", "asked", "counted"),
    [
        ("so <answer>7</answer>", "answer", "Q: so <answer", [">4", "2"], 2),
        ("so <answer> 7</answer>", "answer", "Q: so <answer>", [" 42"], 1),
        ("so <answer>\n7</answer>", "answer", "Q: so <answer>\n", ["42"], 1),
        ("so <ANSWER> </answer>", "answer", "Q: so <ANSWER>", ["42"], 1),
        ("so \\boxed{\\frac{1}{2}} ok", "boxed", "Q: so \\boxed{", ["42"], 1),
        ("so #### 7", "hashes", "Q: so ####", [" 42"], 1),
        ("é é <final> é</final>", "final", "Q: é é <final> ", ["42"], 1),
    ],
)
def test_the_right_answer_stands_where_the_stated_one_began(reply, place, context, asked, counted):
    policy = TablePolicy()
    score = scored(policy, attempt(policy, reply), place=place, measure="product")
    ((behind, told),) = policy.asked
    assert (behind, "".join(told)) == (context, "".join(asked))
    assert score.value == pytest.approx(0.5**counted)


def test_the_drawn_ids_are_never_encoded_again():
    """The policy may have drawn `<answer` in pieces that no tokenizer would make of it."""
    policy = TablePolicy()
    policy.encode("<answer> 9</answer>")
    odd = [policy.id_of(piece) for piece in ("<an", "sw", "er", ">", " ", "9", "</answer>")]
    turn = Turn(
        index=0,
        prompt_ids=policy.encode("Q"),
        completion_ids=odd,
        logprobs=[-1.0] * 7,
        versions=[0] * 7,
        finish_reason="stop",
    )
    seen = []
    ask = policy.score

    async def score(context_ids, ids):
        seen.append(context_ids)
        return await ask(context_ids, ids)

    policy.score = score
    scored(policy, Trajectory(id="a", task_id="t", group_id="g", turns=[turn]))
    assert seen == [[*policy.encode("Q"), *odd[:5]]]


@pytest.mark.parametrize(
    "reply",
    [
        "42",
        "<answer>42",
        "42</answer>",
        "</answer>42<answer>",
        "<answer>1</answer><answer>42</answer>",
        "<answer><answer>42</answer>",
        "",
    ],
)
def test_a_reply_that_does_not_state_one_answer_has_nothing(reply):
    policy = TablePolicy()
    score = scored(policy, attempt(policy, reply), format_weight=0.1)
    assert (score.value, score.parts, score.success) == (0, {"probability": 0, "format": 0}, False)
    assert policy.asked == []


def test_an_attempt_without_turns_has_nothing():
    assert scored(TablePolicy(), Trajectory(id="a", task_id="t", group_id="g")).value == 0


def test_the_last_turn_states_the_answer_behind_all_others():
    policy = TablePolicy()
    scored(policy, attempt(policy, "<answer> 1</answer>", "<answer> 2</answer>"))
    assert policy.asked == [("Q: <answer> 1</answer>!<answer>", [" 42"])]


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ("mean", (0.9 + 0.1) / 2),
        ("product", 0.09),
        ("geometric_mean", 0.3),
        ("mean_logprob", math.log(0.3)),
    ],
)
def test_measures(measure, expected):
    logprobs = [math.log(0.9), math.log(0.1)]
    assert measure_logprobs(logprobs, measure) == pytest.approx(expected)
    policy = TablePolicy({" new": 0.9, " york": 0.1})
    score = scored(policy, attempt(policy, "<answer> x</answer>"), "new york", measure=measure)
    assert score.value == pytest.approx(expected)


def test_what_was_known_without_reasoning_earns_nothing():
    """The baseline is of the policy as it was at first: what it thinks of the answer later changes
    nothing."""
    table = {" 42": 0.3, "42": 0.1, ">4": 0.1, "2": 0.1}
    policy = TablePolicy(table, {"t": "Q: "})
    options = {"debias": True, "format_weight": 0.1}
    scorer = make_reward(reward_config("rlpr")(name="rlpr", **options))
    asyncio.run(scorer.prepare([Task(id="t", query="?", answer="42")], policy))
    policy.chance[" 42"] = 0.9
    score = scored(policy, attempt(policy, "hm <answer> 7</answer>"), **options)
    assert score.parts == pytest.approx({"probability": 0.9 * (0.9 - 0.3), "format": 0.1})
    assert score.success

    policy.chance[" 42"] = 0.2
    worse = scored(policy, attempt(policy, "hm <answer> 7</answer>"), **options)
    assert worse.parts == pytest.approx({"probability": 0.0, "format": 0.1}), "never below 0"
    assert not worse.success
    assert [context for context, _ in policy.asked].count("Q: ") == 2, "each form asked once"


def test_the_best_of_several_answers_counts():
    policy = TablePolicy({" yes": 0.8, " no": 0.1})
    score = scored(policy, attempt(policy, "<answer> x</answer>"), ["no", "yes", "no"])
    assert score.value == pytest.approx(0.8)
    assert len(policy.asked) == 2


@pytest.mark.parametrize("answer", [None, [], "", ["a", " "]])
def test_a_task_without_an_answer_fails_its_score(answer):
    policy = TablePolicy(prompts={"t": "Q"})
    with pytest.raises(ValueError, match="'t'"):
        scored(policy, attempt(policy, "<answer> 7</answer>"), answer)
    scorer = make_reward(reward_config("rlpr")(name="rlpr"))
    asyncio.run(scorer.prepare([Task(id="t", query="?", answer=answer)], policy))


def test_places_without_a_spot_are_refused():
    policy = TablePolicy()
    for place in ("auto", "whole", "json:a", "number", "regex:a(b)"):
        with pytest.raises(ValueError, match="not a place where another answer can be put"):
            reward_config("rlpr")(name="rlpr", place=place)

    with pytest.raises(ConfigError, match="'t': answer_schema: 'number' is not a place"):
        scored(policy, attempt(policy, "7"), metadata={"answer_schema": "number"})

    scored(policy, attempt(policy, "\\boxed{7}"), metadata={"answer_schema": "boxed"})
    assert policy.asked[0][0].endswith("\\boxed{")


@given(st.text(alphabet="é >ab<1", max_size=30), st.integers(0, 30))
def test_ids_are_split_where_no_character_is(text, end):
    policy = TablePolicy()
    ids = policy.encode(text)
    end = min(end, len(text))
    kept, rest = split(policy, ids, text, end)
    assert kept == ids[: len(kept)] and policy.text(kept) + rest == text[:end]
    assert len(rest) <= 3, "no more than a token is cut off"


@given(st.text(alphabet="<>/answer {}\\boxed#1", max_size=60))
def test_an_opening_is_within_its_text(text):
    for place in ("answer", "boxed", "hashes"):
        found = find_opening(text, place)
        assert found is None or 0 < found <= len(text)
        whole = opening_text(place) + "42" + {"answer": "</answer>", "boxed": "}"}.get(place, "")
        assert find_opening(whole, place) == len(opening_text(place))


@pytest.mark.slow
def test_hostile_replies_take_no_longer_than_others():
    for text in (
        "<answer>" * 100_000,
        "\\boxed{" * 100_000,
        "\\boxed{" + "{" * 500_000,
        "#" * 10**6,
    ):
        for place in ("answer", "boxed", "hashes"):
            find_opening(text, place)


def test_baselines_outlast_the_process_and_the_first_one_stays(tmp_path):
    path = tmp_path / "reward_baselines.json"

    async def work():
        one = BaselineScorers(path)
        other = BaselineScorers(path)
        assert await one.known() == await other.known() == {}
        await one.add({"a": Baseline("t", 0, [-1.0])})
        await other.add({"a": Baseline("t", 5, [-9.0]), "b": Baseline("u", 5, [-2.0])})
        assert (await other.known())["a"].version == 0
        assert set(await BaselineScorers(path).known()) == {"a", "b"}

    asyncio.run(work())
    assert json.loads(path.read_text())["b"] == {"task": "u", "version": 5, "logprobs": [-2.0]}

    path.write_text('{"a": ')
    with pytest.raises(ConfigError, match=r"reward_baselines\.json can't be read .*delete it"):
        asyncio.run(BaselineScorers(path).known())


def test_baselines_that_are_added_at_once_are_all_known(tmp_path):
    class LateReturn(BaselineScorers):
        def _write(self, entries):
            merged = super()._write(entries)
            time.sleep(0.0 if "b" in entries else 0.3)
            return merged

    async def work():
        baselines = LateReturn(tmp_path / "reward_baselines.json")
        await baselines.known()
        one, other = (Baseline("t", version, [-1.0]) for version in (0, 1))
        await asyncio.gather(baselines.add({"a": one}), baselines.add({"b": other}))
        assert set(await baselines.known()) == {"a", "b"}

    asyncio.run(work())
