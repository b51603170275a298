"""Strands Agents with its OpenAI model."""

from strands import Agent, tool
from strands.models.openai import OpenAIModel

from hunt import INSTRUCTIONS, Hunt


async def rollout(task, policy):
    hunt = Hunt(task)
    client = {"base_url": policy.base_url, "api_key": policy.api_key}
    agent = Agent(
        model=OpenAIModel(client_args=client, model_id="policy"),
        tools=[tool(hunt.open_box)],
        system_prompt=INSTRUCTIONS,
        callback_handler=None,
    )
    return hunt.reward(await agent.invoke_async(task.query))
