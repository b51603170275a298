"""Two environments of this test's own, so that these tests say nothing about the real environments'
options."""

import random
from typing import Any, ClassVar, Literal

import pytest
from pydantic import Field

from agentevo.environments import EnvironmentConfig, TextEnvironment, environments
from agentevo.types import Baselines


class DoorsConfig(EnvironmentConfig):
    type: Literal["test_doors"] = "test_doors"
    num_doors: int = Field(default=3, ge=2, le=9)
    """Doors in the wall."""


class IceConfig(EnvironmentConfig):
    type: Literal["test_ice"] = "test_ice"
    max_actions: int = Field(default=20, ge=1)
    """Actions after which an unfinished episode is truncated."""
    slick: bool = True
    """A move goes sideways two times in three."""
    size: int | Literal["random"] = 4
    """Side of the map, in cells."""


class Doors(TextEnvironment):
    """Open the right door."""

    Config: ClassVar[type[EnvironmentConfig]] = DoorsConfig
    instructions = "Say the number of a door."

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return "doors", {"valid": True, "effective": False, "success": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return (
            "opened",
            0.0,
            True,
            False,
            {"valid": True, "effective": True, "success": action == "1"},
        )

    def random_action(self, rng: random.Random) -> str:
        return str(rng.randint(1, 3))

    def optimal_action(self) -> str | None:
        return "1"

    def baselines(self, max_actions: int | None = None) -> Baselines:
        return Baselines(random=1 / 3, optimal=1.0)


class Ice(Doors):
    """Cross the ice."""

    Config: ClassVar[type[EnvironmentConfig]] = IceConfig


@pytest.fixture(autouse=True, scope="session")
def _environments() -> None:
    environments.register("test_doors")(Doors)
    environments.register("test_ice")(Ice)


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    """Each test runs in a folder that holds nothing but what it writes."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def doors() -> type[TextEnvironment]:
    return Doors
