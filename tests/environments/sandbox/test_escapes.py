"""More than a hundred tries to get out. Each is contained: the host's canaries are unharmed and
unread, and the sandbox answers afterwards."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from open_sandbox import OpenSandbox
from sandbox_escapes import FILES, KERNEL, NETWORK, PREPARED, PROCESSES, TALK, Escape

from agentevo.environments.sandbox import Execution
from agentevo.environments.sandbox.seccomp import _REFUSED

SECRET = "secret-of-the-host-5f0b"
TRIES = {**FILES, **NETWORK, **PROCESSES, **KERNEL, **TALK}


class Host:
    """Canaries: a file, a process, a variable, a port, and sockets with a path and with a name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "canary"
        self.file.write_text(SECRET)
        self.file.chmod(0o666)

        self.process = subprocess.Popen(["sleep", "3600"], env={"CANARY": SECRET})
        self.port = socket.create_server(("127.0.0.1", 0))
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(folder / "s"))
        self.named = socket.socket(socket.AF_UNIX)
        self.named.bind(f"\0agentevo-canary-{os.getpid()}")

        for one in (self.port, self.socket, self.named):
            one.listen()
            one.setblocking(False)

    def told(self, code: str) -> str:
        words = {
            "FILE": str(self.file),
            "FOLDER": str(self.folder),
            "PID": str(self.process.pid),
            "PORT": str(self.port.getsockname()[1]),
            "SOCKET": str(self.folder / "s"),
            "NAME": f"agentevo-canary-{os.getpid()}",
        }
        for word, meaning in words.items():
            code = code.replace(word, meaning)

        return code

    def check(self, execution: Execution) -> None:
        """Nothing was touched, and nothing is told."""
        assert SECRET not in repr(execution)
        assert self.file.read_text() == SECRET
        assert self.file.stat().st_mode & 0o777 == 0o666
        assert self.file.stat().st_nlink == 1
        assert sorted(path.name for path in self.folder.iterdir()) == ["canary", "s"]
        assert self.process.poll() is None

        state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state in "SR"
        for one in (self.port, self.socket, self.named):
            with pytest.raises(BlockingIOError):
                one.accept()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for one in (self.port, self.socket, self.named):
            one.close()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    canaries = Host(tmp_path_factory.mktemp("h"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANARY", SECRET)
        yield canaries
    canaries.close()


def judge(found: Execution, tried: Escape) -> None:
    if tried.value is not None:
        assert found.value == tried.value, found
        return
    assert found.error is not None, found
    assert found.error.type in (*tried.refused, *tried.ended), found
    assert found.is_alive is not bool(tried.ended)


@pytest.mark.parametrize("name", TRIES)
def test_an_escape_is_contained(opened: OpenSandbox, host: Host, name: str) -> None:
    tried = TRIES[name]
    opened(lambda sandbox: sandbox.run(PREPARED))
    found = opened(lambda sandbox: sandbox.run(host.told(tried.code), 3.0))
    host.check(found)
    judge(found, tried)

    after = opened(lambda sandbox: sandbox.run("6 * 7"))
    if after.value != "42":  # the interpreter that it has left is broken: then it says so
        assert after.error is not None
        opened(lambda sandbox: sandbox.execute(["true"]))
        after = opened(lambda sandbox: sandbox.run("6 * 7"))

    assert after.value == "42"


def test_no_handle_of_the_host_is_inherited(opened: OpenSandbox) -> None:
    opened(lambda sandbox: sandbox.execute(["true"]))  # a new interpreter comes after it
    code = "import os\n[n for n in range(1024) if os.path.exists(f'/proc/self/fd/{n}')]"
    assert opened(lambda sandbox: sandbox.run(code)).value == "[0, 1, 2, 200]"
    listing = opened(lambda sandbox: sandbox.execute(["ls", "/proc/self/fd"]))
    assert listing.stdout.split() == ["0", "1", "2", "3"]  # 3 is the folder that it lists


def test_every_refused_call_is_refused(opened: OpenSandbox) -> None:
    column = 0 if os.uname().machine == "x86_64" else 1
    numbers = [pair[column] for pair in _REFUSED.values() if pair[column] is not None]
    opened(lambda sandbox: sandbox.run(PREPARED))
    code = f"""
wrong = []
for number in {numbers}:
    try:
        call(number, 0, 0, 0, 0, 0, 0)
        wrong.append((number, "done"))
    except OSError as error:
        if error.errno not in (1, 38):
            wrong.append((number, error.errno))
wrong"""

    assert len(numbers) > 60
    assert opened(lambda sandbox: sandbox.run(code)).value == "[]"
