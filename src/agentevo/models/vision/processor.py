"""Makes prompts with images: token ids, the spans of the images among them, pixel tensors and
positions.

    ids        the rendering with each image's placeholder replaced by the image's tokens, encoded
               once; equal to those of transformers' processor of the family
    spans      offset, length, grid and digest of each image, in the order of the ids
    images     pixel tensors of each image alone, by which they can be encoded in any company
    positions  a function of the number of tokens and the spans (positions.py)

The number of feature tokens in the ids equals the number of features of the images, and an image's
placeholder comes from the chat template alone. Pixel tensors are computed by transformers' image
processors for Pillow on every machine, and `fingerprint` names all settings that they and the ids
depend on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, PretrainedConfig, PreTrainedTokenizerBase

from agentevo.data.images import decode_image
from agentevo.data.message_markers import encode_rendering
from agentevo.errors import ImageError, ModelError
from agentevo.models.chat.chat_template import NO_TOOLS, ToolSchemas
from agentevo.models.vision.families import find_family, vision_ids
from agentevo.models.vision.image_template import ImageChatTemplate
from agentevo.models.vision.positions import mrope_positions, plain_positions
from agentevo.runtime.byte_cache import ByteCache
from agentevo.types import Message
from agentevo.types.image_span import ImageSpan
from agentevo.types.images import ImageFile, file_of, images_of_messages

IMAGE_FILE = "preprocessor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"
PROCESSOR_FILES = (IMAGE_FILE, "processor_config.json", VIDEO_FILE)
"""Files of the image processing of a model. AgentEvo changes only the size of images in them."""
MODEL_INPUTS = ("pixel_values", "image_grid_thw", "pixel_attention_mask", "image_position_ids")
"""The tensors of an image processor that models read. The others describe the layout."""
NAMES_OF_CLASSES = ("auto_map", "feature_extractor_type", "image_processor_type", "processor_class")
"""The settings of an image processor that change no pixel. Loading one may add them."""
PIXEL_BYTES = 2**30
"""The most CPU memory for the pixel tensors of the images that were processed last. Prompts, engine
and trainer read the same images."""
KEPT_IMAGES = 2048
"""The number of images whose tokens are kept. Those of a large image have about 20 kB."""


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """One image as the vision tower reads it."""

    digest: str
    """The SHA-256 of the image file, in hexadecimal."""
    tensors: Mapping[str, torch.Tensor]
    """By MODEL_INPUTS: what the family's image processor returns for this image alone. Everybody
    who reads the image has the same tensors: never change them in place."""
    text: str
    """The text that replaces the image's placeholder."""
    grid: tuple[int, ...]
    """See ImageSpan."""

    @property
    def num_bytes(self) -> int:
        """The size of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class ImageTokens(NamedTuple):
    """The tokens of an image in a prompt: all that ids and spans depend on. Equal for equal files,
    under one processor."""

    digest: str
    """The SHA-256 of the image file, in hexadecimal."""
    text: str
    """The text that replaces the image's placeholder."""
    grid: tuple[int, ...]
    """See ImageSpan."""
    num_features: int
    """The number of feature tokens in the text."""


@dataclass(frozen=True, eq=False)
class VisionPrompt:
    """The tokens of messages with images."""

    ids: list[int]
    spans: tuple[ImageSpan, ...]
    images: tuple[ProcessedImage, ...]
    """In the order of the spans. An image that is shown twice is in it twice."""


