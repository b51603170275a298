"""Tools that ship with AgentEvo, servers for tools, and tasks to learn them with.

calculator, database, files, booking    tools by name (config/tools.py: PACKAGED); all except the
                                        calculator have a state for each attempt
serving      any registered tools as an MCP server over stdin and stdout, or HTTP
lessons/     tasks for each tool, separate held-out tasks, and demonstrations
"""
