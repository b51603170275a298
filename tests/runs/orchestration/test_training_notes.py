"""What a run says of its training before the first step."""

from types import SimpleNamespace

import pytest

from agentevo.config import build_config
from agentevo.runs.orchestration.trainers import training_notes


@pytest.mark.parametrize(
    ("device", "dtype", "name", "advised"),
    [
        ("cuda", "float32", "org/model", True),
        ("npu", "float32", "org/model", True),
        ("cuda", "bfloat16", "org/model", False),
        ("cpu", "float32", "org/model", False),
        ("cuda", "float32", "tiny", False),
    ],
)
def test_bfloat16_is_asked_for_on_an_accelerator(device, dtype, name, advised):
    model = {"name": name, "dtype": dtype}
    config = build_config({"environment": {"type": "coins"}, "model": model})
    placed = SimpleNamespace(device=SimpleNamespace(type=device))
    tasks = SimpleNamespace(shortfall=lambda: None)
    notes = training_notes(SimpleNamespace(config=config, model=placed, tasks=tasks), "train")
    assert any("set model.dtype=bfloat16" in note for note in notes) is advised
