"""Models that are split over several processes. This module assembles the whole tensors when such a
model is written (a checkpoint's folder, or a version for engines).

The code that splits a model registers it once, with `register_in_parts`. On the first process,
which writes, `InParts.tensors` then makes one whole tensor after the other. The other processes
send their parts when `send_to_others` sends a command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
from torch import distributed, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from agentevo.models.compute.parts import Spec, WeightPart, WholeTensors
from agentevo.models.files.tensor_file import FILE_BYTES, split_files, write_files


@dataclass(frozen=True)
class GiveParts:
    """Send the parts of all tensors, or only of trained ones."""

    only_trained: bool


@dataclass(frozen=True)
class CompareParts:
    """See PublishedParts.compare."""


@dataclass(frozen=True)
class GiveChanges:
    """See PublishedParts.give."""


@dataclass(frozen=True)
class KeepParts:
    """See PublishedParts.keep."""


PartsCommand: TypeAlias = GiveParts | CompareParts | GiveChanges | KeepParts
"""The commands of the first process about the parts of the others. Except for `GiveParts`, it
concerns what was published of them (inference/weights/part_deltas.py)."""


@dataclass(frozen=True, eq=False)
class InParts:
    """See the module."""

    skeleton: PreTrainedModel
    """The model with its configuration. Its weights are not read."""
    own_parts: Callable[[bool], Mapping[str, WeightPart]]
    """Returns this process's current parts by name, in the dtype that is served. The order is the
    same on all processes. The argument: whether to return only trained tensors."""
    send_to_others: Callable[[PartsCommand], None] = lambda command: None
    """The other processes carry out the command."""
    group: distributed.ProcessGroup | None = None
    """The group of all processes, for tensors on the CPU."""

    def specs(self, *, only_trained: bool) -> dict[str, Spec]:
        """The specs of the tensors that `tensors` yields, in its order."""
        return {name: part.spec for name, part in self.own_parts(only_trained).items()}

    def tensors(self, *, only_trained: bool) -> WholeTensors:
        """On the first process: yields (name, whole tensor on the CPU), one after the other."""
        self.send_to_others(GiveParts(only_trained))
        return WholeTensors(self.own_parts(only_trained), self.group)


_IN_PARTS: WeakKeyDictionary[nn.Module, InParts] = WeakKeyDictionary()


def register_in_parts(model: nn.Module, how: InParts) -> None:
    """Registers a split model, so that every writer gathers its parts."""
    _IN_PARTS[model] = how


def in_parts(model: nn.Module) -> InParts | None:
    """How to gather the model's parts. None if this process has the whole model."""
    return _IN_PARTS.get(model)


def write_from_parts(
    how: InParts,
    folder: Path,
    weights: WholeTensors | None = None,
    *,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes a model's configuration and weights as `save_pretrained` does, but layer by layer.
    Tensors that transformers merged when it loaded the model (experts, for example) are split again
    within each layer. `weights`: weights to write instead of the model's current ones."""
    how.skeleton.save_pretrained(folder, state_dict={})
    (folder / "model.safetensors").unlink(missing_ok=True)
    coming = how.tensors(only_trained=False) if weights is None else weights
    with coming:
        _write_weights(how.skeleton, folder, coming, file_bytes)


def _write_weights(
    model: PreTrainedModel, folder: Path, weights: WholeTensors, file_bytes: int
) -> None:
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    specs = {n: s for n, s in weights.specs.items() if n not in ignored}
    layers: dict[str, dict[str, Spec]] = {}
    for name, spec in specs.items():
        layers.setdefault(_layer_of(name), {})[name] = spec

    saved: dict[str, Spec] = {}
    for layer in layers.values():
        hollow = {n: torch.empty(s.shape, dtype=s.dtype, device="meta") for n, s in layer.items()}
        saved |= {
            name: Spec(tensor.dtype, tuple(tensor.shape))
            for name, tensor in _as_saved(model, hollow).items()
        }

    files = split_files("model", saved, file_bytes)
    write_files(folder, files, _by_layers(model, weights, layers))
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(spec.num_bytes for spec in saved.values())},
            "weight_map": {name: file for file, group in files.items() for name in group},
        }
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _by_layers(
    model: PreTrainedModel,
    tensors: Iterable[tuple[str, torch.Tensor]],
    layers: Mapping[str, Mapping[str, Spec]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in the form in which they are saved, one layer after the other."""
    waiting = {layer: set(specs) for layer, specs in layers.items()}
    collected: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        layer = _layer_of(name)
        if name not in waiting.get(layer, ()):
            continue

        collected.setdefault(layer, {})[name] = tensor
        del tensor
        waiting[layer].discard(name)

        if not waiting[layer]:
            yield from _as_saved(model, collected.pop(layer)).items()


def _as_saved(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return cast(dict[str, torch.Tensor], revert_weight_conversion(cast(Any, model), tensors))


def _layer_of(name: str) -> str:
    """The name of the tensor's layer (`model.layers.3`). Outside of layers, the tensor's own
    name."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match[0] if match else name
