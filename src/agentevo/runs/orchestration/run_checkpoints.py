"""The checkpoints of a run: their contents, the time at which a checkpoint counts as saved, and the
choice of the best one.

The record of a step names the step's checkpoint. If the checkpoint is written in the background or
between two steps, head.json names it.
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

    def keep(self) -> None:
        """Saves the committed weights between two steps, unless a checkpoint has them."""
        self.settle(wait=True)
        step = self._record.progress.step
        if self._folder.steps()[-1:] != [step]:
            self._name_in_head(step, self._writer(None, copied=False)())

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
