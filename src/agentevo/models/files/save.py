"""Writes a model and its tokenizer in transformers' format."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from agentevo.errors import ModelError
from agentevo.models.compute.adapters import is_adapted, is_adapter_folder, write_adapter
from agentevo.models.compute.parameters import trained_weights
from agentevo.models.compute.parts import WholeTensors
from agentevo.models.files.split_models import in_parts, write_from_parts
from agentevo.models.files.unused_tensors import write_unused
from agentevo.models.vision.parts import processor_of
from agentevo.models.vision.processor import PROCESSOR_FILES
from agentevo.runtime.files import atomic_folder


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    """Saves model and tokenizer into `folder` atomically, and replaces an older model there.
    Returns the folder.

    Raises `ModelError` if the folder exists and holds something else.
    """
    folder = Path(folder)
    holds_model = (folder / "config.json").is_file() or is_adapter_folder(folder)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not holds_model):
        raise ModelError(
            f"{folder} exists and holds no model, so it is not replaced by one: choose another "
            "folder"
        )

    with atomic_folder(folder) as staging:
        write_model(model, tokenizer, staging)

    return folder


def write_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    weights: WholeTensors | Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Writes model and tokenizer into an existing folder, file by file. If the model has adapters,
    only the active adapter is written. Callers use `atomic_folder` to make the folder appear
    atomically.

    `weights`: weights to write instead of the model's current ones (`saved_weights`). The weights
    of a model that is split over several processes are gathered, one tensor after the other.
    Tensors of its original folder that the model does not use are copied from there.
    """
    how = in_parts(model)
    with no_progress_bars():
        if is_adapted(model):
            if how is not None and weights is None:
                weights = how.tensors(only_trained=True)
            write_adapter(model, folder, None if weights is None else dict(weights))
        elif how is not None:
            assert not isinstance(weights, Mapping), "this process has no whole weights"
            write_from_parts(how, folder, weights)
        else:
            model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))

        if not is_adapted(model):
            write_unused(model, folder)
        processor = processor_of(model)
        if processor is not None:
            processor.save(folder)
        elif not is_adapted(model) and model.name_or_path:
            _copy_processor(Path(model.name_or_path), folder)
        tokenizer.save_pretrained(folder)


def _copy_processor(source: Path, folder: Path) -> None:
    """Copies the processor's files from the folder that the model was read from, so that a
    multimodal model that was trained on text can still process images in other programs."""
    for name in PROCESSOR_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def saved_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights for `write_model`, of a model that this process has completely."""
    if is_adapted(model):
        return trained_weights(model)
    return dict(model.state_dict())


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keeps transformers' progress bars off the terminal, which the live view uses."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
