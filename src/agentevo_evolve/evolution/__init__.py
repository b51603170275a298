"""Improves an agent for a tool server: makes tasks, and trains on them in rounds with a pipeline of
stages. The entry point is `evolve.py`."""
