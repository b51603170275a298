"""From trajectories to packed batches."""
