"""Agents: each makes attempts at tasks with replies from a policy."""

from agentevo.agents.agent import Agent, AgentFunction, FunctionAgent, make_agent
from agentevo.agents.code_agent import CodeAgent
from agentevo.agents.command import CommandAgent
from agentevo.agents.environment_agent import EnvironmentAgent
from agentevo.agents.policy import Policy, Reply
from agentevo.agents.single_turn import SingleTurnAgent
from agentevo.agents.tool_agent import ToolAgent
from agentevo.types import Outcome

__all__ = [
    "Agent",
    "AgentFunction",
    "CodeAgent",
    "CommandAgent",
    "EnvironmentAgent",
    "FunctionAgent",
    "Outcome",
    "Policy",
    "Reply",
    "SingleTurnAgent",
    "ToolAgent",
    "make_agent",
]
