"""Tasks for each of the tools that ship, with the calls that solve them.

lesson      the definition of a lesson; separate held-out tasks, and a solver's demonstrations
packaged    the lessons
"""

from agentevo.agents.tool_servers.lessons.packaged import LESSONS

__all__ = ["LESSONS"]
