"""A running attempt, as events for a viewer in a browser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agentevo.errors import storable
from agentevo.evaluation import player_words as words
from agentevo.evaluation.attempt import KINDS, TEXTS, turn_of
from agentevo.observability.attempt_tokens import TokenBlock, Training, block_of
from agentevo.observability.attempt_view import ShownMessage, TurnView, to_shown_message, turn_view
from agentevo.pages.worlds import Legend, WorldPiece, legend_of, pieces
from agentevo.rollout.group import GroupAttempt
from agentevo.store.call_log import RunningCall
from agentevo.types import Message, RemoteTurn, Trajectory, Turn

MAX_TOKENS = 4_096
"""The maximum number of tokens of a turn that are shown individually."""
MAX_EVENTS = 4_000
"""The maximum number of events of an attempt. The event of its end is always sent."""
MAX_SHOWN = 30_000
"""The maximum number of characters of a message."""
_UNTRAINED = Training(None, None, None)


def tokens_of(turn: Turn, decode: Callable[[Sequence[int]], str]) -> TokenBlock:
    """The tokens of a turn, in the form for pages."""
    size = min(len(turn.completion_ids), MAX_TOKENS)
    return block_of(turn, 0, size, turn.parent, False, decode, _UNTRAINED)


class LiveTurns:
    """Sends events when calls start and end, and for each reply. `name`: the id of the request."""

    def __init__(
        self,
        attempt: GroupAttempt,
        name: str,
        send: Callable[[words.Event], None],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._attempt = attempt
        self._name = name
        self._send = send
        self._decode = decode
        self._numbers: dict[int, int] = {}
        self._calls: list[RunningCall] = []
        """Keeps ended calls alive, so that no new call gets the `id()` of an ended one."""
        self._legend: dict[str, str] = {}
        """The environment's legend of its symbols."""
        self._ending: list[WorldPiece] = []
        self._num_sent = 0

    def on_call(self, call: RunningCall) -> None:
        """See AttemptCalls.listen."""
        if id(call) not in self._numbers:
            self._numbers[id(call)] = len(self._calls)
            self._calls.append(call)

        self._num_sent += 1
        if self._num_sent > MAX_EVENTS:
            return

        if call.kind == "attempt" and call.has_ended:
            shown = str(call.record("").attributes.get("ending", ""))
            self._ending = pieces(_cut(shown), self._legend) if shown else []
        elif call.kind in ("policy", "remote"):
            self._note_turn(call)
        elif call.kind in KINDS:
            self._made(call)

    def _note_turn(self, call: RunningCall) -> None:
        record = call.record("")
        number = self._numbers[id(call)]
        if not call.has_ended or record.status != "completed":
            self._call(call)
            return

        turn, agent = turn_of(self._attempt, call)
        if isinstance(turn, Turn):
            self._legend |= legend_of(message.text for message in turn.messages)
            view = turn_view(turn, turn.parent, False, {}, self._legend)
            tokens = tokens_of(turn, self._decode)
        else:
            view = _remote_view(turn)
            tokens = None
            agent = turn.model

        complete_view = view._replace(
            messages=[
                _whole(shown_message, message, self._legend)
                for shown_message, message in zip(view.messages, turn.messages, strict=True)
            ]
        )
        self._send(words.Turned(self._name, number, agent, complete_view, tokens))

    def _made(self, call: RunningCall) -> None:
        """A successful call is shown if it has output."""
        facts = call.record("").attributes
        has_texts = any(name in facts for name in TEXTS)
        has_failed = call.has_ended and call.record("").status != "completed"
        if call.kind in ("tool", "process", "scorer") or has_texts or has_failed:
            self._call(call)

    def _call(self, call: RunningCall) -> None:
        record = call.record("")
        texts = [
            (name, _cut(str(record.attributes[name])))
            for name in TEXTS
            if name in record.attributes
        ]
        if record.kind == "scorer" and "score" in record.attributes:
            texts.append(("score", str(record.attributes["score"])))
        if record.error and record.error not in [text for _, text in texts]:
            texts.append(("error", _cut(record.error)))

        took = None if record.ended_at is None else record.ended_at - record.started_at
        number = self._numbers[id(call)]
        kind = record.kind
        name = record.name
        status = record.status or ""
        self._send(words.Called(self._name, number, kind, name, took, status, texts))

    def end(self, trajectory: Trajectory, *, judged: bool) -> None:
        """Sends the result of the attempt."""
        completed = trajectory.status == "completed"
        num_policy_tokens: Any = trajectory.metrics.get("policy_tokens", 0)
        self._send(
            words.EndedPlay(
                id=self._name,
                agent=trajectory.agent,
                status=trajectory.status,
                error=_cut(trajectory.error or ""),
                judged=judged and completed,
                reward=trajectory.reward,
                parts=dict(trajectory.reward_parts),
                success=trajectory.success,
                truncated=trajectory.truncated,
                turns=len(trajectory.turns),
                tokens=int(trajectory.num_completion_tokens() or num_policy_tokens),
                seconds=trajectory.duration_s,
                ending=self._ending,
            )
        )


def _remote_view(turn: RemoteTurn) -> TurnView:
    messages = [
        to_shown_message(message, number, []) for number, message in enumerate(turn.messages)
    ]
    return TurnView(
        number=turn.index,
        note="",
        is_shared=False,
        messages=messages,
        num_prompt=turn.prompt_tokens,
        num_completion=turn.completion_tokens,
        reward=0.0,
        versions="",
        finish=turn.finish_reason,
        how="another model",
    )


def _whole(shown: ShownMessage, message: Message, legend: Legend) -> ShownMessage:
    """A page can't request the rest of a message later, so a longer part is shown."""
    if not shown.rest:
        return shown

    text = message.text
    num_hidden = len(message.text) - MAX_SHOWN
    parts = pieces(text[:MAX_SHOWN], legend)
    if num_hidden > 0:
        parts.append(WorldPiece(f"... ({num_hidden} further characters)", []))
    return shown._replace(pieces=parts, rest=0)


def _cut(text: str) -> str:
    """The head and tail of a long text."""
    if len(text) > words.MAX_TEXT:
        half = words.MAX_TEXT // 2
        text = f"{text[:half]}\n... ({len(text)} characters) ...\n{text[-half:]}"
    return storable(text)
