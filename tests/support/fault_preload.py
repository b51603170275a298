"""Imported by the fork server: everything that a process needs, used once, so that caches are full.
No gradients: autograd may not be forked."""

from __future__ import annotations

import tempfile
from pathlib import Path

import fault_environment  # noqa: F401 (registers its environment)
import torch

from agentevo.api.run import evaluate_model
from agentevo.config import build_config
from agentevo.models.compute.device_peak import device_peak
from agentevo.models.files.save import write_model
from agentevo.runs.orchestration.checks import check_parts
from agentevo.runs.orchestration.components import load_policy

torch.set_num_threads(1)
SHAPE = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "context_length": 256}
config = build_config(
    {
        "environment": {"type": "lottery"},
        "model": {"name": "tiny", "device": "cpu", "tiny": SHAPE},
        "evaluation": {"tasks": 1, "samples": 0},
        "sampling": {"max_new_tokens": 2},
    }
)
device_peak(torch.device("cpu"), torch.float32)
with tempfile.TemporaryDirectory() as folder:  # a model that is read back, as when a run is resumed
    loaded = load_policy(config)
    write_model(loaded.model, loaded.tokenizer, Path(folder) / "model")
    load_policy(config, Path(folder) / "model")
check_parts(config, None, resume=False)
evaluate_model(config)
