"""An attempt as its page shows it: plain data from the store, in parts, so that the cost depends on
the part and not on the size of the attempt."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agentevo.observability.clicks import find_clicks
from agentevo.observability.pages.grid_worlds import (
    NO_LEGEND,
    Legend,
    WorldPiece,
    legend_of,
    pieces,
)
from agentevo.store.calls import StoredCall
from agentevo.types import Message, RemoteTurn, Trajectory, Turn
from agentevo.types.images import images_of_messages

TURNS = 12
"""The number of turns in a part of the page."""
FIRST = 6_000
"""The number of characters of a message that are shown initially."""
MORE = 50_000
"""The number of characters of each further part of a message."""
ARGUMENTS = 4_000
MAX_CALLS = 400
NO_IMAGES: Mapping[str, str] = {}
MAX_TREE = 150


class ShownToolUse(NamedTuple):
    """A call of a tool: the policy's text, and the outcome."""

    name: str
    arguments: str
    id: str
    took_s: float | None
    status: str
    error: str


class ShownImage(NamedTuple):
    """An image of a message."""

    sha256: str
    media_type: str
    data_url: str
    """The image itself, for a page that is a file; empty if the page does not have it."""
    clicks: tuple[tuple[float, float], ...] = ()
    """The points on it that the answer names (see clicks.py)."""


class ShownMessage(NamedTuple):
    """One message."""

    number: int
    role: str
    who: str
    thought: str
    pieces: list[WorldPiece]
    images: list[ShownImage]
    tools: list[ShownToolUse]
    rest: int
    """The number of characters that are not shown yet."""


class TurnView(NamedTuple):
    """A turn as messages."""

    number: int
    note: str
    """The number of the turn that it continues, if that is not the turn before it."""
    is_shared: bool
    """Whether an earlier branch has the turn too."""
    messages: list[ShownMessage]
    num_prompt: int
    num_completion: int
    reward: float
    versions: str
    finish: str
    how: str
    """The sampling parameters, if they differ from the recipe's."""


class ShownPart(NamedTuple):
    """Some turns, and the start of the next part."""

    turns: list[TurnView]
    next: int | None
    total: int


def path_to(turns: Sequence[Turn], leaf: int) -> list[int]:
    """The turns from the root to `leaf`, including `leaf`."""
    path = [leaf]
    while (parent := turns[path[-1]].parent) is not None:
        path.append(parent)
    return path[::-1]


def leaves(turns: Sequence[Turn]) -> list[int]:
    """Turns that no other turn continues."""
    parents = {turn.parent for turn in turns}
    return [turn.index for turn in turns if turn.index not in parents]


def is_branched(turns: Sequence[Turn]) -> bool:
    """Whether two turns continue the same turn."""
    parents = Counter(turn.parent for turn in turns if turn.parent is not None)
    return any(count > 1 for count in parents.values())


def select_turns(turns: Sequence[Turn], leaf: int | None) -> tuple[list[int], set[int]]:
    """The turns to show, and which of them an earlier branch has too."""
    if leaf is None or not 0 <= leaf < len(turns):
        return list(range(len(turns))), set()

    path = path_to(turns, leaf)
    earlier: set[int] = set()
    for other_leaf in leaves(turns):
        if other_leaf < leaf:
            earlier.update(path_to(turns, other_leaf))

    return path, earlier & set(path)


def part_of(
    trajectory: Trajectory,
    calls: Sequence[StoredCall],
    *,
    start: int = 0,
    leaf: int | None = None,
    most: int = TURNS,
    images: Mapping[str, str] = NO_IMAGES,
) -> ShownPart:
    """Up to `most` of the turns to show, from number `start`. `images`: digest -> data URL."""
    shown, shared = select_turns(trajectory.turns, leaf)
    uses = _uses(trajectory, calls)
    legend = world_of(trajectory.turns)
    page = shown[start : start + most]
    before = dict(zip(shown[1:], shown, strict=False))
    views = [
        turn_view(trajectory.turns[i], before.get(i), i in shared, uses, legend, images)
        for i in page
    ]
    next_start = start + most
    return ShownPart(views, next_start if next_start < len(shown) else None, len(shown))


def world_of(turns: Sequence[Turn]) -> Legend:
    """The legend of the environment's symbols, from the attempt's first messages."""
    messages = turns[0].messages if turns else []
    return legend_of(message.text[:FIRST] for message in messages)


