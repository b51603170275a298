"""A program that is started warm can't tell, and neither can its caller."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm_processes

PROGRAM = str(Path(__file__).parent / "support" / "warm_program.py")
PATIENCE_S = 300.0

pytestmark = pytest.mark.slow


@pytest.fixture(params=["warm", "cold"])
def how(request):
    """Each test holds of both, or what it says of warm programs is not what `exec` does."""
    with warm_processes.cold_start(request.param == "cold"):
        yield request.param


def run(*words, **options):
    command = [sys.executable, PROGRAM, *words]
    options = {"capture_output": True, "text": True, "timeout": PATIENCE_S} | options
    return subprocess.run(command, check=False, **options)


def facts(**options):
    return json.loads(run("facts", **options).stdout)


def test_both_ways_tell_a_program_the_same(tmp_path):
    def tell(**options):
        with warm_processes.cold_start():
            cold = facts(**options)
        assert facts(**options) == cold
        return cold

    assert tell()["parent"] == os.getpid()
    assert tell(cwd=tmp_path)["cwd"] == str(tmp_path)
    assert tell(env={**os.environ, "VARIABLE": "ü"})["variable"] == "ü"
    assert tell(env={n: v for n, v in os.environ.items() if n != "HOME"})["home"] is None
    assert tell(umask=0o077)["umask"] == 0o077
    assert tell(stdin=subprocess.DEVNULL)
    assert tell(env={**os.environ, "PYTHONPATH": str(tmp_path)})["path"][1] == str(tmp_path)
    assert tell(env={**os.environ, "PYTHONUNBUFFERED": "1"})


def test_a_program_of_the_command_line(how):
    program = Path(PROGRAM).read_text() + "\nimport agentevo\n"
    command = [sys.executable, "-c", program, "facts"]
    assert warm_processes._is_ours(command)
    assert not warm_processes._is_ours([*command[:2], "print('agentevo')"])

    told = json.loads(subprocess.check_output(command, text=True, timeout=PATIENCE_S))
    assert told["argv"] == ["-c", "facts"]
    assert (told["path"][0], told["name"]) == ("", "__main__")
    assert told["parent"] == os.getpid()


def test_a_session_of_its_own(how):
    told = facts(start_new_session=True)
    assert told["session"] == told["group"] != os.getsid(0)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["exit", "nothing"], 0, ""),
        (["exit", "3"], 3, ""),
        (["exit", "words"], 1, "some words\n"),
        (["raise"], 1, "ValueError: on purpose\n"),
        (["interrupt"], -signal.SIGINT, "KeyboardInterrupt\n"),
    ],
)
def test_how_it_ends(how, words, code, said):
    done = run(*words)
    assert (done.returncode, done.stderr[-len(said) :] if said else done.stderr) == (code, said)


def test_streams(how):
    done = run("echo", input="a line")
    assert (done.stdout, done.stderr) == ("A LINE\n", "said\n")
    command = [sys.executable, PROGRAM, "echo"]
    both = subprocess.check_output(command, input="a line", stderr=subprocess.STDOUT, text=True)
    assert sorted(both.split()) == ["A", "LINE", "said"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_signals_reach_it(how, number):
    with subprocess.Popen(
        [sys.executable, PROGRAM, "wait"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == -number


def test_descriptors_are_passed_on(how):
    read, write = os.pipe()
    run("descriptor", str(write), pass_fds=[write])
    os.close(write)
    with open(read, "rb") as pipe:
        assert pipe.read() == b"through", "nobody else holds the other end"


def test_its_own_children(how):
    told = json.loads(run("child").stdout)
    assert told["child"]["parent"] == told["pid"]


def test_programs_of_asyncio(how):
    async def start():
        process = await asyncio.create_subprocess_exec(
            sys.executable, PROGRAM, "exit", "3", stderr=subprocess.PIPE
        )
        await asyncio.wait_for(process.communicate(), PATIENCE_S)
        return process.returncode

    assert asyncio.run(start()) == 3


def test_what_a_fork_cannot_imitate_starts_cold():
    parent = warm_processes._warm_parent()
    same = dict(os.environ)
    assert parent.can_start(same)
    assert not parent.can_start({**same, "OMP_NUM_THREADS": "7"})
    assert not parent.can_start({**same, "PYTHONHASHSEED": "0"})


@pytest.mark.cold_start
def test_a_marked_test_starts_cold():
    assert not warm_processes._State.is_warm
