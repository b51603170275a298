"""Playing an environment by its own optimal actions."""

from __future__ import annotations

from typing import Any

from agentevo.environments import TextEnvironment


def play_optimally(environment: TextEnvironment, max_actions: int) -> dict[str, Any]:
    """Plays on from where the environment is, to the end of the episode or for so many actions;
    returns the last step's info."""
    info: dict[str, Any] = {}
    for _ in range(max_actions):
        action = environment.optimal_action()
        assert action is not None
        _, _, terminated, _, info = environment.step(action)
        if terminated:
            break

    return info
