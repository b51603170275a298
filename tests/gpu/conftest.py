"""Tests that need a CUDA GPU: `make test-gpu`. They skip without one, CI among the machines that
have none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from agentevo.models.compute.attention import prepare

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    without = pytest.mark.skip(reason="PyTorch sees no CUDA GPU")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(without)


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    return torch.device("cuda")


@pytest.fixture
def on_gpu(random_model, gpu) -> Callable[..., PreTrainedModel]:
    """`on_gpu(name, dtype=torch.float32)`: a copy of `random_model(name)` there, prepared there."""

    def make(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        model = copy.deepcopy(random_model(name).alone).to(device=gpu, dtype=dtype)
        return prepare(model)

    return make