def turn_view(
    turn: Turn,
    before: int | None,
    is_shared: bool,
    uses: dict[tuple[int, int], StoredCall],
    legend: Legend = NO_LEGEND,
    images: Mapping[str, str] = NO_IMAGES,
) -> TurnView:
    low = min(turn.versions, default=None)
    high = max(turn.versions, default=None)

    note = ""
    if turn.parent != before:
        note = "new context" if turn.parent is None else f"continues turn {turn.parent}"

    place = 0
    messages = []
    for number, message in enumerate(turn.messages):
        tools = []
        for call in message.tool_calls:
            tools.append(
                _tool_use(call.name, call.arguments, call.id, uses.get((turn.index, place)))
            )
            place += 1
        messages.append(to_shown_message(message, number, tools, legend, images))

    if turn.messages and turn.messages[-1].role == "assistant":
        _draw_clicks(messages, find_clicks(turn.messages[-1].text))

    how = ["greedy" if turn.temperature == 0 else ""]
    how += (
        [f"with its own {', '.join(turn.overrides.given())}: never trained on"]
        if turn.overrides
        else []
    )
    how += ["under a grammar"] if turn.constraint else []
    how += ["with penalties"] if turn.penalties else []

    return TurnView(
        number=turn.index,
        note=note,
        is_shared=is_shared,
        messages=messages,
        num_prompt=len(turn.prompt_ids),
        num_completion=len(turn.completion_ids),
        reward=turn.reward,
        versions="" if low is None else f"{low}" if low == high else f"{low} to {high}",
        finish=turn.finish_reason,
        how=", ".join(filter(None, how)),
    )


def _draw_clicks(messages: list[ShownMessage], clicks: list[tuple[float, float]]) -> None:
    """Draws the points of a turn's answer on the newest image of its messages."""
    seen = [message for message in messages if message.images]
    if clicks and seen:
        images = seen[-1].images
        images[-1] = images[-1]._replace(clicks=tuple(clicks))


def to_shown_message(
    message: Message,
    number: int,
    tools: list[ShownToolUse],
    legend: Legend = NO_LEGEND,
    images: Mapping[str, str] = NO_IMAGES,
) -> ShownMessage:
    """A message with its first FIRST characters."""
    text = message.text
    return ShownMessage(
        number=number,
        role=message.role,
        who=message.name or "",
        thought=message.reasoning or "",
        pieces=pieces(text[:FIRST], legend) if text else [],
        images=[
            ShownImage(part.sha256, part.media_type, images.get(part.sha256, ""))
            for part in images_of_messages([message])
        ],
        tools=tools,
        rest=max(0, len(text) - FIRST),
    )


def _tool_use(name: str, arguments: str, call_id: str, call: StoredCall | None) -> ShownToolUse:
    took = None
    if call is not None and call.call.ended_at is not None:
        took = call.call.ended_at - call.call.started_at

    return ShownToolUse(
        name,
        pretty(arguments),
        call_id,
        took,
        "" if call is None else call.call.status or call.state,
        "" if call is None else call.call.error or "",
    )


def pretty(arguments: str) -> str:
    """JSON with indentation. A text that is not JSON stays unchanged."""
    if len(arguments) > ARGUMENTS:
        return arguments
    try:
        return json.dumps(json.loads(arguments), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments


def _uses(trajectory: Trajectory, calls: Sequence[StoredCall]) -> dict[tuple[int, int], StoredCall]:
    """Maps (turn, number of the call in it) to the recorded call, if messages and record have the
    same number of calls of the tool. Calls do not record which message requested them."""
    requested: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for turn in trajectory.turns:
        names = [call.name for message in turn.messages for call in message.tool_calls]
        for index, name in enumerate(names):
            requested[name].append((turn.index, index))

    recorded: dict[str, list[StoredCall]] = defaultdict(list)
    for stored in sorted(calls, key=lambda stored: stored.call.started_at):
        if stored.call.kind == "tool":
            recorded[stored.call.name].append(stored)

    return {
        place: stored
        for name, places in requested.items()
        if len(places) == len(recorded[name])
        for place, stored in zip(places, recorded[name], strict=True)
    }


def text_part(
    trajectory: Trajectory, turn: int, number: int, start: int, *, is_remote: bool = False
) -> tuple[str, int]:
    """MORE characters of a message from `start`, and the number of characters after them.
    `is_remote`: whether the turn is one of the remote models' turns. Raises IndexError for a
    message that does not exist."""
    if turn < 0 or number < 0 or start < 0:
        raise IndexError(turn)
    turns = trajectory.remote_turns if is_remote else trajectory.turns
    text = turns[turn].messages[number].text
    return text[start : start + MORE], max(0, len(text) - start - MORE)


class CallRow(NamedTuple):
    """A call in the timeline."""

    depth: int
    title: str
    took_s: float | None
    state: str
    error: str
    facts: str
    x: float
    width: float
    """`x` and `width`: the start and the duration, in percent of the attempt's time."""


def timeline(calls: Sequence[StoredCall]) -> list[CallRow]:
    """The calls in the order of their starts, each below the call that made it."""
    ordered = sorted(calls[:MAX_CALLS], key=lambda stored: stored.call.started_at)
    if not ordered:
        return []

    begin = ordered[0].call.started_at
    end = max(stored.call.ended_at or stored.call.started_at for stored in ordered)
    span = max(end - begin, 1e-6)
    depths: dict[str, int] = {}
    rows = []
    for stored in ordered:
        call = stored.call
        depths[call.id] = min(depths.get(call.parent or "", -1) + 1, 5)
        took = None if call.ended_at is None else call.ended_at - call.started_at
        facts = ", ".join(
            f"{name} {value}"
            for name, value in call.attributes.items()
            if name not in ("reason", "ending") and len(str(value)) < 80
        )
        rows.append(
            CallRow(
                depths[call.id],
                f"{call.kind} {call.name}",
                took,
                stored.state if call.status is None else call.status,
                call.error or "",
                facts,
                100 * (call.started_at - begin) / span,
                max(0.6, 100 * (took or 0.0) / span),
            )
        )

    return rows


def ending(trajectory: Trajectory, calls: Sequence[StoredCall]) -> list[WorldPiece]:
    """The observation after the last turn, from the newest try that recorded it."""
    texts = [
        str(stored.call.attributes["ending"])
        for stored in sorted(calls, key=lambda stored: stored.call.started_at)
        if stored.call.kind == "attempt" and stored.call.attributes.get("ending")
    ]
    return pieces(texts[-1], world_of(trajectory.turns)) if texts else []


def rejected_replies(trajectory: Trajectory) -> str:
    """`2 invalid actions, 1 answer without an action`: the replies that the environment
    rejected."""
    parts = []
    for name, singular, plural in (
        ("num_invalid_actions", "invalid action", "invalid actions"),
        ("num_format_errors", "answer without an action", "answers without an action"),
    ):
        if number := round(trajectory.metrics.get(name, 0.0)):
            parts.append(f"{number:,} {singular if number == 1 else plural}")

    return ", ".join(parts)


_LIMIT_NOTES = {
    "turns": "all turns were used (agent.max_turns)",
    "tokens": "all tokens of an attempt were used (agent.max_tokens)",
    "context": "the context was full",
    "repeats": "the same calls were made again and again (agent.max_repeats)",
}
"""The limits that end an agent with tools."""


def limit(trajectory: Trajectory, config: Mapping[str, Any]) -> str:
    """The limit that cut an attempt off, in a run with this configuration. It comes from the
    agent's note, or from the last turn. Empty if unknown."""
    if not trajectory.truncated or not trajectory.turns:
        return ""

    for end, words in _LIMIT_NOTES.items():
        if trajectory.metrics.get(f"ended_by_{end}"):
            return words

    last = trajectory.turns[-1]
    most = _number(config, "sampling", "max_new_tokens")
    if last.finish_reason == "length":
        size = len(last.completion_ids)
        if most is None or size < most:
            return f"its last answer filled the context, after {size:,} tokens"
        return f"its last answer was cut at {size:,} tokens (sampling.max_new_tokens)"

    most = _number(config, "agent", "max_turns")
    if most is not None and len(trajectory.turns) >= most:
        return f"all {most} turns were used (agent.max_turns)"

    return ""


def _number(config: Mapping[str, Any], section: str, key: str) -> int | None:
    """A number of the configuration, whose file is untrusted."""
    values = config.get(section)
    value = values.get(key) if isinstance(values, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class Verdict(NamedTuple):
    """The verdict of a scorer."""

    name: str
    score: float | None
    reason: str


def verdicts(calls: Sequence[StoredCall]) -> list[Verdict]:
    """The verdicts of the scorers of an attempt, such as a judge."""
    scorer_verdicts = []
    for stored in calls:
        if stored.call.kind == "scorer":
            score = stored.call.attributes.get("score")
            reason = stored.call.attributes.get("reason", "")
            number = float(score) if isinstance(score, int | float) else None
            scorer_verdicts.append(
                Verdict(stored.call.name, number, str(reason or stored.call.error or ""))
            )

    return scorer_verdicts


class TreeNode(NamedTuple):
    """A turn in the picture of the branches."""

    number: int
    x: int
    y: int
    parent: tuple[int, int] | None
    leaf: int
    """The branch that a click shows."""
    is_on: bool


def tree(turns: Sequence[Turn], leaf: int | None) -> list[TreeNode]:
    """The turns as a tree from left to right. Empty without branches, or with more turns than a
    picture shows."""
    if not is_branched(turns) or len(turns) > MAX_TREE:
        return []

    shown = set(select_turns(turns, leaf)[0])
    children: dict[int | None, list[int]] = defaultdict(list)
    for turn in turns:
        children[turn.parent].append(turn.index)

    places: dict[int, tuple[int, int]] = {}
    firsts: dict[int, int] = {}
    for lane, end in enumerate(leaves(turns)):
        for index in path_to(turns, end):
            if index not in places:
                parent = turns[index].parent
                places[index] = (0 if parent is None else places[parent][0] + 1, lane)
                firsts[index] = end

    return [
        TreeNode(
            turn.index,
            *places[turn.index],
            None if turn.parent is None else places[turn.parent],
            firsts[turn.index],
            turn.index in shown,
        )
        for turn in turns
    ]


def remote_part(
    turns: Sequence[RemoteTurn], limit: int = 40, images: Mapping[str, str] = NO_IMAGES
) -> list[tuple[RemoteTurn, list[ShownMessage]]]:
    """The first `limit` turns of remote models. `images`: digest -> data URL."""
    return [
        (
            turn,
            [
                to_shown_message(
                    m,
                    i,
                    [_tool_use(c.name, c.arguments, c.id, None) for c in m.tool_calls],
                    images=images,
                )
                for i, m in enumerate(turn.messages)
            ],
        )
        for turn in turns[:limit]
    ]
