"""What every kind of sandbox does for code that means no harm."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
from open_sandbox import OpenSandbox

from agentevo.environments.sandbox import Execution, Sandbox, Sandboxes, SandboxTool, termination
from agentevo.environments.sandbox.section import SandboxSection
from agentevo.errors import SandboxError, UnknownNameError


def ran(opened: OpenSandbox, code: str, deadline_s: float | None = None) -> Execution:
    return opened(lambda sandbox: sandbox.run(code, deadline_s))


def test_variables_functions_and_imports_live_from_call_to_call(opened: OpenSandbox) -> None:
    ran(opened, "import math\nx = 40\ndef twice(n): return 2 * n")
    assert ran(opened, "twice(x) + math.floor(1.5)").value == "81"


def test_a_value_is_the_last_expressions_and_none_has_none(opened: OpenSandbox) -> None:
    assert ran(opened, "'a' + 'b'").value == "'ab'"
    assert ran(opened, "y = 3").value is None
    assert ran(opened, "None").value is None
    assert ran(opened, "").value is None


def test_stdout_and_stderr_come_apart_and_only_with_their_own_call(opened: OpenSandbox) -> None:
    first = ran(
        opened,
        "import os, sys\nprint('out')\nprint('err', file=sys.stderr)\nos.system('echo below')",
    )
    assert (first.stdout, first.stderr) == ("below\nout\n", "err\n")
    assert ran(opened, "1").stdout == ""


@pytest.mark.slow
def test_an_error_shows_the_users_lines_only(opened: OpenSandbox) -> None:
    error = ran(opened, "def half(n):\n    return 1 / n\nhalf(0)").error
    assert error is not None
    assert (error.type, error.message) == ("ZeroDivisionError", "division by zero")
    assert "return 1 / n" in error.traceback
    assert "interpreter.py" not in error.traceback


def test_output_that_is_lost_at_the_end_of_the_code_is_an_error(opened: OpenSandbox) -> None:
    code = """
import io, sys
class Lossy(io.StringIO):
    def flush(self):
        raise OSError("the pipe is gone")
