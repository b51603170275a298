"""Qwen-Agent's assistant over an API like OpenAI's."""

import json5
from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool

from hunt import INSTRUCTIONS, OPEN_BOX, Hunt


def rollout(task, policy):
    hunt = Hunt(task)

    class OpenBox(BaseTool):
        name = OPEN_BOX["name"]
        description = OPEN_BOX["description"]
        parameters = OPEN_BOX["parameters"]

        def call(self, params, **options):
            return hunt.open_box(**json5.loads(params))

    model = {
        "model": "policy",
        "model_type": "oai",
        "model_server": policy.base_url,
        "api_key": policy.api_key,
        "generate_cfg": {"use_raw_api": True},
    }
    agent = Assistant(function_list=[OpenBox()], llm=model, system_message=INSTRUCTIONS)
    *_, last = agent.run([{"role": "user", "content": task.query}])
    return hunt.reward(last[-1]["content"])
