"""The tools of agents: the user's functions and classes, and servers that offer tools.

tool       the contract: toolsets, their sessions, specs and results
toolbox    all tools of an agent, and how their calls are run
sources    turns an entry of `agent.tools` into toolsets
functions  Python functions and classes, and the schemas of their arguments
search     search in a corpus
"""
