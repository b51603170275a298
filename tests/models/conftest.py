"""Fixtures of the model tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentevo.config import ModelSection, TinyModel
from agentevo.models.files.load import LoadedModel, load_model
from agentevo.models.files.resolve import fetch

CORPUS = (
    "You stand at P on a frozen lake.\nWalk to G; avoid O.\n_P_\n__G\n",
    "Actions: Up, Down, Left, Right.",
    "Step 12 of 30: you fell!\n",
)


@pytest.fixture
def tiny_section() -> ModelSection:
    return ModelSection(
        name="tiny",
        device="cpu",
        tiny=TinyModel(hidden_size=32, num_layers=2, num_heads=2, context_length=128),
    )


@pytest.fixture
def corpus() -> tuple[str, ...]:
    return CORPUS


@pytest.fixture
def tiny(tiny_section: ModelSection, corpus: tuple[str, ...]) -> LoadedModel:
    return load_model(tiny_section, corpus=lambda: corpus, seed=0)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2 in the model cache: downloaded (93 MB) the first time on a machine."""
    return fetch("smollm2-135m-instruct")
