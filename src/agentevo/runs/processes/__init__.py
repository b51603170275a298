"""The processes of a run, and of sweeps: learn, sample, serve, and their supervisor."""
