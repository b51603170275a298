"""The reward of the recipe: 1 for a solved task, else 0.

MiniWoB++'s raw reward is -1 for a wrong click and 0 for a click on nothing, so a policy that is not
sure yet learns to click on nothing.
"""

import agentevo
from agentevo.types import Trajectory


@agentevo.reward("solved")
def solved(trajectory: Trajectory) -> agentevo.Score:
    return agentevo.Score(float(trajectory.success), success=trajectory.success)
