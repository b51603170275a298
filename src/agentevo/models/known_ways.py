"""The way in which each architecture of transformers is computed, known without loading a model.

`benchmarks/architectures.py --write` writes ways.json. It is what the trial of a tiny model chose
(models/compute/trial.py). The trial of the model itself decides when it is loaded, so a model with
an unusual configuration may be computed in another way.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias, cast

from agentevo.runtime.parsing import read_json_object

Way: TypeAlias = Literal["tree", "rows"]
FILE = Path(__file__).with_name("ways.json")


@cache
def known_ways() -> dict[Way, list[str]]:
    """Way -> the model types (`model_type` in a model's config.json) that are computed so."""
    return cast(dict[Way, list[str]], read_json_object(FILE))


def way_of(model_type: str) -> Way | None:
    """The way of a model type; None if it is not known."""
    return next((way for way, types in known_ways().items() if model_type in types), None)
