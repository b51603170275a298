"""Converts trajectories to packed batches."""
