"""MiniWoB++: the solvers, seeds, and the raw reward."""

from __future__ import annotations

import random

import pytest
from browser_site import wait_for_no_process

from agentevo.environments.browser import MiniWobConfig, MiniWobEnvironment, close_browsers
from agentevo.environments.browser.miniwob import SOLVED, html_folder
from agentevo.errors import MissingExtraError, UnknownNameError

pytestmark = pytest.mark.slow
NUM_SEEDS = 5


@pytest.fixture(autouse=True)
def _has_miniwob(chromium: str) -> None:
    try:
        html_folder()
    except MissingExtraError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("task", SOLVED)
def test_the_solver_earns_the_raw_reward(task: str) -> None:
    environment = MiniWobEnvironment(MiniWobConfig(task=task, deadline_s=240))
    for seed in range(NUM_SEEDS):
        environment.reset(seed=seed)
        is_over = False
        while not is_over:
            action = environment.optimal_action()
            assert action is not None
            _, reward, terminated, truncated, info = environment.step(action)
            assert info["valid"], info["problem"]
            is_over = terminated or truncated
        assert (reward, terminated, info["success"]) == (1, True, True)
        assert environment.optimal_action() is None
    environment.close()


def test_a_seed_makes_the_task_and_no_time_passes() -> None:
    environment = MiniWobEnvironment(
        MiniWobConfig(task="click-shape", observation="screenshot", max_actions=30, deadline_s=240)
    )
    first, second, other = (environment.reset(seed=seed)[0] for seed in (3, 3, 4))
    assert first == second
    assert first != other

    for _ in range(20):  # 200 s of the page's clock; a task of MiniWoB++ ends after 10 s
        _, reward, terminated, _, _ = environment.step("wait 10000")
        assert (reward, terminated) == (0, False)
    _, reward, terminated, _, _ = environment.step(environment.optimal_action() or "")
    assert (reward, terminated) == (1, True)
    environment.close()


@pytest.mark.parametrize("task", ["click-color", "click-test", "focus-text-2", "identify-shape"])
def test_a_used_page_looks_like_a_new_page(task: str) -> None:
    def make(reuse_pages: bool) -> MiniWobEnvironment:
        config = MiniWobConfig(
            task=task,
            observation="screenshot",
            actions=("click",),
            max_actions=2,
            reuse_pages=reuse_pages,
            deadline_s=240,
        )
        return MiniWobEnvironment(config)

    used, new = make(reuse_pages=True), make(reuse_pages=False)
    rng = random.Random(1)
    pages = set()
    for seed in range(NUM_SEEDS):
        assert used.reset(seed=seed)[0] == new.reset(seed=seed)[0]
        pages.add(used.session.page)
        is_over = False
        while not is_over:
            action = (used.optimal_action() or "") if seed % 2 else used.random_action(rng)
            result, other = used.step(action), new.step(action)
            assert result[:4] == other[:4]
            is_over = result[2] or result[3]
    assert len(pages) == 1
    used.close()
    new.close()


def test_a_page_whose_episode_did_not_end_is_not_used_again() -> None:
    environment = MiniWobEnvironment(MiniWobConfig(task="click-test", reuse_pages=True))
    environment.reset(seed=1)
    page = environment.session.page
    environment.reset(seed=2)
    assert environment.session.page is not page
    assert page.is_closed()
    environment.close()


def test_pages_that_wait_for_an_episode_end_with_the_browser() -> None:
    config = MiniWobConfig(task="click-test", max_actions=1, reuse_pages=True)
    for _ in range(2):
        environments = [MiniWobEnvironment(config) for _ in range(3)]
        for environment in environments:
            environment.reset(seed=1)
            environment.step("click 0 0")
        for environment in environments:
            environment.close()
        close_browsers()
        wait_for_no_process()


def test_players_and_names() -> None:
    environment = MiniWobEnvironment(MiniWobConfig(task="click-test-2", max_actions=1))
    environment.reset(seed=1)
    rates = environment.baselines()
    assert rates.random in (0, 1)
    assert rates.optimal == 1
    assert environment.step(environment.random_action(random.Random(1)))[4]["valid"]
    environment.close()

    with pytest.raises(UnknownNameError, match=r"did you mean 'click-test"):
        MiniWobEnvironment(MiniWobConfig(task="click-tset"))
