"""Who turns a task into an attempt by asking a policy."""

from agentevo.agents.agent import Agent, Outcome
from agentevo.agents.environment_agent import EnvironmentAgent
from agentevo.agents.policy import Policy, Reply

__all__ = ["Agent", "EnvironmentAgent", "Outcome", "Policy", "Reply"]
