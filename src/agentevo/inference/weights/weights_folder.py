"""Sends weights from the trainer to engines in other processes, through a folder that all of them
can access.

Invariants, in addition to those of weight_versions.py: a version's folder appears whole or not at
all, and `latest.json` names a version only after that (files and folders are synced to the disk in
this order). The writer detects later damage to a version (disk errors, manual changes) by `check`,
and repairs it by writing the version again. `latest` is the version that was written last. It may
be lower than an earlier one if a trainer resumed from a checkpoint.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from agentevo.errors import EngineError
from agentevo.inference.weights.weight_transport import LATEST_FILE
from agentevo.inference.weights.weight_versions import (
    MANIFEST_FILE,
    ManifestPart,
    VersionManifest,
    WeightVersions,
    folder_name,
    in_parallel,
    version_numbers,
)
from agentevo.models.compute.parts import Spec
from agentevo.models.files.tensor_file import write_files
from agentevo.runtime.files import PARTIAL, atomic_folder, sync_to_disk, write_atomic


class WeightsFolder(WeightVersions):
    """Weight versions in a folder. See the module. Reading and writing block until the disk is
    done."""

    def __init__(self, folder: Path, *, full_every: int = 1) -> None:
        super().__init__(full_every=full_every)
        self.folder = folder

    @property
    def place(self) -> str:
        """See WeightSource.place."""
        return str(self.folder)

    def path(self, version: int) -> Path:
        """The folder of that version, which may not exist."""
        return self.folder / folder_name(version)

    def versions(self) -> list[int]:
        """See WeightVersions.versions."""
        return version_numbers(path.name for path in self.folder.glob("version-*"))

    def state(self, version: int) -> tuple[tuple[str, int, int, int], ...]:
        """See WeightVersions.state. It includes the state of the versions that this version builds
        on."""
        try:
            chain = [link.version for link in self._manifest(version, None).chain]
        except EngineError:
            chain = []

        files = [self.folder / LATEST_FILE]
        for number in (*chain, version):
            files += sorted(self.path(number).glob("*"))

        states = []
        for file in files:
            try:
                info = file.stat()
            except OSError:
                continue
            name = str(file.relative_to(self.folder))
            states.append((name, info.st_ino, info.st_mtime_ns, info.st_size))

        return tuple(states)

    def _get(self, version: int | None, file: str) -> bytes:
        folder = self.folder if version is None else self.path(version)
        return (folder / file).read_bytes()

    def _put(
        self,
        files: dict[str, dict[str, Spec]],
        tensors: Iterator[tuple[str, torch.Tensor]],
        manifest: VersionManifest,
    ) -> VersionManifest:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Left by a writer that was killed. Only one writer exists at a time.
        for leftover in self.folder.glob(f".*{PARTIAL}"):
            shutil.rmtree(leftover, ignore_errors=True)

        with atomic_folder(self.path(manifest.version)) as staging:
            write_files(staging, files, tensors)
            manifest = manifest.with_parts(
                in_parallel(_sync_part, [staging / file for file in files])
            )
            (staging / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
            sync_to_disk(staging / MANIFEST_FILE)
            sync_to_disk(staging)

        sync_to_disk(self.folder)
        return manifest

    def _put_latest(self, content: bytes) -> None:
        write_atomic(self.folder / LATEST_FILE, content, durable=True)

    def _delete(self, version: int) -> None:
        shutil.rmtree(self.path(version), ignore_errors=True)

    def _check_part(self, version: int, part: ManifestPart) -> None:
        """Reads the file again."""
        try:
            actual = _sha256(self.path(version) / part.file)
        except OSError as error:
            raise self._unreadable(version, error) from error
        self._compare(version, part, actual)


def _sync_part(path: Path) -> ManifestPart:
    """Syncs a written file to the disk, so that it survives a power cut. Returns its manifest
    entry."""
    sync_to_disk(path)
    return ManifestPart(path.name, _sha256(path), path.stat().st_size)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
