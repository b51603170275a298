"""New weights on their way into vLLM, as a file: what the engine writes, and what vLLM's workers,
which are other processes, do with it.

Invariant: a worker has read all of it, and found nothing unknown, before it changes anything.
What fails after that leaves a mixture of old and new weights, and is said (`VllmEngine` then ends).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from agentevo.inference.engine import Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def write_weights(model: PreTrainedModel, weights: Weights, path: Path) -> None:
    """Writes what `model` would save of them: checkpoints may name and cut tensors otherwise than
    the modules that compute with them."""
    saved = revert_weight_conversion(model, dict(weights))
    save_file({name: one.detach().cpu().contiguous() for name, one in saved.items()}, path)


class WeightLoader:
    """What vLLM's workers are extended by: each of its processes has one beside its model."""

    model_runner: Any
    agentevo_weights: ClassVar[dict[str, torch.Tensor]] = {}
    """What was read and is not yet loaded."""

    def read_agentevo_weights(self, path: str, base: str) -> None:
        """Reads the tensors of the file `path` and, for what it has not, those of the folder
        `base`, from which vLLM has begun. Changes nothing of the model."""
        tensors = _read_tensors(sorted(Path(base).glob("*.safetensors")))
        changed = _read_tensors([Path(path)])
        for name, tensor in changed.items():
            if name not in tensors or tensor.shape != tensors[name].shape:
                raise ValueError(f"{name} {tuple(tensor.shape)} is none of the model's tensors")
        WeightLoader.agentevo_weights = tensors | changed

    def load_agentevo_weights(self) -> None:
        """The model computes with what was read from now on. `load_weights` of vLLM's model is not
        enough for that: kernels on a CPU keep packed copies of weights."""
        tensors, WeightLoader.agentevo_weights = WeightLoader.agentevo_weights, {}
        self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))


def _read_tensors(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        with safe_open(str(path), framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors
