"""Tiny vision-language policies with wide random weights, prompts that show them images, and what
transformers itself computes for these."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from seeing import load_seeing, processor_in
from tiny_vision import png, write_tiny_vision

from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.compute.attention import prepare
from agentevo.models.token_rows import token_logits
from agentevo.models.vision.processor import ProcessedImage, VisionProcessor
from agentevo.types import Completion, Message, SamplingParams, TextPart
from agentevo.types.images import ImageFile, PromptImage, image_file

TYPES = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids", "qwen": "mm_token_type_ids"}
"""Family -> the argument with which transformers' own pass tells images from text."""


class SeenPrompt(NamedTuple):
    """A prompt, and its images as an engine gets them."""

    ids: list[int]
    images: list[PromptImage]
    processed: list[ProcessedImage]

    def after(self, completion: Completion, later: SeenPrompt) -> SeenPrompt:
        """The prompt of the next turn, which adds `later` to the completion."""
        length = len(self.ids) + len(completion.ids)
        moved = [PromptImage(i.span.shifted(length), i.file) for i in later.images]
        return SeenPrompt(
            [*self.ids, *completion.ids, *later.ids],
            [*self.images, *moved],
            [*self.processed, *later.processed],
        )


class SeeingPolicy(NamedTuple):
    """A prepared model, the same model as transformers runs it, and its processor."""

    model: Any
    alone: Any
    processor: VisionProcessor

    def prompt(self, *parts: str | ImageFile) -> SeenPrompt:
        """One message of a user."""
        files = {part.part.sha256: part for part in parts if isinstance(part, ImageFile)}
        content = tuple(TextPart(part) if isinstance(part, str) else part.part for part in parts)
        seen = self.processor.prompt([Message("user", content)], files)
        images = [PromptImage(span, files[span.digest]) for span in seen.spans]
        return SeenPrompt(seen.ids, images, list(seen.images))

    @torch.no_grad()
    def logprobs(self, prompt: SeenPrompt, more: Sequence[int] = ()) -> torch.Tensor:
        """[T, V] float64: transformers' own log-probs of the prompt and of what follows it."""
        ids = [*prompt.ids, *more]
        name = TYPES.get(self.processor.family.name)
        types = torch.tensor([[int(id == self.processor.feature_id) for id in ids]])
        if hasattr(self.alone.model, "rope_deltas"):
            self.alone.model.rope_deltas = None
        logits = self.alone(
            input_ids=torch.tensor([ids]),
            **self.processor.join(prompt.processed),
            **({name: types} if name else {}),
            use_cache=False,
        ).logits[0]
        return torch.log_softmax(token_logits(self.alone, logits).double(), -1)

    def difference(self, prompt: SeenPrompt, completion: Completion) -> float:
        """The largest difference of a completion's log-probs, at temperature 1."""
        exact = self.logprobs(prompt, completion.ids)[len(prompt.ids) - 1 : -1]
        ids = torch.tensor(completion.ids)
        drawn = exact.gather(1, ids[:, None])[:, 0]
        return float((drawn - torch.tensor(completion.logprobs)).abs().max())


def picture(number: int, width: int = 40, height: int = 24) -> ImageFile:
    return image_file(png(width, height, number), "image/png")


RED = picture(1)
BLUE = picture(2)
TALL = picture(3, 24, 48)
PATIENCE_S = 300.0


async def ask(
    engine: TorchEngine,
    prompt: SeenPrompt,
    *,
    session: str | None = None,
    images: Sequence[PromptImage] | None = None,
    **sampling: Any,
) -> Completion:
    """The engine's answer to a prompt with its images, or with others."""
    params = SamplingParams(**{"max_new_tokens": 10, "seed": 3} | sampling)
    images = prompt.images if images is None else images
    return await engine.generate(
        prompt.ids, params, session=session, deadline_s=PATIENCE_S, images=images
    )


async def play_two_turns(
    policy: SeeingPolicy, engine: TorchEngine
) -> list[tuple[SeenPrompt, Completion]]:
    """Each prompt with its answer. The second turn of the session shows a new image."""
    first = policy.prompt("look at ", RED, " and say what it is")
    answer = await ask(engine, first, session="s")
    second = first.after(answer, policy.prompt("now this: ", TALL, RED))
    return [(first, answer), (second, await ask(engine, second, session="s"))]


def seeing_policy(name: str, **text: Any) -> SeeingPolicy:
    """`name`: of tiny_vision.FAMILIES or VARIANTS. `text`: other values of the part for text."""
    with TemporaryDirectory() as folder:
        loaded = load_seeing(write_tiny_vision(name, Path(folder), **text))

    model: Any = loaded.model
    alone: Any = copy.deepcopy(model)
    alone.set_attn_implementation("eager")
    return SeeingPolicy(prepare(model), alone, processor_in(loaded))
