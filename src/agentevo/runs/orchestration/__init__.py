"""Combines the sampler and the trainer into runs."""
