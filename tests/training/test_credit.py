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
from agentevo.runs.folder import read_store
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


def of_turns(credit, **hyper):
    """Attempt -> the advantage of each of its turns, the same at both of its tokens."""
    rows = [row for one in GROUP for row in trajectory_rows(one)]
    advantage = bind_advantage("credit", {"scale_by_std": False, **hyper})
    samples = advantages_of(rows, advantage, credit=credit)
    assert all(
        (s.advantages[s.loss_mask][::2] == s.advantages[s.loss_mask][1::2]).all() for s in samples
    )
    return [s.advantages[s.loss_mask][::2].tolist() for s in samples]


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


@pytest.mark.parametrize(
    ("credit", "said"),
    [
        (lambda group: [[1.0, 1.0]], "1 lists for 3 attempts"),
        (lambda group: [[1.0]] * 3, "g#0 has 2 turns, and got 1 numbers"),
        (lambda group: [["a", "b"], [1.0] * 3, [1.0]], "the credit of a turn of g#0"),
        (lambda group: [[float("nan")] * len(one.turns) for one in group], "the credit of a turn"),
        (lambda group: None, "TypeError"),
        (lambda group: exit(3), "a credit function can't end the process"),
        (raises, "raises of the group g: KeyError: 'colour'"),
    ],
)
def test_what_a_function_does_wrong_ends_the_step_with_the_reason(credit, said):
    with pytest.raises(TrainingError, match=said) as raised:
        of_turns(credit)
    assert "the weights were not changed" in str(raised.value)


@pytest.mark.parametrize(
    ("credit", "said"),
    [
        (lambda group: threading.Event().wait(), "did not return within 0.2 s"),
        (raises, "colour"),
    ],
)
def test_a_function_that_hangs_ends_the_step_and_one_that_raises_shows_where(
    credit, said, monkeypatch, capsys
):
    monkeypatch.setattr(module, "LONGEST_S", 0.2 if "within" in said else 300.0)
    with pytest.raises(TrainingError, match=said):
        of_turns(credit)
    assert ("in raises" in capsys.readouterr().err) == (credit is raises), "its traceback"


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

    rows = [row for one in attempts for row in trajectory_rows(one)]
    advantages_of(rows, bind_advantage("credit", {}), credit=spoils)
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
