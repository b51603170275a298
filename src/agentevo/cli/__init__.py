"""The `agentevo` command."""
