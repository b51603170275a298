"""OpenAI Agents SDK: its runner, over the Responses API."""

from agents.exceptions import AgentsException

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool, set_tracing_disabled
from hunt import INSTRUCTIONS, MAX_TURNS, Hunt
from learn import learn

set_tracing_disabled(True)  # its traces would go to OpenAI


async def rollout(task, policy):
    hunt = Hunt(task)
    agent = Agent(
        name="hunter",
        model="policy",
        instructions=INSTRUCTIONS,
        tools=[function_tool(hunt.open_box)],
    )
    provider = OpenAIProvider(
        base_url=policy.base_url,  # changed
        api_key=policy.api_key,  # changed
    )
    try:
        result = await Runner.run(
            agent, task.query, max_turns=MAX_TURNS, run_config=RunConfig(model_provider=provider)
        )
    except AgentsException:  # too many turns, or a tool that is not there
        return 0.0

    return hunt.reward(result.final_output)


if __name__ == "__main__":
    learn(rollout)
