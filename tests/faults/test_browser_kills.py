"""Sixteen pages feed a trainer that doesn't wait for them, while their browser, a page and
Playwright's driver are killed: nothing is lost, and nothing is left."""

from __future__ import annotations

import os
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from browser_site import (
    DEADLINE_S,
    Site,
    kill_a_page,
    kill_browser,
    kill_driver,
    require_chromium,
    serving,
    wait_for_no_process,
)
from fault_checks import check
from slow import soak

from agentevo.api import train
from agentevo.config import build_config
from agentevo.environments.browser import BrowserConfig, BrowserEnvironment, close_browsers
from agentevo.environments.browser.process import PREFIX
from agentevo.environments.environment import EnvironmentConfig, environments

pytestmark = pytest.mark.slow

PAGE = "<button onclick=\"this.textContent = 'thanks'\">go</button>"
KILLS = (kill_browser, kill_a_page, kill_driver)
ACTIONS_PER_KILL = 12


class ChecksumConfig(BrowserConfig):
    type: Literal["checksum_page"] = "checksum_page"


@environments.register("checksum_page")
class ChecksumPage(BrowserEnvironment):
    """Pays the checksum of the action, so that every step has a gradient."""

    Config: ClassVar[type[EnvironmentConfig]] = ChecksumConfig
    acted: ClassVar[threading.Semaphore] = threading.Semaphore(0)
    """Has a slot for each action so far."""

    def step(self, action: str) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        self.acted.release()
        return observation, zlib.crc32(action.encode()) % 101 / 100, terminated, truncated, info


@pytest.fixture
def site() -> Iterator[Site]:
    require_chromium()
    with serving() as server:
        server.pages["/"] = PAGE
        try:
            yield server
        finally:
            close_browsers()


def recipe(url: str, steps: int) -> dict[str, Any]:
    return {
        "environment": {
            "type": "checksum_page",
            "url": url,
            "observation": "text",
            "actions": ["click"],
            "max_actions": 2,
            "viewport": [200, 100],
            "deadline_s": DEADLINE_S,
        },
        "model": {
            "name": "tiny",
            "device": "cpu",
            "tiny": {
                "tokenizer": "byte",
                "hidden_size": 32,
                "num_layers": 1,
                "num_heads": 2,
                "context_length": 4096,
            },
        },
        "agent": {"format": "plain", "max_turns": 2, "step_timeout_s": 2 * DEADLINE_S},
        "sampling": {"max_new_tokens": 8},
        "algorithm": {"drop_zero_variance": False},
        "trainer": {"steps": steps, "groups_per_step": 2, "group_size": 8},
        "engine": {"timeout_s": DEADLINE_S, "kv_cache_tokens": 65536},
        "evaluation": {"tasks": 1, "every": 0, "samples": 0},
        "rollout": {"staleness": 1, "lease_s": DEADLINE_S},
        "tracking": {"tensorboard": False, "report": False},
        "run": {"seed": 5, "threads": 1},
    }


@pytest.mark.parametrize("rounds", [1, *soak(20)])
def test_kills_while_sixteen_pages_feed_a_trainer(site: Site, tmp_path: Path, rounds: int) -> None:
    kills = KILLS * rounds
    num_steps = len(kills) * ACTIONS_PER_KILL // 16 + 2
    config = build_config(recipe(f"{site.url}/", num_steps), [f"run.dir={tmp_path / 'run'}"])
    killed: list[str] = []

    def attack() -> None:
        for kill in kills:
            for _ in range(ACTIONS_PER_KILL):
                if not ChecksumPage.acted.acquire(timeout=DEADLINE_S):
                    return
            kill()
            killed.append(kill.__name__)

    attacker = threading.Thread(target=attack)
    attacker.start()
    train(config)
    attacker.join()

    assert killed == [kill.__name__ for kill in kills]
    found = check(config)
    assert sum(found.trained.values()) > 0
    failed = [one for one in found.trajectories.values() if one.state == "failed"]
    assert failed
    assert all("EnvironmentFailure: the " in str(one.trajectory.error) for one in failed)
    close_browsers()
    wait_for_no_process()
    assert not list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*-{os.getpid()}-*"))
