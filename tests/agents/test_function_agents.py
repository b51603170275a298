"""Agent functions of any shape: with the policy or without, async or not, and what they return."""

import asyncio
import json
import sys
import threading
import time
import urllib.request
from functools import partial, wraps

import pytest
from fake_gateway import FakeGateway

import agentevo
from agentevo.agents import FunctionAgent, Policy
from agentevo.agents import agent as agent_module
from agentevo.errors import ConfigError
from agentevo.inference.conversations.conversation import Conversation
from agentevo.rollout.group import GroupAttempt
from agentevo.runtime import daemon_threads, event_loop
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Message, Outcome, SamplingParams, Task

ASKED = [Message("user", "Go on.")]


@pytest.fixture
def attempt_of(loaded, chat, scripted_engine):
    """Makes one attempt of an agent function at a task, with the policy's words."""

    def make(function, *, gateway=None, limit_s=300.0, words=("left",) * 9):
        engine = scripted_engine(loaded.tokenizer, chat.end_of_turn_id, list(words))
        conversation = Conversation(
            engine, chat, SamplingParams(), name="a", seed=1, context_length=256, timeout_s=300
        )
        policy = Policy(conversation, gateway)
        return GroupAttempt(
            FunctionAgent(function), Task(id="t", query="?"), policy, name="a", limit_s=limit_s
        )

    return make


@pytest.fixture
def played(attempt_of):
    """What becomes of such an attempt."""

    def play(function, **options):
        async def work():
            attempt = attempt_of(function, **options)
            (trajectory,) = await attempt.run(task_id="t", group_id="g", number=0)
            return trajectory

        return run_coroutine(work())

    return play


class Clock:
    """Passes only where a test says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(event_loop.time, "perf_counter", lambda: self.now)


def test_an_async_agent_that_blocks_the_event_loop_is_named_once(played, monkeypatch, capsys):
    clock = Clock(monkeypatch)

    async def run(task, policy):
        clock.now += 0.3  # time.sleep, or a client that is not async
        await asyncio.sleep(0)
        clock.now += 0.2
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 0)
        except TimeoutError:
            clock.now += 0.8
        return 1.0

    assert played(run).reward == 1.0
    said = capsys.readouterr().err
    assert said.count("has blocked the event loop for 1.1 s") == 1
    assert "test_function_agents.py" in said and "asyncio.to_thread" in said


def test_users_are_not_told_of_agents_that_are_ours(played, monkeypatch, capsys):
    """A busy machine makes their steps long."""
    clock = Clock(monkeypatch)

    async def run(task, policy):
        clock.now += 2.0
        return 1.0

    run.__module__ = "agentevo.agents.tool_agent"
    assert played(run).reward == 1.0
    assert "blocked" not in capsys.readouterr().err


def test_an_async_agent_that_waits_is_not_named_and_may_be_cancelled(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    ended = []

    async def work(answer):
        try:
            clock.now += 0.2
            return await answer
        finally:
            ended.append(asyncio.current_task().cancelling())

    async def both():
        notices = event_loop.NoticesBlocks("it", "so")
        answer = asyncio.get_running_loop().create_future()
        first = asyncio.ensure_future(notices.run(work(answer)))
        second = asyncio.ensure_future(notices.run(work(asyncio.Event().wait())))
        await asyncio.sleep(0)
        clock.now += 100
        second.cancel()
        answer.set_result("fine")
        return await asyncio.gather(first, second, return_exceptions=True)

    fine, cancelled = asyncio.run(both())
    assert fine == "fine" and isinstance(cancelled, asyncio.CancelledError)
    assert sorted(ended) == [0, 1] and not capsys.readouterr().err


def test_a_function_that_is_not_async_asks_the_policy_and_waits(played):
    ran_in = []

    def run(task, policy):
        ran_in.append(threading.current_thread())
        first = policy.generate(ASKED)
        with policy.call("tool", "think"):
            pass
        second, third = policy.generate([*ASKED, first.message, *ASKED], n=2)
        assert (policy.name, len(policy.turns)) == ("a", 3)
        return float(first.text == second.text == third.text == "left")

    trajectory = played(run)
    assert (trajectory.status, trajectory.error, trajectory.reward) == ("completed", None, 1.0)
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 0]
    assert ran_in[0] is not threading.main_thread() and ran_in[0].daemon


def test_a_function_may_run_a_loop_of_its_own_or_return_what_is_to_be_awaited(played):
    async def inner(task, policy):
        reply = await policy.generate(ASKED)
        return float(reply.text == "left")

    @wraps(inner)
    def decorated(*args):
        return inner(*args)

    for function in (lambda task, policy: asyncio.run(inner(task, policy)), decorated):
        trajectory = played(function)
        assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, 1.0, 1)


@pytest.mark.parametrize(
    ("returned", "reward", "turn_rewards"),
    [
        ([0.5, 0.75], 1.25, [0.5, 0.75]),
        ({0: 0.25, 1: -1}, -0.75, [0.25, -1.0]),
        ({1: 2.0}, 2.0, [0.0, 2.0]),
        ({"a": 0.5, "b": 1.0}, 1.5, [0.0, 0.0]),
    ],
)
def test_rewards_of_turns(played, returned, reward, turn_rewards):
    def run(task, policy):
        first = policy.generate(ASKED)
        policy.generate([*ASKED, first.message, *ASKED])
        return returned

    trajectory = played(run)
    assert (trajectory.status, trajectory.error, trajectory.reward) == ("completed", None, reward)
    assert [turn.reward for turn in trajectory.turns] == turn_rewards


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([0.5], "a list of 1 rewards, but it took 2 turns: return one reward"),
        ({2: 1.0}, "name the turn 2, but it took 2"),
        ([0.5, "x"], "reward of turn 1 is 'x': give a number"),
        ((1.0, 0.5), "the agent returned a tuple: return a number, a mapping of named rewards, a "),
    ],
)
def test_wrong_rewards_of_turns(played, returned, expected):
    async def run(task, policy):
        first = await policy.generate(ASKED)
        await policy.generate([*ASKED, first.message, *ASKED])
        return returned

    trajectory = played(run)
    assert trajectory.status == "failed" and expected in trajectory.error


def test_a_function_that_hangs_costs_its_attempt(played):
    """Its thread can't be ended, but the policy answers it no more."""
    goes_on = threading.Event()
    errors = []

    def run(task, policy):
        goes_on.wait(300)
        try:
            policy.generate(ASKED)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    started = time.monotonic()
    trajectory = played(run, limit_s=0.2)
    assert (trajectory.status, trajectory.error) == (
        "failed",
        "the episode took longer than agent.timeout_s=0.2 s",
    )
    assert time.monotonic() - started < 150

    (thread,) = [one for one in threading.enumerate() if one.name == "agent"]
    goes_on.set()
    thread.join(300)
    assert [str(error) for error in errors] == ["the run of the attempt a is over"]


