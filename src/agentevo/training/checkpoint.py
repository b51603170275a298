"""Checkpoints: a Hugging Face model folder, or a PEFT adapter's, with the optimizer and the run's state beside it.

    checkpoints/step-000010/   model.safetensors, config.json, tokenizer files, trainer.pt, state.json
                               (with adapters: adapter_model.safetensors, adapter_config.json in place of the first two)
    checkpoints/index.json     {"steps": [...], "best": {"step": 10, "value": 0.9} | null}

A folder appears whole or not at all (written beside, then renamed). The newest `keep_last` stay, and the best one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentevo.errors import CheckpointError
from agentevo.models.adapters import is_adapter_folder
from agentevo.models.folder import atomic_folder
from agentevo.models.load import write_model

_NAME = re.compile(r"step-(\d{6,})")


class Checkpoints:
    """The checkpoint folder of one run."""

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder, self.keep_last = folder, keep_last
        self.best_step: int | None = None
        self.best_value: float | None = None
        index = folder / "index.json"
        if index.is_file():
            best = json.loads(index.read_text(encoding="utf-8")).get("best")
            if best is not None:
                self.best_step, self.best_value = int(best["step"]), float(best["value"])

    def steps(self) -> list[int]:
        """Steps that have a whole checkpoint, in order."""
        if not self.folder.is_dir():
            return []
        found = [(match, path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return sorted(int(match.group(1)) for match, path in found if (path / "state.json").is_file())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def find(self, which: str) -> Path:
        """`last`, `best`, or the path of a checkpoint folder. Raises CheckpointError."""
        if which not in {"last", "best"}:
            path = Path(which)
            if not (path / "config.json").is_file() and not is_adapter_folder(path):
                raise CheckpointError(
                    f"{path} is not a checkpoint (no config.json or adapter_config.json): give one under {self.folder}, `last` or `best`"
                )
            return path
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"{self.folder} has no whole checkpoint: train with checkpoint.every above 0, or let a run finish")
        return self.path(self.best_step if which == "best" and self.best_step in steps else steps[-1])

    def save(
        self,
        step: int,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        trainer_state: dict[str, Any],
        run_state: dict[str, Any],
        value: float | None,
    ) -> Path:
        """Writes the checkpoint of `step`, names it best if `value` beats the best so far, drops what need not be kept."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_folder(self.path(step)) as staging:
            write_model(model, tokenizer, staging)
            torch.save(trainer_state, staging / "trainer.pt")
            (staging / "state.json").write_text(json.dumps(run_state, indent=1), encoding="utf-8")
        if value is not None and (self.best_value is None or value >= self.best_value):
            self.best_step, self.best_value = step, value
        steps = self.steps()
        kept = [s for s in steps if s in steps[-self.keep_last :] or s == self.best_step]
        self._write_index(kept)
        for old in set(steps) - set(kept):
            shutil.rmtree(self.path(old))
        return self.path(step)

    def load(self, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Trainer state and run state of a checkpoint. Raises CheckpointError if it can't be read."""
        try:
            if not zipfile.is_zipfile(path / "trainer.pt"):  # torn or none at all, on which torch.load may raise anything
                raise ValueError("trainer.pt is not whole")
            trainer_state = torch.load(path / "trainer.pt", weights_only=True)
            run_state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise CheckpointError(
                f"{path} can't be read as a checkpoint ({type(error).__name__}: {error}): resume from an older one"
            ) from error
        return trainer_state, run_state

    def forget_after(self, step: int) -> None:
        """A resumed run starts at `step`: later checkpoints are of an undone future, and what a kill left half-written goes too."""
        for torn in self.folder.glob(".step-*"):
            shutil.rmtree(torn)
        steps = self.steps()
        if self.best_step is not None and self.best_step > step:
            self.best_step = self.best_value = None
        self._write_index([s for s in steps if s <= step])
        for later in steps:
            if later > step:
                shutil.rmtree(self.path(later))

    def _write_index(self, steps: list[int]) -> None:
        best = None if self.best_step is None else {"step": self.best_step, "value": self.best_value}
        staging = self.folder / "index.json.tmp"
        staging.write_text(json.dumps({"steps": steps, "best": best}), encoding="utf-8")
        os.replace(staging, self.folder / "index.json")
