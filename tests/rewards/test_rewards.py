"""What replies are worth: built-in rewards, rewards of a user's own, and which of them counts."""

import asyncio
import time

import msgspec
import numpy as np
import pytest
import torch

from agentevo.config import build_config
from agentevo.errors import ConfigError
from agentevo.rewards import RewardConfig, Score, make_reward, reward, rewards
from agentevo.rewards.reward import check_reward, completion_of, reward_config, score_of
from agentevo.rollout.scoring import NO_REWARD, Scoring
from agentevo.runtime import event_loop
from agentevo.types import Message, Task, ToolCall, Trajectory, Turn


def said(text, name="a", reward=0.25, **fields):
    turn = Turn(
        index=0,
        prompt_ids=[1],
        completion_ids=[2],
        logprobs=[-1.0],
        versions=[0],
        finish_reason="stop",
        messages=[Message("user", "?"), Message("assistant", text)],
    )
    return Trajectory(id=name, task_id="t", group_id="g", turns=[turn], reward=reward, **fields)


def task(answer="4", **fields):
    return Task(id="t", query="2 + 2?", answer=answer, **fields)


def value(name, text, answer="4", **options):
    scorer = make_reward(reward_config(name)(name=name, **options))
    return asyncio.run(scorer.score(said(text), task(answer))).value


@pytest.fixture
def own_rewards(monkeypatch):
    monkeypatch.setattr(rewards, "_items", dict(rewards._items))


@pytest.mark.parametrize(
    ("name", "text", "answer", "options", "expected"),
    [
        ("exact_match", " The  CAT. ", "the cat", {}, 1.0),
        ("exact_match", "The cat", "the cat", {"ignore_case": False}, 0.0),
        ("exact_match", "dog", ["cat", "dog"], {}, 1.0),
        ("exact_match", "a dog", "dog", {}, 0.0),
        ("exact_match", "a dog", "dog", {"place": "answer"}, 0.0),
        ("contains", "It is a dog!", "dog", {}, 1.0),
        ("contains", "a dogma", "dog", {}, 0.0),
        ("contains", "C++ it is", "C++", {}, 1.0),
        ("numeric", "I think 4.0", "4", {}, 1.0),
        ("numeric", "4 or 5", 4, {}, 0.0),
        ("numeric", "#### 1,000", "reasons\n#### 1000", {}, 1.0),
        ("numeric", "3.14", 3.14159, {"tolerance": 0.01}, 1.0),
        ("numeric", "3.14", 3.14159, {}, 0.0),
        ("numeric", "none", 4, {}, 0.0),
        ("numeric", "0.3", 0, {"absolute_tolerance": 0.5}, 1.0),
        ("numeric", "0.6", 0, {"absolute_tolerance": 0.5}, 0.0),
        ("numeric", '{"sum": 4}', 4, {"place": "json:sum"}, 1.0),
        ("em", "The Cat!", "cat", {}, 1.0),
        ("em", "<a>x</a> <b>An owl.</b>", ["cat", "owl"], {"place": "b"}, 1.0),
        ("em", "black cat", "cat", {}, 0.0),
        ("f1", "the black cat", ["a dog", "a cat"], {}, 2 / 3),
        ("f1", "dog", "cat", {}, 0.0),
        ("f1", "", "cat", {"place": "boxed"}, 0.0),
        ("multiple_choice", "I think it is (B).", "B", {}, 1.0),
        ("multiple_choice", "A or B", "B", {}, 0.0),
        ("multiple_choice", "A. Not this. B. This one. The answer is B.", "B", {}, 1.0),
        ("multiple_choice", "The answer is option A. Option B is wrong.", "A", {}, 1.0),
        ("multiple_choice", "B. Because option A is wrong.", "B", {}, 1.0),
        ("length", "x" * 10, None, {"max_length": 10, "unit": "characters"}, 0.0),
        ("length", "x" * 12, None, {"max_length": 10, "margin": 8, "unit": "characters"}, -0.25),
        ("length", "x" * 99, None, {"max_length": 10, "margin": 8, "unit": "characters"}, -1.0),
        ("length", "a b", None, {"max_length": 9, "min_length": 3, "unit": "words"}, -1.0),
        ("length", "a b", None, {"max_length": 1}, 0.0),
        ("repetition", "a b c d e f", None, {}, 0.0),
        ("repetition", "a b c " * 4, None, {}, -0.7),
        ("language", "yes \u662f\u7684", None, {"language": "zh"}, 2 / 3),
        ("language", "caf\u00e9 $x$ `\u662f` 12", None, {"language": "en"}, 1.0),
        ("format", "<a>\nx</a>", None, {"pattern": "<a>.*</a>"}, 1.0),
        ("format", "<a>x</a> y", None, {"pattern": "<a>.*</a>"}, 0.0),
    ],
)
def test_built_in_rewards(name, text, answer, options, expected):
    assert value(name, text, answer, **options) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("B", "B", 1.0),
        ("**(b)**", "B", 1.0),
        (r"\boxed{\text{B}}", "B", 1.0),
        ("B. Lyon", "B", 1.0),
        ("B: because", 1, 1.0),
        ("Lyon", "B", 1.0),
        ("It must be the city of Lyon, surely.", "Lyon", 1.0),
        ("Lyon Sud", "B", 0.0),
        ("Paris or Lyon", "B", 0.0),
        ("A city: the answer is B", "B", 1.0),
        ("The Answer: A, no: the answer is C", "B", 0.0),
        ("E", "B", 0.0),
        ("", "B", 0.0),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {"options": ["Paris", "Lyon", "Lyon Sud", "Nice"]},
        {"choices": {"A": "Paris", "B": "Lyon", "C": "Lyon Sud", "D": "Nice"}},
        {"choices": {"label": ["A", "B", "C", "D"], "text": ["Paris", "Lyon", "Lyon Sud", "Nice"]}},
    ],
)
def test_which_option_is_chosen(text, answer, expected, options):
    scorer = make_reward(reward_config("multiple_choice")(name="multiple_choice"))
    judged = scorer.score(said(text), task(answer, metadata=options))
    assert asyncio.run(judged).value == expected


