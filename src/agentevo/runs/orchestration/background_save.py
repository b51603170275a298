"""A checkpoint that is written while the run continues.

    start(step, write) -> a thread writes -> settle: the run records it, or ends with the failure

At most one save is in progress. The thread writes a copy in the CPU's memory that was made before.
A step counts as saved only when its folder is complete and the run has recorded it (head.json),
which happens as soon as the event loop is free. A kill before that leaves a folder that a resume
deletes; the resume continues from the previous checkpoint. A failure is reported immediately and
ends the run before its next step.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from agentevo.errors import AgentEvoError, CheckpointError, describe_error
from agentevo.models.compute.parts import WeightPart


class BackgroundSave:
    """See the module."""

    def __init__(self, saved: Callable[[int, str], None], warn: Callable[[str], None]) -> None:
        """`saved(step, sha256)` and `warn` are called on the run's thread."""
        self._saved = saved
        self._warn = warn
        self._thread: threading.Thread | None = None
        self._step = 0
        self._outcome: str | Exception | None = None

    def start(self, step: int, write: Callable[[], str]) -> None:
        """`write` returns the checkpoint's sha256. No other save may be in progress (`settle`)."""
        assert self._thread is None, "one checkpoint at a time"

        loop = _running_loop()

        def work() -> None:
            try:
                self._outcome = write()
            except Exception as error:  # noqa: BLE001 (told at once, and raised by `settle`)
                self._outcome = error
            if loop is not None and not loop.is_closed():
                loop.call_soon_threadsafe(self._look)

        self._step = step
        self._outcome = None
        self._thread = threading.Thread(target=work, name=f"checkpoint {step}", daemon=True)
        self._thread.start()

    def settle(self, *, wait: bool) -> None:
        """Records the checkpoint that was written. `wait`: until it is written. Raises
        CheckpointError if it could not be written."""
        if self._thread is None or not (wait or self._outcome is not None):
            return

        self._thread.join()
        outcome = self._outcome
        self._thread = None
        self._outcome = None

        if isinstance(outcome, AgentEvoError):
            raise outcome

        if isinstance(outcome, Exception):
            raise CheckpointError(
                f"the checkpoint of step {self._step} could not be written "
                f"({describe_error(outcome)}): resume from an older one"
            ) from outcome

        assert outcome is not None

        self._saved(self._step, outcome)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Waits for the save in progress when the run has failed for another reason. A failure of
        the save is reported as a warning and not raised."""
        try:
            self.settle(wait=True)
        except AgentEvoError as error:
            self._warn(str(error))

    def _look(self) -> None:
        """Called on the event loop when the thread has ended."""
        if isinstance(self._outcome, Exception):
            self._warn(f"checkpoint of step {self._step}: {describe_error(self._outcome)}")
        else:
            self.settle(wait=False)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def copy_weights(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of a model's weights by name. Tied weights remain one tensor, since a model's folder
    has them once."""
    copies_by_storage: dict[tuple[int, torch.Size], torch.Tensor] = {}
    copies = {}
    for name, tensor in weights.items():
        key = (tensor.data_ptr(), tensor.shape) if tensor.numel() else (id(tensor), tensor.shape)
        if key not in copies_by_storage:
            copies_by_storage[key] = _copy_tensor(tensor)
        copies[name] = copies_by_storage[key]

    return copies


def copy_state(state: Any) -> Any:
    """A copy of a trainer's state. Later steps do not change it."""
    if isinstance(state, torch.Tensor):
        return _copy_tensor(state)
    if isinstance(state, WeightPart):
        return state.copy_to_cpu()
    if isinstance(state, dict):
        return {key: copy_state(value) for key, value in state.items()}
    if isinstance(state, list):
        return [copy_state(value) for value in state]
    return copy.deepcopy(state)


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return copy.deepcopy(tensor.detach())  # an 8-bit tensor, for example, copies itself
    return tensor.detach().to("cpu", copy=True)
