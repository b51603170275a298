"""The checkpoints of a run: their contents, the time at which a checkpoint counts as saved, and the
choice of the best one.

The record of a step names the step's checkpoint. If the checkpoint is written in the background or
between two steps, head.json names it.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch

from agentevo.errors import AgentEvoError, CheckpointError, describe_error
from agentevo.models.compute.parts import WeightPart
from agentevo.models.files.save import saved_weights
from agentevo.models.files.split_models import in_parts
from agentevo.observability import LiveView
from agentevo.runs.folder.chain import End
from agentevo.runs.orchestration.components import Components
from agentevo.runs.orchestration.rank_trainers import PolicyTrainers
from agentevo.runs.orchestration.run_record import RunRecord
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.learner import Learner
from agentevo.training.phases import phase


class RunCheckpoints:
    """Saves and restores the checkpoints of a run. As a context manager around the run's steps, it
    waits at the end for a save in progress."""

    def __init__(
        self,
        parts: Components,
        folder: Checkpoints,
        record: RunRecord,
        trainers: PolicyTrainers,
        trainer: Learner,
        view: LiveView,
    ) -> None:
        self._parts = parts
        self._section = parts.config.checkpoint
        self._folder = folder
        self._record = record
        self._trainers = trainers
        self._trainer = trainer
        self._view = view
        self._background = BackgroundSave(self._name_in_head, record.warn)

    def __enter__(self) -> Self:
        self._background.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._background.__exit__(*exception)

    @property
    def best(self) -> dict[str, float | None]:
        """The step and the evaluation of the best checkpoint."""
        return {"step": self._folder.best_step, "value": self._folder.best_value}

    def settle(self, *, wait: bool) -> None:
        """See BackgroundSave.settle."""
        self._background.settle(wait=wait)

    def restore(self, checkpoint: Path) -> None:
        """Restores the state of trainer and record from a checkpoint. The model is loaded
        already."""
        trainer_state, state = self._folder.load(checkpoint, mapped=self._trainers.reads_parts)
        self._trainer.load_state_dict(trainer_state)
        self._record.load_state_dict(state)

    def is_due(self, step: int, value: float | None) -> bool:
        """Whether the recipe asks for a checkpoint of the step, whose evaluation is `value`."""
        interval = self._section.every
        return (bool(interval) and step % interval == 0) or self._is_best(value)

    def save(self, value: float | None = None) -> dict[str, str] | None:
        """Saves a checkpoint of the newest step, and returns its entry for the step's record. Older
        checkpoints stay until the step is committed. `value`: the step's evaluation, if any.
        Returns None if the checkpoint is written in the background: no record names it."""
        self.settle(wait=True)
        step = self._record.progress.step
        copied = self._section.background
        self._view.phase("saving", f"checkpoint of step {step}")

        write = self._writer(value, copied=copied)
        if copied:
            self._background.start(step, write)
            return None

        path = self._folder.path(step).relative_to(self._parts.config.run_dir)
        return {"path": str(path), "sha256": write()}

    def keep(self, value: float | None = None) -> None:
        """Saves the committed weights between two steps, unless a checkpoint has them. `value`:
        their evaluation, if any."""
        self.settle(wait=True)
        step = self._record.progress.step
        if self._folder.steps()[-1:] != [step]:
            self._name_in_head(step, self._writer(value, copied=False)())

    def keep_lost_best(self, end: End) -> None:
        """Saves the weights of the step that was just repeated if their evaluation is the best one
        and their checkpoint is lost, because the process was killed during the background save or
        the checkpoint is torn. `end`: the end of the chain at that step."""
        rating = self._record.progress.newest_rating
        if rating is not None and rating.step == end.step and self._is_best(rating.value):
            self._name_in_head(end.step, self._writer(rating.value, copied=False, end=end)())

    def prune(self) -> None:
        """Deletes the checkpoints that the recipe does not keep."""
        self._folder.prune()

    def _is_best(self, value: float | None) -> bool:
        """Whether a checkpoint with the evaluation `value` would be the best one, and is kept."""
        best = self._folder.best_value
        is_kept = self._section.keep_best and self._section.every > 0
        is_kept = is_kept or self._record.chooses_by_gap
        return is_kept and value is not None and (best is None or value > best)

    def _name_in_head(self, step: int, sha256: str) -> None:
        """Names a saved checkpoint in head.json, because no record names it."""
        self._record.head.note_checkpoint(step, sha256)
        if step <= self._record.end.step:
            self.prune()

    def _writer(
        self, value: float | None, *, copied: bool, end: End | None = None
    ) -> Callable[[], str]:
        """A function that writes the checkpoint of the newest step and returns its sha256.
        `copied`: the function writes the state at the time of this call, and may run later on any
        thread. `end`: see RunRecord.state_dict."""
        state = self._record.state_dict(end)
        parts = self._parts
        step = self._record.progress.step
        further_models = parts.saved_beside
        models = {"": parts.model} | {name: model for name, (model, _) in further_models.items()}
        copies: dict[str, dict[str, torch.Tensor]] = {}
        with phase("checkpoint"):
            trainer_state, contribution = self._trainers.state_of(self._trainer, copied=copied)
            if copied:
                trainer_state = copy_state(trainer_state)
                copies = {
                    name: copy_weights(saved_weights(model))
                    for name, model in models.items()
                    if in_parts(model) is None
                }

        def write() -> str:
            with phase("checkpoint"):
                return self._folder.save(
                    step,
                    parts.model,
                    parts.tokenizer,
                    trainer_state,
                    state,
                    value,
                    prune=False,
                    further_models=further_models,
                    contribution=contribution,
                    copies=copies,
                )[1]

        return write


class BackgroundSave:
    """A checkpoint that is written while the run continues.

        start(step, write) -> a thread writes -> settle: the run records it, or ends with the error

    At most one save is in progress. The thread writes a copy in the CPU's memory that was made
    before. A step counts as saved only when its folder is complete and the run has recorded it
    (head.json), which happens as soon as the event loop is free. A kill before that leaves a folder
    that a resume deletes; the resume continues from the previous checkpoint. A failure is reported
    immediately and ends the run before its next step.
    """

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
