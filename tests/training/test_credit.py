"""Credit by a function of the user's: from what it returns to advantages, and into the records."""

from __future__ import annotations

import threading

import msgspec
import pytest

import agentevo
from agentevo.algorithms.estimators import bind_advantage
from agentevo.cli.main import main
from agentevo.config import build_config
from agentevo.config.algorithm_functions import CREDITS
from agentevo.errors import ConfigError, TrainingError
from agentevo.runs.folder.run_folder import read_store
from agentevo.training.batching import credit as module
from agentevo.training.batching.samples import advantages_of, trajectory_rows
from agentevo.types import Trajectory, Turn


def attempt(number, turns, reward):
    return Trajectory(
        id=f"g#{number}",
        task_id="t",
        group_id="g",
        attempt=number,
        reward=reward,
        turns=[
            Turn(
                index=index,
                parent=index - 1 if index else None,
                prompt_ids=[1],
                completion_ids=[2, 3],
                logprobs=[-1.0, -1.0],
                versions=[0, 0],
                finish_reason="stop",
            )
            for index in range(turns)
        ],
    )


GROUP = [attempt(0, 2, 1.0), attempt(1, 3, 0.0), attempt(2, 1, 4.0)]


def asker(credit):
    name = f"test_{id(credit)}"
    CREDITS.registry.register(name)(credit)
    return module.CreditAsker(name)


def of_turns(credit, **hyper):
    """Attempt -> the advantage of each of its turns, the same at both of its tokens."""
    rows = [row for one in GROUP for row in trajectory_rows(one)]
    advantage = bind_advantage("credit", {"scale_by_std": False, **hyper})
    of_groups = asker(credit).ask(GROUP).of_turns
    samples = advantages_of(rows, advantage, turn_credits=of_groups)
    assert all((s.advantages[::2] == s.advantages[1::2]).all() for s in samples)
    return [s.advantages[::2].tolist() for s in samples]


def by_place(group):
    for one in group:
        one.turns.clear()  # copies: nothing of it is seen elsewhere
    return [[1.0, 2.0], [3.0, 4.0, 8.0], [5.0]]


def test_turns_are_compared_as_the_recipe_says():
    assert of_turns(by_place, turn_baseline="none") == [[1.0, 2.0], [3.0, 4.0, 8.0], [5.0]]
    assert of_turns(by_place, turn_baseline="place") == [[-2.0, -1.0], [0.0, 1.0, 0.0], [2.0]]
    mean = 23 / 6
    assert of_turns(by_place) == [
        pytest.approx([1 - mean, 2 - mean]),
        pytest.approx([3 - mean, 4 - mean, 8 - mean]),
        pytest.approx([5 - mean]),
    ]


def raises(group):
    raise KeyError("colour")


goes_on = threading.Event()


def hangs(group):
    goes_on.wait()


class Base(BaseException):
    pass


def overreaches(group):
    raise Base("out")


@pytest.mark.parametrize(
    ("credit", "said"),
    [
        (lambda group: [[1.0, 1.0]], "1 lists for 3 attempts"),
        (lambda group: [[1.0]] * 3, "g#0 has 2 turns, and got 1 numbers"),
        (lambda group: [["a", "b"], [1.0] * 3, [1.0]], "the credit of a turn of g#0"),
        (lambda group: [[float("nan")] * len(one.turns) for one in group], "the credit of a turn"),
        (lambda group: None, "TypeError"),
        (lambda group: exit(0), "SystemExit(0): a credit function can't end the process"),
        (overreaches, "Base: out: a credit function can't end the process"),
        (hangs, "did not return within 0.2 s"),
        (raises, "failed for the group g: KeyError: 'colour'"),
    ],
)
def test_a_group_in_which_a_function_fails_is_left_out_with_the_reason(credit, said, monkeypatch):
    monkeypatch.setattr(module, "TIME_LIMIT_S", 0.2 if credit is hangs else 300.0)

    def fails_in_g(group):
        if group[0].group_id == "g":
            return credit(group)
        return [[1.0] * len(one.turns) for one in group]

    other = [msgspec.structs.replace(one, id=f"h{one.id}", group_id="h") for one in GROUP]
    if credit is hangs:
        other = []  # which may take longer than 0.2 s on a busy machine
    asked = asker(fails_in_g)
    credited = asked.ask([*GROUP, *other])

    assert credited.dropped == dict.fromkeys((one.id for one in GROUP), module.CREDIT_FAILED)
    assert credited.of_turns == {one.id: [1.0] * len(one.turns) for one in other}
    (warning,) = credited.warnings
    assert said in warning
    assert ("in raises" in warning) == (credit is raises), "its traceback"
    assert asked.ask(GROUP).warnings == [], "a kind of failure is told of once"
    if credit is hangs:
        goes_on.set()


def test_three_failures_in_a_row_end_the_run_and_others_do_not():
    def by_name(group):
        return raises(group) if group[0].group_id == "bad" else [[1.0] for one in group]

    bad, good = (
        msgspec.structs.replace(attempt(0, 1, 1.0), id=name, group_id=name)
        for name in ("bad", "good")
    )
    asked = asker(by_name)
    for _ in range(3):
        asked.ask([bad])
        asked.ask([bad])
        asked.ask([good])

    asked.ask([bad])
    asked.ask([bad])
    with pytest.raises(TrainingError) as raised:
        asked.ask([bad])

    said = str(raised.value)
    assert "3 groups in a row" in said and "the weights were not changed" in said
    assert "--resume" in said and "in raises" in said, "with its traceback"


