"""Files and functions stay short enough to be read at once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks"])
def test_no_file_is_over_500_lines(folder: str) -> None:
    lengths = {
        path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / folder).rglob("*.py")
    }
    assert lengths
    assert {path: n for path, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_no_function_of_src_is_over_60_lines() -> None:
    lengths = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    }
    assert lengths
    assert {where: n for where, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}
