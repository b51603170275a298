"""Checkpoints: a Hugging Face model folder, or a PEFT adapter's, together with the optimizer and
the run's state.

    checkpoints/step-000010/   model.safetensors, config.json, tokenizer files, trainer.pt,
                               state.json, checkpoint.json (with adapters:
                               adapter_model.safetensors and adapter_config.json in place of the
                               first two; of sharded trainers: trainer/, see state_parts.py)
    checkpoints/index.json     {"steps": [...], "best": {"step": 10, "value": 0.9} | null}, for
                               readers; not read here

A folder appears whole or not at all: it is written under another name, hashed (`manifest.py`),
synced to the disk, then renamed. Deleting begins with a rename too. Later damage (a failing disk, a
careless copy) shows in its checksums. The newest `keep_last` stay, and with `keep_best` the best
one.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import uuid
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentevo.errors import CheckpointError, UnusableCheckpointError
from agentevo.models import checkpoint_manifest as manifest
from agentevo.models.checkpoint_manifest import CheckpointManifest, TornError
from agentevo.models.compute.adapters import is_adapter_folder
from agentevo.models.compute.parts import WholeTensors
from agentevo.models.files.save import write_model
from agentevo.runtime.files import PARTIAL, atomic_folder, sync_to_disk, write_atomic
from agentevo.runtime.parsing import read_json_object
from agentevo.training.checkpoint_parts import Contribution
from agentevo.training.parallel import on_first
from agentevo.training.state_parts import FOLDER, PartsError, join_state, split_state

T = TypeVar("T")
INDEX = "index.json"
"""The index in the folder of all checkpoints."""
_NAME = re.compile(r"step-(\d{6,})")


class Checkpoints:
    """The checkpoint folder of one run."""

    def __init__(
        self, folder: Path, keep_last: int, *, keep_best: bool = True, is_only_caller: bool = False
    ) -> None:
        """`is_only_caller`: of several processes that train together, only this one calls."""
        self.folder = folder
        self.keep_last = keep_last
        self._keep_best = keep_best
        self._is_only_caller = is_only_caller
        self.best_value, self.best_step = self._best()
        """The highest evaluation, and the step of the newest checkpoint that has it."""

    def steps(self) -> list[int]:
        """The steps whose checkpoint has all its files, in order. `verify` checks the content of
        the files."""
        return sorted(self._manifests())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def find(self, which: str) -> Path:
        """The folder of the named checkpoint: `last`, `best`, step-NUMBER or a path. Raises
        UnusableCheckpointError."""
        if which not in {"last", "best"}:
            path = Path(which) if Path(which).exists() else self.folder / which
            if not (path / "config.json").is_file() and not is_adapter_folder(path):
                raise UnusableCheckpointError(
                    f"{which} is not a checkpoint (no config.json or adapter_config.json): give "
                    f"one under {self.folder}, `last` or `best`"
                )
            return path

        steps = self.steps()
        if not steps:
            raise UnusableCheckpointError(
                f"{self.folder} has no complete checkpoint: train with checkpoint.every above 0, "
                f"or "
                "let a run finish"
            )

        return self.path(
            self.best_step if which == "best" and self.best_step in steps else steps[-1]
        )

    def save(
        self,
        step: int,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        trainer_state: dict[str, Any],
        run_state: dict[str, Any],
        value: float | None,
        *,
        prune: bool = True,
        further_models: Mapping[
            str, tuple[PreTrainedModel, PreTrainedTokenizerBase]
        ] = MappingProxyType({}),
        contribution: Contribution | None = None,
        copies: Mapping[str, Mapping[str, torch.Tensor]] = MappingProxyType({}),
    ) -> tuple[Path, str]:
        """Writes the checkpoint of `step`; returns its folder and the sha256 that identifies its
        whole content (`CheckpointManifest.sha256`).

        `value` is its evaluation, if there was one. `further_models`: models, each in a folder
        below the checkpoint's. `prune=False` leaves `prune` to the caller, who commits the step in
        between: until then the older checkpoints may be the only ones that a resumed run can use.
        Raises CheckpointError if it can't be written. Then no part of it remains, and the older
        ones are unchanged. Where several processes train, all of them call it, and the first one
        writes.

        `contribution`: the parts of the model and of `trainer_state` that are on several processes;
        all processes add theirs while only the first one calls this. `copies`: folder -> the
        weights that are written in place of that model's own (`saved_weights`), "" for the main
        one.
        """
        models = {"": (model, tokenizer), **further_models}
        state = (trainer_state, run_state)
        sha256 = self._on_first(
            lambda: self._write(step, models, state, value, contribution, copies)
        )
        self.best_value, self.best_step = self._on_first(self._best)

        if prune:
            self.prune()
        else:
            self._on_first(self._write_index)

        return self.path(step), sha256

    def _on_first(self, work: Callable[[], T]) -> T:
        return work() if self._is_only_caller else on_first(work)

    def _write(
        self,
        step: int,
        models: Mapping[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]],
        state: tuple[dict[str, Any], dict[str, Any]],
        value: float | None,
        contribution: Contribution | None,
        copies: Mapping[str, Mapping[str, torch.Tensor]],
    ) -> str:
        """`state`: of the trainer and of the run."""
        value = float(value) if value is not None and math.isfinite(value) else None
        plain, _ = split_state(state[0])
        try:
            with _SharedCheckpoint(contribution) as shared:
                self.folder.mkdir(parents=True, exist_ok=True)
                with atomic_folder(self.path(step)) as staging:
                    for folder, (model, tokenizer) in models.items():
                        (staging / folder).mkdir(parents=True, exist_ok=True)
                        weights = None if folder else shared.weights
                        write_model(
                            model,
                            tokenizer,
                            staging / folder,
                            weights=copies.get(folder) if weights is None else weights,
                        )

                    _write_state(plain, staging / "trainer.pt")
                    (staging / "state.json").write_text(
                        json.dumps(state[1], indent=1), encoding="utf-8"
                    )
                    sealed = manifest.seal(staging, step, value, shared.finish(staging))

            sync_to_disk(self.folder)
        except (OSError, SafetensorError, PartsError) as error:
            older = ", ".join(str(s) for s in self.steps() if s != step) or "none"
            raise CheckpointError(
                f"{self.path(step)} could not be written ({error}): make room there and resume; "
                f"no part of it remains, and the complete checkpoints of other steps are "
                f"unchanged (steps: {older})"
            ) from error

        return sealed.sha256

    def prune(self) -> None:
        """Deletes the checkpoints beyond the kept ones; see `save` for its caller."""
        self._on_first(self._prune)

    def _prune(self) -> None:
        steps = self.steps()
        kept_steps = set(steps[-self.keep_last :])
        if self._keep_best and self.best_step is not None:
            kept_steps.add(self.best_step)

        for old in steps:
            if old not in kept_steps:
                self._delete(self.path(old))
        self._write_index()

    @staticmethod
    def verify(path: Path) -> CheckpointManifest:
        """Reads every file of a checkpoint again. Raises TornError, naming the first file that is
        missing or changed, CheckpointError for one that can't be read now."""
        sealed = manifest.verify(path)
        name = _NAME.fullmatch(path.name)
        if name is not None and int(name.group(1)) != sealed.step:
            raise TornError(
                f"{path / manifest.NAME} is of step {sealed.step}: the folder was renamed; "
                "resume from another one"
            )

        return sealed

    def newest_whole(
        self,
        limit: int | None = None,
        *,
        torn: Callable[[int, CheckpointError], None] = lambda step, error: None,
    ) -> int | None:
        """The newest step, up to `limit`, whose checkpoint is whole to the last byte; None if there
        is none.

        `torn` is called with every newer step whose checkpoint is not, and why. Raises
        CheckpointError for one that can't be read now, which may be whole.
        """
        for step in sorted(self.folders(), reverse=True):
            if limit is not None and step > limit:
                continue

            path = self.path(step)
            try:
                self.verify(path)
            except TornError as error:
                torn(step, error)
            else:
                return step

        return None

    def load(self, path: Path, *, mapped: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        """Trainer state and run state of a checkpoint. State that several processes have saved in
        parts is `Stored` in it, and is read when it is used. `mapped`: other tensors are
        memory-mapped, for a caller that needs a part of each. Raises UnusableCheckpointError if it
        can't be read."""
        try:
            if not zipfile.is_zipfile(
                path / "trainer.pt"
            ):  # torn or not a checkpoint, on which torch.load may raise anything
                raise ValueError("trainer.pt is not whole")
            saved = torch.load(path / "trainer.pt", weights_only=True, mmap=mapped)
            trainer_state = join_state(saved, path / FOLDER)
        except Exception as error:
            raise self._unusable(path, error) from error

        return trainer_state, self.run_state(path)

    @classmethod
    def run_state(cls, path: Path) -> dict[str, Any]:
        """Only the run state of a checkpoint. Raises as `load`."""
        try:
            return read_json_object(path / "state.json")
        except Exception as error:
            raise cls._unusable(path, error) from error

    @staticmethod
    def _unusable(path: Path, error: Exception) -> UnusableCheckpointError:
        return UnusableCheckpointError(
            f"{path} can't be read as a checkpoint ({type(error).__name__}: {error}): resume "
            "from an older one"
        )

    def forget_after(self, step: int) -> None:
        """Deletes the checkpoints after `step`, from which a resumed run starts, and files that a
        kill left half-written."""
        for torn in self.folder.glob(f".step-*{PARTIAL}"):
            shutil.rmtree(torn)
        for later in self.folders():
            if later > step:
                self._delete(self.path(later))
        self.best_value, self.best_step = self._best()
        self._write_index()

    def folders(self) -> list[int]:
        """The steps that have a folder, whether whole or torn."""
        if not self.folder.is_dir():
            return []

        candidates = [
            (match, path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))
        ]
        return [
            int(match.group(1))
            for match, path in candidates
            if path == self.path(int(match.group(1)))
        ]

    def _manifests(self) -> dict[int, CheckpointManifest]:
        """Step -> manifest, for the checkpoints that have all their files."""
        manifests = {}
        for step in self.folders():
            path = self.path(step)
            try:
                sealed = manifest.read(path)
            except CheckpointError:
                continue  # incomplete, or not readable now; newest_whole distinguishes them
            if all((path / name).is_file() for name in sealed.files):
                manifests[step] = sealed

        return manifests

    def _best(self) -> tuple[float | None, int | None]:
        """The (value, step) of the best checkpoint on disk."""
        rated = [
            (sealed.value, step)
            for step, sealed in self._manifests().items()
            if sealed.value is not None
        ]
        return max(rated, default=(None, None))

    def _delete(self, path: Path) -> None:
        """Deletes a checkpoint. A kill in the middle leaves a hidden folder, never half a
        checkpoint."""
        hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old{PARTIAL}")
        path.rename(hidden)
        shutil.rmtree(hidden)

    def _write_index(self) -> None:
        best = (
            None if self.best_step is None else {"step": self.best_step, "value": self.best_value}
        )
        index = json.dumps({"steps": self.steps(), "best": best})
        try:
            write_atomic(self.folder / INDEX, index)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder / INDEX} could not be written ({error}): make room there and "
                f"resume; the checkpoints are unchanged"
            ) from error


class _SharedCheckpoint:
    """A context around the first process's writing: the other processes add their parts, and are
    released if nothing is written. Without other processes it does nothing."""

    def __init__(self, contribution: Contribution | None) -> None:
        self._contribution = contribution
        self._done = contribution is None
        self.weights: WholeTensors | None = None
        """The model's, one whole tensor after the other; None: the model has them."""
        if contribution is not None and contribution.weights:
            self.weights = contribution.tensors()

    def finish(self, folder: Path) -> dict[str, str]:
        """Makes all processes write into the checkpoint's folder: file -> sha256."""
        if self._contribution is None:
            return {}
        self._done = True
        digests = self._contribution.finish(folder / FOLDER)
        return {f"{FOLDER}/{name}": digest for name, digest in digests.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._contribution is None or self._done:
            return
        if self.weights is not None:
            self.weights.close()
        self._contribution.finish(None)


def _write_state(state: dict[str, Any], path: Path) -> None:
    """Writes a state with torch.save. Raises the OSError itself, which torch.save would replace by
    an error about positions in its archive."""
    with path.open("wb") as file:  # with a path, torch would lose the reason of the error
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
