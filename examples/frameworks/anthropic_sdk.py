"""Anthropic's Python SDK: messages with a tool."""

from anthropic import Anthropic

from hunt import INSTRUCTIONS, MAX_TURNS, OPEN_BOX, Hunt
from learn import learn

client = Anthropic(api_key="sk-...")
TOOL = {
    "name": OPEN_BOX["name"],
    "description": OPEN_BOX["description"],
    "input_schema": OPEN_BOX["parameters"],
}


def rollout(task, policy):
    policy_client = client.with_options(
        base_url=policy.session.base,  # changed
        api_key=policy.api_key,  # changed
    )
    hunt = Hunt(task)
    messages = [{"role": "user", "content": task.query}]
    for _ in range(MAX_TURNS):
        said = policy_client.messages.create(
            model="policy", max_tokens=48, system=INSTRUCTIONS, messages=messages, tools=[TOOL]
        )
        calls = [block for block in said.content if block.type == "tool_use"]
        if not calls:
            return hunt.reward("".join(block.text for block in said.content))

        results = []
        for call in calls:
            try:
                result = hunt.open_box(**call.input)
                failed = False
            except TypeError as error:
                result = str(error)
                failed = True

            results.append(
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": result,
                    "is_error": failed,
                }
            )

        messages += [
            {"role": "assistant", "content": said.content},
            {"role": "user", "content": results},
        ]

    return 0.0


if __name__ == "__main__":
    learn(rollout)