class VisionProcessor:
    """The processor of one vision-language model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        image_processor: Any,
        config: PretrainedConfig,
    ) -> None:
        """`image_processor`: transformers' for Pillow. `config`: the model's. Raises ModelError for
        a model of an unknown family, and for a tokenizer without a chat template or without the
        tokens of images."""
        self.tokenizer = tokenizer
        self.family = find_family(config, tokenizer, image_processor)
        self.vision_ids = vision_ids(self.family, config, tokenizer)
        """The ids that a policy must never sample."""
        self._image_processor = image_processor
        names = tokenizer.convert_ids_to_tokens(sorted(self.vision_ids))
        self.vision_texts = frozenset(name for name in names if isinstance(name, str))
        """The texts of these ids. In a message they are ordinary text, also in an assistant's."""
        marks = self.vision_texts | {self.family.placeholder, self.family.feature}
        self.template = ImageChatTemplate(tokenizer, marks)
        """The template that shows images."""
        self.feature_id = _only_id(tokenizer, self.family.feature)
        """The id in whose places the model reads features."""
        self._image_tokens: dict[str, ImageTokens] = {}
        """By digest, the oldest first."""
        self._processed = ByteCache[str, ProcessedImage](PIXEL_BYTES)
        self._processed_lock = threading.Lock()
        self._files: dict[str, bytes] = {}
        self.fingerprint = self._make_fingerprint()
        """Names everything that ids, grids and pixel tensors of an image depend on, in hexadecimal.
        Pixels that are made again for a turn must come from a processor of the same
        fingerprint."""

    def prompt(
        self,
        messages: Sequence[Message],
        images: Mapping[str, ImageFile],
        tools: ToolSchemas = NO_TOOLS,
    ) -> VisionPrompt:
        """The prompt of a conversation, up to the beginning of the answer. `images`: digest ->
        image, for each image of the messages. Raises ImageError for an image that is missing,
        damaged or not the one of its digest; ModelError for a template that does not show each
        image once."""
        files = [file_of(part.sha256, images) for part in images_of_messages(messages)]
        return self.encode(self.render(messages, tools), files)

    def render(self, messages: Sequence[Message], tools: ToolSchemas = NO_TOOLS) -> str:
        """The text of a conversation with one placeholder per image, up to the beginning of the
        answer. Engines that expand placeholders themselves get it. Markers that messages spell,
        placeholders among them, are cut in it (data/message_markers.py)."""
        return self.template.render(messages, prompt=True, tools=tools)

    def encode(self, text: str, files: Sequence[ImageFile]) -> VisionPrompt:
        """The tokens of a rendering that has a placeholder for each of these images, in their
        order. Raises as `prompt`."""
        self._check_places(text, len(files))
        by_digest = {file.part.sha256: file for file in files}
        processed = {digest: self.process(file) for digest, file in by_digest.items()}
        images = tuple(processed[file.part.sha256] for file in files)
        tokens = [self._tokens_of(image) for image in images]
        ids = encode_rendering(self.tokenizer, self.expand(text, tokens))
        return VisionPrompt(ids, self.find_spans(ids, tokens), images)

    def expand(self, text: str, images: Sequence[ImageTokens]) -> str:
        """A rendering, with the texts of these images in place of its placeholders. Raises
        ModelError for a rendering that does not have one placeholder for each image."""
        pieces = self._check_places(text, len(images))
        texts = [image.text for image in images]
        return pieces[0] + "".join(
            part for pair in zip(texts, pieces[1:], strict=True) for part in pair
        )

    def _check_places(self, text: str, num_images: int) -> list[str]:
        """The pieces of a rendering between its placeholders."""
        pieces = text.split(self.family.placeholder)
        if len(pieces) - 1 != num_images:
            raise ModelError(
                f"the rendered conversation has {len(pieces) - 1} placeholders "
                f"({self.family.placeholder}), and the messages have {num_images} images: choose a "
                "model whose chat template shows each image once"
            )
        return pieces

    def tokens_of(self, file: ImageFile) -> ImageTokens:
        """The tokens of an image. They are kept for the images that were read last. Raises
        ImageError."""
        known = self._image_tokens.get(file.part.sha256)
        if known is not None:
            return known

        tokens = self._tokens_of(self.process(file))
        self._image_tokens[tokens.digest] = tokens
        for digest in list(self._image_tokens)[:-KEPT_IMAGES]:
            self._image_tokens.pop(digest, None)
        return tokens

    def knows(self, digest: str) -> bool:
        """Whether `tokens_of` returns at once."""
        return digest in self._image_tokens

    def _tokens_of(self, image: ProcessedImage) -> ImageTokens:
        return ImageTokens(image.digest, image.text, image.grid, self.count_features(image))

    def process(self, file: ImageFile) -> ProcessedImage:
        """The pixel tensors and tokens of an image. They are kept for the images that were
        processed last. Raises ImageError."""
        processed = self.kept_image(file.part.sha256)
        if processed is None or not file.is_intact:
            processed = self._process(file)
            with self._processed_lock:
                if processed.digest not in self._processed:
                    self._processed.put(processed.digest, processed, processed.num_bytes)
        return processed

    def kept_image(self, digest: str) -> ProcessedImage | None:
        """The image, if `process` has kept it."""
        with self._processed_lock:
            return self._processed.get(digest)

    def forget_pixels(self) -> None:
        """Drops the pixel tensors that nobody else holds."""
        with self._processed_lock:
            self._processed.clear()

    @property
    def pixel_bytes(self) -> int:
        """The size of the pixel tensors that are kept."""
        return self._processed.num_bytes

    def _process(self, file: ImageFile) -> ProcessedImage:
        where = f"the image {file.part.sha256[:12]}..."
        pixels = decode_image(file, where)
        height, width, _ = pixels.shape
        image = Image.fromarray(pixels)
        try:
            processed = self._image_processor([image], return_tensors="pt", **self.family.options)
        except ValueError as error:
            raise ImageError(
                f"{where} of {width} x {height} pixels can't be shown to the model "
                f"({error}): choose another size"
            ) from error

        layout = self.family.lay_out(processed)
        tensors = {name: processed[name] for name in MODEL_INPUTS if name in processed}
        return ProcessedImage(file.part.sha256, tensors, layout.text, layout.grid)

    def positions(self, length: int, spans: Sequence[ImageSpan]) -> np.ndarray:
        """[A, length] int64: the positions of a sequence from its first token, on A = 3 axes for
        models with M-RoPE, otherwise on one."""
        if self.family.merge is None:
            return plain_positions(length)
        return mrope_positions(length, spans, self.family.merge)

    def join(self, images: Sequence[ProcessedImage]) -> dict[str, torch.Tensor]:
        """The arguments with which the model reads these images in one pass. Their order is that of
        the feature tokens in the pass, row by row."""
        names = images[0].tensors if images else ()
        return {
            name: torch.cat([image.tensors[name] for image in images], self.family.image_axis)
            for name in names
        }

    def count_features(self, image: ProcessedImage) -> int:
        """The number of feature tokens of an image."""
        return image.text.count(self.family.feature)

    def keep_files(self, folder: Path, *, is_changed: bool) -> None:
        """Remembers the processor's files in the model's folder for `save`, because a run deletes
        old checkpoints. `is_changed`: whether this processor has other settings than the files."""
        self._files = {
            name: (folder / name).read_bytes()
            for name in PROCESSOR_FILES
            if (folder / name).is_file()
        }
        if is_changed:
            self._files = {
                name: _with_size(name, data, dict(self._image_processor.size))
                for name, data in self._files.items()
            }

    def save(self, folder: Path) -> None:
        """Writes the files of the image processor into a model's folder."""
        if not self._files:
            self._image_processor.save_pretrained(folder)
        for name, data in self._files.items():
            (folder / name).write_bytes(data)

    def __deepcopy__(self, memo: dict[int, Any]) -> VisionProcessor:
        """Itself: nothing changes a processor, and copies of a model share it."""
        return self

    def find_spans(
        self, ids: Sequence[int], images: Sequence[ImageTokens]
    ) -> tuple[ImageSpan, ...]:
        """The spans of these images, in order, among the ids that show them. Raises ModelError for
        ids with more or fewer feature tokens than the images have."""
        places = np.flatnonzero(np.asarray(ids, dtype=np.int64) == self.feature_id).tolist()
        counts = [image.num_features for image in images]
        if len(places) != sum(counts):
            raise ModelError(
                f"the ids have {len(places)} tokens {self.family.feature} for {sum(counts)} "
                "features: the tokenizer does not belong to the model"
            )

        spans = []
        start = 0
        for image, count in zip(images, counts, strict=True):
            first, last = places[start], places[start + count - 1]
            start += count
            spans.append(ImageSpan(first, last + 1 - first, image.grid, image.digest))
        return tuple(spans)

    def _make_fingerprint(self) -> str:
        processor = {
            name: value
            for name, value in self._image_processor.to_dict().items()
            if name not in NAMES_OF_CLASSES
        }
        facts = {
            "image_processor": [type(self._image_processor).__name__, processor],
            "family": [self.family.name, self.family.numbers, dict(self.family.options)],
            "feature": [self.family.feature, self.feature_id],
        }
        return sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def load_processor(
    folder: Path,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> VisionProcessor:
    """The processor of the model in a folder. `min_pixels`, `max_pixels`: the size to which images
    are scaled, if it is not the folder's. Raises ModelError."""
    limits = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    chosen = {name: limit for name, limit in limits.items() if limit is not None}
    try:
        # Pillow's on every machine, so that pixels don't depend on whether torchvision is there.
        image_processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil", **chosen)
    except Exception as error:  # a damaged preprocessor_config.json may raise anything
        raise ModelError(
            f"the image processor in {folder} can't be read ({type(error).__name__}: {error}): "
            "save the model's own there with processor.save_pretrained"
        ) from error

    processor = VisionProcessor(tokenizer, image_processor, config)
    if chosen:
        _check_limits(processor.family.name, chosen, image_processor)
    processor.keep_files(folder, is_changed=bool(chosen))
    return processor


def _check_limits(family: str, chosen: Mapping[str, int], image_processor: Any) -> None:
    """Raises ModelError for a family that does not scale images to a number of pixels, and for
    limits that contradict each other."""
    if family != "qwen":
        names = ", ".join(f"model.vision.{name}" for name in chosen)
        raise ModelError(
            f"{names}: models of the family {family} scale every image to their own size: remove "
            "it, or choose a Qwen model"
        )
    check_size(image_processor)


def check_size(image_processor: Any) -> None:
    """Raises ModelError if the limits of a Qwen model's images contradict each other."""
    size = image_processor.size
    if size["shortest_edge"] > size["longest_edge"]:
        raise ModelError(
            f"model.vision: images would have at least {size['shortest_edge']} and at most "
            f"{size['longest_edge']} pixels: set both min_pixels and max_pixels"
        )


def _with_size(name: str, data: bytes, size: Mapping[str, int]) -> bytes:
    """One of PROCESSOR_FILES with another size of images."""
    settings = json.loads(data)
    of_images = settings if name == IMAGE_FILE else settings.get("image_processor")
    if of_images is None or name == VIDEO_FILE:
        return data

    of_images |= {"size": dict(size)}
    for key in ("min_pixels", "max_pixels"):
        of_images.pop(key, None)
    return (json.dumps(settings, indent=2) + "\n").encode()


def _only_id(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise ModelError(f"the tokenizer encodes {text} as {len(ids)} tokens, and it must be one")
    return int(ids[0])
