"""Google's Agent Development Kit: its agent and runner, over LiteLLM."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a list of prices

from google.adk.agents import LlmAgent, RunConfig
from google.adk.agents.invocation_context import LlmCallsLimitExceededError
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

from hunt import INSTRUCTIONS, MAX_TURNS, Hunt
from learn import learn


async def rollout(task, policy):
    hunt = Hunt(task)
    model = LiteLlm(
        "openai/policy",
        api_base=policy.base_url,  # changed
        api_key=policy.api_key,  # changed
    )
    agent = LlmAgent(name="hunter", model=model, instruction=INSTRUCTIONS, tools=[hunt.open_box])
    runner = InMemoryRunner(agent, app_name="hunt")
    session = await runner.session_service.create_session(app_name="hunt", user_id="user")
    events = runner.run_async(
        user_id="user",
        session_id=session.id,
        new_message=types.UserContent(task.query),
        run_config=RunConfig(max_llm_calls=MAX_TURNS),
    )
    try:
        final = [event.content async for event in events if event.is_final_response()]
    except (LlmCallsLimitExceededError, ValueError):  # a tool that is not there, or no arguments
        return 0.0

    parts = (final and final[-1] and final[-1].parts) or []
    return hunt.reward("".join(part.text or "" for part in parts))


if __name__ == "__main__":
    learn(rollout)
