"""Runs: the folder of a run, its loop and its processes, and what can be learned from it
afterwards: audit, evaluation, the checks of `agentevo doctor`."""
