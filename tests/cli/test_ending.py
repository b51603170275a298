"""A command ends its process, whatever a user's code has left there."""

from __future__ import annotations

import subprocess
import sys

import pytest
from slow import soak

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
@pytest.mark.parametrize("left", ["a thread", "a process", *soak(*list(LEFT)[1::2])])
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
