import re
import tomllib
from pathlib import Path

import pytest

from agentevo.errors import MissingExtraError
from agentevo.runtime.extras import load_extra


def test_a_missing_package_names_who_needs_it_and_the_line_that_installs_it() -> None:
    words = r"^a\.csv needs .*'no_such_package': pip install 'agentevo\[data\]', or convert it$"
    with pytest.raises(MissingExtraError, match=words):
        load_extra("no_such_package", "data", "a.csv", ", or convert it")


def test_a_present_package_is_returned() -> None:
    assert load_extra("json", "data", "a.csv").loads("[1]") == [1]


def test_extras_that_no_environment_can_hold_together_are_declared() -> None:
    """vLLM holds llguidance below what grammars need, so `uv sync`, which resolves all extras at
    once, is told which of them exclude it."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    extras = project["project"]["optional-dependencies"]

    def packages(extra: str) -> set[str]:
        names = set()
        for requirement in extras[extra]:
            name, inner = re.match(r"([\w.-]+)(?:\[([^\]]*)\])?", requirement).groups()
            names |= {name}
            if name == "agentevo":
                names |= {package for other in inner.split(",") for package in packages(other)}
        return names

    excluded = {extra for extra in extras if "llguidance" in packages(extra)}
    declared = project["tool"]["uv"]["conflicts"]
    assert [[member["extra"] for member in pair] for pair in declared] == [
        ["vllm", extra] for extra in ("all", "constrained", "dev")
    ]
    assert excluded == {"all", "constrained", "dev"}
