"""Loads new weights into vLLM's workers, which are separate processes. Either the engine writes a
file that the workers read, or the workers receive the weights from the trainer.

Invariant: before a worker changes its model, it has all weights and has checked their names. A
later failure leaves a mixture of old and new weights and is reported (`VllmEngine` then ends).
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion

from agentevo.errors import EngineError, WeightsLostError
from agentevo.inference.engine import Weights
from agentevo.inference.weights.broadcast_files import IncomingWeights
from agentevo.inference.weights.broadcast_source import receive_place
from agentevo.inference.weights.weight_checks import check_shapes
from agentevo.models.compute.adapters import is_adapted
from agentevo.models.files.save import no_progress_bars
from agentevo.models.files.unused_tensors import write_unused
from agentevo.models.vision.parts import processor_of
from agentevo.runtime.decoding import decode_json
from agentevo.runtime.devices import identity

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agentevo.models.compute.parts import Spec

CALL_S = 60.0
"""The time limit for the workers to answer a call. They answer between two steps of the model."""
POLL_S = 0.05
Call = Callable[..., Awaitable[Any]]
"""A function that calls a method of every worker and returns their results, in the order of the
workers."""

T = TypeVar("T")


def write_base(model: PreTrainedModel, folder: Path, *, is_drafting: bool = False) -> None:
    """Writes the model that vLLM starts with, without adapters. A model that is shown images comes
    with its tokenizer and the files of its processor. `is_drafting`: vLLM may draft with the
    model's own heads, so they are written too."""
    with no_progress_bars():
        if is_adapted(model):
            base: Any = model.get_base_model()  # type: ignore[operator]
            state = {
                name.replace(".base_layer.", "."): tensor
                for name, tensor in base.state_dict().items()
                if ".lora_" not in name
            }
            base.save_pretrained(folder, state_dict=state)
        else:
            model.save_pretrained(folder)

        if is_drafting:
            write_unused(model, folder, only_drafts=True)

        processor = processor_of(model)
        if processor is not None:
            processor.save(folder)
            processor.tokenizer.save_pretrained(folder)


def write_adapter_weights(model: Any, weights: Weights, folder: Path) -> None:
    """Writes the weights of the adapter in use into a new folder, in PEFT's format."""
    folder.mkdir()
    name = model.active_adapter
    model.peft_config[name].save_pretrained(folder)
    tensors = {
        key.replace(f".{name}.weight", ".weight"): weight.detach().cpu().contiguous()
        for key, weight in weights.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")


def saves_as_it_is(model: PreTrainedModel, names: Iterable[str]) -> bool:
    """Whether a checkpoint of the model has tensors with these names of the model's modules."""
    placeholders = {
        name: torch.empty_like(model.get_parameter(name), device="meta", requires_grad=False)
        for name in names
    }
    saved = revert_weight_conversion(model, dict(placeholders))
    return saved.keys() == placeholders.keys() and all(
        saved[name] is placeholders[name] for name in placeholders
    )


def write_weights(model: PreTrainedModel, weights: Weights, path: Path) -> None:
    """Writes the weights as a checkpoint of `model` has them. A checkpoint may name and split
    tensors differently from the modules."""
    saved = revert_weight_conversion(model, dict(weights))
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in saved.items()}, path)


def remove_weights(path: Path | None) -> None:
    """Deletes weights that are no longer read."""
    if path is not None and path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    elif path is not None:
        path.unlink(missing_ok=True)


async def places_of_workers(
    call: Call, model: PreTrainedModel, specs: Mapping[str, Spec]
) -> list[str]:
    """The workers' devices. Empty if there is an adapter, which vLLM reads from files, or if a
    checkpoint of the model has other tensors than its modules. Raises EngineError for weights that
    are not the model's."""
    check_shapes(model, {name: spec.shape for name, spec in specs.items()})
    if is_adapted(model) or not saves_as_it_is(model, specs):
        return []
    async with asyncio.timeout(CALL_S):
        return list(await call("place_of_agentevo_weights"))


