"""`agentevo sandbox` runs a file and says what became of it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from agentevo.environments.sandbox import sandbox as contract


@pytest.mark.slow
def test_a_file_is_run(agentevo: Callable[..., object]) -> None:
    Path("good.py").write_text("print('hi')\n6 * 7")
    code, out, err = agentevo("sandbox", "good.py", "type=none")  # type: ignore[misc]
    assert (code, out) == (0, "hi\n")
    assert "value: 42" in err


def test_what_the_terminal_can_not_show_is_escaped(
    agentevo: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("euro.py").write_text("print(chr(0x20ac))\nchr(0x20ac)")
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2))
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    code, *_ = agentevo("sandbox", "euro.py", "type=none")  # type: ignore[misc]
    assert (code, out.buffer.getvalue()) == (0, b"\\u20ac\n")  # type: ignore[attr-defined]
    assert b"value: '\\u20ac'" in err.buffer.getvalue()  # type: ignore[attr-defined]


def test_code_that_fails_is_exit_code_1(
    agentevo: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("open('f', 'w').write('1')\n1 / 0"))
    code, out, err = agentevo("sandbox", "-", "type=none")  # type: ignore[misc]
    assert (code, out) == (1, "")
    assert "ZeroDivisionError: division by zero" in err
    assert "files: f" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["missing.py"], "missing.py"),
        (["small.yaml", "memory_mib"], "write key=value"),
        (["small.yaml", "memory_mib=1"], "memory_mib: "),
        (["small.yaml", "memry_mib=100"], "keys: type, url, api_key, memory_mib"),
        (["small.yaml", "type=remote"], "needs the url"),
        (["small.yaml", "url=http://box:1"], "set type: remote"),
        (["small.yaml", "type=remote", "url=box:1"], "url: "),
        (["small.yaml", "type=remote", "url=http://box:1", "api_key=abc"], "${env:NAME}"),
        (["small.yaml", "type=bubblewarp"], "did you mean 'bubblewrap'"),
        (["small.yaml", "timeout_s=1e9"], "timeout_s: "),
        (["small.yaml", "file_mib=9", "disk_mib=8"], "lower it"),
        (["small.yaml", "env={PATH: x}"], "is set by the sandbox itself"),
    ],
)
def test_what_can_not_be_run_is_exit_code_2(
    agentevo: Callable[..., object], words: list[str], says: str
) -> None:
    code, out, err = agentevo("sandbox", *words)  # type: ignore[misc]
    assert (code, out) == (2, "")
    assert says in err


def test_the_kinds_are_listed(agentevo: Callable[..., object]) -> None:
    code, out, _ = agentevo("list", "sandboxes")  # type: ignore[misc]
    assert code == 0
    assert {line.split()[0] for line in out.splitlines()} == {"auto", *contract.sandboxes.names()}