@pytest.mark.parametrize(
    ("answer", "metadata"),
    [
        ("E", {"options": ["x", "y"]}),
        (7, {"options": ["x", "y"]}),
        ("A", {"options": "xy"}),
        ("A", {"choices": {"label": ["A", "B"], "text": ["x"]}}),
        ("A", {"choices": {"label": "A", "text": 1}}),
    ],
)
def test_a_choice_without_its_options_is_no_wrong_answer(answer, metadata):
    scorer = make_reward(reward_config("multiple_choice")(name="multiple_choice"))
    with pytest.raises(ValueError, match="the task 't'"):
        asyncio.run(scorer.score(said("A"), task(answer, metadata=metadata)))


@pytest.mark.parametrize("answer", ["", " . ", ["", "."]])
def test_an_empty_answer_is_contained_in_no_reply_and_that_is_no_wrong_answer(answer):
    scorer = make_reward(reward_config("contains")(name="contains"))
    with pytest.raises(ValueError, match="the task 't' has no words"):
        asyncio.run(scorer.score(said("A"), task(answer)))


def test_a_tasks_own_place_decides():
    scorer = make_reward(reward_config("em")(name="em", place="answer"))
    reply = said(r"<answer>3</answer> \boxed{4}")
    assert asyncio.run(scorer.score(reply, task())).value == 0.0
    own = task(metadata={"answer_schema": "boxed"})
    assert asyncio.run(scorer.score(reply, own)).value == 1.0


