"""Code that takes all it can get: memory, processes, disk, output, time. The sandbox's limits end
it, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from agentevo.environments.sandbox import Execution, Sandboxes
from agentevo.environments.sandbox.section import SandboxSection

pytestmark = pytest.mark.slow

LIMITS: dict[str, Any] = {
    "memory_mib": 256,
    "processes": 12,
    "disk_mib": 8,
    "file_mib": 4,
    "max_files": 500,
    "output_kib": 8,
}


class Bomb(NamedTuple):
    code: str
    errors: tuple[str, ...]
    loses: str = ""
    """`variables` or `files`, where it costs them for certain."""


BOMBS = {
    "forks": Bomb(
        "import os\nwhile True: os.fork()", ("BlockingIOError", "Timeout", "TooManyProcesses")
    ),
    "forks that ignore failure": Bomb(
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        ("Timeout", "TooManyProcesses", "ProtocolViolation"),
    ),
    "forks in a session of their own": Bomb(
        "import os, time\nfor n in range(100):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        time.sleep(1000)",
        ("BlockingIOError", "TooManyProcesses"),
    ),
    "a shell's bomb": Bomb(
        "import subprocess\nsubprocess.run(['bash', '-c', ':(){ :|:& };:; sleep 20'])",
        ("Timeout", "TooManyProcesses"),
    ),
    "threads": Bomb(
        "import threading, time\nwhile True:\n"
        "    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
        ("RuntimeError", "TooManyProcesses"),
    ),
    "memory": Bomb("x = bytearray(2**40)", ("MemoryError",)),
    "memory in steps": Bomb("x = []\nwhile True: x.append(bytearray(2**20))", ("MemoryError",)),
    "memory by children": Bomb(
        "import os, time\nfor n in range(8):\n    if os.fork() == 0:\n"
        "        x = bytearray(80 * 2**20)\n        time.sleep(1000)\ntime.sleep(1000)",
        ("OutOfMemory",),
        "files",
    ),
    "memory that is shared": Bomb(
        "import mmap, os, time\nfor n in range(8):\n    if os.fork() == 0:\n"
        "        m = mmap.mmap(-1, 80 * 2**20)\n"
        "        for at in range(0, len(m), 4096): m[at] = 1\n"
        "        time.sleep(1000)\ntime.sleep(1000)",
        ("OutOfMemory",),
        "files",
    ),
    "a file": Bomb(
        "with open('f', 'wb') as f:\n    while True: f.write(bytes(2**20))", ("OSError",)
    ),
    "files": Bomb(
        "for n in range(1000):\n    with open(f'f{n}', 'wb') as f: f.write(bytes(2**20))\n"
        "import time; time.sleep(1000)",
        ("OSError", "DiskFull"),
    ),
    "empty files": Bomb(
        "import os, time\nfor n in range(100_000):\n    os.close(os.open(f'e{n}', os.O_CREAT))\n"
        "time.sleep(1000)",
        ("OSError", "DiskFull"),
    ),
    "folders": Bomb(
        "import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')",
        ("OSError", "DiskFull", "Timeout"),
    ),
    "stdout": Bomb("import os\nwhile True: os.write(1, b'x' * 65536)", ("Timeout",)),
    "stderr by children": Bomb(
        "import subprocess\nsubprocess.run('yes >&2 & yes >&2 & yes', shell=True)", ("Timeout",)
    ),
    "a number": Bomb("x = 10 ** 10 ** 10", ("Timeout", "MemoryError")),
    "an expression": Bomb("import re\nre.match('(a+)+$', 'a' * 60 + 'b')", ("Timeout",)),
    "a value": Bomb("'x' * 2**26", ()),
    "a message": Bomb("raise ValueError('x' * 2**26)", ("ValueError",)),
    "calls of a tool": Bomb(
        "while True:\n    try: tool()\n    except ToolError: pass", ("Timeout",)
    ),
    "handles": Bomb("import os\nwhile True: os.pipe()", ("OSError",)),
    "a stopped supervisor": Bomb(
        "import os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\n"
        "os.kill(os.getppid(), signal.SIGSTOP)\nwhile True: pass",
        ("Timeout",),
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_contained(kind: str, name: str) -> None:
    bomb = BOMBS[name]

    async def tool(arguments: dict[str, Any]) -> Any:
        return 1

    async def use() -> tuple[Execution, Execution]:
        from agentevo.environments.sandbox import SandboxTool

        section = SandboxSection(type=kind, **LIMITS)
        tools = {"tool": SandboxTool("tool", (), "", tool)}
        async with Sandboxes(section).open(tools) as sandbox:
            return await sandbox.run(bomb.code, 4.0), await sandbox.run("6 * 7", 30.0)

    memory = psutil.Process().memory_info().rss
    found, after = asyncio.run(use())
    if bomb.errors:
        assert found.error is not None, found
        assert found.error.type in bomb.errors, found

    assert found.files_lost or bomb.loses != "files", found
    assert len(found.stdout) + len(found.stderr) + len(found.value or "") < 3 * 9000
    assert len(repr(found.error)) < 20_000

    if not found.is_alive:
        assert after.is_new

    # threads and children that a living interpreter keeps may use up its own limits
    assert after.value == "42" or found.is_alive, after
    assert psutil.Process().memory_info().rss - memory < 300 * 2**20


def test_nothing_is_left_of_a_closed_sandbox(kind: str) -> None:
    mark = str(20_000_000 + os.getpid() * 10 + len(kind))
    code = f"""
