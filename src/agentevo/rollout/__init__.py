"""Tasks in, scored trajectories out."""