def test_tool_calls_that_worked():
    def turn(index, *messages):
        return Turn(
            index=index,
            prompt_ids=[1],
            completion_ids=[2],
            logprobs=[-1.0],
            versions=[0],
            finish_reason="stop",
            messages=list(messages),
        )

    def calls(*arguments):
        made = tuple(ToolCall("f", text, str(n)) for n, text in enumerate(arguments))
        return Message("assistant", "", tool_calls=made)

    def result(name, text):
        return Message("tool", text, tool_call_id=name)

    example = [
        Message("user", "?"),
        calls("not policy"),
        result("0", "Error: so"),
        calls("{}", "[]"),
    ]
    second = [result("0", "fine"), result("1", "error: no"), calls("{}", "{}")]
    third = [result("0", "Error: gone"), result("1", "1"), Message("assistant", "done")]
    turns = [turn(0, *example), turn(1, *second), turn(2, *third)]
    attempt = Trajectory(id="a", task_id="t", group_id="g", turns=turns)
    scorer = make_reward(reward_config("tool_use")(name="tool_use"))
    assert asyncio.run(scorer.score(attempt, task())).value == 0.5

    malformed = msgspec.structs.replace(attempt, metrics={"num_malformed_calls": 4.0})
    assert asyncio.run(scorer.score(malformed, task())).value == 0.25
    assert asyncio.run(scorer.score(said("no call"), task())).value == 0.0


@pytest.mark.parametrize(("name", "answer"), [("exact_match", None), ("numeric", "four")])
def test_a_task_that_can_not_be_judged_is_no_wrong_answer(name, answer):
    with pytest.raises(ValueError, match=r"the (task|answer)"):
        value(name, "4", answer)


def scored(configs, trajectories, task, unrewarded=None):
    missing = unrewarded or [False] * len(trajectories)
    return asyncio.run(Scoring(configs).score(trajectories, missing, {}, task=task))


def test_an_async_reward_that_blocks_is_named(own_rewards, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(event_loop.time, "perf_counter", lambda: now[0])

    @reward("blocks")
    async def blocks(completion):
        now[0] += 0.6
        return 1.0

    scoring = Scoring([RewardConfig(name="blocks")])
    for _ in range(4):
        asyncio.run(scoring.score([said("4")], [False], {}, task=task()))
    assert capsys.readouterr().err.count("the reward 'blocks' has blocked the event loop") == 1


def test_the_tasks_own_scorer_then_the_list_then_what_was_returned(own_rewards):
    @reward("fifth")
    def fifth(completion, answer):
        return {"right": float(completion == answer), "always": 0.2}

    members = [said("4", "a"), said("5", "b"), said("4", "c", status="failed", error="x")]
    listed = [
        reward_config("numeric")(name="numeric"),
        RewardConfig(name="fifth", weight=0.5),
        RewardConfig(name="returned"),
    ]
    first, second, failed = scored(listed, members, task())
    assert first.reward_parts == pytest.approx(
        {"numeric": 1.0, "fifth/right": 0.5, "fifth/always": 0.1, "returned": 0.25}
    )
    assert (first.reward, first.success) == (pytest.approx(1.85), True)
    assert (second.reward, second.success) == (pytest.approx(0.35), False)
    assert failed == members[2]

    own = scored(listed, members[:1], task(scorer="fifth"))[0]
    assert (own.reward, own.success) == (pytest.approx(1.2), True)
    assert scored([], members, task()) == members

    missing = scored([], members, task(), [True, False, True])
    assert [(one.status, one.error) for one in missing] == [
        ("failed", NO_REWARD),
        ("completed", None),
        ("failed", "x"),
    ]


def test_a_group_is_compared(own_rewards):
    @reward("rank")
    class Rank:
        def __init__(self, config):
            pass

        async def score_group(self, trajectories, task):
            order = sorted(completion_of(trajectory) for trajectory in trajectories)
            return [
                Score(float(order.index(completion_of(trajectory)))) for trajectory in trajectories
            ]

    members = [said("b", "1"), said("x", "2", status="cancelled"), said("a", "3")]
    config = [RewardConfig(name="rank")]
    assert [one.reward for one in scored(config, members, task())] == [1.0, 0.25, 0.0]
    assert Scoring(config).compares(task()) and not Scoring([]).compares(task())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["plain", "async", "class"])
