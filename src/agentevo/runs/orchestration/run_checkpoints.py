"""The checkpoints of a run: what is saved and restored, when it counts as saved, and which one is
the best.

A checkpoint of a step is named by the step's record, or, if it is written in the background or
between two steps, by head.json.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch

from agentevo.models.files.save import saved_weights
from agentevo.models.files.split_models import in_parts
from agentevo.observability import LiveView
from agentevo.runs.folder.chain import End
from agentevo.runs.orchestration.background_save import BackgroundSave, copy_state, copy_weights
from agentevo.runs.orchestration.components import Components
from agentevo.runs.orchestration.learners import PolicyTrainers
from agentevo.runs.orchestration.run_record import RunRecord
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.learner import Learner
from agentevo.training.phases import phase


class RunCheckpoints:
    """See the module; a context around the run's steps, which waits for the save in progress."""

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
        self._background = BackgroundSave(self._note, record.warn)

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
        """Brings trainer and record to where they were when it was saved. The model is loaded
        already."""
        trained, state = self._folder.load(checkpoint, mapped=self._trainers.reads_parts)
        self._trainer.load_state_dict(trained)
        self._record.load_state_dict(state)

    def is_due(self, step: int, value: float | None) -> bool:
        """Whether the recipe asks for a checkpoint of the step, whose evaluation is `value`."""
        every = self._section.every
        return (bool(every) and step % every == 0) or self._is_best(value)

    def save(self, value: float | None = None) -> dict[str, str] | None:
        """Saves a checkpoint of the newest step, for its record; older ones stay until the step is
        committed. `value` is the step's evaluation, if any. Returns None if the checkpoint is
        written in the background, and no record will name it."""
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

    def keep(self) -> None:
        """Saves the committed weights, between two steps, if no checkpoint has them."""
        self.settle(wait=True)
        step = self._record.progress.step
        if self._folder.steps()[-1:] != [step]:
            self._note(step, self._writer(None, copied=False)())

    def keep_lost_best(self, end: End) -> None:
        """Saves the weights of the step that was just repeated where their evaluation is the best
        and their checkpoint is lost: a kill interrupted its background save, or it is torn. `end`:
        of the chain at that step."""
        rating = self._record.progress.newest_rating
        if rating is not None and rating.step == end.step and self._is_best(rating.value):
            self._note(end.step, self._writer(rating.value, copied=False, end=end)())

    def prune(self) -> None:
        """Deletes the checkpoints that the recipe does not keep."""
        self._folder.prune()

    def _is_best(self, value: float | None) -> bool:
        """Whether a checkpoint of weights with that evaluation is kept as the best one."""
        best = self._folder.best_value
        is_kept = self._section.keep_best and self._section.every > 0
        return is_kept and value is not None and (best is None or value > best)

    def _note(self, step: int, sha256: str) -> None:
        """A checkpoint exists that no record names."""
        self._record.head.note_checkpoint(step, sha256)
        if step <= self._record.end.step:
            self.prune()

    def _writer(
        self, value: float | None, *, copied: bool, end: End | None = None
    ) -> Callable[[], str]:
        """A function that writes the checkpoint of the newest step and returns its sha256.
        `copied`: it writes the state as it is now, whenever and on whichever thread it is called.
        `end`: see RunRecord.state_dict."""
        state = self._record.state_dict(end)
        parts = self._parts
        step = self._record.progress.step
        further_models = parts.saved_beside
        models = {"": parts.model} | {name: model for name, (model, _) in further_models.items()}
        copies: dict[str, dict[str, torch.Tensor]] = {}
        with phase("checkpoint"):
            trained, shared = self._trainers.state_of(self._trainer, copied=copied)
            if copied:
                trained = copy_state(trained)
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
                    trained,
                    state,
                    value,
                    prune=False,
                    further_models=further_models,
                    contribution=shared,
                    copies=copies,
                )[1]

        return write
