"""The gateway: agents ask the policy through the client that they use already."""
