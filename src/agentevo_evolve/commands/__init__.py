"""The commands of `agentevo` that this package adds."""
