"""Samplers and engines as child processes: replaced when they die, given up when they only fail.
The children are shell scripts; what the real ones do is tested where they are."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time

import pytest

from agentevo.runs.orchestration import supervisor as module
from agentevo.runs.orchestration.supervisor import ChildFailedError, sampling_children

pytestmark = pytest.mark.slow

FOR_EVER = "exec sleep 60"


def wait_for(condition, what, within_s=300.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Everything a hundred times as fast."""
    for name, value in {
        "POLL_INTERVAL_S": 0.01,
        "SOON_S": 0.2,
        "LONG_S": 2.0,
        "FIRST_DELAY_S": 0.005,
        "MAX_DELAY_S": 0.05,
    }.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def notes():
    return []


@pytest.fixture
def start(small_config, tmp_path, notes):
    """`start(engine="exit 3", sampler=...)`: one of each, to be entered, as scripts."""

    def make(engine=FOR_EVER, sampler=FOR_EVER):
        made = sampling_children(small_config(tmp_path / "run", "rollout.samplers=1"), notes.append)
        for child, script in zip(made._children, (engine, sampler), strict=True):
            child.command = ["/bin/sh", "-c", script]
        return made

    return make


def failure(children) -> str:
    found = []

    def failed() -> bool:
        try:
            children.check()
        except ChildFailedError as error:
            found.append(str(error))
        return bool(found)

    wait_for(failed, "it is given up")
    return found[0]


def replaced(children, notes, times=6) -> None:
    """Without an end, as far as that can be seen."""
    wait_for(lambda: len(notes) >= times, "it is replaced")
    children.check()


@pytest.mark.parametrize("name", ["KILL", "TERM", "INT", "HUP"])
def test_who_is_killed_is_replaced_however_often_and_soon(name, start, notes):
    ignored_by_nohup = "number == s.SIGKILL or s.signal(number, s.SIG_DFL)"
    program = (
        f"import os, signal as s; number = s.SIG{name}; {ignored_by_nohup}; "
        "os.kill(os.getpid(), number)"
    )
    with start(sampler=f"exec {sys.executable} -S -c '{program}'") as children:
        replaced(children, notes)

    assert all(
        "sampler-0 ended (signal " in note and note.endswith("is started again") for note in notes
    )


@pytest.mark.parametrize("script", ["kill -SEGV $$", "kill -ABRT $$", "exit 3", "exit 0"])
@pytest.mark.parametrize("who", ["engine", "sampler"])
def test_who_only_fails_is_given_up_with_the_end_of_its_log(script, who, start, notes):
    with start(**{who: f"echo no such model; {script}"}) as children:
        told = failure(children)
    assert f"{who}-0 failed 3 times before it did any work" in told and told.endswith(
        "no such model"
    )
    assert len(notes) == 2


def test_who_takes_long_to_fail_is_given_up_too(start):
    """Loading a model may take minutes, and then there is no memory."""
    with start(engine="sleep 0.4; echo out of memory; exit 1") as children:
        assert "out of memory" in failure(children)


def announce(pid: str, seconds: float, folder) -> str:
    """An engine that announces itself, serves for so long and fails."""
    text = '{"url": "http://127.0.0.1:9", "name": "engine-0", "pid": %s, "started_at": 1.0}'
    return f"printf '{text}' {pid} > {folder / 'engine-0.json'}; sleep {seconds}; exit 1"


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "run" / "engines"
    made.mkdir(parents=True)
    return made


def test_an_engine_that_has_served_is_replaced(start, notes, folder):
    with start(engine=announce("$$", 0.8, folder)) as children:
        replaced(children, notes, 4)


def test_an_engine_that_fails_as_soon_as_it_serves_is_given_up(start, folder):
    with start(engine=announce("$$", 0.0, folder)) as children:
        assert "engine-0 failed 3 times" in failure(children)


def test_the_announcement_of_another_engine_does_not_count(start, folder):
    with start(engine=announce("1", 0.5, folder)) as children:
        assert "engine-0 failed 3 times" in failure(children)


def test_a_sampler_that_has_lived_for_long_is_replaced(start, notes, monkeypatch):
    monkeypatch.setattr(module, "LONG_S", 0.1)
    with start(sampler="sleep 0.3; exit 1") as children:
        replaced(children, notes, 4)


def test_failures_before_a_good_life_are_forgotten(start, notes, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONG_S", 0.2)
    count = tmp_path / "count"
    count.write_text("0")
    with start(
        sampler=f"n=$(cat {count}); echo $((n + 1)) > {count}; [ $((n % 3)) = 2 ] && sleep 0.6; "
        "exit 1"
    ) as children:
        replaced(children, notes, 8)


def test_what_keeps_a_child_from_being_started_is_told_once_and_waited_for(
    start, notes, monkeypatch
):
    real = subprocess.Popen
    refused = []

    def popen(command, **options):
        if refused and len(refused) < 5:
            refused.append(command)
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return real(command, **options)

    with start() as children:
        monkeypatch.setattr(subprocess, "Popen", popen)
        engine = children._children[0]
        refused.append(engine.command)
        first = engine.process
        first.kill()
        wait_for(
            lambda: len(refused) == 5 and engine.process not in (None, first), "it is there again"
        )
        children.check()

    assert [note for note in notes if "can't be started" in note] == [notes[1]], notes
    assert "engine-0" in notes[1] and "Resource temporarily unavailable" in notes[1]


def test_a_log_that_is_gone_hides_no_failure(start, tmp_path):
    with start(sampler=f"rm {tmp_path / 'run' / 'logs' / 'sampler-0.log'}; exit 3") as children:
        told = failure(children)
    assert "exit code 3" in told and "can't be read" in told


def test_nobody_looking_after_them_is_a_failure(small_config, tmp_path):
    def closed(line):
        raise ValueError("I/O operation on closed file")

    children = sampling_children(small_config(tmp_path / "run", "rollout.samplers=1"), closed)
    for child in children._children:
        child.command = ["/bin/sh", "-c", "kill -9 $$"]

    with children:
        assert "no longer supervised: ValueError: I/O operation on closed file" in failure(children)


def test_ctrl_c_is_not_for_them_and_they_end_with_the_block(start, notes):
    with start() as children:
        processes = [child.process for child in children._children]
        assert all(
            os.getpgid(process.pid) == process.pid and os.getsid(process.pid) == process.pid
            for process in processes
        )
    assert all(process.returncode is not None for process in processes) and notes == []
