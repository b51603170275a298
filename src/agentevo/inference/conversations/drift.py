"""Drift: answers of the policy that come back in another form than they were recorded.

    undone    the client wrote an answer in a form of its own (equivalence.py): its ids are reused
    branched  the history can't be joined exactly: it was edited, cut, or asked with other
              tools or other values of the template's variables

A request branches in two cases: an assistant's message matches no answer that was recorded at its
place, although answers were recorded there; or the answer was recorded at another place, because
the messages before it have changed. A recorded history that is followed by other messages does not
count as drift. Neither does an assistant's message that the policy did not write (an example in the
prompt). Each answer counts as undone at most once. Each request counts as branched at most once,
under the class of the first message that differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from agentevo.inference.conversations.equivalence import edit, key_of, undone
from agentevo.inference.conversations.history import HistoryMatch, HistoryNode
from agentevo.types import Message

UNDONE_PREFIX = "joined/"
"""The prefix of the classes of answers that were undone."""
SHOWN_CHARS = 120
"""The number of a message's characters that are kept for display."""


class DriftPlace(NamedTuple):
    """The first occurrence of a class of drift."""

    message: int
    """The number of the message in the request, from 1."""
    recorded: str
    """The recorded message, shortened and escaped; empty if there is none."""
    came: str
    """The message that came back in its place."""


class _DriftEvent(NamedTuple):
    """Drift in a request: its class, the number of the message (from 0), the recorded text, and
    the text that came back."""

    kind: str
    number: int
    texts: tuple[str, str]


class Drift:
    """The drift of one conversation."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Class -> its count. The classes of undone answers begin with `joined/`."""
        self.first: dict[str, DriftPlace] = {}
        """Class -> its first occurrence."""
        self.extended = 0
        """Requests that should extend a recorded answer, but can't be joined to it."""
        self.branched = 0
        """Requests that should have been joined, and could not be."""
        self._said: dict[Hashable, list[HistoryNode]] = {}
        self._with_call: dict[str, HistoryNode] = {}

    @property
    def merge_rate(self) -> float | None:
        """Among the requests that contain recorded answers, the share that extends them. None if
        there were no such requests."""
        requests = self.extended + self.branched
        return self.extended / requests if requests else None

    def metrics(self) -> dict[str, float]:
        """For the trajectory: empty if nothing drifted."""
        metrics = {f"drift/{kind}": float(count) for kind, count in sorted(self.counts.items())}
        if metrics and self.merge_rate is not None:
            metrics["merge_rate"] = self.merge_rate
        return metrics

    def record(self, answer: HistoryNode, form: Message) -> None:
        """Records an answer in this form."""
        self._said.setdefault(key_of(form, -1), []).append(answer)
        for call in form.tool_calls:
            if call.id:
                self._with_call[call.id] = answer

    def count(self, match: HistoryMatch) -> None:
        """Counts the drift of a request."""
        branch = self._branch(match)
        if branch is not None:
            self.branched += 1
            self._add(branch)
        elif match.answer is not None:
            self.extended += 1

        for node, number in reversed(match.restyled):
            message = match.messages[number]
            if node.came is None and match.answer is not None:
                for kind in undone(node.forms, message):
                    texts = _line(node.forms[-1]), _line(message)
                    self._add(_DriftEvent(UNDONE_PREFIX + kind, number, texts))
            node.came = message

    def _add(self, finding: _DriftEvent) -> None:
        self.counts[finding.kind] += 1
        if finding.kind not in self.first:
            recorded, came = _shown(*finding.texts)
            self.first[finding.kind] = DriftPlace(finding.number + 1, recorded, came)

    def _branch(self, match: HistoryMatch) -> _DriftEvent | None:
        """Counts the drift of a request that does not extend the answers that it contains."""
        answers = [
            number
            for number in range(match.num_matched, len(match.messages))
            if match.messages[number].role == "assistant"
        ]
        for number in reversed(answers):
            original = self._original(match, number)
            if original is not None:
                return _compare_request(match, number, original)

        if answers and answers[0] == match.num_matched:
            siblings = [
                child
                for end in match.ends
                for child in end.children
                if child.turn is not None and not child.is_lost
            ]
            if siblings:
                message = match.messages[answers[0]]
                original = _nearest(siblings, message)
                texts = _line(original.forms[-1]), _line(message)
                return _DriftEvent(edit(original.forms, message), answers[0], texts)

        return None

    def _original(self, match: HistoryMatch, number: int) -> HistoryNode | None:
        """The recorded answer at any place that an assistant's message repeats. If there are
        several, the likeliest."""
        message = match.messages[number]
        named = [self._with_call[c.id] for c in message.tool_calls if c.id in self._with_call]
        candidates = named or self._said.get(key_of(message, -1), [])
        return max(
            candidates,
            key=lambda node: (
                node.tools == match.root.tools,
                node.values == match.root.values,
                node.size == number + 1,
                node.turn,
            ),
            default=None,
        )


