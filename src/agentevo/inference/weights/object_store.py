"""Sends weights through an object store to engines that share no folder with the trainer. The store
is any file system that fsspec knows (`objects.py`), under rollout.weights.url.

An object appears whole or not at all, but folders can't be renamed. A version's files are therefore
uploaded concurrently, and the size of each is checked; its manifest and latest.json are uploaded
last. Checksums detect an upload that broke off or is not finished. Readers never rely on listings,
which can be outdated. Listings are only used to delete old versions.

`writer.json` has a random id that is also in the trainer's run folder. So the trainer of another
run, whose weights this run's engines would read, is refused. `config.yaml` is the run's
configuration, for machines that join the run without its folder (runs/folder/identity.py). Engines
announce themselves under `engines/` (`announcements.py`).
"""

from __future__ import annotations

import hashlib
import io
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from agentevo.errors import EngineError
from agentevo.inference.weights.objects import CALL_S, Objects
from agentevo.inference.weights.weight_transport import (
    CONFIG_FILE,
    LATEST_FILE,
    WRITER_FILE,
    Latest,
    is_others,
    others_weights,
)
from agentevo.inference.weights.weight_versions import (
    MANIFEST_FILE,
    SIDE_BY_SIDE,
    ManifestPart,
    VersionManifest,
    WeightVersions,
    folder_name,
    version_numbers,
)
from agentevo.models.compute.parts import Spec
from agentevo.models.files.tensor_file import TensorFile
from agentevo.runtime.files import write_atomic

POLL_INTERVAL_S = 1.0
"""An engine requests latest.json from the store at most this often."""


class ObjectStoreWeights(WeightVersions):
    """Weight versions in an object store. See the module. `id_file`: the trainer's file with the id
    of its run's weights. `config`: the configuration that the trainer stores next to the weights.
    Both are None for a reader."""

    def __init__(
        self,
        url: str,
        *,
        full_every: int = 1,
        id_file: Path | None = None,
        config: str | None = None,
        call_s: float = CALL_S,
        poll_interval_s: float = 0.0,
    ) -> None:
        """Raises ConfigError for an address that fsspec does not know, MissingExtraError if its
        package is not installed."""
        super().__init__(full_every=full_every)
        self._id_file = id_file
        self._poll_interval_s = poll_interval_s
        self._config = config
        self.objects = Objects(url, call_s=call_s)
        self._looked: tuple[float, Latest | None] | None = None

    @property
    def place(self) -> str:
        """See WeightSource.place."""
        return self.objects.url

    def versions(self) -> list[int]:
        """See WeightVersions.versions. Read from the store's listing."""
        return version_numbers(self.objects.under())

    def latest_version(self) -> Latest | None:
        """See WeightVersions.latest_version."""
        if self._looked is not None and time.monotonic() - self._looked[0] < self._poll_interval_s:
            return self._looked[1]
        latest = super().latest_version()
        self._looked = (time.monotonic(), latest)
        return latest

    def state(self, version: int) -> tuple[str, ...]:
        """See WeightVersions.state. The manifest names what the version builds on."""
        paths = (LATEST_FILE, _path(version, MANIFEST_FILE))
        return tuple(self.objects.state(path) for path in paths)

    def write(
        self, version: int, model: torch.nn.Module, *, keep: int, in_full: bool = False
    ) -> str:
        """See WeightVersions.write. Raises EngineError if another run has its weights there."""
        self._claim()
        return super().write(version, model, keep=keep, in_full=in_full)

    def _claim(self) -> None:
        """Claims this address for this run."""
        assert self._id_file is not None, "who only reads writes nothing"
        try:
            writer_id = self._id_file.read_text()
        except FileNotFoundError:
            writer_id = uuid.uuid4().hex
            self._id_file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._id_file, writer_id, durable=True)

        try:
            stored_id = self._get(None, WRITER_FILE).decode(errors="replace")
        except FileNotFoundError:
            stored_id = ""

        if stored_id != writer_id and not is_others(stored_id, writer_id):
            self.objects.put(WRITER_FILE, writer_id.encode())
            stored_id = self._get(None, WRITER_FILE).decode(errors="replace")

        if stored_id != writer_id:
            raise EngineError(others_weights(self.place))

        if self._config is not None:
            self.objects.put(CONFIG_FILE, self._config.encode())
            self._config = None

    def _get(self, version: int | None, file: str) -> bytes:
        return self.objects.get(_path(version, file))

    def _put(
        self,
        files: dict[str, dict[str, Spec]],
        tensors: Iterator[tuple[str, torch.Tensor]],
        manifest: VersionManifest,
    ) -> VersionManifest:
        """At most SIDE_BY_SIDE + 1 files are in memory at a time."""
        version = manifest.version

        def upload(file: str, raw: bytes) -> ManifestPart:
            self.objects.put(_path(version, file), raw)
            return ManifestPart(file, hashlib.sha256(raw).hexdigest(), len(raw))

        uploads: list[Future[ManifestPart]] = []
        with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
            for file, specs in files.items():
                buffer = io.BytesIO()
                TensorFile(buffer, specs).add_all(tensors)
                if len(uploads) >= SIDE_BY_SIDE:
                    uploads[-SIDE_BY_SIDE].result()
                uploads.append(threads.submit(upload, file, buffer.getvalue()))

        manifest = manifest.with_parts([upload.result() for upload in uploads])
        self.objects.put(_path(version, MANIFEST_FILE), msgspec.json.encode(manifest))
        return manifest

    def _put_latest(self, content: bytes) -> None:
        self._claim()
        self.objects.put(LATEST_FILE, content)

    def _delete(self, version: int) -> None:
        try:
            self.objects.delete(folder_name(version), recursive=True)
        except OSError:
            return  # the version is old, and deleting is tried again with the next one

    def _check_part(self, version: int, part: ManifestPart) -> None:
        """Compares only the size, because the store may charge for reading. Readers compare the
        checksums."""
        try:
            size = self.objects.info(_path(version, part.file)).get("size")
        except OSError as error:
            raise self._unreadable(version, error) from error

        if size != part.bytes:
            raise EngineError(
                f"{self._name(version)}/{part.file} has {size} bytes and not {part.bytes}: torn"
            )


def _path(version: int | None, file: str) -> str:
    return file if version is None else f"{folder_name(version)}/{file}"
