"""DSPy: its ReActV2 module, whose tool calls are the API's own."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a list of models

import dspy
from dspy.utils.exceptions import AdapterParseError

from cold_start import call
from hunt import INSTRUCTIONS, MAX_TURNS, Hunt
from learn import learn

dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)  # it takes no heed of keys
dspy.configure(adapter=dspy.ChatAdapter(use_native_function_calling=True))


async def rollout(task, policy):
    hunt = Hunt(task)
    lm = dspy.LM(
        "openai/gpt-4o-mini",
        api_base=policy.base_url,  # changed
        api_key=policy.api_key,  # changed
    )
    signature = dspy.Signature("question -> answer", INSTRUCTIONS)
    agent = dspy.ReActV2(signature, tools=[hunt.open_box], max_iters=MAX_TURNS - 1)
    try:
        with dspy.context(lm=lm):
            result = await agent.acall(question=task.query)
    except (AdapterParseError, ValueError):  # no answer was submitted
        return 0.0

    return hunt.reward(result.answer)


TEACHER = {"says": lambda answer: call("submit", answer=answer)}

if __name__ == "__main__":
    learn(rollout, **TEACHER)
