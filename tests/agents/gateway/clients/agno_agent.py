"""Agno, with its class for APIs like OpenAI's."""

from agno.agent import Agent
from agno.models.openai.like import OpenAILike

from hunt import INSTRUCTIONS, Hunt


async def rollout(task, policy):
    hunt = Hunt(task)
    model = OpenAILike(id="policy", base_url=policy.base_url, api_key=policy.api_key)
    agent = Agent(model=model, tools=[hunt.open_box], instructions=INSTRUCTIONS, telemetry=False)
    return hunt.reward((await agent.arun(task.query)).content)
