"""Scorers, which compute the reward of an attempt after it has ended.

Importing this package registers the built-in rewards. It imports neither torch nor an optional
package.
"""

from agentevo.rewards import (  # noqa: F401 (the imports register the rewards)
    builtin,
    code_tests,
    llm_judge,
    math_answer,
    probability,
    reward_model,
    ruler,
    sqlite_state,
    style_rewards,
)
from agentevo.rewards.reward import (
    GroupScorer,
    RewardConfig,
    Score,
    Scorer,
    Unscored,
    completion_of,
    make_reward,
    reward,
    rewards,
)

__all__ = [
    "GroupScorer",
    "RewardConfig",
    "Score",
    "Scorer",
    "Unscored",
    "completion_of",
    "make_reward",
    "reward",
    "rewards",
]
