"""`agentevo optimize`: searches for better texts for an agent, with unchanged weights."""
