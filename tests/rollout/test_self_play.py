"""What proposals earn, against values by hand; what is proposed, read and refused."""

from __future__ import annotations

import asyncio
import json
import sys
import threading

import pytest

import agentevo
from agentevo.config import build_config, sources
from agentevo.config.self_play import SelfPlay
from agentevo.data.question_overlap import question_key
from agentevo.errors import ConfigError, StoreError
from agentevo.rollout.self_play import (
    QUESTION,
    ProposalTasks,
    SelfPlayAgent,
    encode_question,
    learnability,
    make_family,
    read_proposals,
    reward_proposals,
)
from agentevo.types import Task, Trajectory


@agentevo.question_family("test_words")
class Words:
    """Its questions are words; `limit` letters are the most."""

    def __init__(self, limit=9):
        self.limit = limit

    def prompt(self, rng):
        return f"A word, {rng.randrange(10**6)}"

    def read(self, text, prompt):
        if not text.isalpha() or len(text) > self.limit:
            raise ValueError(f"{text!r} is no word")
        if text == "zero":
            raise ZeroDivisionError("a defect of the family")
        return agentevo.Question(text, text.upper(), difficulty=len(text))


SECTION = SelfPlay(family="test_words")


def proposal(number, text, group=0, status="completed", **fields):
    """A proposer's attempt that says `text`; None says nothing that is a question."""
    name = f"propose-1-{group}/train@1:proposer"
    row = (
        {"invalid": "no word"}
        if text is None
        else json.loads(encode_question(agentevo.Question(text, "x", **fields)))
    )
    files = {QUESTION: json.dumps(row).encode()} if status == "completed" else {}

    return Trajectory(
        id=f"{name}#{number}",
        task_id=f"propose-1-{group}",
        group_id=name,
        attempt=number,
        turns=[],
        reward=0.0,
        status=status,
        files=files,
    )


def attempts(task, solved, count, failed=0):
    """The solver's: `solved` of `count` succeed, and some fail besides."""
    group = f"{task}/train@1:solver"
    return [
        Trajectory(
            id=f"{group}#{number}",
            task_id=task,
            group_id=group,
            attempt=number,
            turns=[],
            reward=float(number < solved),
            success=number < solved,
            status="failed" if number >= count else "completed",
        )
        for number in range(count + failed)
    ]


def earned(said, solved, section=SECTION, held_out=()):
    """What proposals of one group earn. solved: text -> (successes, attempts)."""
    given = [proposal(number, text) for number, text in enumerate(said)]
    found = read_proposals(given, 1, map(question_key, held_out))
    tried = [attempt for task in found.tasks for attempt in attempts(task.id, *solved[task.query])]
    return reward_proposals(found, tried, section)


def rewards(paid):
    return [pytest.approx(trajectory.reward) for trajectory in paid.trajectories]


def test_a_question_is_worth_most_where_half_of_the_attempts_solve_it():
    shares = [0, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 1]
    assert [learnability(p, "r_zero") for p in shares] == [0, 0.25, 0.5, 1, 0.5, 0.25, 0]
    assert [learnability(p, "absolute_zero") for p in shares] == [
        0,
        7 / 8,
        3 / 4,
        1 / 2,
        1 / 4,
        1 / 8,
        0,
    ]


def test_rewards_of_a_group_by_hand():
    solved = {"half": (4, 8), "easy": (8, 8), "hard": (1, 8)}
    paid = earned(["half", "easy", "hard", None], solved)
    # 1 - 1/4, max(0, 0 - 1/4), 0.25 - 1/4, and what an invalid one gets
    assert rewards(paid) == [0.75, 0.0, 0.0, -1.0]
    assert [trajectory.success for trajectory in paid.trajectories] == [True, False, True, False]

    none = SelfPlay(family="test_words", repetition=0, invalid=-0.5, reward="absolute_zero")
    assert rewards(earned(["half", "easy", "hard", None], solved, none)) == [0.5, 0.0, 0.875, -0.5]

    for one in paid.trajectories:
        assert sum(one.reward_parts.values()) == pytest.approx(one.reward)


def test_attempts_at_different_questions_are_not_mixed():
    # in the middle the two are at 1/2, and each by itself is worth nothing
    paid = earned(["always", "never"], {"always": (8, 8), "never": (0, 8)})
    assert rewards(paid) == [0.0, 0.0]
    assert paid.metrics["selfplay/success_rate"] == 0.5
    assert paid.metrics["selfplay/at_edge"] == 0


