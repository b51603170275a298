"""Runs on machines that other people's tools hand out: Slurm, Kubernetes, SkyPilot, compose."""