def test_too_many_that_hang_are_refused(played, monkeypatch):
    monkeypatch.setattr(daemon_threads, "MAX_ABANDONED", 2)
    goes_on = threading.Event()
    errors = [played(lambda task, policy: goes_on.wait(300), limit_s=0.05).error for _ in range(3)]
    assert errors[1].startswith("the episode took longer")
    assert errors[2].startswith("AgentEvoError: 2 agents of attempts that have ended still run")

    goes_on.set()

    while any(one.name == "agent" for one in threading.enumerate()):
        time.sleep(0.01)

    assert played(lambda task, policy: policy.generate(ASKED) and 1.0).error is None


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (SystemExit(3), "SystemExit(3): an agent can't end the process that it runs in"),
        (KeyboardInterrupt(), "KeyboardInterrupt: : an agent can't end the process"),
        (StopIteration(3), "RuntimeError: the agent raised StopIteration(3)"),
    ],
)
def test_whatever_it_raises_fails_its_attempt(played, raised, expected):
    def run(task, policy):
        raise raised

    trajectory = played(run)
    assert trajectory.status == "failed" and trajectory.error.startswith(expected)


def test_an_attempt_that_is_cut_lets_go_of_its_thread(attempt_of):
    began = threading.Event()
    goes_on = threading.Event()

    def run(task, policy):
        began.set()
        goes_on.wait(300)

    async def work():
        attempt = attempt_of(run)
        running = asyncio.create_task(attempt.run(task_id="t", group_id="g", number=0))
        await asyncio.to_thread(began.wait, 300)
        attempt.cut("cut")
        return await running

    (trajectory,) = run_coroutine(work())
    goes_on.set()
    assert (trajectory.status, trajectory.error) == ("cancelled", "cut")


def call(url):
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/chat", b"{}"), timeout=300
    ) as answer:
        return json.load(answer)


@pytest.mark.parametrize("kind", ["async", "not async"])
def test_a_function_with_one_parameter_calls_the_gateway_in_its_attempts_name(
    kind, attempt_of, monkeypatch
):
    """The gateway stands between its client and the policy; here a fake one."""
    import os

    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere")

    def run(task):
        return Outcome(reward=float(call(os.environ["OPENAI_BASE_URL"])["object"] != ""))

    async def run_async(task):
        return await asyncio.to_thread(run, task)

    async def work():
        loop = asyncio.get_running_loop()

        def on_call(key):
            keys.append(key)
            asking = attempt.policy.generate(ASKED)
            asyncio.run_coroutine_threadsafe(asking, loop).result(300)

        with FakeGateway(on_call) as gateway:
            function = run if kind == "not async" else run_async
            attempt = attempt_of(function, gateway=gateway)
            (trajectory,) = await attempt.run(task_id="t", group_id="g", number=0)
            return trajectory

    keys: list[str] = []
    trajectory = run_coroutine(work())
    assert (trajectory.status, trajectory.error, trajectory.reward) == ("completed", None, 1.0)
    assert keys == ["key-0"] and len(trajectory.turns) == 1
    assert os.environ["OPENAI_BASE_URL"] == "http://elsewhere"


