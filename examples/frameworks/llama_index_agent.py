"""LlamaIndex: its function agent, which streams chat completions."""

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.workflow import WorkflowRuntimeError
from llama_index.llms.openai_like import OpenAILike

from hunt import INSTRUCTIONS, MAX_TURNS, Hunt
from learn import learn


async def rollout(task, policy):
    hunt = Hunt(task)
    llm = OpenAILike(
        model="policy",
        api_base=policy.base_url,  # changed
        api_key=policy.api_key,  # changed
        is_chat_model=True,
        is_function_calling_model=True,
    )
    agent = FunctionAgent(llm=llm, tools=[hunt.open_box], system_prompt=INSTRUCTIONS)
    try:
        result = await agent.run(task.query, max_iterations=MAX_TURNS)
    except WorkflowRuntimeError:  # too many turns
        return 0.0

    return hunt.reward(result.response.content)


if __name__ == "__main__":
    learn(rollout)
