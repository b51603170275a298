"""The manifest of a checkpoint, `checkpoint.json`: the sha256 of every file in the folder.

    {"step": 10, "value": 0.9 | null, "sha256": "ef…",
     "files": {"model.safetensors": "ab…", "optimizer/0.pt": "cd…"}}

The key `sha256` is the checksum of the same object without this key, as JSON without spaces and
with sorted keys. One checksum thus covers all bytes of all files. The manifest is written last, so
a folder without it is incomplete. Its bytes are determined by its content, so any change is
detected. Files are read back in chunks, several at once, while others are written to the disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import msgspec

from agentevo.errors import CheckpointError, UnusableCheckpointError
from agentevo.runtime.decoding import decode_json
from agentevo.runtime.files import sync_to_disk

NAME = "checkpoint.json"
TRAINING_FILES = frozenset({"trainer.pt", "state.json", NAME})
"""The files of a checkpoint that are not part of the model. Files in subfolders are not part of it
either."""
UNREAD_FILES = frozenset({"README.md"})
"""Files that may be added to a checkpoint because no loader reads them. Hidden files may be added,
too."""
VISIBLE_S = 90.0
"""How long a file that another machine wrote may take to appear here, because network file systems
cache folders."""
POLL_INTERVAL_S = 0.1
"""The interval between two checks for such a file."""
_CHUNK = 1 << 20
_READERS = 4
"""The number of files that are hashed at once; hashing releases Python's lock."""


