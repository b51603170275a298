"""Servers whose client was killed, and servers that wait for a package."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from agentevo.agents.tools.toolbox import Toolbox
from agentevo.config.mcp import MCPServerSection
from agentevo.environments.sandbox.programs import _own_folders
from agentevo.errors import ToolUnavailableError
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Task, ToolCall

pytest.importorskip("mcp", reason="the SDK of MCP is not installed")
SUPPORT = Path(__file__).parents[2] / "support"
CLIENT = """
import asyncio, sys
from agentevo.config.mcp import MCPServerSection
from agentevo.agents.tools.toolbox import Toolbox
from agentevo.types import Task

async def work():
    box = Toolbox([MCPServerSection(name="s", command=sys.argv[1], args=sys.argv[2:])])
    async with box.open(Task(id="t"), 0):
        print("open", flush=True)
        await asyncio.sleep(600)

asyncio.run(work())
"""


@pytest.mark.slow
def test_a_server_that_goes_on_ends_with_a_client_that_was_killed(tmp_path):
    """It is the child of a shell, as those that npx starts are."""
    server = [sys.executable, str(SUPPORT / "odd_mcp_server.py"), "--stays", str(tmp_path)]
    words = ["sh", "-c", '"$@"; true', "sh", *server]
    client = subprocess.Popen([sys.executable, "-c", CLIENT, *words], stdout=subprocess.PIPE)
    try:
        assert client.stdout is not None and client.stdout.readline() == b"open\n"
        started = [
            one
            for one in psutil.Process(client.pid).children(recursive=True)
            if str(tmp_path) in one.cmdline()
        ]
        assert len(started) >= 2
    finally:
        os.kill(client.pid, signal.SIGKILL)
        client.wait()

    _, alive = psutil.wait_procs(started, timeout=300)
    assert not alive


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        for number in range(3):
            os.close(number)
        with open(sys.argv[1], "w") as file:
            file.write(str(os.getpid()))
        time.sleep(3600)
    os._exit(0)
os.wait()
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""Leaves a process that has neither its parent nor its session, and becomes a server."""


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_what_a_server_has_left_behind_ends_with_it(is_killed, tmp_path):
    left = tmp_path / "left"
    server = [str(SUPPORT / "odd_mcp_server.py"), str(tmp_path)]
    words = [sys.executable, "-c", DAEMON, str(left), *server]
    program = CLIENT if is_killed else CLIENT.replace("asyncio.sleep(600)", "asyncio.sleep(0)")
    client = subprocess.Popen([sys.executable, "-c", program, *words], stdout=subprocess.PIPE)
    try:
        assert client.stdout is not None and client.stdout.readline() == b"open\n"
        while is_killed and not (left.exists() and left.read_text()):
            time.sleep(0.05)
        daemon = psutil.Process(int(left.read_text()))
    except (psutil.NoSuchProcess, FileNotFoundError, ValueError):  # it ended before it wrote
        daemon = None
        assert not is_killed
    finally:
        if is_killed:
            client.kill()
        assert (client.wait() == 0) != is_killed

    if daemon is not None:
        _, alive = psutil.wait_procs([daemon], timeout=300 if is_killed else 1)
        assert not alive


def test_a_launcher_may_end_before_its_server(tmp_path):
    """Its server goes on until its stdin ends."""
    server = [sys.executable, str(SUPPORT / "odd_mcp_server.py"), str(tmp_path)]
    section = MCPServerSection(
        name="s", command="sh", args=("-c", 'exec 3<&0; "$@" <&3 3<&- &', "sh", *server)
    )

    async def work():
        async with Toolbox([section]).open(Task(id="t"), 0) as tools:
            await asyncio.sleep(0.5)
            (result,) = await tools.call([ToolCall("count", "{}")])
            return result.text

    assert run_coroutine(work()) == "0"


def test_a_program_that_is_none_is_told_by_its_name(tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF no program")
    program.chmod(0o755)

    async def work():
        section = MCPServerSection(name="s", command=str(program))
        async with Toolbox([section]).open(Task(id="t"), 0):
            pass

    with pytest.raises(ToolUnavailableError, match=r"program can't be started: Exec format error"):
        run_coroutine(work())


def test_a_program_that_waits_for_a_package_is_told_so(tmp_path):
    program = tmp_path / "npx"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    section = MCPServerSection(
        name="s", command=str(program), args=("-y", "some-server"), start_timeout_s=0.2
    )

    async def work():
        async with Toolbox([section]).open(Task(id="t"), 0):
            pass

    with pytest.raises(
        ToolUnavailableError, match=r"npx downloads a package .* install the package"
    ):
        run_coroutine(work())


def test_a_program_of_npm_is_shown_with_its_packages_and_its_interpreter(tmp_path, monkeypatch):
    node = tmp_path / "bin" / "node"
    package = tmp_path / "app" / "node_modules" / "server"
    for folder in (node.parent, package, package.parent / ".bin"):
        folder.mkdir(parents=True, exist_ok=True)
    node.write_text("")
    node.chmod(0o755)
    (package / "index.js").write_text("#!/usr/bin/env node\n")
    link = package.parent / ".bin" / "server"
    link.symlink_to("../server/index.js")
    monkeypatch.setenv("PATH", str(node.parent), prepend=os.pathsep)
    assert set(_own_folders(str(link))) == {str(package.parent), str(node)}