def test_a_repeated_question_is_solved_once_and_pays_less():
    given = [proposal(n, text) for n, text in enumerate(["one", "ONE ", " one", "two"])]
    given += [proposal(0, "one", group=1), proposal(1, "three", group=1)]
    found = read_proposals(given, 1, ())
    assert [task.query for task in found.tasks] == ["one", "two", "three"]
    assert found.tasks[0].metadata["proposed_by"] == [
        *(f"propose-1-0/train@1:proposer#{n}" for n in range(3)),
        "propose-1-1/train@1:proposer#0",
    ]

    tried = [attempt for task in found.tasks for attempt in attempts(task.id, 2, 4)]
    paid = reward_proposals(found, tried, SECTION)
    # 1 - 3/4 thrice, 1 - 1/4; in the other group nobody repeats: 1 - 1/2
    assert rewards(paid) == [0.25, 0.25, 0.25, 0.75, 0.5, 0.5]
    assert paid.metrics["selfplay/distinct"] == 4 / 6

    row = json.loads(paid.trajectories[1].files[QUESTION])
    assert row["task"] == found.tasks[0].id
    assert (row["attempts"], row["solved"], row["repeats"]) == (4, 2, 3)


def test_a_family_says_what_repeats_what():
    given = [proposal(n, text, cluster=text[0]) for n, text in enumerate(["aa", "ab", "b"])]
    found = read_proposals(given, 1, ())
    assert len(found.tasks) == 3
    paid = reward_proposals(
        found, [attempt for task in found.tasks for attempt in attempts(task.id, 1, 2)], SECTION
    )
    assert rewards(paid) == [1 - 2 / 3, 1 - 2 / 3, 1 - 1 / 3]


def test_what_is_held_out_is_not_solved_not_paid_and_not_trained_on():
    paid = earned(["secret", " SECRET", "other"], {"other": (1, 2)}, held_out=["Secret"])
    first, second, other = paid.trajectories
    assert paid.dropped == {first.id: "held-out", second.id: "held-out"}
    assert first.reward == second.reward == 0 and first.reward_parts == {}
    assert json.loads(first.files[QUESTION])["held_out"] is True
    assert other.reward == pytest.approx(1 - 1 / 3)
    assert paid.metrics["selfplay/held_out"] == 2 and paid.metrics["selfplay/questions"] == 1


def test_failed_attempts_say_nothing_of_a_question():
    paid = earned(["some", "none"], {"some": (1, 2, 6), "none": (0, 0, 8)})
    assert rewards(paid) == [0.5, 0.0]
    assert paid.dropped == {paid.trajectories[1].id: "untried"}

    given = [proposal(0, "a"), proposal(1, None, status="failed")]
    found = read_proposals(given, 1, ())
    paid = reward_proposals(found, attempts(found.tasks[0].id, 1, 2), SECTION)
    assert paid.trajectories[1] is given[1]
    assert paid.trajectories[0].reward == 0  # alone among the completed ones: 1 - 1/1
    assert paid.metrics["selfplay/proposed"] == 1


def test_paid_again_is_paid_the_same():
    solved = {"one": (1, 4), "two": (4, 4)}
    once = earned(["one", "two", None, "one"], solved)
    found = read_proposals(once.trajectories, 1, ())
    again = reward_proposals(
        found, [o for t in found.tasks for o in attempts(t.id, *solved[t.query])], SECTION
    )
    assert again == once


def test_a_damaged_question_is_refused():
    broken = proposal(0, "a")
    broken.files[QUESTION] = b'{"query": "a"}'
    with pytest.raises(StoreError, match=r"question\.json is missing or damaged"):
        read_proposals([broken], 1, ())


def test_prompts_follow_from_seed_step_and_place():
    def made(seed):
        return ProposalTasks(
            SelfPlay(family="test_words", group_size=4), Words(), seed, 8, timeout_s=300.0
        )

    first = made(0).of_step(1)
    assert len(first) == 2 and first[0].query != first[1].query
    assert made(0).of_step(1) == first
    assert made(1).of_step(1)[0].query != first[0].query != made(0).of_step(2)[0].query


class Said:
    """A policy that says one thing."""

    def __init__(self, text):
        self.answer = text
        self.files = {}

    async def generate(self, messages):
        self.asked = [message.text for message in messages]
        return self

    def keep_files(self, files):
        self.files = files


