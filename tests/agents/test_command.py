"""An agent that is a program: its contract, its rewards, and the end of all that it starts."""

import asyncio
import itertools
import json
import shutil
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from fake_gateway import FakeGateway

import agentevo
from agentevo.agents import CommandAgent, FunctionAgent, Policy
from agentevo.agents.command import KEPT_BYTES
from agentevo.agents.posted_rewards import PostedReward, outcome_of_rewards, printed_reward
from agentevo.api import _trainable_of, resolve
from agentevo.config.agents import CommandAgentSection
from agentevo.errors import ConfigError
from agentevo.inference.conversations.conversation import Conversation
from agentevo.rollout.group import GroupAttempt
from agentevo.runtime.event_loop import run_coroutine
from agentevo.store.call_log import AttemptCalls
from agentevo.types import Message, Outcome, SamplingParams, Task

ASKED = [Message("user", "Go on.")]
ASKS = """
import json, os, sys, time, urllib.request

def post(url, body):
    key = os.environ["OPENAI_API_KEY"]
    headers = {"content-type": "application/json", "authorization": "Bearer " + key}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)

def ask():
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": []})

"""


class Recorded:
    """Calls of attempts that were recorded, in place of a log."""

    tracing = None
    recorder = "r"

    def __init__(self):
        self.calls = {}

    def admit(self, call):
        call.number = len(self.calls) + 1
        self.calls[call.number] = call
        return True

    def note_change(self, call):
        pass

    def of_kind(self, kind):
        calls = [call.record("r") for call in self.calls.values()]
        return [call for call in calls if call.kind == kind]


TASKS = (Task(id="t", query="?"),)


@pytest.fixture
def program(tmp_path):
    """Writes a program that can ask, and returns the command for it."""

    def write(text):
        path = tmp_path / "agent.py"
        path.write_text(ASKS + textwrap.dedent(text))
        return [sys.executable, "-S", "-E", str(path)]

    return write


@pytest.fixture
def played(loaded, chat, scripted_engine):
    """What becomes of attempts of a program at tasks, beside one another."""
    recorded = Recorded()

    def attempt_of(agent, task, gateway, limit_s):
        engine = scripted_engine(loaded.tokenizer, chat.end_of_turn_id, ["left"] * 20)
        conversation = Conversation(
            engine,
            chat,
            SamplingParams(),
            name=task.id,
            seed=1,
            context_length=256,
            timeout_s=300,
            calls=AttemptCalls(recorded, task.id),
        )
        policy = Policy(conversation, gateway)
        return GroupAttempt(FunctionAgent(agent.run), task, policy, name=task.id, limit_s=limit_s)

    def play(command, *, tasks=TASKS, limit_s=300.0, cut=None, **options):
        attempts = []

        async def work():
            loop = asyncio.get_running_loop()
            agent = CommandAgent(CommandAgentSection(command=tuple(command), **options))

            def on_call(key):
                attempt = next(a for a in attempts if a.policy.api_key == key)
                asking = attempt.policy.generate(ASKED)
                asyncio.run_coroutine_threadsafe(asking, loop).result(300)

            with FakeGateway(on_call) as play.gateway:
                attempts.extend(attempt_of(agent, task, play.gateway, limit_s) for task in tasks)
                running = [
                    asyncio.ensure_future(one.run(task_id=one.name, group_id="g", number=0))
                    for one in attempts
                ]
                if cut is not None:
                    await asyncio.to_thread(cut)
                    attempts[0].cut("cut")

                return [one for (one,) in await asyncio.gather(*running)]

        trajectories = run_coroutine(work())
        return trajectories[0] if len(tasks) == 1 else trajectories

    play.recorded = recorded
    return play


@pytest.mark.slow
def test_the_contract(program, played, tmp_path, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "secret")
    command = program(
        """
        ask()
        ours = ("OPENAI", "ANTHROPIC", "AGENTEVO", "MINE")
        names = [name for name in os.environ if name.split("_")[0] in ours]
        json.dump({n: os.environ[n] for n in names}, open("seen.json", "w"))
        json.dump(sys.argv[1:], open("words.json", "w"))
        post(os.environ["AGENTEVO_REWARD_URL"], {"reward": 0.5})
        """
    )
    task = Task(id="a", query="q ü", answer=3, metadata={"level": 2})
    trajectory = played([*command, "$HOME", "a b"], tasks=[task], cwd=tmp_path, env={"MINE": 1})
    assert (trajectory.status, trajectory.error, trajectory.reward) == ("completed", None, 0.5)
    assert len(trajectory.turns) == 1
    assert json.loads((tmp_path / "words.json").read_text()) == ["$HOME", "a b"]

    seen = json.loads((tmp_path / "seen.json").read_text())
    base = played.gateway.url
    assert json.loads(seen.pop("AGENTEVO_TASK")) == {
        "id": "a", "query": "q ü", "answer": 3, "metadata": {"level": 2},
        "environment": None, "seed": 0, "scorer": None,
    }  # fmt: skip
    assert seen == {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",
        "OPENAI_API_KEY": "key-0",
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": "key-0",
        "AGENTEVO_BASE_URL": f"{base}/v1",
        "AGENTEVO_API_KEY": "key-0",
        "AGENTEVO_REWARD_URL": f"{base}/s/key-0/reward",
        "MINE": "1",
    }


