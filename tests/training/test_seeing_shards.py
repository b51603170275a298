"""A model that sees and is sharded over processes ends with the weights of one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from several_processes import run_processes
from slow import soak
from tiny_vision import FAMILIES, write_tiny_vision

sys.path.insert(0, str(Path(__file__).parent))
import seeing_runs as runs

CASES = {
    "CI": [("qwen3_vl", "float32"), ("idefics3", "bfloat16")],
    "soak": [(family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16")],
}


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["CI", *soak("soak")])
def test_a_sharded_model_that_sees_learns_as_one_process(cases: str, tmp_path: Path) -> None:
    """Tower and projector stay whole; the processes do not have the same images."""
    models = [
        (write_tiny_vision(family, tmp_path / f"{family}-{dtype}"), dtype)
        for family, dtype in CASES[cases]
    ]
    words = [word for folder, dtype in models for word in (folder, dtype)]
    outs = [tmp_path / f"{process}.pt" for process in range(2)]
    run_processes(
        runs.__file__,
        [(process, 2, tmp_path / "meeting", out, *words) for process, out in enumerate(outs)],
        within_s=1_500,
    )

    processes = zip(*(torch.load(out) for out in outs), strict=True)
    for (folder, dtype), sharded in zip(models, processes, strict=True):
        alone = runs.train(folder, dtype, None)
        for trained in sharded:
            compare(folder.name, dtype, trained, alone)
            assert trained["masters"] < alone["masters"], "a part of the language model"


def compare(name: str, dtype: str, trained: dict[str, Any], alone: dict[str, Any]) -> None:
    relative = 1e-3 if dtype == "float32" else 3e-2
    for ours, theirs in zip(trained["metrics"], alone["metrics"], strict=True):
        for key in ("actor/grad_norm", "sft/loss"):
            assert ours[key] == pytest.approx(theirs[key], rel=relative), (name, key)

    assert trained["weights"].keys() == alone["weights"].keys()
    apart = torch.cat(
        [(trained["weights"][key] - t).abs().flatten() for key, t in alone["weights"].items()]
    )
    assert apart.max() < (1e-5 if dtype == "float32" else 1e-2), name
