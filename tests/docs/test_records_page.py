"""The page of tasks names every field of the records, and its short examples run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentevo.types import Message, Task, Trajectory, Turn

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")


def section(name: str) -> str:
    return PAGE.partition(f"\n### {name}\n")[2].partition("\n##")[0]


@pytest.mark.parametrize("record", [Task, Message, Turn, Trajectory])
def test_the_page_names_every_field(record: Any) -> None:
    rows = re.findall(r"^\| (`.*?) \|", section(record.__name__), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(field.name for field in msgspec.structs.fields(record))


@pytest.mark.parametrize("name", ["Message", "Turn"])
def test_its_short_examples_run(name: str) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", section(name), re.MULTILINE | re.DOTALL)
    exec(compile(code, f"tasks.md, {name}", "exec"), {})