@pytest.mark.parametrize("problem", ["raises", "nan", "text", "exits", "hangs"])
def test_a_reward_that_fails_fails_its_attempt_only(own_rewards, form, problem):
    def judge(completion):
        if completion != "bad":
            return 1.0
        if problem == "raises":
            raise KeyError("no such answer")
        if problem == "exits":
            raise SystemExit(3)
        return float("nan") if problem == "nan" else "text"

    async def judge_later(completion):
        if problem == "hangs" and completion == "bad":
            await asyncio.sleep(60)
        return judge(completion)

    class Judge:
        def __init__(self, config):
            pass

        async def score(self, trajectory, task):
            return await judge_later(completion_of(trajectory))

    def plain(completion):
        if problem == "hangs" and completion == "bad":
            time.sleep(3)
        return judge(completion)

    reward("judge")({"plain": plain, "async": judge_later, "class": Judge}[form])
    config = [RewardConfig(name="judge", timeout_s=0.3 if problem == "hangs" else 300)]
    bad, good = scored(config, [said("bad", "a"), said("fine", "b")], task())
    assert (bad.status, bad.reward, bad.success) == ("failed", 0.0, False)
    assert bad.error.startswith("the reward 'judge' failed: ")

    told = {
        "raises": "KeyError: 'no such answer'",
        "nan": "its value is nan",
        "text": "it returned 'text'",
        "exits": "SystemExit(3)",
        "hangs": "no score within timeout_s=0.3 s",
    }
    assert told[problem] in bad.error
    if (form, problem) != ("plain", "hangs"):  # it holds up the other for the time of the grace
        assert (good.status, good.reward, good.success) == ("completed", 1.0, True)


async def _score_later(self, trajectory, task):
    return 1.0


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (lambda completion, other: 1.0, "are unknown: a reward may have completion, task"),
        (type("Empty", (), {}), "needs a method `async def score"),
        (
            type("Half", (), {"score": _score_later, "score_group": lambda self, own, task: []}),
            "needs a method `async def score",
        ),
        (
            type("Odd", (), {"Config": int, "score": lambda self: None}),
            "needs a method `async def score",
        ),
    ],
)
def test_what_can_be_no_reward_is_refused(item, expected):
    with pytest.raises(ConfigError, match="the reward 'x'") as caught:
        check_reward("x", item)
    assert expected in str(caught.value)


