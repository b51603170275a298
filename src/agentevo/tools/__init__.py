"""What agents call: functions and classes of the user's, and servers that offer tools.

tool       the contract: toolsets, their sessions, specs and results
toolbox    all tools of an agent, and what becomes of their calls
sources    what an entry of `agent.tools` becomes
functions, signature    Python functions and classes, and the schemas of what they take
search     search in a corpus
cache, shorten          results that are kept, and results that are too long
"""
