"""CrewAI: a crew of one agent with one task, over chat completions."""

import os

os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"  # it would tell CrewAI of every run
os.environ["CREWAI_TRACING_ENABLED"] = "false"  # it would ask whether to show traces

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

from hunt import INSTRUCTIONS, MAX_TURNS, Hunt
from learn import learn


def rollout(task, policy):
    hunt = Hunt(task)
    llm = LLM(
        model="openai/policy",
        base_url=policy.base_url,  # changed
        api_key=policy.api_key,  # changed
    )
    agent = Agent(
        role="hunter",
        goal=INSTRUCTIONS,
        backstory="",
        llm=llm,
        tools=[tool(hunt.open_box)],
        max_iter=MAX_TURNS,
        max_retry_limit=0,  # else it begins an attempt that went wrong anew, twice
    )
    work = Task(description=task.query, expected_output="The treasure.", agent=agent)
    try:
        return hunt.reward(Crew(agents=[agent], tasks=[work]).kickoff().raw)
    except ValueError:  # the policy said nothing
        return 0.0


if __name__ == "__main__":
    learn(rollout)
