"""The processes of a run, and of sweeps: learn, sample and serve."""
