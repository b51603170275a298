"""Tiny vision-language models as transformers reads them and as AgentEvo does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny_vision import png
from transformers import AutoModelForImageTextToText

from agentevo.config import ModelSection
from agentevo.models.compute.attention import Compute, prepare
from agentevo.models.compute.row_states import state_of
from agentevo.models.compute.rows import RowGroup, accepted_inputs, padded_group, run_rows
from agentevo.models.files.load import LoadedModel, load_model
from agentevo.models.vision.features import ImageEncoder, ImageFeatures
from agentevo.models.vision.parts import part_of
from agentevo.models.vision.processor import VisionProcessor, VisionPrompt
from agentevo.types.images import ImageFile, image_file

FILES = [
    image_file(png(width, height, seed), "image/png")
    for seed, (width, height) in enumerate(((16, 16), (24, 16), (16, 32)))
]
"""Images of different shapes."""
TOLERANCE = 1e-4
"""The largest allowed difference of a log-prob, in nats, and of a gradient, relative to its
norm."""


def load_seeing(folder: Path, **options: Any) -> LoadedModel:
    return load_model(ModelSection(name=str(folder), device="cpu", **options))


def processor_in(loaded: LoadedModel) -> VisionProcessor:
    assert loaded.processor is not None
    return loaded.processor


@dataclass
class Seeing:
    """A model that computes as `compute` says, and the same by transformers alone."""

    loaded: LoadedModel
    plain: Any

    @classmethod
    def read(cls, folder: Path, compute: Compute, **options: Any) -> Seeing:
        loaded = load_seeing(folder, **options)
        prepare(loaded.model, compute=compute)
        plain = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
        return cls(loaded, plain.eval())

    @property
    def processor(self) -> VisionProcessor:
        return processor_in(self.loaded)

    def prompt(self, *parts: str | ImageFile) -> VisionPrompt:
        """The tokens of texts and images."""
        files = [part for part in parts if isinstance(part, ImageFile)]
        mark = self.processor.family.placeholder
        text = "".join(part if isinstance(part, str) else mark for part in parts)
        return self.processor.encode(text, files)

    def features(self, prompt: VisionPrompt) -> list[ImageFeatures]:
        return ImageEncoder(self.loaded.model, self.processor).encode(prompt.images)

    def positions(self, prompt: VisionPrompt) -> torch.Tensor:
        """[A, L]"""
        return torch.from_numpy(self.processor.positions(len(prompt.ids), prompt.spans))

    def types(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([int(id == self.processor.feature_id) for id in ids])

    def plain_logits(self, prompt: VisionPrompt) -> torch.Tensor:
        """[L, V] by transformers alone: from pixels, with positions of its own."""
        types = self.types(prompt.ids)[None]
        kind = self.plain.config.model_type
        arguments: dict[str, Any] = dict(self.processor.join(prompt.images))
        if kind == "gemma3":
            arguments["token_type_ids"] = types
        elif kind == "gemma4" or kind.startswith("qwen"):
            arguments["mm_token_type_ids"] = types
        ids = torch.tensor([prompt.ids])
        logits: torch.Tensor = self.plain(input_ids=ids, use_cache=False, **arguments).logits[0]
        return logits

    def watched(self, model: Any) -> list[torch.nn.Parameter]:
        """The embeddings, a matrix of the tower and one of the projector."""
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        named = dict(inner.named_parameters())
        matrices = [
            next(p for n, p in named.items() if part_of(inner, n) == part and p.dim() == 2)
            for part in ("tower", "projector")
        ]
        return [inner.get_input_embeddings().weight, *matrices]


def log_prob_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of a log-prob, in nats."""
    return float((one.log_softmax(-1) - other.log_softmax(-1)).abs().max())


def measure(logits: torch.Tensor) -> torch.Tensor:
    """A number that depends on every log-prob of some tokens."""
    return logits.log_softmax(-1).square().mean(-1).sum()


def gradient_difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest |g - e| / |e|."""
    return max(float((g - e).norm() / e.norm()) for g, e in zip(found, expected, strict=True))


def group_of(
    model: Seeing, prompts: list[VisionPrompt], start: int = 0, stop: int | None = None
) -> RowGroup:
    """The prompts from `start` to before `stop`, with the output at every place."""
    rows = [prompt.ids[start:stop] for prompt in prompts]
    places = [(row, column) for row, ids in enumerate(rows) for column in range(len(ids))]
    group = padded_group(rows, places, model.loaded.model)
    count, width = group.input_ids.shape
    axes = len(model.positions(prompts[0]))
    positions = torch.zeros(axes, count, width, dtype=torch.int64)
    types = torch.zeros(count, start + width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        positions[:, row, : len(rows[row])] = model.positions(prompt)[:, start:stop]
        types[row, : len(prompt.ids[:stop])] = model.types(prompt.ids[:stop])
    return group._replace(positions=positions, types=types)


@torch.no_grad()
def second_turn_difference(model: Seeing) -> float:
    """The largest difference of a log-prob where a second turn with a new image continues from the
    state of the first, and single tokens follow it, as the engine draws them."""
    whole = model.prompt("first ", FILES[0], " turn", "second ", FILES[1], " end")
    turn = len(model.prompt("first ", FILES[0], " turn").ids)
    last = len(whole.ids) - 2
    features = model.features(whole)
    accepted = accepted_inputs(model.loaded.model)
    logits = []
    state = None
    for start, stop in ((0, turn), (turn, last), (last, last + 1), (last + 1, last + 2)):
        group = group_of(model, [whole], start, stop)
        new_features = {0: features[:1], turn: features[1:]}.get(start, [])
        inputs = {} if state is None else {"past_key_values": state}
        output = run_rows(model.loaded.model, group, new_features, use_cache=True, **inputs)
        state = state_of(output, accepted)
        logits.append(output.logits[0])

    return log_prob_difference(torch.cat(logits), model.plain_logits(whole))