def test_a_function_with_one_parameter_that_makes_no_call_is_told_how(played):
    with FakeGateway() as gateway:
        trajectory = played(lambda task: 1.0, gateway=gateway)
    assert trajectory.status == "failed"
    assert trajectory.error.startswith("NoCallError: ")
    for part in ("<lambda> (", "test_function_agents.py, line", gateway.url, "policy.base_url"):
        assert part in trajectory.error


def test_without_a_gateway_it_says_so(played):
    assert "there is no gateway here" in played(lambda task: 1.0).error


class Thinker:
    async def __call__(self, task, policy, reward=1.0):
        return reward

    def alone(self, task, times=3):
        return 1.0


@pytest.mark.parametrize(
    ("function", "needs_session"),
    [
        (Thinker(), False),
        (partial(Thinker().__call__, reward=1.0), False),
        (Thinker().alone, True),
        (lambda task: 1.0, True),
        (lambda task, policy=None: 1.0, False),
        (lambda task, model="x": 1.0, True),
        (lambda *args: 1.0, False),
        (lambda task, policy, seed=3: 1.0, False),
    ],
)
def test_what_a_function_takes(function, needs_session):
    assert FunctionAgent(function).needs_session is needs_session


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (lambda: 1.0, "no parameters"),
        (lambda task, policy, seed: 1.0, "task, policy, seed"),
        (lambda task, *, policy: 1.0, "task, policy"),
        (lambda *, task: 1.0, "task"),
    ],
)
def test_what_no_agent_function_takes(function, takes):
    expected = rf"the agent '<lambda>' takes {takes}: make it `run\(task\)` or `run\(task, policy\)"
    with pytest.raises(ConfigError, match=expected):
        FunctionAgent(function)
    with pytest.raises(ConfigError, match=expected):
        agentevo.train(function, [{"query": "?"}])
    with pytest.raises(ConfigError, match="the agent 'x' takes"):
        agentevo.agent("x")(function)
    with pytest.raises(ConfigError, match="the agent 'x' takes"):
        agentevo.agent("x")(type("Player", (), {"run": staticmethod(function)}))


def test_classes_may_have_functions_of_any_shape():
    class Plain:
        def run(self, task):
            return 1.0

    class Static:
        @staticmethod
        async def run(task, policy):
            return 1.0

    for number, player in enumerate((Plain, Static)):
        assert agentevo.agent(f"shape {number}")(player) is player


@pytest.mark.parametrize("takes_policy", [False, True])
@pytest.mark.parametrize("returned", [{0: 0.5}, [0.5], None])
def test_a_client_of_its_own_counts_the_turns_that_it_received(played, takes_policy, returned):
    """The first turn was lost on its way. What was posted counts where nothing is returned."""
    asked = []

    def ask(key):
        conversation = asked[0]
        for _ in range(2):
            asyncio.run_coroutine_threadsafe(conversation.complete(ASKED), loop[0]).result(300)
        conversation.discard(0)

    loop = []
    with FakeGateway(ask) as gateway:
        opened = gateway.open

        def opening(conversations, *rest):
            asked.append(conversations[""])
            loop.append(asyncio.get_running_loop())
            return opened(conversations, *rest)

        gateway.open = opening

        def post(url, body):
            request = urllib.request.Request(url, json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=300) as answer:
                answer.read()

        def play(base_url, reward_url):
            post(f"{base_url}/chat/completions", {"messages": []})
            if returned is None:
                post(reward_url, {"turn": 0, "reward": 0.5})
            return returned

        def with_policy(task, policy):
            return play(policy.base_url, policy.session.reward_url)

        def alone(task):
            return play(f"{gateway.url}/v1", f"{gateway.url}/s/key-0/reward")

        trajectory = played(with_policy if takes_policy else alone, gateway=gateway)

    assert (trajectory.status, trajectory.error, trajectory.reward) == ("completed", None, 0.5)
    assert [turn.reward for turn in trajectory.turns] == [0.5]


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (lambda: sys.exit(0), "SystemExit"),
        (lambda: [][1], "IndexError"),
        (None, "TimeoutError"),
    ],
)
@pytest.mark.parametrize("waits", [False, True])
def test_a_close_that_fails_is_shown_and_ends_nothing(does, said, waits, monkeypatch, capsys):
    goes_on = threading.Event()
    monkeypatch.setattr(agent_module, "CLOSING_S", 300.0 if does else 0.1)

    class Player:
        def close(self):
            return does() if does else goes_on.wait()

    class AsyncPlayer:
        async def close(self):
            return does() if does else await asyncio.Event().wait()

    player = AsyncPlayer() if waits else Player()
    agent = FunctionAgent(lambda task, policy: 0.0, player)
    assert run_coroutine(agent.close()) is None
    goes_on.set()
    assert f"the agent's close failed: {said}" in capsys.readouterr().err