def test_what_a_function_does_to_its_copies_is_seen_nowhere():
    attempts = [
        msgspec.structs.replace(
            one,
            reward_parts={"a": 1.0},
            metrics={"n": 1.0},
            files={"f": b"1"},
            texts={"system": "x"},
        )
        for one in GROUP
    ]
    before = repr(attempts)

    def spoils(group):
        for one in group:
            for held in (one.reward_parts, one.metrics, one.files, one.texts):
                held["n"] = float("nan")
            for turn in one.turns:
                turn.messages.append(None)
                turn.logprobs[0] = 5.0
            one.turns.pop()
        return [[0.0] * len(one.turns) for one in attempts]

    assert not asker(spoils).ask(attempts).dropped
    assert repr(attempts) == before


def test_a_rule_that_can_not_be_is_refused():
    for algorithm, said in (
        ({"credit": "late", "advantage": "rloo"}, "leave one of them out"),
        ({"advantage": "credit"}, "name it with algorithm.credit"),
        ({"name": "dpo", "credit": "late"}, "credit"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_config({"environment": {"type": "coins"}, "algorithm": algorithm})


def test_an_unknown_function_and_one_without_a_name_are_refused_with_what_to_do():
    with pytest.raises(ConfigError) as refused:
        agentevo.train("coins", algorithm={"credit": "nobody-has"})

    said = str(refused.value)
    assert said.startswith("algorithm.credit: no credit is called 'nobody-has': known credits: ")
    assert "`@agentevo.credit('nobody-has')`" in said and "key import" in said

    def mine(group):
        return [[0.0] * len(one.turns) for one in group]

    with pytest.raises(ConfigError) as refused:
        agentevo.train("coins", algorithm={"credit": mine})

    assert "algorithm.credit: <function" in str(refused.value)
    assert "put `@agentevo.credit(NAME)` above it, and give that name here" in str(refused.value)


@pytest.mark.slow
def test_the_rule_in_force_is_in_the_log_the_record_and_what_is_shown(tmp_path, capsys):
    @agentevo.credit("last_turn_of_test")
    def last_turn(group):
        return [[0.0] * (len(one.turns) - 1) + [one.reward] for one in group]

    async def twice(task, policy):
        asked = [{"role": "user", "content": task.query}]
        first = await policy.generate(asked)
        second = await policy.generate([*asked, first.message, *asked])
        return sum(map(ord, second.text)) % 7 / 7

    assert CREDITS.find("last_turn_of_test") is last_turn

    run = agentevo.train(
        twice,
        [{"id": str(n), "query": str(n)} for n in range(4)],
        algorithm={"credit": "last_turn_of_test", "turn_baseline": "none"},
        model={"name": "tiny", "tiny": {"tokenizer": "byte", "hidden_size": 32, "num_layers": 1}},
        sampling={"max_new_tokens": 2},
        trainer={"steps": 1, "groups_per_step": 1, "group_size": 2},
        evaluation={"tasks": 1, "samples": 0},
        tracking={"report": False, "tensorboard": False},
        run={"dir": str(tmp_path / "run")},
    )
    rule = "credit by last_turn_of_test (scale_by_std=True, epsilon=1e-06, turn_baseline=none)"
    assert f"credit: {rule}" in capsys.readouterr().out

    (record,) = read_store(run.dir, lambda store: store.steps())
    assert record.record["plan"]["credit"] == rule

    trained = run.trajectories(trained_step=1)[0]
    assert main(["trajectories", "show", str(run.dir), trained.id]) in (0, None)

    shown = " ".join(capsys.readouterr().out.split())
    assert f"trained in step 1, credit: {rule}" in shown


@pytest.mark.slow
def test_a_run_goes_on_without_the_groups_that_fail_stops_after_three_and_is_resumed(
    tmp_path, capsys
):
    behaviour = {"fails_from": 2}

    @agentevo.credit("fails_at_times_of_test")
    def at_times(group):
        step = int(group[0].id.partition("@")[2].partition("#")[0])
        if (step == 1 and group[0].task_id == group_of_step_1[0]) or (
            step >= behaviour["fails_from"]
        ):
            raise KeyError("colour")
        return [[one.reward] for one in group]

    group_of_step_1 = []

    async def once(task, policy):
        if not group_of_step_1 and policy.conversation.name.partition("/train@")[2]:
            group_of_step_1.append(task.id)
        reply = await policy.generate([{"role": "user", "content": task.query}])
        return sum(map(ord, reply.text)) % 7 / 7

    def train(**more):
        return agentevo.train(
            once,
            [{"id": str(n), "query": str(n)} for n in range(9)],
            algorithm={"credit": "fails_at_times_of_test", "drop_zero_variance": False},
            model={
                "name": "tiny",
                "tiny": {"tokenizer": "byte", "hidden_size": 32, "num_layers": 1},
            },
            sampling={"max_new_tokens": 2},
            trainer={"steps": 3, "groups_per_step": 3, "group_size": 2},
            evaluation={"tasks": 1, "samples": 0},
            tracking={"report": False, "tensorboard": False},
            run={"dir": str(tmp_path / "run")},
            **more,
        )

    with pytest.raises(TrainingError, match="3 groups in a row"):
        train()
    assert "in at_times" in capsys.readouterr().out

    (record,) = read_store(tmp_path / "run", lambda store: store.steps())
    plan = record.record["plan"]
    assert len(plan["ids"]) == 4 and len(plan["dropped"][module.CREDIT_FAILED]) == 2
    (warning,) = record.record["progress"]["warnings"]
    assert "KeyError: 'colour'" in warning and "in at_times" in warning

    behaviour["fails_from"] = 9
    run = train(resume=True)
    assert run.summary["steps"] == 3
    assert run.audit().ok
