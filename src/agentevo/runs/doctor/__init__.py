"""Diagnoses of a recipe on this machine, before and without training."""
