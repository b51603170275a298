"""The topics of `agentevo --help`, in their order."""

from __future__ import annotations

from enum import StrEnum


class Topic(StrEnum):
    START = "Start here"
    RECIPES = "Recipes and models"
    TRAINING = "More ways to train"
    RUNS = "Look at runs"
    LABELS = "Judges and labels"
    TASKS = "Tasks and tools"
    MACHINES = "Several processes and machines"
