"""The files of a trajectory: checks before storing, and writing the files to a folder for
people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentevo.runtime.files import atomic_folder

MAX_FILES_BYTES = 8 * 2**20
"""The maximum number of bytes of all files of a trajectory. MongoDB limits a document to 16 MB."""
MAX_PATH_CHARS = 1024
MAX_FILES = 1000


def is_inner_path(path: str) -> bool:
    """Whether a path stays inside the folder that it is relative to."""
    parts = path.split("/")
    return (
        0 < len(path) <= MAX_PATH_CHARS
        and not set(path) & set("\0\\:")
        and not any(part in ("", ".", "..") for part in parts)
    )


def check_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files in the order of their paths. Raises TypeError or ValueError for files that can't be
    stored."""
    for path, content in files.items():
        if not isinstance(path, str) or not isinstance(content, bytes):
            raise TypeError(f"the file {path!r:.100} must have a text as path and bytes as content")
        if not is_inner_path(path):
            raise ValueError(f"the path {path[:100]!r} is not relative to a folder: give `a/b.txt`")
        path.encode()  # raises ValueError for half of a surrogate pair

    size = sum(map(len, files.values()))
    if size > MAX_FILES_BYTES or len(files) > MAX_FILES:
        raise ValueError(
            f"{len(files)} files of {size:,} bytes: at most {MAX_FILES} files of "
            f"{MAX_FILES_BYTES:,} bytes in all are kept"
        )

    return dict(sorted(files.items()))


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Writes the files to a new folder, which appears whole or not at all. Raises OSError, and
    ValueError for paths that leave the folder."""
    checked = check_files(files)
    with atomic_folder(folder) as staging:
        for path, content in checked.items():
            target = staging / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
