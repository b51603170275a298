"""The section `memory`: what it refuses, and when."""

from __future__ import annotations

import sys

import pytest

from agentevo.config import build_config
from agentevo.errors import ConfigError, MissingExtraError
from agentevo.runs.orchestration.components import check_memory
from agentevo.training import optimization


def config(*overrides: str):
    return build_config(
        {"environment": {"type": "frozen_lake"}, "model": {"name": "tiny"}}, overrides
    )


@pytest.mark.parametrize("key", ["offload_activations", "offload_optimizer"])
def test_offloading_needs_a_gpu(key, monkeypatch):
    with pytest.raises(ConfigError, match=rf"memory\.{key} .* set memory\.{key}=false"):
        config("model.device=cpu", f"memory.{key}=true")

    allowed = config(f"memory.{key}=true")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=rf"memory\.{key} .* set memory\.{key}=false"):
        check_memory(allowed)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_memory(allowed)


def test_offloading_and_selective_contradict():
    with pytest.raises(ConfigError, match=r"memory\.checkpointing=selective"):
        config("memory.offload_activations=true", "memory.checkpointing=selective")


def test_eight_bits_without_torchao_say_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MissingExtraError, match=r"agentevo\[8bit\]"):
        optimization.check_8bit()
    with pytest.raises(MissingExtraError):
        check_memory(config("memory.optimizer=adamw_8bit"))