@pytest.mark.slow
def test_a_large_task_is_in_a_file(program, played, tmp_path):
    command = program(
        """
        ask()
        assert "AGENTEVO_TASK" not in os.environ
        path = os.environ["AGENTEVO_TASK_FILE"]
        print(path, file=sys.stderr)
        print(json.dumps({"reward": len(json.load(open(path))["query"])}))
        """
    )
    trajectory = played(command, tasks=[Task(id="a", query="x" * 200_000)])
    assert (trajectory.error, trajectory.reward) == (None, 200_000)

    (process,) = played.recorded.of_kind("process")
    assert not Path(process.attributes["stderr"].strip()).exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_a_program_of_another_language(played, tmp_path):
    path = tmp_path / "agent.js"
    path.write_text(
        """
        const headers = {
          "content-type": "application/json",
          authorization: `Bearer ${process.env.OPENAI_API_KEY}`,
        };
        const post = (url, body) =>
          fetch(url, {method: "POST", body: JSON.stringify(body), headers});
        (async () => {
          const url = process.env.OPENAI_BASE_URL + "/chat/completions";
          const answer = await post(url, {messages: []});
          const said = (await answer.json()).choices[0].message.content;
          console.log("it said", said);
          const rewards = {said: said === "left" ? 1 : 0, short: 0.25};
          console.log(JSON.stringify({rewards}));
        })();
        """
    )
    trajectory = played(["node", str(path)])
    assert (trajectory.error, trajectory.reward_parts) == (None, {"said": 1.0, "short": 0.25})

    (process,) = played.recorded.of_kind("process")
    assert process.attributes["stdout"].startswith("it said left\n")
    assert (process.attributes["exit_code"], process.name) == (0, "node")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ask(); print('a'); sys.exit('no luck')", "ended with exit code 1: no luck"),
        (
            "sys.exit('at x.js:1\\nError: no such tool\\n    at y.js:2\\n\\nNode.js v20.20.2')",
            "ended with exit code 1: Error: no such tool",
        ),
        (
            "import signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "was ended by SIGSEGV: stderr is empty",
        ),
        ("ask(); 1 / 0", "exit code 1: ZeroDivisionError: division by zero\nTraceback"),
        ("print('{\"reward\": 1}')", "NoCallError: "),
        ("ask()", "the agent returned no reward"),
        ('ask(); print(\'{"reward": "x"}\')', "the last line of its stdout is not a reward: "),
        ("ask(); print(float('nan'))", "the reward is nan"),
        ("ask(); print(10**13)", "numbers go up to 1e+12"),
    ],
)
def test_how_it_may_fail(program, played, text, expected):
    trajectory = played(program(text))
    if "no reward" in expected and "stdout" not in expected:  # left to the scorers
        assert (trajectory.status, trajectory.reward) == ("completed", 0.0)
    else:
        assert trajectory.status == "failed" and expected in trajectory.error
        assert trajectory.error.startswith(
            ("CommandFailedError: ", "NoCallError: ", "ValueError: ")
        )


@pytest.mark.slow
def test_gigabytes_of_output_take_no_memory(program, played):
    before = psutil.Process().memory_info().rss
    trajectory = played(
        program(
            """
            ask()
            line = b"x" * 999_999 + b"\\n"
            for _ in range(300):
                os.write(1, line)
            os.write(2, b"y" * 70_000 + b"end")
            print('{"reward": 1}')
            """
        )
    )
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert psutil.Process().memory_info().rss - before < 100 * 2**20

    (process,) = played.recorded.of_kind("process")
    assert process.attributes["stderr"].endswith("yend")
    assert process.attributes["stdout"].endswith('x\n{"reward": 1}\n')
    assert all(len(process.attributes[s]) == KEPT_BYTES for s in ("stdout", "stderr"))


