"""Beyond one run: pipelines of training stages, tasks made from tool servers and documents, better
prompts, and `agentevo evolve`. It reaches AgentEvo by its packages, which do not know it."""
