"""AgentEvo's own tool agent with an MCP server, which every attempt has of its own."""

import sys
from pathlib import Path

from agentevo.agents import ToolAgent
from hunt import INSTRUCTIONS, MAX_TURNS
from learn import learn

SERVER = {
    "type": "mcp",
    "name": "hunt",
    "command": sys.executable,
    "args": [str(Path(__file__).with_name("hunt_server.py"))],
    "send_task": True,
}

if __name__ == "__main__":
    section = ToolAgent.Config(tools=[SERVER], system_prompt=INSTRUCTIONS, max_turns=MAX_TURNS)
    learn(ToolAgent(section).run, sections={"rewards": ["exact_match"]})
