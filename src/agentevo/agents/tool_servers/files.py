"""Tools for files. Each attempt has its own folder, with the files of its task.

    metadata: {"files": {"notes/a.txt": "..."}, "expected": {"b.txt": "...", "notes/a.txt": null}}

`files` exist before the attempt. The attempt scores 1 if the files of `expected` have these texts
at its end (null: the file is deleted) and all other files of `files` are unchanged, else 0. A task
without `expected` has no outcome. The option `root` replaces the attempt's folder by an existing
folder. `read_only` forbids changes to `root`, so a task with files can't use it.

No path leads out of the folder: each part of a path is opened relative to the part before it, links
are not followed, and only regular files and folders are opened.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentevo.config.tools import tool
from agentevo.errors import ConfigError, EnvironmentFailure, ToolError
from agentevo.types import Task

MAX_FILE = 2**20
"""The maximum bytes of one file that is read or written."""
MAX_FILES = 1000
"""The maximum number of files and folders in an attempt's own folder."""
MAX_TOTAL = 16 * 2**20
"""The maximum total size of the files in an attempt's own folder."""
MAX_PATH = 500
MAX_PARTS = 16
MAX_LISTED = 200
MAX_VISITED = 20_000
"""The maximum number of files and folders that one call visits."""
MAX_SEARCHED = 64 * 2**20
"""The maximum bytes that one search reads."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@tool("files")
class FileTools:
    """Files in a folder."""

    def __init__(self, task: Task, root: str | None = None, read_only: bool = False) -> None:
        """Raises ConfigError for a `root` that is not a folder, and EnvironmentFailure for a task
        whose files can't be written."""
        self._task = task
        self._read_only = False
        self._temporary_folder: str | None = None
        if root is None:
            self._temporary_folder = tempfile.mkdtemp(prefix="agentevo-files-")
        elif not os.path.isdir(root):
            raise ConfigError(f"the tool files: root: {root!r} is not a folder")
        elif read_only and task.metadata.get("files"):  # the task may come from a server's client
            raise EnvironmentFailure(
                f"the task {task.id!r}: metadata.files can't be written: root is read_only"
            )

        self._root = os.open(
            self._temporary_folder or str(root), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        )
        try:
            for path, text in self._texts("files").items():
                self.write_file(path, "" if text is None else text)
        except ToolError as error:
            self.close()
            raise EnvironmentFailure(f"the task {task.id!r}: metadata.files: {error}") from error
        except BaseException:
            self.close()
            raise

        self._read_only = read_only

    def list_files(self, folder: str = "") -> str:
        """Lists files and folders.

        Args:
            folder: Where to look; empty for the whole folder.
        """
        with self._folder(_split_path(folder)) as folder_fd:
            paths = sorted(self._list(folder_fd))
        rest_text = "" if len(paths) <= MAX_LISTED else f"\n(and {len(paths) - MAX_LISTED} more)"
        return ("\n".join(paths[:MAX_LISTED]) or "There are no files.") + rest_text

    def read_file(self, path: str) -> str:
        """Reads a file.

        Args:
            path: The file, such as notes/a.txt.
        """
        *parents, name = _split_file_path(path)
        with self._folder(parents) as folder_fd:
            return _text(_read(folder_fd, name, path))

    def write_file(self, path: str, text: str) -> str:
        """Writes a file, in place of an earlier one of that name. Folders are made.

        Args:
            path: The file, such as notes/a.txt.
            text: All that it is to hold.
        """
        content = text.encode("utf-8", "replace")
        *parents, name = _split_file_path(path)
        self._check_change()

        if len(content) > MAX_FILE:
            raise ToolError(f"a file has at most {MAX_FILE:,} bytes, and this has {len(content):,}")

        self._check_room(len(content))
        with self._folder(parents, make=True) as folder_fd:
            _check_plain(folder_fd, name, path)
            try:
                file = os.open(
                    name, _FILE | os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=folder_fd
                )
            except OSError as error:
                raise _refusal(path, error) from None

            with os.fdopen(file, "wb") as out:
                out.write(content)

        return f"Wrote {len(content):,} bytes to {path}."

    def delete_file(self, path: str) -> str:
        """Deletes a file.

        Args:
            path: The file.
        """
        *parents, name = _split_file_path(path)
        self._check_change()
        with self._folder(parents) as folder_fd:
            _check_plain(folder_fd, name, path)
            try:
                os.unlink(name, dir_fd=folder_fd)
            except OSError as error:
                raise _refusal(path, error) from None

        return f"Deleted {path}."

    def search_files(self, text: str) -> str:
        """Finds lines that hold a text, in all files.

        Args:
            text: What is looked for, to the letter.
        """
        if not text:
            raise ToolError("an empty text is in every line: give some words")

        matches: list[str] = []
        read = 0
        for path in sorted(self._walk()):
            if path.endswith("/"):
                continue

            *parents, name = path.split("/")
            try:
                with self._folder(parents) as folder_fd:
                    content = _read(folder_fd, name, path, limit=None)
            except ToolError:
                continue  # deleted, or not readable

            read += len(content)
            lines = _text(content).splitlines() if len(content) <= MAX_FILE else []
            matches += [
                f"{path}:{number}: {line[:500]}"
                for number, line in enumerate(lines, start=1)
                if text in line
            ]
            if len(matches) > MAX_LISTED or read > MAX_SEARCHED:
                return "\n".join([*matches[:MAX_LISTED], "(the search ended here)"])

        return "\n".join(matches) or "Nothing was found."

    def outcome(self) -> float | None:
        """1 if the files are as the task expects, else 0."""
        if "expected" not in self._task.metadata:
            return None
        expected = self._texts("files") | self._texts("expected")
        return float(all(self._current_text(path) == text for path, text in expected.items()))

    def close(self) -> None:
        """Deletes the attempt's own folder, if it has one."""
        os.close(self._root)
        if self._temporary_folder is not None:
            shutil.rmtree(self._temporary_folder, ignore_errors=True)

    def _texts(self, key: str) -> dict[str, str | None]:
        texts = self._task.metadata.get(key, {})
        if not isinstance(texts, Mapping) or not all(
            isinstance(text, str) or (text is None and key == "expected") for text in texts.values()
        ):
            raise EnvironmentFailure(
                f"the task {self._task.id!r}: metadata.{key} should be a mapping of paths to texts"
            )

        return dict(texts)

    def _current_text(self, path: str) -> str | None:
        try:
            return self.read_file(path)
        except ToolError:
            return None

    def _check_change(self) -> None:
        if self._read_only:
            raise ToolError("these files can only be read")

    def _check_room(self, num_bytes: int) -> None:
        if self._temporary_folder is None:
            return

        sizes = [
            0 if path.endswith("/") else (Path(self._temporary_folder) / path).lstat().st_size
            for path in self._walk()
        ]
        if len(sizes) >= MAX_FILES or sum(sizes) + num_bytes > MAX_TOTAL:
            raise ToolError(
                f"there is room for {MAX_FILES} files and folders and {MAX_TOTAL:,} bytes, no more"
            )

    @contextmanager
    def _folder(self, parts: list[str], *, make: bool = False) -> Iterator[int]:
        """A handle on a folder, opened part by part. Raises ToolError."""
        folder_fd = os.dup(self._root)
        try:
            for number, part in enumerate(parts, start=1):
                if make:
                    try:
                        os.mkdir(part, 0o700, dir_fd=folder_fd)
                    except FileExistsError:
                        pass
                    except OSError as error:
                        raise _refusal("/".join(parts[:number]), error) from None

                try:
                    below = os.open(part, _FOLDER, dir_fd=folder_fd)
                except OSError as error:
                    raise _refusal("/".join(parts[:number]), error) from None

                os.close(folder_fd)
                folder_fd = below

            yield folder_fd
        finally:
            os.close(folder_fd)

    def _walk(self) -> Iterator[str]:
        """The paths of all files and folders, with a slash after a folder. Links and other entries
        are left out."""
        yield from _walk_folder(self._root, "", [MAX_VISITED])

    @staticmethod
    def _list(folder_fd: int) -> Iterator[str]:
        yield from _walk_folder(folder_fd, "", [MAX_VISITED])


