"""Tools that ship with AgentEvo, tools behind doors of their own, and tasks to learn them with.

calculator, database, files, booking    tools by name (config/tools.py: PACKAGED), each with a state
                                        for each attempt but the first
serving      any registered tools as an MCP server over stdin and stdout, or HTTP
lessons/     tasks for each of them, held-out ones separate, with demonstrations
"""