class Nobody:
    needs_scorer = needs_session = False


def proposals(family, timeout_s=300.0):
    return ProposalTasks(SECTION, family, 0, 4, timeout_s=timeout_s)


def read(text, family=None):
    (task,) = proposals(Words()).of_step(1)
    policy = Said(text)
    asyncio.run(SelfPlayAgent(Nobody(), family or Words()).run(task, policy))
    return json.loads(policy.files[QUESTION])


def test_a_reply_is_read_while_it_is_played():
    assert read("word")["answer"] == "WORD"
    assert read("not a word") == {"invalid": "'not a word' is no word"}

    class Strict(Words):
        def read(self, text, prompt):
            raise ValueError(text)

    assert read("half: \ud800", Strict()) == {"invalid": "half: ?"}
    with pytest.raises(ZeroDivisionError):  # a defect costs the attempt
        read("zero")


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        ("a text", "return an agentevo.Question"),
        (agentevo.Question(""), "empty"),
        (agentevo.Question("a", answer={1, 2}), "JSON"),
        (agentevo.Question("a", answer=float("nan")), "JSON"),
        (agentevo.Question("a", difficulty=float("inf")), "finite"),
        (agentevo.Question("a", metadata={"id": "b"}), "has the key id"),
        (agentevo.Question("a", metadata={"proposes_for_step": 1}), "reserved"),
        (agentevo.Question("a" * (1 << 20)), "the limit is"),
        (agentevo.Question("a", cluster="\ud800"), "surrogate"),
        (agentevo.Question("a", cluster=[1]), "give a text"),
        (agentevo.Question("a", scorer="nobodys"), "no reward is called"),
    ],
)
def test_what_a_family_may_not_return_costs_the_attempt(returned, what):
    class Wrong(Words):
        def read(self, text, prompt):
            return returned

    with pytest.raises(Exception, match=what):
        read("word", Wrong())


def test_a_family_that_cannot_be_made_is_refused():
    with pytest.raises(ConfigError, match=r"tasks\.self_play\.family: no question_family"):
        make_family(SelfPlay(family="nobody"), 300.0)
    with pytest.raises(ConfigError, match="can't be made with the options"):
        make_family(SelfPlay(family="test_words", options={"wrong": 1}), 300.0)
    with pytest.raises(ConfigError, match="has no read"):
        agentevo.question_family("test_half")(type("Half", (), {"prompt": lambda self, rng: "a"}))

    with pytest.raises(ConfigError, match=r"is called as `read\(self, text, prompt\)`"):
        agentevo.question_family("test_short")(
            type("Short", (), {"prompt": lambda self, rng: "a", "read": lambda self, text: text})
        )

    class Silent(Words):
        def prompt(self, rng):
            return ""

    with pytest.raises(ConfigError, match="no valid prompt"):
        proposals(Silent()).of_step(1)


class Overreach(BaseException):
    pass


goes_on = threading.Event()


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (lambda: sys.exit(0), r"SystemExit\(0\): a question family can't end the process"),
        (lambda: raises(Overreach("out")), "Overreach: out: a question family can't end"),
        (lambda: raises(KeyboardInterrupt()), "KeyboardInterrupt: : a question family can't end"),
        (lambda: raises(StopIteration(3)), "RuntimeError: .*StopIteration"),
        (lambda: raises(KeyError("colour")), "KeyError: 'colour'.*(.|\n)*in raises"),
        (lambda: goes_on.wait(), "TimeoutError: it did not return within 0.2 s"),
    ],
)
def test_what_a_family_does_to_its_process_ends_the_run_with_a_reason(does, said):
    limit_s = 0.2 if "within" in said else 300.0

    class Rude(Words):
        def prompt(self, rng):
            return does()

    with pytest.raises(ConfigError, match=said):
        proposals(Rude(), limit_s).of_step(1)

    class Unmade(Words):
        def __init__(self):
            does()

    agentevo.question_family(f"test_rude_{id(does)}")(Unmade)
    with pytest.raises(ConfigError, match="can't be made with the options"):
        make_family(SelfPlay(family=f"test_rude_{id(does)}"), limit_s)
    if "within" in said:
        goes_on.set()


def raises(error):
    raise error


@pytest.fixture
def held_out(tmp_path):
    path = tmp_path / "held_out.jsonl"
    path.write_text('{"query": "a", "answer": "A"}\n')
    return str(path)


