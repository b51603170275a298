"""Checks whether the files of a saved model's weights can be read: each file that loading opens
must exist and have the length in its header. No weight is read, so this check does
not detect changed weights. The digests of a checkpoint do (checkpoint_manifest.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from agentevo.errors import ConfigError, ModelError
from agentevo.models.checkpoint_manifest import verify_model
from agentevo.runtime.parsing import read_json_object

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
SINGLE_FILES = (WHOLE, "adapter_model.safetensors")
"""The files that may hold all weights of a model or an adapter."""
MAX_HASHED_BYTES = 2**29
"""The size in bytes of files that are hashed within a second or two."""


def check_saved_model(key: str, folder: Path) -> str:
    """Checks a saved model without loading it. Returns a note if the weights are too large to
    compare with their digests now, otherwise an empty text. `key`: the model's name in messages.
    Raises the ModelError or TornError that loading would raise."""
    is_compared = verify_model(folder, most_bytes=MAX_HASHED_BYTES)
    check_weight_files(key, folder)
    if is_compared:
        return ""
    return (
        f"{key}: its weights were not compared with their digests, which takes longer than a dry "
        "run: the run compares them"
    )


def check_weight_files(key: str, folder: Path) -> None:
    """Raises ModelError for a file of weights that is missing, cut off or damaged in its header."""
    for path in list_weight_files(key, folder):
        try:
            with safe_open(path, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            problem = str(error) if path.is_file() else "it is missing"
            raise ModelError(
                f"{key}: the weights in {path} can't be read ({problem}): save or fetch the model "
                "again"
            ) from error


def list_weight_files(
    key: str, folder: Path, names: Sequence[str] = SINGLE_FILES
) -> Iterator[Path]:
    """The safetensors files that loading opens: those of `names` that exist, otherwise those of the
    index."""
    single_files = [folder / name for name in names if (folder / name).is_file()]
    yield from single_files
    if single_files or not (folder / INDEX).is_file():
        return

    try:
        shards = read_json_object(folder / INDEX).get("weight_map")
    except ConfigError as error:
        raise ModelError(f"{key}: {error}: save or fetch the model again") from error
    if not isinstance(shards, dict):
        raise ModelError(
            f"{key}: {folder / INDEX} has no weight_map: save or fetch the model again"
        )

    for name in sorted({str(shard) for shard in shards.values()}):
        yield folder / name
