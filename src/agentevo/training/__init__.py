"""From samples to an update."""
