"""Keeps the tensors of a model's folder that its class does not load: heads that predict several
tokens (`mtp.*`, layers beyond `num_hidden_layers`), vision towers, and others.

Such tensors are not trained. Each complete model that AgentEvo writes has them unchanged, so
engines still find their drafting heads, and a model that sees still does. They are copied one by
one from the folder that the model was loaded from. Its files stay open, because a run deletes old
checkpoints.

Not kept: tensors of folders without safetensors files or with quantized weights, and layers that
`model.config_overrides` leaves out.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from agentevo.errors import ModelError
from agentevo.models.compute.parts import Spec
from agentevo.models.files.tensor_file import (
    DTYPE_NAMES,
    FILE_BYTES,
    split_files,
    write_files,
)
from agentevo.models.files.weight_files import INDEX, WHOLE, list_weight_files
from agentevo.models.token_rows import causal_model
from agentevo.runtime.parsing import read_json_object

_KEY = "_agentevo_unused_tensors"
"""The attribute of a model with unused tensors. Copies of the model keep it."""
_DRAFTS = re.compile(r"(^|\.)mtp\.")
"""Names of drafting heads in models that also see."""


@dataclass(frozen=True, eq=False)
class UnusedTensors:
    """See the module."""

    files: Mapping[str, Any]
    """Name of a tensor -> the open file that has it."""
    outer: PretrainedConfig | None
    """The folder's configuration if the model's is only its part for text."""

    def __deepcopy__(self, memo: dict[int, Any]) -> UnusedTensors:
        return self


def remember_unused(
    model: PreTrainedModel, folder: Path, overrides: Mapping[str, Any], reader: Any
) -> None:
    """Finds the unused tensors of the folder that the model was loaded from by the class `reader`,
    with `overrides` of its configuration. Reads the headers of the files only. Raises ModelError
    for a tensor that can't be copied."""
    paths = list(list_weight_files(f"model {folder}", folder, [WHOLE]))
    config = AutoConfig.from_pretrained(folder)
    if not paths or getattr(config.get_text_config(), "quantization_config", None) is not None:
        return
    if getattr(config, "quantization_config", None) is not None:
        return

    like = model
    if overrides:  # which may leave layers out
        with torch.device("meta"):
            like = reader.from_config(config)

    loaded = like.state_dict()
    transforms = copy.deepcopy(getattr(model, "_weight_conversions", None) or [])
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    prefix = model.base_model_prefix
    files = {}
    for path in paths:
        file = safe_open(path, framework="pt")
        for name in file.keys():  # noqa: SIM118
            renamed, _ = rename_source_key(name, renamings, converters, prefix, loaded)
            plain, _ = rename_source_key(name, [], [], prefix, loaded)
            if renamed not in loaded and plain not in loaded:
                _check_dtype(path, name, file.get_slice(name).get_dtype())
                files[name] = file

    if files:
        is_part = config.model_type != model.config.model_type
        vars(model)[_KEY] = UnusedTensors(files, config if is_part else None)


def _check_dtype(path: Path, name: str, dtype: str) -> None:
    if dtype not in DTYPE_NAMES.values():
        raise ModelError(
            f"{path}: the model does not use the tensor {name!r}, and its dtype {dtype} can't be "
            "written into a checkpoint: remove it from the file"
        )


def write_unused(model: PreTrainedModel, folder: Path, *, only_drafts: bool = False) -> None:
    """Adds the unused tensors to a folder that the model has just been written into. If the model
    is a part of one that also sees, the folder's configuration becomes that of the whole.
    `only_drafts`: adds only drafting heads, for an engine that serves text. Raises OSError."""
    unused: UnusedTensors | None = vars(causal_model(model)).get(_KEY)
    if unused is None:
        return

    names = sorted(unused.files)
    if only_drafts and unused.outer is not None:
        names = [name for name in names if _DRAFTS.search(name)]
    if not names:
        return

    places = _named_places(folder)
    specs = {name: _spec(unused.files[name].get_tensor(name)) for name in names}
    files = split_files("model-unused", specs, FILE_BYTES)
    write_files(folder, files, ((name, unused.files[name].get_tensor(name)) for name in names))
    places["weight_map"] |= {name: file for file, group in files.items() for name in group}
    places["metadata"]["total_size"] += sum(spec.num_bytes for spec in specs.values())
    text = json.dumps(places, indent=2, sort_keys=True) + "\n"
    (folder / INDEX).write_text(text, encoding="utf-8")

    if unused.outer is not None and not only_drafts:
        _write_outer(unused.outer, causal_model(model).config, folder)


def _named_places(folder: Path) -> dict[str, Any]:
    """The index of the folder's weights. A folder with a single file gets one, and the file another
    name, because a file with the usual name is taken for the whole model."""
    if (folder / INDEX).is_file():
        return read_json_object(folder / INDEX)

    first = "model-00001-of-00001.safetensors"
    (folder / WHOLE).rename(folder / first)
    with safe_open(folder / first, framework="pt") as file:
        names = list(file.keys())
        size = sum(_spec(file.get_tensor(name)).num_bytes for name in names)
    return {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(names, first)}


def _spec(tensor: torch.Tensor) -> Spec:
    return Spec(tensor.dtype, tuple(tensor.shape))


def _write_outer(outer: PretrainedConfig, text: PretrainedConfig, folder: Path) -> None:
    """Writes the whole model's configuration with the part for text as it is now."""
    whole = copy.deepcopy(outer)
    part = next(
        name
        for name in whole.sub_configs
        if getattr(getattr(whole, name, None), "model_type", None) == text.model_type
    )
    setattr(whole, part, copy.deepcopy(text))
    whole.dtype = text.dtype
    whole.save_pretrained(folder)
