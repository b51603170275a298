"""Semantic Kernel's chat agent over OpenAI's client."""

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

from hunt import INSTRUCTIONS, Hunt


class Boxes:
    """The agent's plugin."""

    def __init__(self, hunt):
        self._hunt = hunt

    @kernel_function(name="open_box", description="Opens the box of a colour.")
    def open_box(self, colour: str) -> str:
        return self._hunt.open_box(colour)


async def rollout(task, policy):
    hunt = Hunt(task)
    client = AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key)
    agent = ChatCompletionAgent(
        service=OpenAIChatCompletion(ai_model_id="policy", async_client=client),
        name="hunter",
        instructions=INSTRUCTIONS,
        plugins=[Boxes(hunt)],
    )
    return hunt.reward(await agent.get_response(messages=task.query))
