"""The manifest of a version of the weights, and its folder: see weight_versions.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from agentevo.inference.weights.weight_transport import Latest
from agentevo.models.compute.parts import Grid

MANIFEST_FILE = "manifest.json"
LATEST_FILE = "latest.json"


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


class Base(NamedTuple):
    """A version that a delta may build on."""

    latest: Latest
    manifest: VersionManifest


def folder_name(version: int) -> str:
    """Name of a version's folder, next to latest.json."""
    return f"version-{version:06d}"


def version_numbers(names: Iterable[str]) -> list[int]:
    """The versions with these folder names, the oldest first."""
    matches = (re.fullmatch(r"version-(\d+)", name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def full_manifest(version: int, tensors: int) -> Callable[[list[ManifestPart]], bytes]:
    """Returns a function that makes a full version's manifest from its files."""
    return lambda parts: msgspec.json.encode(
        VersionManifest(version, sum(part.bytes for part in parts), tensors, parts)
    )


def delta_manifest(
    version: int,
    base: Base,
    state: dict[str, str],
    grids: Mapping[str, Grid] = MappingProxyType({}),
) -> Callable[[list[ManifestPart]], bytes]:
    """Returns a function that makes a delta's manifest from its files. `state`: the checksum of
    every tensor."""

    def manifest(parts: list[ManifestPart]) -> bytes:
        size = sum(part.bytes for part in parts)
        return msgspec.json.encode(
            VersionManifest(
                version,
                size,
                len(state),
                parts,
                chain=[*base.manifest.chain, base.latest],
                deltas=base.manifest.deltas + size,
                state=state,
                grids={name: [list(starts) for starts in grid] for name, grid in grids.items()},
            )
        )

    return manifest


def base_of(latest: Latest, manifest: bytes) -> Base:
    """The base for later deltas: a version that was just written with this manifest."""
    return Base(latest, msgspec.json.decode(manifest, type=VersionManifest))
