"""Environments of verifiers before 0.4, played by themselves. Runs where that is installed: in the
environment that tests/examples/test_worlds.py makes."""

from __future__ import annotations

import asyncio
import signal
import sys
import time

import pytest
from gateway_play import call, play_through_gateway

from agentevo.config import AgentSection, build_config
from agentevo.errors import ConfigError, EnvironmentFailure
from agentevo.rollout.task_source import TaskSource
from agentevo.runtime import loop_thread

pytest.importorskip("verifiers.envs", reason="verifiers before 0.4 is not in this environment")

import verifiers as vf
from datasets import Dataset

from agentevo.integrations.verifiers import VerifiersAgent, VerifiersSection, world

ROWS = [{"question": f"Say {n}.", "answer": str(n)} for n in range(4)]


def right(completion, answer) -> float:
    return float(completion[-1]["content"] == answer)


def length(completion) -> float:
    return float(len(completion[-1]["content"]))


class Guesses(vf.MultiTurnEnv):
    """Says `no` until the answer is right."""

    async def env_response(self, messages, state, **kwargs):
        if messages[-1]["content"] == state["answer"]:
            state["final_env_response"] = []
            return []

        if messages[-1]["content"] == "break":
            raise ValueError("the board is gone")
        if messages[-1]["content"] == "hang":
            time.sleep(600)  # noqa: ASYNC251 (what a bad environment does)
        return [{"role": "user", "content": "no"}]


def made(kind=vf.SingleTurnEnv, funcs=(right, length), weights=(1.0, 0.0), **options):
    rubric = vf.Rubric(funcs=list(funcs), weights=list(weights))
    return kind(dataset=Dataset.from_list(ROWS), rubric=rubric, **options)


def player_of(environment, name="played"):
    return world(environment, name=name)(AgentSection(type=name))


@pytest.fixture
def attempt(scripted_engine):
    def played(environment, says, *, number=1, name=None, **options):
        player = player_of(environment, name or f"world{id(environment)}")
        train, _ = player.tasks()
        return play_through_gateway(scripted_engine, player, train[number], says, **options)

    return played


def test_the_rubric_rewards_and_each_of_its_functions_is_a_metric(attempt):
    environment = made(system_prompt="Be brief.")
    outcome, conversation = attempt(environment, ["1"])
    assert (outcome.reward, outcome.success) == (1.0, True)
    assert outcome.metrics.items() >= {"right": 1.0, "length": 1.0, "num_turns": 1.0}.items()

    roles = [message.role for message in conversation.turns[0].messages]
    assert roles == ["system", "user", "assistant"]
    outcome, _ = attempt(environment, ["seven"])
    assert (outcome.reward, outcome.success, outcome.metrics["length"]) == (0.0, False, 5.0)


def test_turns_of_the_environment_extend_the_recorded_tokens(attempt):
    outcome, conversation = attempt(made(Guesses, max_turns=5), ["3", "2", "1"])
    assert outcome.reward == 1.0
    assert [turn.parent for turn in conversation.turns] == [None, 0, 1]
    outcome, conversation = attempt(made(Guesses, max_turns=2), ["3", "2", "1"])
    assert outcome.reward == 0.0 and len(conversation.turns) == 2


def test_tools_are_called_and_their_results_answered(attempt):
    def add(a: int, b: int) -> str:
        """Adds."""
        return str(a + b)

    environment = made(vf.ToolEnv, tools=[add], max_turns=4)
    outcome, conversation = attempt(environment, [call("add", '{"a": 0, "b": 1}'), "1"])
    assert outcome.reward == 1.0 and outcome.metrics["total_tool_calls"] == 1.0
    assert [turn.parent for turn in conversation.turns] == [None, 0]
    assert conversation.turns[1].messages[0].text == "1"


def test_hidden_arguments_of_a_stateful_tool(attempt):
    class Vault(vf.StatefulToolEnv):
        def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
            return {**tool_args, "secret": state["answer"]}

    def peek(secret: str) -> str:
        """Says the number."""
        return f"It is {secret}."

    environment = made(Vault, max_turns=4)
    environment.add_tool(peek, args_to_skip=["secret"])
    outcome, conversation = attempt(environment, [call("peek", "{}"), "2"], number=2)
    assert outcome.reward == 1.0
    assert conversation.turns[1].messages[0].text == "It is 2."