async def receive_in_workers(call: Call, incoming: IncomingWeights, base: Path) -> None:
    """Returns when every worker has received the weights. The workers' models have not changed
    then. This always ends, because each step of a worker has a deadline. Raises EngineError."""
    arguments = (msgspec.json.encode(incoming).decode(), str(base))
    async with asyncio.timeout(CALL_S):
        await call("begin_agentevo_weights", args=arguments)

    while True:
        async with asyncio.timeout(CALL_S):
            answers = await call("end_agentevo_weights")
        if None not in answers:
            break
        await asyncio.sleep(POLL_S)

    for kind, failure in (("refused", EngineError), ("lost", WeightsLostError)):
        for answer in answers:
            if answer[0] == kind:
                raise failure(f"weights {kind}, nothing changed: {answer[1]}")


class WeightLoader:
    """An extension of vLLM's workers. Each worker process has one."""

    model_runner: Any
    rank: int
    device: torch.device
    agentevo_weights: ClassVar[dict[str, torch.Tensor]] = {}
    """Weights that were read or received, but are not yet loaded."""
    agentevo_receiving: ClassVar[Future[dict[str, torch.Tensor]] | None] = None

    def read_agentevo_weights(self, path: str, base: str) -> None:
        """Reads the tensors from the file `path`. Reads tensors that are not in this file from the
        folder `base`, from which vLLM was started. The model does not change."""
        WeightLoader.agentevo_weights = _over_base(base, load_file(path))

    def place_of_agentevo_weights(self) -> str:
        """See `devices.identity`."""
        return identity(self.device)

    def begin_agentevo_weights(self, incoming: str, base: str) -> None:
        """As `read_agentevo_weights`, but starts to receive the weights, in a thread, so the model
        continues to compute."""

        def work() -> dict[str, torch.Tensor]:
            decoded = decode_json(incoming, IncomingWeights)
            changed = receive_place(decoded, self.rank, self.device)
            for name, tensor in changed.items():
                if not torch.isfinite(tensor).all():
                    raise EngineError(f"{name} holds NaN or infinity")
            return _over_base(base, changed)

        self._forget_agentevo_weights()  # weights of a round that another worker has lost
        WeightLoader.agentevo_receiving = _run_in_thread(work)

    def end_agentevo_weights(self) -> list[str] | None:
        """None while the weights are being received. Then `here`, or `lost` or `refused` with the
        reason."""
        coming = WeightLoader.agentevo_receiving
        if coming is None or not coming.done():
            return None

        error = coming.exception()
        if error is not None:
            kind = "lost" if isinstance(error, WeightsLostError) else "refused"
            return [kind, f"{type(error).__name__}: {error}"]

        WeightLoader.agentevo_weights = coming.result()
        return ["here"]

    def load_agentevo_weights(self) -> None:
        """Loads the weights that were read into the model. `load_weights` of vLLM's model is not
        enough: kernels on a CPU keep packed copies of weights."""
        tensors = WeightLoader.agentevo_weights
        self._forget_agentevo_weights()
        self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))

    def _forget_agentevo_weights(self) -> None:
        WeightLoader.agentevo_weights = {}
        WeightLoader.agentevo_receiving = None


def _over_base(base: str, changed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """These tensors, and the missing ones from the folder. Raises ValueError for a tensor that the
    folder does not have."""
    tensors = dict(changed)
    shapes = dict[str, list[int]]()
    for path in sorted(Path(base).glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                shapes[name] = file.get_slice(name).get_shape()
                if name not in changed:
                    tensors[name] = file.get_tensor(name)

    for name, tensor in changed.items():
        if shapes.get(name) != list(tensor.shape):
            raise ValueError(f"{name} {tuple(tensor.shape)} is none of the model's tensors")

    return tensors


def _run_in_thread(work: Callable[[], T]) -> Future[T]:
    """Runs the work in a daemon thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 (handed to the caller that asks for the result)
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
