"""Better texts for the same agent and the same weights: `agentevo optimize`."""
