"""A command ends its process, whatever a user's code has left there."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from agentevo.cli.memory_limit import memory_problem

LEFT = {
    "a thread": "threading.Thread(target=time.sleep, args=(600,), name='theirs').start()",
    "a thread of a pool": "ThreadPoolExecutor(1, 'theirs').submit(time.sleep, 600)",
    "a process": (
        "multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,)).start()"
    ),
    "what is done at exit": "atexit.register(time.sleep, 600)",
}
NAMED = {"a process": "the process", "what is done at exit": "something"}


@pytest.mark.slow
@pytest.mark.cold_start
@pytest.mark.parametrize("left", LEFT)
def test_the_process_ends_soon_and_says_what_it_left(left):
    program = (
        "import atexit, multiprocessing, sys, threading, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from agentevo.cli import ending, main\n"
        "ending.ENDING_S = 0.3\n"
        "sys.argv = ['agentevo', 'list', 'no such kind']\n"
        f"{LEFT[left]}\n"
        "sys.exit(main.main())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,  # what was left takes 600
    )
    assert ended.returncode == 2
    assert f"{NAMED.get(left, 'the thread theirs')}" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_a_thread_that_never_starts_does_not_keep_the_process():
    program = (
        "import sys, threading\n"
        "from agentevo.cli import ending\n"
        "ending.START_S = 0.3\n"
        "threading.Thread._bootstrap = lambda thread: None  # as without memory\n"
        "ending.end_soon(3)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert (ended.returncode, ended.stderr) == (3, "")


@pytest.mark.slow
@pytest.mark.cold_start
@pytest.mark.parametrize("mib", [200, 300])  # with less, Python may fail to report the error
def test_where_memory_runs_out_one_line_says_so(mib, tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "agentevo", "train", "coins"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20)),
    )
    *_, last = ended.stderr.splitlines()
    assert "Traceback" not in ended.stderr
    assert last.startswith("error: memory has run out (")
    assert last.endswith(f"the process may take {mib} MiB (`ulimit -v`): allow it more")
    assert ended.returncode == 1


def test_what_came_of_memory_that_ran_out_is_told_from_other_errors():
    with pytest.raises(ModuleNotFoundError) as other:
        import nobody_has_this  # noqa: F401
    assert memory_problem(other.value) == "" == memory_problem(RuntimeError("a step failed"))

    failed_import = ImportError("it can't be imported")
    failed_import.__cause__ = MemoryError()
    assert memory_problem(failed_import).startswith("memory has run out (MemoryError): ")
