"""AutoGen: AgentChat's assistant with a tool, over chat completions."""

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily, ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

from hunt import INSTRUCTIONS, MAX_TURNS, Hunt
from learn import learn

ABILITIES = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=True,
    structured_output=True,
    family=ModelFamily.UNKNOWN,
)


async def rollout(task, policy):
    hunt = Hunt(task)
    client = OpenAIChatCompletionClient(
        model="policy",
        base_url=policy.base_url,  # changed
        api_key=policy.api_key,  # changed
        model_info=ABILITIES,
    )
    agent = AssistantAgent(
        "hunter",
        client,
        tools=[hunt.open_box],
        system_message=INSTRUCTIONS,
        max_tool_iterations=MAX_TURNS,
    )
    result = await agent.run(task=task.query)
    return hunt.reward(result.messages[-1].content)


if __name__ == "__main__":
    learn(rollout)
