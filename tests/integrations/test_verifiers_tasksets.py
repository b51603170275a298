"""Tasksets of verifiers 0.4, played by themselves. Runs where that is installed: in the environment
that tests/examples/test_worlds.py makes."""

from __future__ import annotations

import pytest
from gateway_play import play_through_gateway

from agentevo.errors import ConfigError, EnvironmentFailure

pytest.importorskip("verifiers.v1", reason="verifiers 0.4 is not in this environment")
if pytest.importorskip("verifiers").__version__ < "0.4":
    pytest.skip("these are environments of verifiers 0.4", allow_module_level=True)

from agentevo.integrations.verifiers import VerifiersAgent, VerifiersSection, world

TASKSET = '''
import httpx
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Say(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        if trace.last_reply == "judge":
            raise ValueError("no judge today")
        return float(trace.last_reply == task.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return float("nan") if trace.last_reply == "nan" else float(len(trace.last_reply))

class Config(vf.TasksetConfig):
    num: int = 3

class SayTaskset(vf.Taskset[Say, Config]):
    def load(self):
        for n in range(self.config.num):
            yield Say(Data(prompt=f"Say {n}.", answer=str(n)), self.config.task)

class Quick(vf.Harness[vf.HarnessConfig]):
    """Asks once, in this process."""

    NEEDS_CONTAINER = EXECUTES_CODE = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        async with httpx.AsyncClient() as client:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]},
                timeout=300,
            )
        return vf.ProgramResult(exit_code=int(answer.is_error), stdout="", stderr=answer.text)

__all__ = ["SayTaskset", "Quick"]
'''
ARGS = {"agent": {"runtime": {"type": "subprocess"}}, "taskset": {"num": 5}}


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("taskset")
    (folder / "say_numbers.py").write_text(TASKSET)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(folder)
    yield
    patch.undo()


@pytest.fixture
def attempt(module, scripted_engine):
    player = VerifiersAgent(VerifiersSection(id="say-numbers", args=ARGS))

    def played(says):
        task = player.tasks()[0][1]
        return play_through_gateway(scripted_engine, player, task, [says] * 5)

    return played


def test_the_tasks_reward_is_the_attempts_and_its_metrics_are(attempt):
    outcome, conversation = attempt("1")
    assert (outcome.reward, outcome.success) == (2.0, True)
    assert outcome.reward_parts == {"right": 2.0} and outcome.metrics["length"] == 1.0
    assert len(conversation.turns) == 1
    outcome, _ = attempt("seven")
    assert (outcome.reward, outcome.success, outcome.metrics["length"]) == (0.0, False, 5.0)


def test_what_its_code_raises_fails_the_attempt_with_its_words(attempt):
    with pytest.raises(EnvironmentFailure, match="no judge today"):
        attempt("judge")
    with pytest.raises(ValueError, match=r"length.* is nan"):
        attempt("nan")


def test_attempts_leave_no_client_behind(attempt):
    attempt("1")
    player = VerifiersAgent(VerifiersSection(id="say-numbers", args=ARGS))
    assert [s.clients for s in player._world._environment._interception.servers] == [{}]


def test_its_options_and_tasks(module):
    train, held_out = VerifiersAgent(VerifiersSection(id="say-numbers", args=ARGS)).tasks()
    assert held_out == [] and [(t.id, t.query, t.answer) for t in train[3:]] == [
        ("train-3", "Say 3.", "3"),
        ("train-4", "Say 4.", "4"),
    ]
    with pytest.raises(ConfigError, match="can't be loaded with the options"):
        VerifiersAgent(VerifiersSection(id="say-numbers", args={"taskset": {"nom": 5}}))
    with pytest.raises(ConfigError, match="is no environment of verifiers"):
        world(object())