TREE = """
import subprocess
SLEEPS = "import time; time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPS
PARENT = (
    "import subprocess, sys; command = [sys.executable, '-S', '-c', sys.argv[1]]; "
    "child = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True); "
    "print(child.pid)"
)

def child(code, *words, **options):
    return subprocess.Popen([sys.executable, "-S", "-c", code, *words], **options)

children = [child(SLEEPS), child(SLEEPS, start_new_session=True), child(STUBBORN)]
parent = child(PARENT, STUBBORN, stdout=subprocess.PIPE, start_new_session=True)
pids = [os.getpid(), *(one.pid for one in children), int(parent.communicate()[0])]
ask()
with open(sys.argv[1] + ".new", "w") as file:
    json.dump(pids, file)
os.rename(sys.argv[1] + ".new", sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("time limit", marks=pytest.mark.slow), "cut", "exit"])
def test_the_whole_tree_ends(program, played, tmp_path, how):
    """A child, one that left the session, one that ignores SIGTERM, and one that lost its parent,
    too."""
    path = tmp_path / "pids.json"
    ends = {"exit": "print('{\"reward\": 1}')", "cut": "time.sleep(600)"}
    command = [*program(TREE + ends.get(how, "time.sleep(600)")), str(path)]

    def until_there():
        deadline = time.monotonic() + 250
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    limit_s = 20.0 if how == "time limit" else 300.0
    started = time.monotonic()
    trajectory = played(command, limit_s=limit_s, cut=until_there if how == "cut" else None)
    assert time.monotonic() - started < limit_s + 250

    status = {"time limit": "failed", "cut": "cancelled", "exit": "completed"}
    assert trajectory.status == status[how], trajectory.error

    pids = json.loads(path.read_text())
    assert len(set(pids)) == 5
    assert [pid for pid in pids if lives(pid)] == []


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_so_many_run_at_once_and_waiting_is_no_part_of_their_time(program, played):
    command = program("ask(); time.sleep(4); print('{\"reward\": 1}')")
    tasks = [Task(id=f"t{n}", query="?") for n in range(4)]
    trajectories = played(command, tasks=tasks, limit_s=14, max_processes=1)
    assert [trajectory.error for trajectory in trajectories] == [None] * 4
    calls = sorted(played.recorded.of_kind("process"), key=lambda call: call.started_at)
    for before, after in itertools.pairwise(calls):
        assert before.ended_at <= after.started_at + 1.0


def test_rewards_that_were_posted_or_printed():
    assert printed_reward("a\n{'reward': 1}\n") is None
    assert printed_reward('{"reward": 1}\nmore\n') is None
    assert printed_reward('{"reward_model": 1}\n') is printed_reward('{"reward": 1\n') is None
    assert printed_reward('\n{"reward": 1}\n\n') == PostedReward(reward=1.0)

    for text in ["1", "0.5", "-1", "+.5", "3.", "1e-3", "2E2"]:
        assert printed_reward(f"log\n {text} \n") == PostedReward(reward=float(text))
        assert printed_reward(text, has_posted=True) is None
    for text in ["", "1,000", "1_000", "50%", "1 2", "e5", "True", "step 3", "٣", "0x10", "[1]"]:
        assert printed_reward(text) is None

    with pytest.raises(ValueError, match="unknown field `rewrd`"):
        printed_reward('{"reward": 1, "rewrd": 2}')

    one = PostedReward
    given = [one(reward=0.5, turn=0), one(reward=0.25, turn=0), one(reward=1.0, turn=2)]
    assert outcome_of_rewards([]) == Outcome(reward=None)
    assert outcome_of_rewards(given) == Outcome(
        reward=1.75, success=True, turn_rewards={0: 0.75, 2: 1.0}
    )
    assert outcome_of_rewards([*given, one(reward=3.0), one(reward=0.5)]).reward == 0.5

    parts = [one(rewards={"a": 1.0, "b": -0.5}), one(rewards={"b": -0.25})]
    assert outcome_of_rewards(parts).reward_parts == {"a": 1.0, "b": -0.25}
    assert outcome_of_rewards(parts).reward == 0.75

    with pytest.raises(ValueError, match=r"sum to 0\.75, but reward is 2"):
        outcome_of_rewards([*parts, one(reward=2.0)])
    with pytest.raises(ValueError, match="the reward is inf"):
        outcome_of_rewards([one(reward=float("inf"))])


def test_refusals(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tasks = [{"query": str(number)} for number in range(20)]
    for command, expected in [
        ("node agent.js", r"command is 'node agent\.js': give a list of words"),
        ([], "agent.command: "),
        ([""], "agent.command"),
        (["no-such-program"], r"^agent.command: there is no program 'no-such-program' on the PATH"),
        (["./agent.sh"], r"there is no program '\./agent\.sh'$"),
    ]:
        with pytest.raises(ConfigError, match=expected):
            agentevo.train(command=command, tasks=tasks, model="tiny", evaluation={"tasks": 1})

    with pytest.raises(ConfigError, match="give it what to train"):
        agentevo.train(tasks=tasks)
    with pytest.raises(ConfigError, match="and only one of these"):
        agentevo.train("coins", command=["node"])

    assert list(tmp_path.iterdir()) == []


def test_a_command_and_its_folder_are_in_the_runs_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    config, agent = resolve(
        _trainable_of(None, ["node", "agent.js"], []), has_tasks=True, agent={"timeout_s": 5}
    )
    assert agent is None and config.run.name == "command"
    assert (config.agent.command, config.agent.timeout_s) == (("node", "agent.js"), 5.0)
    assert config.agent.cwd == tmp_path

    config, _ = resolve(_trainable_of(None, ["node"], []), has_tasks=True, agent={"cwd": "there"})
    assert config.agent.cwd == tmp_path / "there"
