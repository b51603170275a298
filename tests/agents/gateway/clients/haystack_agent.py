"""Haystack's agent over its generator for OpenAI."""

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

from hunt import INSTRUCTIONS, OPEN_BOX, Hunt


def rollout(task, policy):
    hunt = Hunt(task)
    generator = OpenAIChatGenerator(
        Secret.from_token(policy.api_key), model="policy", api_base_url=policy.base_url
    )
    tools = [Tool(**OPEN_BOX, function=hunt.open_box)]
    agent = Agent(chat_generator=generator, tools=tools, system_prompt=INSTRUCTIONS)
    return hunt.reward(agent.run([ChatMessage.from_user(task.query)])["last_message"].text)
