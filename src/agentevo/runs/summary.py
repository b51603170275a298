"""summary.json: what a run came to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """summary.json, atomically."""
    staging = folder / "summary.json.tmp"
    staging.write_text(json.dumps(summary, indent=2), encoding="utf-8")
    os.replace(staging, folder / "summary.json")


def sampled_success(metrics: dict[str, float]) -> float | None:
    """Success of the sampled attempts out of an evaluation's metrics."""
    return next((value for key, value in metrics.items() if key.endswith("/success/sampled")), None)