class TornError(UnusableCheckpointError):
    """A file of a checkpoint is missing or has changed since it was saved. A file that
    can't be read now is not a TornError, because the checkpoint may be complete, but another
    CheckpointError."""


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `checkpoint.json`; see the module."""

    step: int
    value: float | None
    """The result of the step's evaluation, if there was one. The best checkpoint has the largest
    value."""
    files: dict[str, str]
    """Path within the folder, with slashes -> sha256 in hex."""
    sha256: str


def seal(
    folder: Path,
    step: int,
    value: float | None,
    known_digests: Mapping[str, str] = MappingProxyType({}),
) -> CheckpointManifest:
    """Hashes every file below `folder`, syncs the files to the disk, and writes the manifest.
    `known_digests`: the checksums of files that other processes have written, hashed and synced.
    Raises OSError."""
    deadline = time.monotonic() + VISIBLE_S
    while missing := [name for name in known_digests if not (folder / name).is_file()]:
        if time.monotonic() > deadline:
            raise OSError(
                errno.ENOENT,
                "another process wrote this file, but this process does not see it: all "
                "processes need the same folder for run.dir",
                missing[0],
            )

        time.sleep(POLL_INTERVAL_S)

    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    new_files = sorted(names - known_digests.keys())
    with ThreadPoolExecutor(_READERS) as pool:
        digests = list(pool.map(_hash_and_sync, (folder / name for name in new_files)))

    files = {**known_digests, **dict(zip(new_files, digests, strict=True))}
    manifest = CheckpointManifest(
        step=step, value=value, files=files, sha256=_sha256(step, value, files)
    )
    (folder / NAME).write_bytes(_encode(manifest))

    for path in [folder / NAME, *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        sync_to_disk(path)

    return manifest


def read(folder: Path) -> CheckpointManifest:
    """Reads only the manifest, not the files. Raises TornError if the manifest is missing or torn,
    and CheckpointError if it can't be read now."""
    path = folder / NAME
    try:
        content = _regular_file(path).read_bytes()
    except FileNotFoundError as error:
        raise TornError(
            f"{path} is missing, so the checkpoint is not whole: resume from an older one"
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error

    try:
        manifest = decode_json(content, CheckpointManifest)
    except msgspec.DecodeError as error:
        raise TornError(f"{path} is torn ({error}): resume from an older checkpoint") from error

    if content != _encode(manifest) or manifest.sha256 != _sha256(
        manifest.step, manifest.value, manifest.files
    ):
        raise TornError(
            f"{path} is torn (its own checksum differs): resume from an older checkpoint"
        )

    return manifest


def verify(folder: Path) -> CheckpointManifest:
    """Reads every file again. Raises TornError for the first file that is missing or has
    another checksum, and CheckpointError for a file that can't be read now or was added later."""
    manifest = read(folder)
    _refuse_unlisted_files(folder, manifest)
    _compare_files(folder, manifest.files, "is torn: resume from an older one")
    return manifest


def verify_model(folder: Path, *, most_bytes: float = math.inf) -> bool:
    """Reads the files of the model again, if `folder` is a checkpoint. Other model folders have no
    manifest, so there is nothing to compare. Returns whether all files were compared. If the files
    together are larger than `most_bytes`, large files are left out. Raises the errors of
    `verify`."""
    if not (folder / NAME).exists():
        return True

    manifest = read(folder)
    _refuse_unlisted_files(folder, manifest)
    files = manifest.files
    model_files = {
        name: files[name] for name in files if name not in TRAINING_FILES and "/" not in name
    }
    sizes = {
        name: (folder / name).stat().st_size for name in model_files if (folder / name).is_file()
    }
    is_small = sum(sizes.values()) <= most_bytes
    if not is_small:
        share = most_bytes / len(sizes)
        model_files = {
            name: digest for name, digest in model_files.items() if sizes.get(name, 0) <= share
        }

    _compare_files(
        folder,
        model_files,
        "is torn, or was changed: use an older one; if you made the change on purpose, use a "
        f"copy of the folder without {NAME}",
    )
    return is_small


def _refuse_unlisted_files(folder: Path, manifest: CheckpointManifest) -> None:
    """Raises CheckpointError for a file that the manifest does not name. A loader may read such a
    file as an adapter, a template, or other weights."""
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for path in (Path(parent, name) for name in sorted([*names, *links])):
            relative = path.relative_to(folder)
            is_hidden = any(part.startswith(".") for part in relative.parts)
            if not is_hidden and relative.as_posix() not in {*manifest.files, NAME, *UNREAD_FILES}:
                raise CheckpointError(
                    f"{path} is not a file of the checkpoint, which was saved without it: loading "
                    "the model may read it. Move it elsewhere and try again; if you added it on "
                    f"purpose, use a copy of the folder without {NAME}"
                )


def _compare_files(folder: Path, files: Mapping[str, str], problem: str) -> None:
    with ThreadPoolExecutor(_READERS) as pool:
        digests = pool.map(_digest_or_error, (folder / name for name in files))

    for name, digest in zip(files, digests, strict=True):
        if digest != files[name]:
            difference = (
                digest
                if digest.startswith("can't")
                else f"has the sha256 {digest[:12]}…, not {files[name][:12]}…"
            )
            raise TornError(f"{folder / name} {difference}, so the checkpoint {problem}")


def _hash_and_sync(path: Path) -> str:
    digest = _hash(path)
    sync_to_disk(path)
    return digest


def _digest_or_error(path: Path) -> str:
    """The file's sha256, or the error if it can't be read."""
    try:
        return _hash(path)
    except FileNotFoundError as error:
        return f"can't be read ({error.strerror})"
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} can't be read now ({error.strerror or error}), so it is unknown whether its "
        "checkpoint is whole: fix that and try again, or delete the checkpoint's folder "
        "to resume from an older one"
    )


def _regular_file(path: Path) -> Path:
    """The path, if it is a regular file: opening a pipe would wait."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path))
    return path


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with _regular_file(path).open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sha256(step: int, value: float | None, files: Mapping[str, str]) -> str:
    return hashlib.sha256(
        _canonical({"step": step, "value": value, "files": dict(files)})
    ).hexdigest()


def _encode(manifest: CheckpointManifest) -> bytes:
    return _canonical(msgspec.to_builtins(manifest))


def _canonical(content: Mapping[str, object]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
