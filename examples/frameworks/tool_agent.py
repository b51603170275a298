"""AgentEvo's own tool agent: the tool is a method of a class with a state for each attempt."""

import agentevo
from agentevo.agents import ToolAgent
from hunt import INSTRUCTIONS, MAX_TURNS, Hunt
from learn import learn


@agentevo.tool("boxes")
class Boxes:
    """The boxes of one hunt."""

    def __init__(self, task):
        self._hunt = Hunt(task)

    def open_box(self, colour: str) -> str:
        """Opens the box of a colour.

        Args:
            colour: The colour of the box.
        """
        return self._hunt.open_box(colour)


if __name__ == "__main__":
    section = ToolAgent.Config(tools=["boxes"], system_prompt=INSTRUCTIONS, max_turns=MAX_TURNS)
    learn(ToolAgent(section).run, sections={"rewards": ["exact_match"]})