def config(held_out, **sections):
    tree = {
        "tasks": {"eval": held_out, "self_play": "test_words"},
        "rewards": ["exact_match"],
        "trainer": {"groups_per_step": 8, "group_size": 4},
    }
    tasks = tree["tasks"] | sections.pop("tasks", {})
    return build_config(tree | sections | {"tasks": tasks})


def test_the_two_roles_share_the_recipes_weights_unless_it_says_otherwise(held_out):
    agents = config(held_out).agents
    assert list(agents) == ["solver", "proposer"]
    assert agents["proposer"].weights_of == "solver"
    own = config(held_out, agents={"solver": {}, "proposer": {"train": False}})
    assert own.agents["proposer"].weights_of is None
    assert config(held_out).agent.type == "single_turn"


def test_overrides_lie_over_the_short_form(held_out):
    tree = {
        "tasks": {"eval": held_out, "self_play": "test_words"},
        "rewards": ["exact_match"],
        "trainer": {"groups_per_step": 8, "group_size": 4},
    }
    options = ["tasks.self_play.group_size=4", "tasks.self_play.options.length=3"]
    for recipe, overrides in (
        (tree, options),
        (
            {**tree, "tasks": {"eval": held_out}},
            ["tasks.self_play=test_words", *options],
        ),
        (
            {
                **tree,
                "run": {"name": "test_words"},
                "tasks": {"eval": held_out, "self_play": "${run.name}"},
            },
            options,
        ),
    ):
        found = build_config(recipe, overrides).tasks.self_play
        assert (found.family, found.group_size, found.options) == ("test_words", 4, {"length": 3})


@pytest.mark.parametrize("name", ["test_half", "${run.name}"])
def test_a_later_short_form_sets_its_one_key(held_out, name):
    tree = {
        "run": {"name": "test_half"},
        "tasks": {"eval": held_out, "self_play": "test_words"},
        "trainer": {"groups_per_step": 8, "group_size": 4},
    }
    options = ["tasks.self_play.group_size=4", "tasks.self_play.options.length=3"]
    found = build_config(tree, [*options, f"tasks.self_play={name}"]).tasks.self_play
    assert (found.family, found.group_size, found.options) == ("test_half", 4, {"length": 3})

    whole = ["copied.self_play.family=test_half", "tasks.self_play=${copied.self_play}"]
    merged = sources.merge(tree, [*options, *whole], where="r", is_text=lambda key: False)
    assert merged["tasks"]["self_play"] == {"family": "test_half"}, "a whole section replaces one"


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"tasks": {"train": ["a.jsonl"]}}, "self_play and train both choose"),
        ({"tasks": {"curriculum": True}}, "self_play and curriculum both choose"),
        ({"tasks": {"eval": []}}, "give eval"),
        ({"tasks": {"self_play": {"family": "test_words", "group_size": 3}}}, "does not divide"),
        ({"rollout": {"staleness": 1}}, r"set rollout\.staleness=0"),
        ({"rollout": {"samplers": 1}}, r"set rollout\.samplers=0"),
        ({"environment": {"type": "coins"}}, "leave out either"),
        ({"agents": {"solver": {}, "critic": {}}}, "the agents solver and proposer"),
        ({"agents": {"proposer": {}, "solver": {}}}, "in this order"),
        ({"agents": {"solver": {"train": False}, "proposer": {}}}, r"agents\.solver"),
        ({"algorithm": {"name": "remax"}}, "not supported in a run with named agents"),
    ],
)
def test_contradictions_are_refused(held_out, sections, what):
    with pytest.raises(ConfigError, match=what):
        config(held_out, **sections)


def test_a_held_out_row_can_not_be_taken_for_a_prompt(tmp_path):
    from agentevo.rollout.task_source import TaskSource

    rows = [{"query": "a", "proposes_for_step": 1}, {"query": "b"}, {"query": "c"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = TaskSource(config(str(path), evaluation={"tasks": 1}), None)
    assert [task.query for task in source.held_out()] == ["b"]
    assert [task.query for task in source.never_trained()] == ["b", "c"]
    assert source.read.reports[0].bad


def test_no_task_of_a_solver_is_the_proposers():
    (task,) = proposals(Words()).of_step(1)
    assert task.metadata == {"proposes_for_step": 1}
    assert Task(id="a").metadata == {}
