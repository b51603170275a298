"""Images that are kept in a temporary file instead of memory: those of a data set, which a run
reads once and shows one at a time.

    images = SpooledImages()
    images[image.part.sha256] = image      # the bytes go to the end of the file
    images[digest]                         # and are read again, at each call

In memory, an image costs its digest and its place. The file is in the system's folder of temporary
files (TMPDIR). It has no name, so it ends with this process, however that ends. Threads and
processes after a fork may read. `del` forgets an image, and its bytes stay in the file.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from typing import IO, NamedTuple

from agentevo.errors import ConfigError, ImageError
from agentevo.types import ImagePart
from agentevo.types.images import ImageFile


class _FilePlace(NamedTuple):
    """Where an image is in the file."""

    offset: int
    length: int
    media_type: str


class SpooledImages(MutableMapping[str, ImageFile]):
    """Maps a digest to its image. See the module."""

    def __init__(self) -> None:
        self._places: dict[str, _FilePlace] = {}
        self._file: IO[bytes] | None = None
        self._end = 0
        self._lock = threading.Lock()

    def __setitem__(self, digest: str, image: ImageFile) -> None:
        """Raises ConfigError if the disk has no room."""
        with self._lock:
            try:
                if self._file is None:
                    self._file = tempfile.TemporaryFile(  # noqa: SIM115 (as long as the mapping)
                        prefix="agentevo-images-", buffering=0
                    )
                _write(self._file.fileno(), image.data, self._end)
            except OSError as error:
                raise ConfigError(
                    f"the images of the data can't be kept in {tempfile.gettempdir()} "
                    f"({error.strerror or error}): make room there, or set TMPDIR to a folder with "
                    "more"
                ) from error

            self._places[digest] = _FilePlace(self._end, len(image.data), image.part.media_type)
            self._end += len(image.data)

    def __getitem__(self, digest: str) -> ImageFile:
        """Raises KeyError for another image, and ImageError if the file can't be read."""
        place = self._places[digest]
        assert self._file is not None
        with suppress(OSError):  # see below
            data = os.pread(self._file.fileno(), place.length, place.offset)
            if len(data) == place.length:
                return ImageFile(ImagePart(digest, place.media_type), data)
        raise ImageError(
            f"the image {digest[:12]}... can't be read from its temporary file: check the disk of "
            f"{tempfile.gettempdir()}"
        )

    def __delitem__(self, digest: str) -> None:
        del self._places[digest]

    def __contains__(self, digest: object) -> bool:
        return digest in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"<SpooledImages, {len(self):,} images, {self._end:,} bytes>"


def _write(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view = view[written:]
        offset += written
