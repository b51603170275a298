"""OpenAI's Python SDK: chat completions with a tool. The same file for openai 2 and 3."""

import json

from openai import OpenAI

from hunt import INSTRUCTIONS, MAX_TURNS, OPEN_BOX, Hunt
from learn import learn

client = OpenAI(base_url="https://api.openai.com/v1", api_key="sk-...")


def rollout(task, policy):
    policy_client = client.with_options(
        base_url=policy.base_url,  # changed
        api_key=policy.api_key,  # changed
    )
    hunt = Hunt(task)
    messages = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": task.query},
    ]
    for _ in range(MAX_TURNS):
        answer = policy_client.chat.completions.create(
            model="policy",
            messages=messages,
            tools=[{"type": "function", "function": OPEN_BOX}],
        )
        said = answer.choices[0].message
        if not said.tool_calls:
            return hunt.reward(said.content)

        messages.append(said)
        for call in said.tool_calls:
            try:
                result = hunt.open_box(**json.loads(call.function.arguments))
            except (TypeError, ValueError) as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    return 0.0


if __name__ == "__main__":
    learn(rollout)
