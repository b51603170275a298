"""`agentevo optimize`: finds better texts for an agent, with unchanged weights."""
