"""LangChain without HTTP: an agent by class, over the policy in this process."""

from agentevo.integrations.langchain import ReactAgent
from hunt import INSTRUCTIONS, MAX_TURNS, Hunt
from learn import learn


class Hunter(ReactAgent):
    """LangGraph's agent with the tool of a hunt."""

    def tools(self, task):
        return [Hunt(task).open_box]

    async def reward(self, task, state):
        return Hunt(task).reward(state["messages"][-1].text)


if __name__ == "__main__":
    section = Hunter.Config(type="hunter", system_prompt=INSTRUCTIONS, max_turns=MAX_TURNS)
    learn(Hunter(section).run)
