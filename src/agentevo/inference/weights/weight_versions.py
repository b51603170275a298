"""Versions of the trained weights in files, whole or as changes, in any kind of storage.

    latest.json  version-000012/manifest.json  version-000012/weights.safetensors
                 version-000013/manifest.json  version-000013/delta.safetensors

A version's checksum is the SHA-256 of its manifest. The manifest has the checksum of each of its
files, so the version's checksum covers every bit. A delta's manifest also names all versions that
it builds on, back to a full version, with their checksums. It also has the checksum that every
tensor must have after the delta is applied.

Invariants: `read` returns exactly the bits that were passed to `write`, or raises EngineError. A
delta is applied only to its base, and never in place. `latest` names a version only after it was
written completely. All versions that a kept version builds on are kept. The deltas after a full
version are together smaller than it, and fewer than `full_every`. Otherwise the next version is
written in full.

One process writes, and any number of processes read. All methods block.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from agentevo.errors import EngineError
from agentevo.inference.weights.part_deltas import PublishedParts
from agentevo.inference.weights.weight_delta import checksum, delta_of, num_bytes, with_delta
from agentevo.inference.weights.weight_transport import LATEST_FILE, Latest
from agentevo.models.compute.parameters import trained_weights
from agentevo.models.compute.parts import Grid, Spec
from agentevo.models.files.split_models import (
    CompareParts,
    GiveChanges,
    InParts,
    KeepParts,
    in_parts,
)
from agentevo.models.files.tensor_file import split_files
from agentevo.runtime.decoding import decode_json

MANIFEST_FILE = "manifest.json"
PART_BYTES = 2**30
"""The most bytes of a file, unless a single tensor is larger. Files are read and hashed in
parallel."""
SIDE_BY_SIDE = 4

T = TypeVar("T")
U = TypeVar("U")


class ManifestPart(msgspec.Struct, frozen=True):
    """A file of a version."""

    file: str
    sha256: str
    bytes: int


class VersionManifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of a version's manifest.json."""

    version: int
    bytes: int
    """The total size of its files."""
    tensors: int
    """The number of tensors of the model."""
    parts: list[ManifestPart]
    chain: list[Latest] = []
    """The versions that a delta builds on: a full version, then the deltas after it. Empty for a
    full version."""
    deltas: int = 0
    """The total size of this delta and the deltas in `chain`."""
    state: dict[str, str] = {}
    """The checksum of every tensor after the delta is applied."""
    grids: dict[str, list[list[int]]] = {}
    """The grids of tensors for which the delta and `state` have several boxes, see
    part_deltas.py."""

    def with_parts(self, parts: list[ManifestPart]) -> VersionManifest:
        """The manifest of the version with these files."""
        size = sum(part.bytes for part in parts)
        deltas = self.deltas + size if self.chain else 0
        return msgspec.structs.replace(self, parts=parts, bytes=size, deltas=deltas)


class VersionBase(NamedTuple):
    """A version that a delta may build on."""

    latest: Latest
    manifest: VersionManifest

    def delta(
        self, version: int, state: dict[str, str], grids: Mapping[str, Grid] = MappingProxyType({})
    ) -> VersionManifest:
        """The manifest of a delta, without its files. `state`: the checksum of every tensor."""
        return VersionManifest(
            version,
            0,
            len(state),
            [],
            chain=[*self.manifest.chain, self.latest],
            deltas=self.manifest.deltas,
            state=state,
            grids={name: [list(starts) for starts in grid] for name, grid in grids.items()},
        )


class HeldVersion(NamedTuple):
    """A version in memory."""

    base: VersionBase
    tensors: dict[str, torch.Tensor]


