"""The files of a sandbox, as its supervisor sees them: regular files below the work folder, reached
by relative paths without following any link. Their number and sizes are bounded."""

from __future__ import annotations

import contextlib
import os
import stat

HIDDEN = ".tmp"
"""The folder for temporary files, which is not listed."""
LONGEST_PATH = 1024


class RefusedFile(Exception):
    """A path or a file outside of the sandbox."""


class WorkFolder:
    """The files in the current folder of the process."""

    def __init__(self, max_files: int, largest: int) -> None:
        self._max_files = max_files
        self._largest = largest

    def snapshot(self) -> dict[str, tuple[int, int, int]]:
        """The size, modification time and inode of each regular file."""
        files: dict[str, tuple[int, int, int]] = {}
        folders = [("", 0)]
        num_entries = 0
        while folders:
            folder, depth = folders.pop()
            with contextlib.suppress(OSError), os.scandir(folder or ".") as entries:
                for entry in entries:
                    path = f"{folder}/{entry.name}" if folder else entry.name
                    num_entries += 1
                    if num_entries > self._max_files:
                        return files
                    if path == HIDDEN or len(path) > LONGEST_PATH:
                        continue

                    with contextlib.suppress(OSError):
                        what = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(what.st_mode):
                            files[path] = (what.st_size, what.st_mtime_ns, what.st_ino)
                        elif stat.S_ISDIR(what.st_mode) and depth < 32:
                            folders.append((path, depth + 1))

        return files

    def sizes(self) -> dict[str, int]:
        return {path: facts[0] for path, facts in sorted(self.snapshot().items())}

    def list_changed(self, before: dict[str, tuple[int, int, int]]) -> list[str]:
        """Files that have changed since `before`, at most 200 of them."""
        now = self.snapshot()
        paths = [path for path in now.keys() | before.keys() if now.get(path) != before.get(path)]
        return sorted(paths)[:200]

    def read(self, path: str) -> bytes:
        folder, name = self._folder_of(path, makes=False)
        try:
            handle = os.open(
                name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
            )
        finally:
            os.close(folder)

        with open(handle, "rb") as file:
            what = os.fstat(handle)
            if not stat.S_ISREG(what.st_mode):
                raise RefusedFile(f"{path} is no regular file")
            if what.st_size > self._largest:
                raise RefusedFile(f"{path} has {what.st_size:,} bytes, at most {self._largest:,}")
            return file.read(self._largest)

    def write(self, path: str, content: bytes) -> None:
        """Writes to a temporary file next to the target first, so that no reader sees a partial
        file."""
        folder, name = self._folder_of(path, makes=True)
        partial = f".{os.urandom(8).hex()}.partial"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open(partial, flags, 0o644, dir_fd=folder)
            try:
                with open(handle, "wb") as file:
                    file.write(content)
                os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.unlink(partial, dir_fd=folder)
                raise
        finally:
            os.close(folder)

    def open_unlinked(self, content: bytes) -> int:
        """A handle on a file without a name, at its beginning."""
        path = f".{os.urandom(8).hex()}.partial"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)

        os.unlink(path)
        view = memoryview(content)
        while view:
            view = view[os.write(handle, view) :]

        os.lseek(handle, 0, os.SEEK_SET)
        return handle

    def _folder_of(self, path: str, *, makes: bool) -> tuple[int, str]:
        """A handle on the folder of a path, and the name in it."""
        parts = path.split("/")
        if (
            not path
            or len(path) > LONGEST_PATH
            or "\0" in path
            or any(part in ("", ".", "..") for part in parts)
        ):
            raise RefusedFile(f"{path[:200]!r} is no path in the work folder")

        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = os.open(".", flags)
        try:
            for part in parts[:-1]:
                if makes:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=folder)
                below = os.open(part, flags, dir_fd=folder)
                os.close(folder)
                folder = below
        except OSError as error:
            os.close(folder)
            raise RefusedFile(
                f"{path[:200]!r}: {part!r} is no folder that can be opened"
            ) from error

        return folder, parts[-1]
