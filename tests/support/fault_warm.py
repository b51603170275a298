"""Imported by the nursery: everything a life needs, used once, so that caches are full. No gradients: autograd may not be forked."""

from __future__ import annotations

import fault_world  # noqa: F401 (registers its environment)
import torch

from agentevo.config import build_config
from agentevo.orchestration.run import check_parts, evaluate_model

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
check_parts(config, None, resume=False)
evaluate_model(config)