class WeightVersions(ABC):
    """See the module. The methods that store files are abstract, and raise OSError. `full_every`:
    at least one of this many successive versions is full. 1: no deltas are written, and no copy of
    the weights is held."""

    def __init__(self, *, full_every: int = 1) -> None:
        self._full_every = full_every
        self._held: HeldVersion | None = None
        """The last version that was written or read, with all its tensors."""
        self._parts: PublishedParts | None = None
        """If weights are in parts on several processes: the parts that were written last..."""
        self._parts_base: VersionBase | None = None
        """...and their version; None before the first."""
        self.advice = ""
        """Why the last version was written in full instead of as a delta."""

    @property
    @abstractmethod
    def place(self) -> str:
        """See WeightSource.place."""

    @abstractmethod
    def versions(self) -> list[int]:
        """The stored versions, the oldest first, including incomplete ones."""

    @abstractmethod
    def state(self, version: int) -> object:
        """A value that changes whenever a file of the version, or latest.json, is rewritten. An
        engine that refused the version may then try again."""

    @abstractmethod
    def _get(self, version: int | None, file: str) -> bytes:
        """The content of a file of a version, or of a file next to the versions. Raises
        FileNotFoundError, OSError."""

    @abstractmethod
    def _put(
        self,
        files: dict[str, dict[str, Spec]],
        tensors: Iterator[tuple[str, torch.Tensor]],
        manifest: VersionManifest,
    ) -> VersionManifest:
        """Writes a version, replaces an existing one, and returns its manifest with its files.
        `tensors` are yielded in the order of the files, and may be freed one by one."""

    @abstractmethod
    def _put_latest(self, content: bytes) -> None:
        """Writes latest.json."""

    @abstractmethod
    def _delete(self, version: int) -> None:
        """Deletes a version, as far as possible."""

    @abstractmethod
    def _check_part(self, version: int, part: ManifestPart) -> None:
        """Raises EngineError if the file has changed since it was written. The check is cheap
        enough for every minute."""

    def write(
        self, version: int, model: torch.nn.Module, *, keep: int, in_full: bool = False
    ) -> str:
        """Publishes what `model` trains (its parameters that require a gradient, under their own
        names) and returns the version's checksum. The newest `keep` versions stay, and the versions
        that they build on. A failure does not change existing versions. Replaces an existing
        `version`. `in_full`: does not write a delta. Raises OSError.

        If a model is split over several processes, its tensors are gathered one by one; for a
        delta, only the changes on each process.
        """
        self.advice = ""
        how = in_parts(model)
        if how is not None:
            return self._write_parts(version, how, keep, in_full=in_full)

        trained = {
            name: tensor.cpu().contiguous() for name, tensor in trained_weights(model).items()
        }
        previous = None if in_full else self._base_of_delta(trained, version)
        change = {} if previous is None else delta_of(previous.tensors, trained)
        specs = _specs(trained)
        if previous is None or not self._is_delta_small_enough(
            previous.base, num_bytes(change), specs
        ):
            manifest = VersionManifest(version, 0, len(trained), [])
            manifest = self._put(_split("weights", specs), iter(trained.items()), manifest)
        else:
            sums = dict(zip(trained, in_parallel(checksum, trained.values()), strict=True))
            files = _split("delta", _specs(change))
            manifest = self._put(files, iter(change.items()), previous.base.delta(version, sums))

        latest = self._announce(manifest, keep)
        if self._full_every > 1:
            snapshot = {name: tensor.clone() for name, tensor in trained.items()}
            self._held = HeldVersion(VersionBase(latest, manifest), snapshot)

        return latest.sha256

    def _write_parts(self, version: int, how: InParts, keep: int, *, in_full: bool) -> str:
        """`write` for a model that is split over several processes. The other processes call
        `compare`, `give` and `keep` at the same time."""
        if self._parts is None:
            self._parts = PublishedParts(how.own_parts, how.group)

        specs = how.specs(only_trained=True)
        base = self._parts_base
        delta = None
        if base is not None and not in_full and self._may_follow(base, version):
            how.send_to_others(CompareParts())
            delta = self._parts.compare()
            if delta is not None and not self._is_delta_small_enough(base, delta.num_bytes, specs):
                delta = None

        if base is None or delta is None:
            manifest = VersionManifest(version, 0, len(specs), [])
            with how.tensors(only_trained=True) as tensors:
                manifest = self._put(_split("weights", specs), tensors, manifest)
        else:
            how.send_to_others(GiveChanges())
            with delta.taken() as changes:
                manifest = base.delta(version, delta.state, delta.grids)
                manifest = self._put(_split("delta", delta.specs), changes, manifest)

        latest = self._announce(manifest, keep)
        if self._full_every > 1:
            how.send_to_others(KeepParts())
            self._parts.keep()
            self._parts_base = VersionBase(latest, manifest)

        return latest.sha256

    def _announce(self, manifest: VersionManifest, keep: int) -> Latest:
        """Announces a version whose files are written."""
        sha256 = hashlib.sha256(msgspec.json.encode(manifest)).hexdigest()
        latest = Latest(manifest.version, sha256)
        self._put_latest(msgspec.json.encode(latest))
        self._delete_old(latest.version, keep)
        return latest

    def _may_follow(self, base: VersionBase, version: int) -> bool:
        """Whether a delta may build on this base."""
        chain = base.manifest.chain
        taken = [base.latest.version, *(link.version for link in chain)]
        return len(chain) + 2 <= self._full_every and version not in taken  # not its own base

    def _base_of_delta(
        self, trained: Mapping[str, torch.Tensor], version: int
    ) -> HeldVersion | None:
        """The version that a delta of whole tensors builds on; None for a full version."""
        held_version = self._held
        if held_version is None or not self._may_follow(held_version.base, version):
            return None
        return held_version if _specs(held_version.tensors) == _specs(trained) else None

    def _is_delta_small_enough(
        self, base: VersionBase, change: int, specs: Mapping[str, Spec]
    ) -> bool:
        """Whether a delta of this size is smaller than the limits."""
        full_bytes = sum(spec.num_bytes for spec in specs.values())
        if change >= full_bytes:
            self.advice = _advice(specs)
        return base.manifest.deltas + change < full_bytes

    def _delete_old(self, version: int, keep: int) -> None:
        """Deletes old versions. The manifests of the kept versions name the others that must
        stay."""
        try:
            versions = [older for older in self.versions() if older <= version]
        except OSError:
            return  # the version is published; old ones are deleted with the next one

        to_keep = set(versions[-keep:])
        for kept_version in list(to_keep):
            try:
                to_keep.update(link.version for link in self._manifest(kept_version, None).chain)
            except EngineError:
                continue  # the version is torn and builds on nothing

        for old in versions:
            if old not in to_keep:
                self._delete(old)

    def latest(self) -> int | None:
        """The last version that was written; None before the first."""
        latest = self.latest_version()
        return None if latest is None else latest.version

    def latest_version(self) -> Latest | None:
        """`latest` with its checksum. Raises EngineError if latest.json is invalid."""
        try:
            return decode_json(self._get(None, LATEST_FILE), Latest)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise EngineError(
                f"{self.place}/{LATEST_FILE} can't be read ({error}): the trainer writes it again"
            ) from error

    def read(self, version: int, *, sha256: str | None = None) -> dict[str, torch.Tensor]:
        """The tensors of a version, on the CPU. The caller must not change them in place. `sha256`:
        the expected checksum of the version; by default the stored one is trusted.

        Raises EngineError if the version, or one that it builds on, is gone, or its bytes are not
        the ones that were written.
        """
        raw = self._raw_manifest(version, sha256)
        manifest = self._decode_manifest(version, raw)

        latest = Latest(version, hashlib.sha256(raw).hexdigest())
        if self._held is not None and self._held.base.latest == latest:
            return dict(self._held.tensors)

        tensors = self._apply_deltas(latest, manifest) if manifest.chain else self._load(manifest)
        if self._full_every > 1:
            self._held = HeldVersion(VersionBase(latest, manifest), tensors)

        return dict(tensors)

    def _apply_deltas(self, latest: Latest, manifest: VersionManifest) -> dict[str, torch.Tensor]:
        """The tensors of a delta, computed from the held version or from the full version."""
        links = manifest.chain
        held_version = self._held
        self._held = None

        if held_version is not None and held_version.base.latest in links:
            begin = links.index(held_version.base.latest) + 1
            tensors = held_version.tensors
        else:
            full = self._manifest(links[0].version, links[0].sha256)
            if full.chain:
                raise EngineError(
                    f"{self._name(latest.version)} builds on version {full.version}, which is not "
                    "a full version: not served"
                )

            begin = 1
            tensors = self._load(full)

        for number in range(begin, len(links) + 1):
            is_last = number == len(links)
            link = latest if is_last else links[number]
            step = manifest if is_last else self._manifest(link.version, link.sha256)
            if step.chain != links[:number]:
                raise EngineError(
                    f"{self._name(link.version)} builds on other versions than "
                    f"{self._name(latest.version)} says: not served"
                )

            try:
                tensors = with_delta(tensors, self._load(step), step.grids)
            except EngineError as error:
                raise EngineError(
                    f"{self._name(link.version)} does not fit the version before it ({error}): not "
                    "served"
                ) from error

        checksums = in_parallel(
            lambda name: checksum(tensors[name], manifest.grids.get(name)), tensors
        )
        actual = dict(zip(tensors, checksums, strict=True))
        if actual != manifest.state:
            wrong = sorted(
                name
                for name in actual.keys() | manifest.state.keys()
                if actual.get(name) != manifest.state.get(name)
            )
            raise EngineError(
                f"{self._name(latest.version)} does not give the weights that were written "
                f"({len(wrong)} tensors differ, {wrong[0]} first): not served"
            )

        return tensors

    def check(self, expected: Latest) -> None:
        """Raises EngineError unless latest.json names these weights, and their files and those of
        all versions that they build on are unchanged (see `_check_part`)."""
        latest = self.latest_version()
        if latest != expected:
            raise EngineError(
                f"{self.place}/{LATEST_FILE} "
                + ("is gone" if latest is None else f"names {latest} and not {expected}")
            )

        manifest = self._manifest(expected.version, expected.sha256)
        for link in [*manifest.chain, expected]:
            for part in self._manifest(link.version, link.sha256).parts:
                self._check_part(link.version, part)

    def _load(self, manifest: VersionManifest) -> dict[str, torch.Tensor]:
        """The tensors of a version's files. Compares each file with its checksum."""

        def load_part(part: ManifestPart) -> dict[str, torch.Tensor]:
            content = self._read(manifest.version, part.file)
            self._compare(manifest.version, part, hashlib.sha256(content).hexdigest())
            try:
                return load(content)
            # The other errors are for dtypes and shapes that this torch does not know.
            except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
                raise EngineError(
                    f"{self._name(manifest.version)}/{part.file} is not a safetensors file "
                    f"({error})"
                ) from error

        tensors: dict[str, torch.Tensor] = {}
        for loaded in in_parallel(load_part, manifest.parts):
            tensors.update(loaded)

        return tensors

    def _manifest(self, version: int, sha256: str | None) -> VersionManifest:
        return self._decode_manifest(version, self._raw_manifest(version, sha256))

    def _raw_manifest(self, version: int, sha256: str | None) -> bytes:
        raw = self._read(version, MANIFEST_FILE)
        actual = hashlib.sha256(raw).hexdigest()
        if sha256 is not None and actual != sha256:
            raise self._change_error(f"{self._name(version)}/{MANIFEST_FILE}", actual, sha256)
        return raw

    def _decode_manifest(self, version: int, raw: bytes) -> VersionManifest:
        try:
            manifest = decode_json(raw, VersionManifest)
        except msgspec.MsgspecError as error:
            raise self._unreadable(version, error) from error

        strange = [part.file for part in manifest.parts if not re.fullmatch(r"[\w.-]+", part.file)]
        if manifest.version != version or strange:
            raise EngineError(
                f"{self._name(version)}/{MANIFEST_FILE} is not what was written "
                + (f"(a file {strange[0]!r})" if strange else f"(version {manifest.version})")
                + ": torn or changed, not served"
            )

        return manifest

    def _compare(self, version: int, part: ManifestPart, sha256: str) -> None:
        if sha256 != part.sha256:
            raise self._change_error(f"{self._name(version)}/{part.file}", sha256, part.sha256)

    def _change_error(self, what: str, actual: str, expected: str) -> EngineError:
        return EngineError(
            f"{what} is not what was written (SHA-256 {actual[:12]}… and not {expected[:12]}…): "
            "torn or changed, not served"
        )

    def _read(self, version: int, file: str) -> bytes:
        try:
            return self._get(version, file)
        except OSError as error:
            raise self._unreadable(version, error) from error

    def _name(self, version: int) -> str:
        return f"{self.place}/{folder_name(version)}"

    def _unreadable(self, version: int, error: Exception) -> EngineError:
        if not isinstance(error, FileNotFoundError):
            return EngineError(
                f"{self._name(version)} can't be read ({error}): the version is torn, and not "
                "served"
            )

        try:
            at_hand = ", ".join(map(str, self.versions())) or "none"
        except OSError as problem:
            at_hand = f"unknown, {problem}"

        return EngineError(
            f"{self._name(version)} is gone (versions at hand: {at_hand}): raise "
            "rollout.keep_versions to keep more"
        )


def _specs(tensors: Mapping[str, torch.Tensor]) -> dict[str, Spec]:
    return {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _split(stem: str, specs: Mapping[str, Spec]) -> dict[str, dict[str, Spec]]:
    return split_files(stem, specs, PART_BYTES)


def in_parallel(function: Callable[[T], U], items: Iterable[T]) -> list[U]:
    """Applies the function to each item in threads, and returns the results in order. Hashing and
    reading release Python's lock."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        return list(threads.map(function, items))


def _advice(specs: Mapping[str, Spec]) -> str:
    dtypes = ", ".join(sorted({str(spec.dtype).removeprefix("torch.") for spec in specs.values()}))
    return (
        f"rollout.weights.delta: a delta of these weights ({dtypes}) is no smaller than all of "
        "them, so they are published in full: deltas pay for bfloat16 at learning rates of about "
        "1e-6"
    )


def folder_name(version: int) -> str:
    """Name of a version's folder, next to latest.json."""
    return f"version-{version:06d}"


def version_numbers(names: Iterable[str]) -> list[int]:
    """The versions with these folder names, the oldest first."""
    matches = (re.fullmatch(r"version-(\d+)", name) for name in names)
    return sorted(int(match[1]) for match in matches if match)