kept = sys.stdout
sys.stdout = Lossy()
print("lost")
"""
    lost = ran(opened, code)
    assert lost.error is not None
    assert (lost.error.type, lost.error.message) == ("OSError", "the pipe is gone")
    also_raised = ran(opened, "1 / 0")
    assert also_raised.error is not None
    assert also_raised.error.type == "ZeroDivisionError"

    for code in ("sys.stdout.close()", "sys.stdout = None", "sys.stdout = kept; print(5)"):
        assert ran(opened, f"import io\nsys.stdout = io.StringIO()\n{code}").error is None


def test_errors_of_syntax_and_exits_leave_the_interpreter_alive(opened: OpenSandbox) -> None:
    ran(opened, "kept = 7")
    for code, kind in [
        ("def", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("input()", "EOFError"),
        ("def deeper(): deeper()\ndeeper()", "RecursionError"),
        ("x = 'a\\0b'; open(x)", "ValueError"),
        ("a\0b", "SyntaxError"),
    ]:
        ended = ran(opened, code)
        assert ended.error is not None
        assert ended.error.type in (kind, "ValueError"), code
        assert ended.is_alive

    assert ran(opened, "kept").value == "7"


def test_long_output_keeps_head_and_tail_and_tells_what_is_missing(opened: OpenSandbox) -> None:
    long = ran(opened, "print('first' + 'x' * 100_000 + 'last')\n'begin' + 'y' * 100_000 + 'end'")
    assert long.stdout.startswith("first")
    assert long.stdout.endswith("last\n")
    assert "bytes left out" in long.stdout
    assert long.value is not None
    assert long.value.startswith("'begin")
    assert long.value.endswith("end'")
    assert len(long.stdout) < 5000
    assert len(long.value) < 5000


def test_code_that_takes_too_long_is_interrupted_and_keeps_its_variables(
    opened: OpenSandbox,
) -> None:
    ran(opened, "kept = 8")
    slow = ran(opened, "import time\ntime.sleep(60)", deadline_s=0.3)
    assert slow.error is not None
    assert slow.error.type == "Timeout"
    assert slow.is_alive
    assert ran(opened, "kept").value == "8"


@pytest.mark.slow
def test_an_interpreter_that_can_not_be_interrupted_is_replaced_and_the_files_stay(
    opened: OpenSandbox,
) -> None:
    ran(opened, "kept = 9\nopen('stays.txt', 'w').write('here')")
    stuck = ran(
        opened,
        "import signal, time\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\ntime.sleep(60)",
        deadline_s=0.3,
    )
    assert stuck.error is not None
    assert stuck.error.type == "Timeout"
    assert not stuck.is_alive

    after = ran(opened, "'kept' in globals(), open('stays.txt').read()")
    assert after.is_new
    assert after.value == "(False, 'here')"
    assert not ran(opened, "1").is_new


def test_changed_files_are_named(opened: OpenSandbox) -> None:
    made = ran(
        opened, "import os\nos.makedirs('new/below')\nopen('new/below/a.txt', 'w').write('1')"
    )
    assert made.files == ("new/below/a.txt",)
    assert ran(opened, "open('new/below/a.txt').read()").files == ()
    assert ran(opened, "os.remove('new/below/a.txt')").files == ("new/below/a.txt",)


def test_files_go_in_and_out(opened: OpenSandbox, tmp_path: Path) -> None:
    content = bytes(range(256)) * 100

    async def use(sandbox: Sandbox) -> tuple[bytes, dict[str, int], tuple[str, ...]]:
        await sandbox.write_file("in/data.bin", content)
        await sandbox.run("open('in/out.bin', 'wb').write(open('in/data.bin', 'rb').read()[::-1])")
        read = await sandbox.read_file("in/out.bin")
        return read, await sandbox.files(), await sandbox.export(tmp_path / "kept")

    read, sizes, exported = opened(use)
    assert read == content[::-1]
    assert sizes["in/data.bin"] == len(content)
    assert "in/out.bin" in exported
    assert (tmp_path / "kept" / "in" / "out.bin").read_bytes() == content[::-1]


def test_names_that_are_no_text_hinder_no_export(opened: OpenSandbox, tmp_path: Path) -> None:
    async def use(sandbox: Sandbox) -> tuple[str, ...]:
        await sandbox.run(
            "import os\nos.mkdir('odd\\udcff')\nopen('odd\\udcff/f', 'w').write('1')\n"
            "open('\\n..', 'w').write('2')\nos.symlink('/etc', 'etc')"
        )
        return await sandbox.export(tmp_path / "kept")

    exported = opened(use)
    assert "\n.." in exported
    assert not [path for path in exported if path.startswith(("odd", "etc"))]
    assert (tmp_path / "kept" / "\n..").read_text() == "2"


def test_a_program_runs_alone_with_its_own_exit_code(opened: OpenSandbox) -> None:
    async def use(sandbox: Sandbox) -> Any:
        await sandbox.run("before = 1")
        await sandbox.write_file(
            "tests.py", b"import sys\nprint(sys.stdin.read()[::-1])\nsys.exit(3)"
        )
        program = await sandbox.execute(["python", "tests.py"], stdin=b"abc")
        return program, await sandbox.run("'before' in globals()")

    program, after = opened(use)
    assert (program.stdout, program.exit_code, program.error) == ("cba\n", 3, None)
    assert (after.value, after.is_new) == ("False", True)


@pytest.mark.slow
def test_a_program_ends_with_all_that_it_started(opened: OpenSandbox) -> None:
    code = b"import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
    code += (
        b"        import time\n        time.sleep(1)\n        open('late.txt', 'w').write('x')\n"
    )

    async def use(sandbox: Sandbox) -> Any:
        await sandbox.write_file("daemon.py", code)
        ran = await sandbox.execute(["python", "daemon.py"], deadline_s=300)
        await asyncio.sleep(1.5)
        return ran, await sandbox.files()

    program, files = opened(use)
    assert program.exit_code == 0
    assert "late.txt" not in files


def test_a_program_that_is_not_there_or_too_slow_says_so(opened: OpenSandbox) -> None:
    missing = opened(lambda sandbox: sandbox.execute(["no-such-program"]))
    assert missing.exit_code == 127
    assert "no-such-program" in missing.stderr
    slow = opened(lambda sandbox: sandbox.execute(["sleep", "60"], deadline_s=0.3))
    assert slow.exit_code is None
    assert slow.error is not None
    assert slow.error.type == "Timeout"


def test_tools_are_functions_of_the_code(opened: OpenSandbox) -> None:
    found = ran(opened, "search('a', k=2)['got']")
    assert found.value == "{'query': 'a', 'k': 2}"
    assert ran(opened, "search('a', 'b', 'c')").error.type == "TypeError"  # type: ignore[union-attr]
    assert ran(opened, "search(object())").error.type == "TypeError"  # type: ignore[union-attr]
    assert ran(opened, "search.__doc__").value == "'Finds it.'"


@pytest.mark.usefixtures("any_kind")
def test_a_tools_failure_is_an_exception_of_the_code_and_a_slow_one_is_given_up() -> None:
    async def fails(arguments: dict[str, Any]) -> Any:
        raise SandboxError("no such page")

    async def breaks(arguments: dict[str, Any]) -> Any:
        raise ValueError("a secret of the host")

    async def hangs(arguments: dict[str, Any]) -> Any:
        await asyncio.sleep(600)

    async def floods(arguments: dict[str, Any]) -> Any:
        return "x" * 2**21

    functions = (fails, breaks, hangs, floods)
    tools = {
        function.__name__: SandboxTool(function.__name__, (), "", function)
        for function in functions
    }

    async def use() -> list[Execution]:
        section = SandboxSection(max_tool_calls=3)
        async with Sandboxes(section).open(tools) as sandbox:
            return [
                await sandbox.run("kept = 1\nfails()"),
                await sandbox.run("breaks()"),
                await sandbox.run("floods()"),
                await sandbox.run("hangs()", deadline_s=0.5),
                await sandbox.run("try:\n    fails()\nexcept ToolError as e:\n    print(kept, e)"),
                await sandbox.run(
                    "n = 0\nwhile True:\n    try:\n        fails()\n"
                    "    except ToolError as e:\n        n += 1\n"
                    "        if n > 4: raise"
                ),
            ]

    failed, broke, flooded, hung, caught, many = asyncio.run(use())
    assert failed.error is not None
    assert (failed.error.type, failed.error.message) == ("ToolError", "no such page")
    assert broke.error is not None
    assert broke.error.message == "breaks has failed: ValueError"
    assert flooded.error is not None
    assert "more than 1,048,576 bytes" in flooded.error.message
    assert hung.error is not None
    assert hung.error.type == "Timeout"
    assert caught.stdout == "1 no such page\n"
    assert many.error is not None
    assert "max_tool_calls" in many.error.message


@pytest.mark.parametrize(
    "path", ["", ".", "..", "/etc/passwd", "a/../../b", "a//b", "a\0b", "x" * 5000]
)
def test_paths_outside_the_work_folder_are_refused(opened: OpenSandbox, path: str) -> None:
    with pytest.raises(SandboxError):
        opened(lambda sandbox: sandbox.read_file(path))
    with pytest.raises(SandboxError):
        opened(lambda sandbox: sandbox.write_file(path, b""))


def test_links_devices_and_pipes_are_no_files(opened: OpenSandbox) -> None:
    ran(
        opened,
        "import os\nos.symlink('/etc', 'away')\nos.symlink('/dev/zero', 'zero')\n"
        "os.mkfifo('pipe')\nos.mkdir('folder')",
    )
    for path in ("away/hostname", "zero", "pipe", "folder", "missing"):
        with pytest.raises(SandboxError):
            opened(lambda sandbox, path=path: sandbox.read_file(path))  # type: ignore[misc]

    with pytest.raises(SandboxError):
        opened(lambda sandbox: sandbox.write_file("away/x", b""))

    assert not {"away", "zero", "pipe"} & set(opened(lambda sandbox: sandbox.files()))


@pytest.mark.usefixtures("any_kind")
def test_a_file_that_is_too_large_is_refused() -> None:
    async def use() -> None:
        section = SandboxSection(file_mib=1)
        async with Sandboxes(section).open() as sandbox:
            await sandbox.write_file("most", b"x" * 2**20)
            with pytest.raises(SandboxError, match="file_mib"):
                await sandbox.write_file("more", b"x" * (2**20 + 1))

    asyncio.run(use())


@pytest.mark.usefixtures("any_kind")
def test_a_closed_sandbox_is_refused_and_closing_again_is_harmless() -> None:
    async def use() -> None:
        async with Sandboxes(SandboxSection()).open() as sandbox:
            await sandbox.close()
            await sandbox.close()
            with pytest.raises(SandboxError, match="closed"):
                await sandbox.run("1")

    asyncio.run(use())


@pytest.mark.usefixtures("any_kind")
def test_a_cancelled_call_ends_the_sandbox_and_the_next_has_another() -> None:
    async def use() -> Execution:
        async with Sandboxes(SandboxSection()).open() as sandbox:
            await sandbox.run("x = 1")
            calling = asyncio.create_task(sandbox.run("import time; time.sleep(60)"))
            await asyncio.sleep(0.3)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            return await sandbox.run("'x' in globals()")

    again = asyncio.run(use())
    assert (again.value, again.is_new) == ("False", True)


@pytest.mark.slow
@pytest.mark.usefixtures("any_kind")
def test_more_sandboxes_than_allowed_wait_for_one_another() -> None:
    async def use() -> int:
        opener = Sandboxes(SandboxSection(max_sandboxes=2))
        both = asyncio.Barrier(2)
        most = open_now = 0

        async def one() -> None:
            nonlocal most, open_now
            async with opener.open() as sandbox:
                open_now += 1
                most = max(most, open_now)
                await both.wait()
                assert (await sandbox.run("6 * 7")).value == "42"
                await asyncio.sleep(0.3)
                open_now -= 1

        async with asyncio.timeout(300):
            await asyncio.gather(*(one() for _ in range(6)))

        return most

    assert asyncio.run(use()) == 2


@pytest.mark.usefixtures("any_kind")
def test_waiting_for_another_sandbox_has_an_end() -> None:
    async def use() -> None:
        opener = Sandboxes(SandboxSection(max_sandboxes=1, wait_timeout_s=0.2))
        async with opener.open(), opener.open():
            pass

    with pytest.raises(SandboxError, match="max_sandboxes"):
        asyncio.run(use())


@pytest.mark.slow
def test_packages_are_there_only_where_they_are_asked_for(kind: str) -> None:
    async def use(packages: bool) -> list[Any]:
        async with Sandboxes(SandboxSection(type=kind, packages=packages)).open() as sandbox:
            imported = await sandbox.run("import msgspec\nmsgspec.json.encode([1])")
            program = await sandbox.execute(["python", "-c", "import msgspec"])
            return [imported.value, imported.error and imported.error.type, program.exit_code]

    assert asyncio.run(use(True)) == ["b'[1]'", None, 0]
    assert asyncio.run(use(False)) == [None, "ModuleNotFoundError", 1]


def test_variables_of_the_section_are_the_codes(kind: str) -> None:
    async def use() -> Execution:
        section = SandboxSection(type=kind, env={"COLOUR": "blue"})
        async with Sandboxes(section).open() as sandbox:
            return await sandbox.run("import os\nos.environ['COLOUR']")

    assert asyncio.run(use()).value == "'blue'"


@pytest.mark.slow
def test_a_cancelled_start_leaves_nothing(kind: str) -> None:
    async def use() -> None:
        opener = Sandboxes(SandboxSection(type=kind, max_sandboxes=1))
        async with opener.open():
            pass

        for delay_s in (0.0, 0.005, 0.02, 0.05):
            opening = asyncio.create_task(opener.open().__aenter__())
            await asyncio.sleep(delay_s)
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)

        async with opener.open() as sandbox:  # the place is free again
            assert (await sandbox.run("1")).value == "1"

    before = set(termination._alive)
    asyncio.run(use())

    until = time.monotonic() + 300
    while termination._alive - before and time.monotonic() < until:
        time.sleep(0.05)

    assert not termination._alive - before


@pytest.mark.slow
def test_a_sandbox_that_is_closed_while_it_starts_is_closed() -> None:
    async def use() -> None:
        async with Sandboxes(SandboxSection(type="none")).open() as sandbox:
            await sandbox.execute(["python", "-c", "import os; os.kill(os.getppid(), 9)"])
            starting = asyncio.create_task(sandbox.run("1"))
            await asyncio.sleep(0)
            await sandbox.close()
            with pytest.raises(SandboxError, match="closed"):
                await starting

    before = set(termination._alive)
    asyncio.run(use())
    assert not termination._alive - before


def test_halves_of_surrogate_pairs_are_the_codes_failure() -> None:
    async def use() -> Execution:
        async with Sandboxes(SandboxSection(type="none")).open() as sandbox:
            with pytest.raises(SandboxError, match="list of strings"):
                await sandbox.execute(["echo", "\ud800"])
            with pytest.raises(SandboxError, match="not valid Unicode"):
                await sandbox.write_file("\ud800", b"")

            await sandbox.run("x = 1")
            failed = await sandbox.run("'\ud800'")
            assert (await sandbox.run("x")).value == "1"  # it lives on
            return failed

    failed = asyncio.run(use())
    assert failed.error is not None
    assert failed.error.type == "UnicodeEncodeError"


def test_a_name_that_is_no_kind_is_refused() -> None:
    async def use() -> None:
        async with Sandboxes(SandboxSection(type="bubblewarp")).open():
            pass

    with pytest.raises(UnknownNameError, match="bubblewrap"):
        asyncio.run(use())


def test_without_protection_only_where_it_is_asked_for() -> None:
    async def use() -> Execution:
        async with Sandboxes(SandboxSection(type="none")).open() as sandbox:
            await sandbox.run("x = 20")
            assert (await sandbox.execute(["python", "-c", "print(5)"])).stdout == "5\n"
            assert (await sandbox.run("'x' in globals()")).value == "False"
            return await sandbox.run("import os; os.getuid(), os.environ.get('PYTHONPATH')")

    assert asyncio.run(use()).value == f"({os.getuid()}, None)"
