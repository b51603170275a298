"""A folder of its own for each test, a recipe in it, and the command run in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from agentevo.cli.main import main

RECIPE = (
    "environment: {type: coins}\nmodel: {name: tiny, tiny: {hidden_size: 32, num_layers: 1, "
    "num_heads: 2}}\n"
)


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def agentevo(capsys) -> Callable[..., Result]:
    """`agentevo("train", "small.yaml")` -> exit code, stdout, stderr."""

    def run(*words: str) -> Result:
        capsys.readouterr()
        code = main(words)
        return Result(code, *capsys.readouterr())

    return run
