"""The images of a request, in the forms of all APIs. A request has each image itself, as a data URL
or in base64: the gateway fetches nothing and keeps no files. The `detail` that OpenAI's clients
send has no effect, because the model's own processor decides how many pixels it sees.

A client sends its whole history with each request, and so the same images again. They are decoded
once: `DecodedImages` remembers their digests.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from agentevo.data.images import image_size, read_image
from agentevo.errors import ImageError
from agentevo.types import ImagePart
from agentevo.types.images import ImageFile

MAX_REMEMBERED = 65_536
"""Digests that a gateway remembers."""
MAX_PIXELS = 2**28
"""The most pixels of the images that one request sends for the first time; decoding them takes a
core about 10 s. They are 200 images of 1,280 x 1,024."""
MAX_IMAGES = 10_000
"""The most different images of a request. A tiny one has 70 bytes, and takes ten times as many in
memory."""
MAX_AT_ONCE = 4
"""The most images that a gateway decodes at once. A large one takes 600 MB of memory."""
DECODING_S = 60.0
"""The time limit for decoding the images of a request, in seconds."""
_MAY_HAVE_IMAGES = re.compile(rb"image|\\u")
"""JSON that has an image has this word, in which letters may be escaped."""


def may_have_images(body: bytes) -> bool:
    """Whether a body in JSON may have an image in the form of any API."""
    return _MAY_HAVE_IMAGES.search(body) is not None


class DecodedImages:
    """See the module. Any thread may use it."""

    def __init__(self) -> None:
        self.slots = threading.BoundedSemaphore(MAX_AT_ONCE)
        """What a thread holds while it decodes an image."""
        self._digests: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, digest: object) -> bool:
        with self._lock:
            is_known = digest in self._digests
            if is_known:
                self._digests.move_to_end(str(digest))
        return is_known

    def add(self, digest: str) -> None:
        with self._lock:
            self._digests[digest] = None
            if len(self._digests) > MAX_REMEMBERED:
                self._digests.popitem(last=False)


class RequestImages:
    """Reads the images of one request."""

    def __init__(self, decoded: DecodedImages) -> None:
        self.files: dict[str, ImageFile] = {}
        """Maps a digest to the image."""
        self.num_characters = 0
        """The characters of all images in base64, with repetitions."""
        self._decoded = decoded
        self._num_pixels = 0

    def read(self, source: Any, where: str) -> ImagePart:
        """The image of a part or block, as a part by digest. Raises ImageError."""
        _check_no_id(source, where)
        with self._decoded.slots:
            image = read_image(source, where, known=self._decoded)
        self.num_characters += (len(image.data) + 2) // 3 * 4
        digest = image.part.sha256
        if digest not in self._decoded:
            width, height = image_size(image, where)
            self._num_pixels += width * height
            if self._num_pixels > MAX_PIXELS:
                raise ImageError(
                    f"{where}: the new images of this request have more than {MAX_PIXELS:,} "
                    "pixels: send fewer, or make them smaller"
                )
            self._decoded.add(digest)

        part = self.files.setdefault(digest, image).part
        if len(self.files) > MAX_IMAGES:
            raise ImageError(
                f"{where}: the request has more than {MAX_IMAGES:,} images: send fewer"
            )
        return part


def _check_no_id(source: Any, where: str) -> None:
    """Raises ImageError for an image of a Files API."""
    inner = source.get("source") if isinstance(source, Mapping) else None
    for holder in (source, inner):
        if isinstance(holder, Mapping) and holder.get("file_id") is not None:
            raise ImageError(
                f"{where} names a file by its id, and this gateway keeps no files: send the image "
                "itself, as a data URL (data:image/png;base64,...)"
            )
