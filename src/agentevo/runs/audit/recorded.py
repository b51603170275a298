"""The engine and the remote models of a replay, which answer from the record.

Both compare each request with the recorded request. After the first difference, or at the end of
the record, they refuse to answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentevo.config.remote_models import RemoteModelSection
from agentevo.errors import EngineError
from agentevo.inference.conversations.equivalence import key_of, places_of
from agentevo.inference.engine import TokenListener
from agentevo.inference.remote_models.ledger import RemoteModelError
from agentevo.inference.remote_models.wire import RemoteReply, Usage
from agentevo.runs.audit.resampling import Difference, DifferenceKind
from agentevo.types import (
    Completion,
    Message,
    RemoteTurn,
    SamplingOverrides,
    SamplingParams,
    Trajectory,
    Turn,
)
from agentevo.types.images import PromptImage


class RecordedEngine:
    """Answers requests with the recorded completions for their seeds. After the first difference,
    or at the end of the record, it refuses to answer."""

    def __init__(self, trajectory: Trajectory, end_ids: Sequence[int]) -> None:
        self._trajectory = trajectory
        self._end_ids = frozenset(end_ids)
        self._by_seed: dict[int, list[Turn]] = {}
        for turn in trajectory.turns:  # an agent may use the same seed for several calls
            self._by_seed.setdefault(turn.seed, []).append(turn)
        self.difference: Difference | None = None
        self.num_answered = 0

    @property
    def version(self) -> int:
        return max(
            (version for turn in self._trajectory.turns for version in turn.versions), default=0
        )

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
        """See Engine.generate. It does not notify a listener, and needs no images, since the ids
        are compared. Raises EngineError when it refuses to
        answer."""
        turns = self._by_seed.get(sampling.seed, [])
        turn = next(
            (t for t in turns if self._trajectory.context_ids(t.index) == prompt_ids),
            turns[0] if turns else None,
        )
        if turn is not None:
            self._check(turn, prompt_ids, sampling)
        elif (
            self._trajectory.status == "completed"
        ):  # a failed or cancelled attempt may have made further requests
            self._differs(
                "end",
                self.num_answered,
                0,
                f"the replay asks for more turns than the {len(self._trajectory.turns)} of the "
                "record",
            )

        if turn is None or self.difference is not None:
            raise EngineError("the replay ends here: the record has no answer to this request")

        self.num_answered += 1
        return Completion(
            ids=list(turn.completion_ids),
            logprobs=list(turn.logprobs),
            versions=list(turn.versions),
            finish_reason=turn.finish_reason,
            masks="" if turn.constraint is None else turn.constraint.masks,
            routed_experts=turn.routed_experts,
        )

    async def release(self, session: str) -> None:
        """See Engine.release."""

    def stats(self) -> dict[str, float]:
        """See Engine.stats."""
        return {}

    def _check(self, turn: Turn, prompt_ids: list[int], sampling: SamplingParams) -> None:
        recorded = self._trajectory.context_ids(turn.index)
        if prompt_ids != recorded:
            pairs = zip(prompt_ids, recorded, strict=False)
            place = next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt_ids), len(recorded))
            )
            what = (
                f"turn {turn.index}: the replay's prompt differs from token {place} "
                "on: the agent or the environment did something else"
            )
            self._differs("prompt", turn.index, place, what)
            return

        recorded_grammar = "" if turn.constraint is None else turn.constraint.grammar
        if sampling.grammar != recorded_grammar or sampling.penalties != turn.penalties:
            what = (
                f"turn {turn.index}: the replay asks for another answer format or other penalties"
            )
            self._differs("prompt", turn.index, 0, what)
            return

        # only the engine's tokenizer knows which token completes a stop text
        if sampling.stop_strings:
            return

        ids = turn.completion_ids
        stop = next((i for i, token in enumerate(ids) if token in self._end_ids), None)
        if stop is not None and stop != len(ids) - 1:
            self._differs(
                "end",
                turn.index,
                stop,
                f"turn {turn.index}: the record continues after the stop token at {stop}",
            )
        elif stop is None and len(ids) != sampling.max_new_tokens:
            what = (
                f"turn {turn.index}: the record ends after {len(ids)} tokens without a stop "
                f"token, the limit is {sampling.max_new_tokens}"
            )
            self._differs("end", turn.index, len(ids), what)
        elif turn.finish_reason != (reason := "length" if stop is None else "stop"):
            what = f"turn {turn.index}: it ends by {reason}, the record says {turn.finish_reason}"
            self._differs("end", turn.index, len(ids), what)

    def _differs(self, kind: DifferenceKind, turn: int, position: int, what: str) -> None:
        if self.difference is None:
            self.difference = Difference(kind=kind, turn=turn, position=position, what=what)


class RecordedModels(Mapping[str, "RecordedModel"]):
    """The remote models of an attempt, in place of RemoteModels. Each call gets the recorded answer
    for its seed. A call without a recorded answer fails, because it may have failed then: failed
    calls are not recorded."""

    def __init__(
        self, sections: Mapping[str, RemoteModelSection], turns: Sequence[RemoteTurn]
    ) -> None:
        self.turns = turns
        self._models = {
            name: RecordedModel(name, self, sees_images=section.sees_images)
            for name, section in sections.items()
        }
        self._given: set[int] = set()
        self.difference: Difference | None = None

    def __getitem__(self, name: str) -> RecordedModel:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    @property
    def num_answered(self) -> int:
        """The number of recorded answers that were requested again."""
        return len(self._given)

    def answer(self, model: str, seed: int | None, messages: Sequence[Message]) -> RemoteReply:
        """The recorded answer. Raises RemoteModelError if there is none for this request."""
        turns = [
            turn
            for turn in self.turns
            if (turn.model, turn.seed) == (model, seed) and turn.index not in self._given
        ]
        request_keys = _keys(messages)
        turn = next((t for t in turns if _keys(self._history(t)) == request_keys), None)
        if turns and turn is None and self.difference is None:
            self.difference = Difference(
                kind="prompt",
                turn=0,
                position=0,
                what=f"remote turn {turns[0].index}: the replay asks the remote model {model} with "
                "other messages: the agent or the environment did something else",
            )

        if turn is None or self.difference is not None:
            raise RemoteModelError(
                f"the replay has no answer of the remote model {model} to this request: it is not "
                "in the record"
            )

        self._given.add(turn.index)
        return RemoteReply(
            message=turn.messages[-1],
            finish_reason=turn.finish_reason,
            usage=Usage(
                prompt_tokens=turn.prompt_tokens,
                cached_tokens=turn.cached_tokens,
                completion_tokens=turn.completion_tokens,
            ),
            cost=turn.cost,
        )

    def _history(self, turn: RemoteTurn) -> list[Message]:
        """The sampling parameters of the turn's request."""
        history: list[Message] = list(turn.messages[:-1])
        while turn.parent is not None:
            turn = self.turns[turn.parent]
            history = [*turn.messages, *history]
        return history


class RecordedModel:
    """A remote model of a replay, in place of RemoteModel."""

    within_s = 0.0

    def __init__(self, name: str, models: RecordedModels, *, sees_images: bool) -> None:
        self.name = name
        self.sees_images = sees_images
        self._models = models

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        sampling: SamplingOverrides | None = None,
        **options: Any,
    ) -> RemoteReply:
        """See RemoteModel.generate. The other arguments are not in the record."""
        seed = None if sampling is None else sampling.seed
        return self._models.answer(self.name, seed, messages)


def _keys(messages: Sequence[Message]) -> list[Any]:
    return [
        key_of(message, place) for message, place in zip(messages, places_of(messages), strict=True)
    ]
