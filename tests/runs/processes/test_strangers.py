"""1,300 connections that are half open, held by another process, which opens them again when they
are cut off: an engine goes on as fast as without them, and new clients reach it."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from engine_process import EngineProcesses
from served_run import PROMPT, names, wait_for

from agentevo.inference.serving import admission
from agentevo.types import SamplingParams

NUMBER = 1300
HOLD = """
import resource, select, socket, sys, time
port, number, again_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4 * number), most))
opened = []
def is_open(one):
    try:
        return one.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
while True:
    still = [one for one in opened if is_open(one)]
    for one in set(opened) - set(still):
        one.close()
    for _ in range(number - len(still)):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", port))
        still.append(one)
    opened = still
    print(len(opened), flush=True)
    time.sleep(again_s)
"""


@contextmanager
def strangers(port: int, again_s: float) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(port), str(NUMBER), str(again_s)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert int(process.stdout.readline()) == NUMBER
        yield
    finally:
        process.kill()
        process.communicate()


async def tokens_per_s(client, seconds: float) -> float:
    """With 16 requests at once."""
    params = SamplingParams(max_new_tokens=32)
    tokens = 0
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        completions = await asyncio.gather(
            *(client.generate(PROMPT, params, deadline_s=300) for _ in range(16))
        )
        tokens += sum(len(completion.ids) for completion in completions)

    return tokens / (time.monotonic() - begun)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("again_s", "least"), [(5.0, 0.7), pytest.param(0.5, 0.4, marks=pytest.mark.soak)]
)
def test_connections_that_are_half_open_slow_no_engine(again_s, least, run):
    """With the usual 1,024 file descriptors. Each second figure is with them. Opened again every
    half second, which is 2,300 a second, they cost their owner a core, too. On two cores with a
    load of 11, no new client got through in 300 s, so that case is for the soak."""
    with EngineProcesses(run.folder) as engines:
        pid = engines.start("a", step_s=0.002).pid
        wait_for(lambda: names(run) == ["a"], "it is there")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (1024, 1024))
        (announced,) = run.directory.living(5.0)
        port = int(announced.url.rpartition(":")[2])

        async def measure() -> list[float]:
            client = run.client()
            await tokens_per_s(client, 1.0)

            rates = []
            for _ in range(3):
                rates.append(await tokens_per_s(client, 3.0))
                with strangers(port, again_s):
                    late = run.client()
                    answer = await late.generate(PROMPT, SamplingParams(), deadline_s=300)
                    assert answer.ids, "a new client reaches it"
                    await late.close()
                    rates.append(await tokens_per_s(client, 3.0))
                    assert psutil.Process(pid).num_fds() < 2 * admission.MAX_STRANGERS + 100

            await client.close()
            return rates

        rates = asyncio.run(measure())

    ratio = sum(rates[1::2]) / sum(rates[::2])
    print(f"ratio half_open_vs_none_again_{again_s:g}_s {ratio:.3f} (tokens/s: {rates})")
    assert ratio > least, rates
