"""Runs on machines of a cluster that another tool manages: Slurm, Kubernetes, SkyPilot, Ray,
compose."""
