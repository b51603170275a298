"""Tools that ship with AgentEvo, tools behind doors of their own, and tasks to learn them with.

calculator, database, files, booking    tools by name, each with a state for each attempt but the
                                        first; importing this package registers them
serving      any registered tools as an MCP server over stdin and stdout, or HTTP
lessons/     tasks for each of them, held out ones apart, with demonstrations
"""

from agentevo.tool_servers import booking as booking
from agentevo.tool_servers import calculator as calculator
from agentevo.tool_servers import database as database
from agentevo.tool_servers import files as files
from agentevo.tools import search as search

PACKAGED = ("booking", "calculator", "database", "files", "search")
"""Names of the tools that ship with AgentEvo; `search` is built in (tools/search.py)."""
