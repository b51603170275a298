"""Pydantic AI: its agent, over chat completions."""

from pydantic_ai import Agent, UsageLimits
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from hunt import INSTRUCTIONS, MAX_TURNS, Hunt
from learn import learn


async def rollout(task, policy):
    hunt = Hunt(task)
    provider = OpenAIProvider(
        base_url=policy.base_url,  # changed
        api_key=policy.api_key,  # changed
    )
    agent = Agent(
        OpenAIChatModel("policy", provider=provider),
        instructions=INSTRUCTIONS,
        tools=[hunt.open_box],
    )
    try:
        result = await agent.run(task.query, usage_limits=UsageLimits(request_limit=MAX_TURNS))
    except AgentRunError:  # too many turns, or a tool that is not there
        return 0.0

    return hunt.reward(result.output)


if __name__ == "__main__":
    learn(rollout)
