"""From a server of tools to a better agent: tasks are made, and a pipeline of stages trains on them
round by round. `evolve.py` has the whole."""
