"""A server in a sandbox reaches its own work folder, what it was shown, and nothing else."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import venv
from pathlib import Path

import psutil
import pytest

from agentevo.agents.tools.toolbox import Toolbox
from agentevo.config.mcp import MCPServerSection
from agentevo.environments.sandbox.bubblewrap import Bubblewrap
from agentevo.environments.sandbox.programs import sandbox_command
from agentevo.environments.sandbox.section import ProgramSandboxSection
from agentevo.errors import ConfigError
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Task, ToolCall

pytest.importorskip("mcp", reason="the SDK of MCP is not installed")
SUPPORT = Path(__file__).parents[2] / "support"
SERVER = str(SUPPORT / "prying_server.py")


def section(**sandbox):
    return MCPServerSection(
        name="s",
        command=sys.executable,
        args=(SERVER,),
        sandbox={"read_only": [str(SUPPORT)], **sandbox},
    )


def played(entry, *calls):
    async def work():
        box = Toolbox([entry], [].append)
        try:
            async with box.open(Task(id="t"), 0) as tools:
                made = [ToolCall(name, json.dumps(given)) for name, given in calls]
                return [(await tools.call([one]))[0].text for one in made]
        finally:
            await box.close()

    return run_coroutine(work())


@pytest.fixture
def needs_bubblewrap():
    if obstacle := Bubblewrap().obstacle():
        pytest.skip(obstacle)


@pytest.fixture
def port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.slow
def test_it_reaches_nothing_of_the_host(needs_bubblewrap, port, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "s")
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    texts = played(
        section(memory_mib=512),
        ("read", {"path": str(secret)}),
        ("read", {"path": SERVER}),
        ("write", {"path": SERVER}),
        ("write", {"path": "/etc/new"}),
        ("write", {"path": "mine.txt"}),
        ("read", {"path": "/sandbox/mine.txt"}),
        ("write", {"path": "/sandbox/.tmp/also.txt"}),
        ("connect", {"port": port}),
        ("fill", {"mebibytes": 1000}),
        ("who", {}),
    )
    assert texts[1].startswith('"""An MCP server') and texts[4:7] == ["written"] * 3

    for place in (0, 2, 3, 7, 8):
        assert texts[place].startswith("Error: "), texts[place]
    assert "secret" not in texts[0].replace("secret.txt", "")

    who = json.loads(texts[9])
    assert who["user"] != 0 and who["processes"] <= 5 and not who["host"]
    assert who["folder"] == "/sandbox" and "SECRET" not in who["variables"]
    assert not any("bwrap" in one.name() for one in psutil.Process().children(recursive=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [("share", {"mebibytes": 3000}), ("breed", {"number": 20, "mebibytes": 200})],
    ids=lambda call: call[0],
)
def test_memory_is_that_of_all_its_processes_together(call, needs_bubblewrap):
    (text,) = played(section(memory_mib=512), call)
    assert text.startswith("Error: ")
    assert "its sandbox ended it: more than 512 MiB of memory, all together" in text
    assert not any("bwrap" in one.name() for one in psutil.Process().children(recursive=True))


@pytest.mark.slow
def test_a_program_of_npms_bin_folder_starts(needs_bubblewrap, tmp_path):
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    package = tmp_path / "node_modules" / "@some" / "server"
    other = tmp_path / "node_modules" / "words"
    for folder in (package / "dist", other, tmp_path / "node_modules" / ".bin"):
        folder.mkdir(parents=True)
    (other / "index.js").write_text("module.exports = 'hello';")
    script = package / "dist" / "cli.js"
    script.write_text("#!/usr/bin/env node\nconsole.log(require('words'));")
    script.chmod(0o755)
    link = tmp_path / "node_modules" / ".bin" / "server"
    link.symlink_to("../@some/server/dist/cli.js")
    for command, folder in ((str(link), None), ("node_modules/.bin/server", tmp_path)):
        words = sandbox_command(command, (), ProgramSandboxSection(), folder)
        ended = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        assert ended.stdout == "hello\n", ended.stderr


@pytest.mark.slow
def test_it_has_what_it_was_given(needs_bubblewrap, port, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    texts = played(
        section(network=True, read_write=[str(shared)]),
        ("connect", {"port": port}),
        ("write", {"path": str(shared / "new.txt")}),
        ("write", {"path": str(tmp_path / "other.txt")}),
    )
    assert texts[:2] == ["connected", "written"] and texts[2].startswith("Error: ")
    assert (shared / "new.txt").read_text() == "written"
    assert not (tmp_path / "other.txt").exists()


def test_a_script_of_a_virtual_environment_that_is_a_link_finds_its_interpreter(
    needs_bubblewrap, tmp_path
):
    real = tmp_path / "real"
    linked = tmp_path / "linked"
    venv.create(real, symlinks=True)
    script = real / "bin" / "hello"
    script.write_text(f"#!{real}/bin/python\nprint('hello')\n")
    script.chmod(0o755)
    linked.symlink_to(real)
    words = sandbox_command(str(linked / "bin" / "hello"), (), ProgramSandboxSection(), None)
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "hello\n", done.stderr


def test_what_can_not_be_is_refused_before_anything_starts(needs_bubblewrap, monkeypatch):
    with pytest.raises(ConfigError, match="there is no /none/such to show in the sandbox"):
        Toolbox([section(read_only=["/none/such"])])
    with pytest.raises(ConfigError, match="there is no program"):
        Toolbox([section().model_copy(update={"command": "no-such-program"})])
    with pytest.raises(ValueError, match="are for a `command`"):
        MCPServerSection(name="a", url="http://a/b", sandbox=True)
    with pytest.raises(ValueError, match="leave out cwd"):
        MCPServerSection(name="a", command="x", cwd="y", sandbox=True)
    assert MCPServerSection(name="a", command="x", sandbox=False).sandbox is None

    monkeypatch.setattr(Bubblewrap, "obstacle", lambda self: "there is no program `bwrap`")
    with pytest.raises(ConfigError, match="sandbox: bubblewrap: there is no program `bwrap`"):
        Toolbox([section()])
