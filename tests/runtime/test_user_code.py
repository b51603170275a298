"""A user's module or constructor that hangs ends at a deadline with its place, whatever it waits
for; what it raises is shown with its place."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from agentevo.agents import make_agent
from agentevo.config import AgentSection
from agentevo.config.agents import agents
from agentevo.errors import ConfigError, LoadingTimeoutError
from agentevo.rewards import RewardConfig, make_reward, rewards
from agentevo.runtime import user_code
from agentevo.runtime.user_code import VARIABLE, load_in_time


def sleeps():
    time.sleep(300)  # here


def waits_on_a_socket():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.makefile("rb").readline()  # here


def tries_again_and_again():
    while True:
        try:
            time.sleep(300)  # here
        except Exception:  # noqa: BLE001 (as users write it)
            continue


def waits_for_a_thread():
    threading.Event().wait(300)  # here


def swallows_the_first():
    try:
        time.sleep(300)
    except BaseException:  # noqa: BLE001 (as users write it)
        time.sleep(300)  # here


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0.1")


@pytest.mark.parametrize(
    "work",
    [sleeps, waits_on_a_socket, tries_again_and_again, waits_for_a_thread, swallows_the_first],
    ids=lambda work: work.__name__,
)
def test_what_hangs_ends_with_its_place(work, soon, monkeypatch):
    monkeypatch.setattr(user_code, "GRACE_S", 300)
    monkeypatch.setattr(user_code, "REPEAT_S", 0.1)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(LoadingTimeoutError) as caught:
        load_in_time(work, "the import of mine.py")

    message = str(caught.value)
    assert "the import of mine.py has not ended within 0.1 s (AGENTEVO_LOADING_S=" in message
    assert "# here" in "".join(message.splitlines()[-2:]), message
    assert f'"{__file__}", line' in message and "asyncio" not in message
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_timer_of_the_caller_goes_on():
    heard = threading.Event()
    before = signal.signal(signal.SIGALRM, lambda *_: heard.set())
    timer = signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        assert load_in_time(lambda: 3, "it") == 3
        assert heard.wait(300)
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def test_a_signal_that_the_code_takes_for_itself_stays_its_own():
    before = signal.getsignal(signal.SIGALRM)

    def handle(*_):
        pass

    try:
        load_in_time(lambda: signal.signal(signal.SIGALRM, handle), "it")
        assert signal.getsignal(signal.SIGALRM) is handle
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_on_another_thread_its_place_is_told_and_it_is_waited_for(soon, capsys, monkeypatch):
    told, go = threading.Event(), threading.Event()
    lines: list[str] = []

    def tell(line):
        lines.append(line)
        told.set()

    monkeypatch.setattr(user_code, "to_stderr", tell)
    returned: list[int] = []
    thread = threading.Thread(target=lambda: returned.append(load_in_time(work, "it")))

    def work():
        go.wait(300)
        return 3

    thread.start()
    assert told.wait(300)
    go.set()
    thread.join()
    assert returned == [3]
    assert "it has not ended within 0.1 s" in lines[0] and "go.wait(300)" in lines[0]


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_a_time_that_is_none_is_refused(text, monkeypatch):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError, match="give a number of seconds above 0"):
        load_in_time(lambda: 3, "it")


@pytest.mark.slow
def test_what_can_not_be_interrupted_ends_the_process(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import time\n"
        "while True:\n"
        "    try:\n"
        "        time.sleep(300)\n"
        "    except BaseException:\n"
        "        pass\n"
    )
    (tmp_path / "recipe.yaml").write_text("import: [./mine.py]\nenvironment: {type: coins}\n")
    program = (
        "from agentevo.runtime import user_code\n"
        "user_code.GRACE_S = 0.5\n"
        "from agentevo.config import load_config\n"
        f"load_config({str(tmp_path / 'recipe.yaml')!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {VARIABLE: "0.2"},
    )
    assert done.returncode == 2
    assert 'mine.py", line' in done.stderr and "the process ends" in done.stderr


class OtherEnding(BaseException):
    """No Exception."""


def constructors(monkeypatch, work):
    """Makes an agent and a reward whose constructor does the work."""

    class Agent:
        def __init__(self, config):
            work()

        async def run(self, task, policy):
            return 1.0

    class Judge:
        def __init__(self, config):
            work()

        async def score(self, trajectory, task):
            return 1.0

    monkeypatch.setattr(agents, "_items", {**agents._items, "mine": Agent})
    monkeypatch.setattr(rewards, "_items", {**rewards._items, "mine": Judge})
    yield "agent.type: mine", lambda: make_agent(AgentSection(type="mine"), lambda: None)
    yield "rewards: mine", lambda: make_reward(RewardConfig(name="mine"))


def test_a_constructor_that_hangs_ends_with_its_place(soon, monkeypatch):
    for where, make in constructors(monkeypatch, sleeps):
        with pytest.raises(ConfigError) as caught:
            make()
        message = str(caught.value)
        assert message.startswith(f"{where}: the constructor of ")
        assert "# here" in "".join(message.splitlines()[-2:]), message


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (OtherEnding("far"), "OtherEnding: far"),
        (KeyError("key"), "KeyError: 'key'"),
        (GeneratorExit(), "GeneratorExit"),
    ],
)
def test_what_a_constructor_raises_is_shown_once_with_its_place(error, expected, monkeypatch):
    def work():
        raise error

    for where, make in constructors(monkeypatch, work):
        with pytest.raises(ConfigError) as caught:
            make()
        message = str(caught.value)
        assert message.startswith(f"{where}: ") and expected in message
        assert message.count("Traceback") == 1 and "    raise error" in message
        assert "/agentevo/user_code.py" not in message
