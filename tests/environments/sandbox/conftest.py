"""Kinds of sandboxes that this machine has, and one that stays open for many cheap tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from open_sandbox import OpenSandbox

from agentevo.environments.sandbox import SandboxTool
from agentevo.environments.sandbox.open_sandbox import chosen_kind, problem_of
from agentevo.environments.sandbox.section import SandboxSection
from agentevo.errors import SandboxError

PROTECTED = ("bubblewrap", "landlock")


def skip_without(kind: str) -> None:
    problem = asyncio.run(problem_of(kind, SandboxSection(type=kind)))
    if problem:
        pytest.skip(f"{kind}: {problem}")


@pytest.fixture(scope="module", params=PROTECTED)
def kind(request: pytest.FixtureRequest) -> str:
    """Every kind that protects, and works here."""
    skip_without(request.param)
    return str(request.param)


@pytest.fixture
def any_kind() -> None:
    """For tests of `type: auto`."""
    try:
        asyncio.run(chosen_kind(SandboxSection()))
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def opened(kind: str) -> Iterator[OpenSandbox]:
    """One for all tests of a module: it starts again by itself where a test has killed it."""

    async def search(arguments: dict[str, Any]) -> Any:
        return {"got": arguments}

    tools = {"search": SandboxTool("search", ("query", "k"), "Finds it.", search)}
    sandbox = OpenSandbox(SandboxSection(type=kind, timeout_s=300.0, output_kib=4), tools)
    yield sandbox
    sandbox.close()