def _compare_request(match: HistoryMatch, number: int, original: HistoryNode) -> _DriftEvent:
    """Compares a request, up to message `number`, with the history of a recorded answer."""
    recorded = original.path()
    came = list(range(number + 1))
    first = _common(recorded, came, match)
    if original.tools != match.root.tools:
        texts = original.tools.as_json, match.root.tools.as_json
        return _DriftEvent("tools_changed", first, texts)
    if original.values != match.root.values:
        texts = original.values.as_json, match.root.values.as_json
        return _DriftEvent("template_changed", first, texts)

    last = _common(recorded[first:][::-1], came[first:][::-1], match)
    replaced = [node.forms[-1] for node in recorded[first : len(recorded) - last]]
    instead = [match.messages[n] for n in came[first : len(came) - last]]
    kind = _class_of(recorded[first : len(recorded) - last], instead)
    texts = _line(replaced[0]) if replaced else "", _line(match.messages[first])
    return _DriftEvent(kind, first, texts)


def _common(recorded: Sequence[HistoryNode], came: Sequence[int], match: HistoryMatch) -> int:
    """The number of messages at the beginning that both have."""
    count = 0
    for node, number in zip(recorded, came, strict=False):
        message = match.messages[number]
        place = match.places[number]
        if not node.matches(message, place, serves_clients=match.serves_clients):
            break
        count += 1

    return count


def _class_of(recorded: Sequence[HistoryNode], came: Sequence[Message]) -> str:
    """The class of the change, which is between the common beginning and the common end."""
    roles = {*(node.forms[-1].role for node in recorded), *(message.role for message in came)}
    if roles == {"system"}:
        return "system_changed"
    if len(recorded) > len(came):
        return "messages_dropped"
    if len(recorded) < len(came) or not came:
        return "system_changed" if came and came[0].role == "system" else "other"

    before = Counter(key_of(node.forms[-1], -1) for node in recorded)
    if len(came) > 1 and before == Counter(key_of(message, -1) for message in came):
        return "order_changed"

    return edit(recorded[0].forms, came[0])


def _nearest(answers: Sequence[HistoryNode], message: Message) -> HistoryNode:
    """The answer that the message was most likely made from: an answer with the same calls,
    otherwise with the same text, otherwise the newest."""
    content, calls = key_of(message, -1)[1:]  # type: ignore[index]

    def likeness(node: HistoryNode) -> tuple[bool, bool, int]:
        own_content, own_calls = key_of(node.forms[-1], -1)[1:]  # type: ignore[index]
        return bool(calls) and own_calls == calls, own_content == content, node.turn or 0

    return max(answers, key=likeness)


def _line(message: Message) -> str:
    """A message in one line."""
    calls = "".join(f" {call.name}({call.arguments}) {call.id}" for call in message.tool_calls)
    thought = f" reasoning: {message.reasoning}" if message.reasoning else ""
    answers = f" ({message.tool_call_id})" if message.tool_call_id else ""
    return f"{message.role}{answers}: {message.text}{calls}{thought}"


def _shown(*texts: str) -> list[str]:
    """Both texts from shortly before their first difference, shortened and escaped."""
    letters = enumerate(zip(*texts, strict=False))
    same = next((place for place, at in letters if len(set(at)) > 1), 0)
    start = max(0, same - SHOWN_CHARS // 3)
    return [_escape_line(text[start : start + SHOWN_CHARS], start > 0) for text in texts]


def _escape_line(text: str, is_cut: bool) -> str:
    line = text.encode("unicode_escape", "surrogatepass").decode("ascii")
    return f"...{line}" if is_cut else line
