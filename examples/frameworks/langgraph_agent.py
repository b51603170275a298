"""LangGraph: LangChain's agent (a graph of a model and its tools) over ChatOpenAI."""

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError

from hunt import INSTRUCTIONS, MAX_TURNS, Hunt
from learn import learn


async def rollout(task, policy):
    hunt = Hunt(task)
    model = ChatOpenAI(
        model="policy",
        base_url=policy.base_url,  # changed
        api_key=policy.api_key,  # changed
    )
    agent = create_agent(model, [tool(hunt.open_box)], system_prompt=INSTRUCTIONS)
    try:
        state = await agent.ainvoke(
            {"messages": [{"role": "user", "content": task.query}]},
            {"recursion_limit": 2 * MAX_TURNS},
        )
    except GraphRecursionError:
        return 0.0

    return hunt.reward(state["messages"][-1].text)


if __name__ == "__main__":
    learn(rollout)