import subprocess
for n in range(5):
    subprocess.Popen(["sleep", "{mark}"], start_new_session=True)"""

    async def use() -> None:
        async with Sandboxes(SandboxSection(type=kind)).open() as sandbox:
            await sandbox.run(code)
            assert sleeps(mark)

    asyncio.run(use())
    assert not sleeps(mark)
    assert not list(Path(tempfile.gettempdir()).glob(f"agentevo-sandbox-*-{os.getpid()}-*"))


def test_a_deep_folder_goes_with_its_sandbox() -> None:
    """Without protection nothing bounds the depth."""
    code = "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')\nos.getcwd()"

    async def use() -> str | None:
        async with Sandboxes(SandboxSection(type="none")).open() as sandbox:
            return (await sandbox.run(code, 300.0)).value

    assert (asyncio.run(use()) or "").count("/d") >= 1500
    assert not list(Path(tempfile.gettempdir()).glob(f"agentevo-sandbox-*-{os.getpid()}-*"))


HOST = """
import asyncio, sys
from agentevo.environments.sandbox.section import SandboxSection
from agentevo.environments.sandbox import Sandboxes

async def main():
    async with Sandboxes(SandboxSection(type=sys.argv[1])).open() as sandbox:
        code = "import subprocess\\nsubprocess.Popen(['sleep', sys_argv], start_new_session=True)"
        await sandbox.run(code.replace("sys_argv", repr(sys.argv[2])))
        print("ready", flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_sandbox_dies_with_the_run(kind: str, number: signal.Signals) -> None:
    mark = str(10_000_000 + os.getpid() * 100 + number)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-c", HOST, kind, mark],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "ready\n"
        assert sleeps(mark)
        host.send_signal(number)

    until = time.monotonic() + 300
    while sleeps(mark) and time.monotonic() < until:
        time.sleep(0.05)
    assert not sleeps(mark)

    folders = Path(tempfile.gettempdir())
    if kind == "landlock" and number == signal.SIGKILL:
        assert list(folders.glob(f"agentevo-sandbox-*-{host.pid}-*"))

    asyncio.run(opened_once(kind))
    assert not list(folders.glob(f"agentevo-sandbox-*-{host.pid}-*"))


def sleeps(mark: str) -> bool:
    return any(one.info["cmdline"] == ["sleep", mark] for one in psutil.process_iter(["cmdline"]))


async def opened_once(kind: str) -> None:
    async with Sandboxes(SandboxSection(type=kind)).open() as sandbox:
        assert (await sandbox.run("1")).value == "1"