def test_a_score_is_a_number_parts_or_a_score():
    assert score_of(2) == Score(2.0)
    assert score_of({"a": 1, "b": 0.5}) == Score(1.5, {"a": 1.0, "b": 0.5})
    assert Score(1.0).is_success and not Score(0.5).is_success
    assert Score(0.5, success=True).is_success

    with pytest.raises(ValueError, match="sum to 1"):
        Score(2.0, {"a": 1.0})

    for wrong in (None, "1"):
        with pytest.raises(TypeError, match="it returned"):
            score_of(wrong)


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5)])
def test_numbers_of_numpy_and_torch_become_plain_ones(number):
    scores = [
        score_of(number),
        score_of(Score(number, success=np.bool_(False))),
        score_of({"a": number}),
        score_of(Score(0.5, {"a": number}, torch.tensor(False))),
    ]
    assert scores == [
        Score(0.5),
        Score(0.5, success=False),
        Score(0.5, {"a": 0.5}),
        Score(0.5, {"a": 0.5}, False),
    ]
    assert all(type(score.value) is float for score in scores)
    assert msgspec.json.decode(msgspec.json.encode(scores), type=list[Score]) == scores


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (1e308, "its value is 1e"),
        (Score(-1e31), "numbers go up to 1e"),
        (Score("0.5"), "its value is '0.5'"),
        (Score(None), "its value is None"),
        (Score(1.0, success="yes"), "its success is 'yes'"),
        (Score(0.5, {1: 0.5}), "has the name 1"),
        ({"a": None}, "'a' is None"),
        ({"a\ud800": 1.0}, "half of a surrogate pair"),
        (10**400, "its value is inf"),
        (1j, "its value is 1j"),
    ],
)
def test_what_is_no_score_is_refused_and_says_why(wrong, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        score_of(wrong)
    assert message in str(caught.value)


@pytest.mark.parametrize("form", [dict, set])
def test_scores_of_a_group_come_in_a_list(own_rewards, form):
    @reward("unordered")
    class Unordered:
        def __init__(self, config):
            pass

        async def score_group(self, trajectories, task):
            return form([(0, 0.1), (1, 0.2)]) if form is dict else {0.1, 0.2}

    for one in scored([RewardConfig(name="unordered")], [said("b", "1"), said("a", "2")], task()):
        assert one.status == "failed" and f"returned a {form.__name__}: return a list" in one.error


def test_what_a_scorer_does_to_an_attempt_changes_nothing(own_rewards):
    @reward("careless")
    def careless(trajectory):
        trajectory.turns[0].messages.clear()
        trajectory.turns[0].completion_ids[0] = 77
        trajectory.turns.clear()
        trajectory.metrics["a"] = 5.0
        return 1.0

    @reward("careless_group")
    class Group:
        def __init__(self, config):
            pass

        async def score_group(self, trajectories, task):
            return [careless(one) for one in trajectories]

    given = said("4", metrics={"a": 1.0})
    for name in ("careless", "careless_group"):
        (after,) = scored([RewardConfig(name=name)], [given], task())
        assert (after.turns, after.metrics) == (said("4").turns, {"a": 1.0})
        assert after.reward == 1.0


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize("error", [Unspeakable(), ValueError("cut \ud800 text")])
def test_whatever_a_scorer_raises_can_be_stored(own_rewards, error):
    @reward("raises")
    def raises(completion):
        raise error

    (failed,) = scored([RewardConfig(name="raises")], [said("4")], task())
    assert failed.status == "failed" and type(error).__name__ in failed.error
    failed.error.encode()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("error", [SystemExit("oops"), KeyboardInterrupt()])
def test_a_reward_that_ends_the_process_is_called_a_reward(own_rewards, error, is_async):
    def raises(completion):
        raise error

    async def raises_later(completion):
        raise error

    reward("raises")(raises_later if is_async else raises)
    (failed,) = scored([RewardConfig(name="raises")], [said("4")], task())
    assert failed.error.startswith("the reward 'raises' failed: ")
    assert failed.error.endswith("a reward can't end the process that it runs in")


def test_a_weighted_sum_that_is_too_large_fails_its_attempt(own_rewards):
    @reward("large")
    def large(completion):
        return 1e12

    (failed,) = scored([RewardConfig(name="large", weight=10.0)], [said("4")], task())
    assert failed.status == "failed" and "the weighted sum of its rewards is 1e+13" in failed.error


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["numerik"], "rewards[0].name: got 'numerik'; did you mean numeric?"),
        ([{"weight": 2}], "rewards[0].name: missing; choose one of "),
        ([{"name": "numeric", "tolerence": 1}], "rewards[0].tolerence: unknown key; did you mean"),
        ([{"name": "format"}], "rewards[0].pattern: missing; A regular expression"),
        ([{"name": "format", "pattern": "("}], "it is not a regular expression"),
        (["numeric", "numeric"], "rewards: numeric is listed twice"),
        ([3], "rewards[0]: got 3; needs a name, or a mapping with a name"),
    ],
)
def test_wrong_rewards_are_refused_before_anything_is_created(given, expected):
    with pytest.raises(ConfigError) as caught:
        build_config({"environment": {"type": "coins"}, "rewards": given})
    assert expected in str(caught.value)


def test_rewards_of_a_recipe_keep_their_options():
    config = build_config(
        {"environment": {"type": "coins"}},
        ["rewards=[exact_match, {name: format, pattern: 'a+', weight: 0.5}]"],
    )
    assert [one.name for one in config.rewards] == ["exact_match", "format"]
    assert build_config(config.model_dump(mode="json")) == config


def test_tasks_without_anybody_to_judge_them_are_refused():
    with pytest.raises(ConfigError, match="nothing judges the task 't'"):
        Scoring([]).check([task()], needed=True)
    Scoring([]).check([task(scorer="numeric")], needed=True)
    with pytest.raises(ConfigError, match="tasks: 't': scorer: no reward is called 'nemeric'"):
        Scoring([]).check([task(scorer="nemeric")], needed=False)
    with pytest.raises(ConfigError, match=r"'t': scorer: format needs options \(pattern\)"):
        Scoring([]).check([task(scorer="format")], needed=False)


def test_a_refusal_of_a_class_of_rewards_stands_alone():
    config = reward_config("reward_model")(name="reward_model", model="./none/such")
    with pytest.raises(ConfigError, match=r"^reward_model\.model: \./none/such does not exist"):
        make_reward(config)
