"""Measurements of `agentevo doctor` on one group of attempts. They give numbers only;
`checks.py` judges them.

The log-prob check deliberately does not use the trainer's code: each attempt goes alone, whole and
uncached through transformers' own attention. Code that the engine and the trainer share (cache,
packing, attention) can therefore not hide an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentevo.errors import EngineError
from agentevo.inference.conversations.conversation import Conversation
from agentevo.inference.conversations.drift import DriftPlace
from agentevo.inference.embedded.sampling import filter_logits
from agentevo.inference.engine import (
    CANT_SCORE,
    Engine,
    ScoringEngine,
    TokenListener,
    TokenScores,
    images_option,
)
from agentevo.models.compute.attention import NAME
from agentevo.models.compute.rows import row_settings
from agentevo.models.token_rows import decoder_of, token_logits
from agentevo.models.vision.features import pixel_arguments
from agentevo.models.vision.parts import processor_of
from agentevo.types import (
    Completion,
    SamplingParams,
    Trajectory,
    Turn,
    images_of_context,
    path_of,
)
from agentevo.types.images import ImageFile, PromptImage

Request = tuple[tuple[int, ...], tuple[int, ...]]
"""A request to the engine and its answer, as token ids."""


class WatchedEngine:
    """An engine that remembers every request, so that checks know what the model really read."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.requests: Counter[Request] = Counter()

    @property
    def version(self) -> int:
        return self._engine.version

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        session: str | None = None,
        deadline_s: float,
        listen: TokenListener | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        """See Engine.generate."""
        completion = await self._engine.generate(
            prompt_ids,
            sampling,
            session=session,
            deadline_s=deadline_s,
            listen=listen,
            **images_option(self._engine, images),
        )
        self.requests[tuple(prompt_ids), tuple(completion.ids)] += 1
        return completion

    async def score(
        self,
        context_ids: list[int],
        ids: list[int],
        *,
        temperature: float = 1.0,
        deadline_s: float,
        images: Sequence[PromptImage] = (),
    ) -> TokenScores:
        """See ScoringEngine.score."""
        if not isinstance(self._engine, ScoringEngine):
            raise EngineError(CANT_SCORE)
        return await self._engine.score(
            context_ids,
            ids,
            temperature=temperature,
            deadline_s=deadline_s,
            **({"images": images} if images else {}),
        )

    async def release(self, session: str) -> None:
        """See Engine.release."""
        await self._engine.release(session)

    def stats(self) -> dict[str, float]:
        """See Engine.stats."""
        return self._engine.stats()


def count_other_contexts(trajectories: Sequence[Trajectory], requests: Counter[Request]) -> int:
    """Turns whose recorded context and completion are not among the engine's requests. Each request
    counts for one turn."""
    unmatched = requests.copy()
    unmatched.subtract(
        (tuple(trajectory.context_ids(turn.index)), tuple(turn.completion_ids))
        for trajectory in trajectories
        for turn in trajectory.turns
    )
    return -sum(count for count in unmatched.values() if count < 0)


def count_reencoded_differently(
    trajectories: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase
) -> int:
    """Attempts whose ids, decoded and encoded again, give other ids."""
    return sum(
        any(
            tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) != ids
            for ids in whole_paths(trajectory)
        )
        for trajectory in trajectories
    )


def drift_places(conversations: Sequence[Conversation]) -> list[str]:
    """A line for each class of drift, the most frequent first: its count and its first place."""
    total: Counter[str] = Counter()
    for conversation in conversations:
        total.update(conversation.drift.counts)

    return [
        next(
            f"{kind} {count}, first in {_place(conversation, conversation.drift.first[kind])}"
            for conversation in conversations
            if kind in conversation.drift.first
        )
        for kind, count in total.most_common()
    ]


def _place(conversation: Conversation, place: DriftPlace) -> str:
    return (
        f"{conversation.name}, message {place.message}: recorded '{place.recorded}', "
        f"received '{place.came}'"
    )


def leaves(trajectory: Trajectory) -> list[Turn]:
    """The turns that no other turn extends, in order; all but branched trajectories have one."""
    parents = {turn.parent for turn in trajectory.turns}
    return [turn for turn in trajectory.turns if turn.index not in parents]


def whole_paths(trajectory: Trajectory) -> list[list[int]]:
    """Per leaf of the trajectory's tree: its context and completion."""
    return [
        [*trajectory.context_ids(turn.index), *turn.completion_ids] for turn in leaves(trajectory)
    ]


@torch.inference_mode()
def max_logprob_difference(
    model: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    sampling: SamplingParams,
    files: Mapping[str, ImageFile] = MappingProxyType({}),
) -> tuple[int, float]:
    """(sampled tokens, largest |recorded log-prob - log-prob by a full forward pass over its path|
    in nats). NaN if any is not a number. `files`: the images of the attempts, by digest."""
    processor = processor_of(model)
    differences = [torch.zeros(0)]
    with _own_attention(model):
        for trajectory in trajectories:
            seen_turns: set[int] = set()
            for leaf in leaves(trajectory):
                ids = torch.tensor(
                    [*trajectory.context_ids(leaf.index), *leaf.completion_ids], device=model.device
                )
                spans = images_of_context(trajectory.turns, leaf.index)
                images = [processor.process(files[s.digest]) for s in spans] if processor else []
                arguments = pixel_arguments(model, ids[None], images)
                _forget_positions(model)
                outputs = model(input_ids=ids[None], use_cache=False, **arguments)
                logits = token_logits(model, outputs.logits[0]).float()  # [positions, tokens]
                for turn in path_of(trajectory.turns, leaf.index):
                    if turn.index not in seen_turns:
                        seen_turns.add(turn.index)
                        start = len(trajectory.context_ids(turn.index))
                        chosen = ids[start : start + len(turn.completion_ids)]
                        rows = logits[start - 1 : start - 1 + len(chosen)] / turn.temperature
                        rows = torch.stack(
                            [filter_logits(row, sampling) for row in rows]
                        ).log_softmax(-1)
                        right = rows.gather(1, chosen[:, None])[:, 0].cpu()
                        differences.append((right - torch.tensor(turn.logprobs)).abs())

    distances = torch.cat(differences)
    return len(distances), float(distances.max()) if len(distances) else 0.0


def _forget_positions(model: PreTrainedModel) -> None:
    """Models with M-RoPE remember how far an image has shifted the positions of the last pass."""
    decoder = decoder_of(model)
    if hasattr(decoder, "rope_deltas"):
        decoder.rope_deltas = None


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Temporarily restores transformers' attention in a model that `models.attention.prepare`
    changed to AgentEvo's."""
    if row_settings(model) is not None:
        yield
        return

    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(NAME)


def worst_case_tokens(
    trajectories: Sequence[Trajectory], max_turns: int, max_new_tokens: int
) -> int:
    """Tokens of the longest conversation possible: the longest first prompt, then in each turn a
    completion cut by the limit and the longest addition seen. A lower bound if no
    attempt took a second turn. `max_turns` is 1 where each turn starts a new conversation."""
    first = max(
        len(turn.prompt_ids)
        for trajectory in trajectories
        for turn in trajectory.turns
        if turn.parent is None
    )
    added = max(
        (
            len(turn.prompt_ids)
            for trajectory in trajectories
            for turn in trajectory.turns
            if turn.parent is not None
        ),
        default=0,
    )
    return first + max_turns * max_new_tokens + (max_turns - 1) * added