def _walk_folder(
    folder_fd: int, prefix: str, remaining: list[int], depth: int = 0
) -> Iterator[str]:
    with os.scandir(folder_fd) as entries:
        for entry in entries:
            remaining[0] -= 1
            if remaining[0] < 0:
                return

            if entry.is_file(follow_symlinks=False):
                yield f"{prefix}{entry.name}"
            elif entry.is_dir(follow_symlinks=False) and depth < MAX_PARTS:
                yield f"{prefix}{entry.name}/"
                try:
                    folder = os.open(entry.name, _FOLDER, dir_fd=folder_fd)
                except OSError:
                    continue  # deleted, or replaced by a link

                try:
                    yield from _walk_folder(folder, f"{prefix}{entry.name}/", remaining, depth + 1)
                finally:
                    os.close(folder)


def _split_path(path: str) -> list[str]:
    """The parts of a path. Raises ToolError for a path that could lead out of the folder."""
    if len(path) > MAX_PATH or "\0" in path or not path.isprintable():
        raise ToolError(f"a path has at most {MAX_PATH} characters, all of them printable")
    if path.startswith(("/", "~")):
        raise ToolError(f"{path!r}: give a path below the folder, such as notes/a.txt")

    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ToolError(f"{path!r}: a path has no '..': give one below the folder")
    if len(parts) > MAX_PARTS or any(len(part.encode("utf-8", "replace")) > 255 for part in parts):
        raise ToolError(f"a path has at most {MAX_PARTS} parts of 255 bytes")

    return parts


def _split_file_path(path: str) -> list[str]:
    parts = _split_path(path)
    if not parts:
        raise ToolError("give the path of a file, such as notes/a.txt")
    return parts


def _check_plain(folder_fd: int, name: str, path: str) -> None:
    """Raises ToolError for a path that exists and is not a file."""
    try:
        status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise _refusal(path, error) from None

    if not stat.S_ISREG(status.st_mode):
        raise ToolError(f"{path}: is {'a folder' if stat.S_ISDIR(status.st_mode) else 'no file'}")


def _read(folder_fd: int, name: str, path: str, limit: int | None = MAX_FILE) -> bytes:
    """The content of a file, cut after MAX_FILE + 1 bytes. Raises ToolError for a file with more
    than `limit` bytes."""
    _check_plain(folder_fd, name, path)
    try:
        file = os.open(name, _FILE | os.O_RDONLY, dir_fd=folder_fd)
        with os.fdopen(file, "rb") as content:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ToolError(f"{path}: is no file")
            read = content.read(MAX_FILE + 1)
    except OSError as error:
        raise _refusal(path, error) from None

    if limit is not None and len(read) > limit:
        raise ToolError(f"{path}: has more than {limit:,} bytes, and no more are read")

    return read


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")


def _refusal(path: str, error: Any) -> ToolError:
    if isinstance(error, FileNotFoundError):
        return ToolError(f"{path}: there is no such file or folder")
    reason = getattr(error, "strerror", None) or str(error)
    return ToolError(f"{path}: can't be opened here ({reason}): links are not followed")