@pytest.mark.parametrize("is_async", [False, True])
def test_a_rubric_that_raises_fails_the_attempt_and_never_counts_as_0(attempt, is_async):
    def broken(completion, answer) -> float:
        raise ValueError("no judge today")

    async def broken_too(completion, answer) -> float:
        raise ValueError("no judge today")

    funcs = (right, broken_too if is_async else broken)
    with pytest.raises(ValueError, match="no judge today"):
        attempt(made(funcs=funcs), ["1"])

    assert attempt(made(), ["1"])[0].reward == 1.0


def test_an_environment_that_raises_fails_the_attempt_with_its_words(attempt):
    with pytest.raises(ValueError, match="the board is gone"):
        attempt(made(Guesses), ["3", "break"])

    class Refuses(Guesses):
        async def setup_state(self, state):
            raise vf.InfraError("no sandbox left")

    with pytest.raises(EnvironmentFailure, match="no sandbox left"):
        attempt(made(Refuses), [])


def test_a_reward_that_is_no_number_fails_the_attempt(attempt):
    with pytest.raises(ValueError, match=r"reward of .* is nan"):
        attempt(made(funcs=(lambda completion: float("nan"),), weights=(1.0,)), ["1"])


def test_an_answer_without_a_word_is_the_policys_doing(attempt):
    outcome, _ = attempt(made(), [""])
    assert outcome.reward == 0.0 and not outcome.success


def test_a_tool_that_blocks_costs_its_attempt_and_the_next_one_has_a_loop(attempt, monkeypatch):
    monkeypatch.setattr(loop_thread, "RESPONSE_TIMEOUT_S", 1.0)
    environment = made(Guesses)
    with pytest.raises(TimeoutError):
        attempt(environment, ["hang"], name="hangs", within_s=3)
    assert attempt(environment, ["1"], name="hangs2")[0].reward == 1.0


def test_its_datasets_are_the_tasks():
    environment = made(eval_dataset=Dataset.from_list(ROWS[:2]))
    train, held_out = player_of(environment, "both").tasks()
    assert [task.id for task in train] == [f"train-{n}" for n in range(4)]
    assert [(task.id, task.query, task.answer) for task in held_out] == [
        ("eval-0", "Say 0.", "0"),
        ("eval-1", "Say 1.", "1"),
    ]

    config = build_config({"agent": {"type": "both"}, "model": {"name": "tiny"}})
    source = TaskSource(config, None)
    assert source.held_out() == held_out and source.given() == [*train, *held_out]

    only_eval = vf.SingleTurnEnv(eval_dataset=Dataset.from_list(ROWS), rubric=vf.Rubric([right]))
    with pytest.raises(ConfigError, match="nothing to train on"):
        player_of(only_eval, "only_eval").tasks()


def test_a_rubric_of_groups_is_refused():
    def best(completions) -> list[float]:
        return [0.0 for _ in completions]

    with pytest.raises(ConfigError, match="scores a whole group at once"):
        world(made(funcs=(best,), weights=(1.0,)))


MODULE = """
import verifiers as vf
from datasets import Dataset
def load_environment(num=3):
    rows = [{"question": str(n), "answer": str(n)} for n in range(num)]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric([lambda: 1.0]))
"""


def test_it_is_loaded_by_its_name_and_the_runs_signal_handlers_stay(tmp_path, monkeypatch):
    (tmp_path / "my_named_env.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    section = VerifiersSection(id="me/my-named-env", args={"num": 5})
    assert len(VerifiersAgent(section).tasks()[0]) == 5
    assert signal.getsignal(signal.SIGTERM) is before

    with pytest.raises(ConfigError, match=r"unexpected keyword.*nom"):
        VerifiersAgent(VerifiersSection(id="my-named-env", args={"nom": 5}))

    (tmp_path / "my_taskset.py").write_text("")
    with pytest.raises(ConfigError, match=r"has no `load_environment`.*verifiers>=0.4"):
        VerifiersAgent(VerifiersSection(id="my-taskset"))
    with pytest.raises(ConfigError, match="no environment 'my-missing-env' is installed"):
        VerifiersAgent(VerifiersSection(id="my-missing-env"))

    assert "my_missing_env" not in sys.modules


def test_what_is_no_environment_is_refused():
    with pytest.raises(ConfigError, match="is no environment of verifiers"):
        world(object())
    with pytest.raises(ConfigError, match="made already"):
        world(made(), num=3)


def test_attempts_share_one_loop():
    async def loop_of_two(own):
        async def which():
            return asyncio.get_running_loop()

        first = await own.run(which)
        second = await own.run(which)
        return first is second and first is not asyncio.get_running_loop()

    assert asyncio.run(loop_of_two(loop_thread.DedicatedLoop("two")))
