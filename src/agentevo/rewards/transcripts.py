"""The judge's view of attempts: each message is a line of JSON, inside a fence.

    --- MARK begin of attempt 2 ---
    {"role": "assistant", "content": "The answer is 4.\\nI am sure."}
    --- MARK end of attempt 2 ---

A text of an attempt can't leave its line, since JSON writes line breaks as \\n. It can't forge a
fence either. MARK is a digest of the whole question, so a forged MARK would have to be the digest
of a text that contains itself. Equal questions have equal marks, so a cache can return earlier
answers, and a local judge repeats its answers. Markup of servers and chat templates (`<|im_end|>`,
`[INST]`) and invisible characters (controls, direction marks) become \\u003c and the like.

The common beginning of all attempts is shown once. An attempt can have several histories, each a
path through its tree of turns. A history that continues an earlier one says where it continues.

A judge that sees images gets the last ones of each attempt. A line names the images of its message
by their digests, and so does a text before each image.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile

from agentevo.types import ImagePart, Message, RemoteTurn, Trajectory, Turn
from agentevo.types.images import images_of_messages

_HIDDEN = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e007f]"
)
_MARKUP = re.compile(r"<|\[(?=/?[A-Z_]{2,}\])")
MARK_BYTES = 16


MAX_HISTORIES = 32
"""The maximum number of histories of an attempt in the judge's view."""
MAX_TOOLS = 20_000
"""The maximum number of characters of the tools in the judge's view."""


@dataclass(frozen=True, slots=True)
class TranscriptLimits:
    """Limits in characters. Of a longer text, the head and the tail are shown."""

    message: int
    attempt: int
    images: int = 0
    """The last images of an attempt that are shown."""


@dataclass(frozen=True, slots=True)
class ShownGroup:
    """The judge's view of a group."""

    context: tuple[str, ...]
    """The lines of the common beginning of all attempts."""
    tools: tuple[str, ...]
    attempts: tuple[tuple[str, ...], ...]
    """The further lines of each attempt. Equal attempts appear once, in an order by content."""
    attempt_of_trajectory: tuple[int, ...]
    """The index of each trajectory in `attempts`."""
    images: tuple[ImagePart, ...] = ()
    """The last images of the attempts, each once. A line names an image by image_name."""


@dataclass(frozen=True, slots=True)
class _TranscriptLine:
    """A message. `full_text` is the whole message, `shown` the part that fits."""

    role: str
    full_text: str
    shown: str


def shown_group(trajectories: Sequence[Trajectory], limits: TranscriptLimits) -> ShownGroup:
    """The judge's view of the attempts at a task, independent of their order. Raises ValueError for
    an attempt without a message."""
    most = min(limits.message, limits.attempt // 2)
    has_images = limits.images > 0
    all_turns = [_lines_of_turns(trajectory, most, has_images) for trajectory in trajectories]
    all_histories = [
        _histories_of(*arguments) for arguments in zip(trajectories, all_turns, strict=True)
    ]
    for trajectory, histories in zip(trajectories, all_histories, strict=True):
        if not histories:
            raise ValueError(f"the attempt {trajectory.id} has no message to judge")

    wholes = [
        json.dumps(
            [trajectory.truncated]
            + [
                [turn.parent, *(line.full_text for line in lines[turn.index])]
                for turn in _turns(trajectory)
            ]
        )
        for trajectory, lines in zip(trajectories, all_turns, strict=True)
    ]
    distinct = sorted(
        set(wholes), key=lambda text: blake2b(text.encode("utf-8", "replace")).digest()
    )
    places = {text: index for index, text in enumerate(distinct)}
    attempt_of_trajectory = tuple(places[text] for text in wholes)
    firsts = [attempt_of_trajectory.index(index) for index in range(len(distinct))]
    common = _common([history for index in firsts for history in all_histories[index]])
    attempts = tuple(
        tuple(
            _within(
                _attempt_lines(all_histories[index], common, trajectories[index].truncated),
                limits.attempt,
            )
        )
        for index in firsts
    )
    context = [line.shown for line in all_histories[firsts[0]][0][:common]]
    tools = _tool_lines([trajectories[index] for index in firsts])
    shown_images = {
        part.sha256: part
        for index in firsts
        for part in last_images(trajectories[index], limits.images)
    }
    return ShownGroup(
        tuple(_within(context, limits.attempt)),
        tools,
        attempts,
        attempt_of_trajectory,
        tuple(shown_images.values()),
    )


def _turns(trajectory: Trajectory) -> Sequence[Turn | RemoteTurn]:
    return trajectory.turns or trajectory.remote_turns


def last_images(trajectory: Trajectory, num: int) -> list[ImagePart]:
    """The last `num` different images of an attempt, in their order."""
    messages = [message for turn in _turns(trajectory) for message in turn.messages]
    last = {part.sha256: part for part in reversed(list(images_of_messages(messages)))}
    return list(last.values())[:num][::-1]


def image_name(image: ImagePart) -> str:
    """The name of an image in a judge's view."""
    return image.sha256[:16]


def _lines_of_turns(
    trajectory: Trajectory, longest: int, has_images: bool
) -> dict[int, list[_TranscriptLine]]:
    """Maps the index of each turn to its messages."""
    return {
        turn.index: [_line(message, longest, has_images) for message in turn.messages]
        for turn in _turns(trajectory)
    }


def _histories_of(
    trajectory: Trajectory, lines: Mapping[int, list[_TranscriptLine]]
) -> list[list[_TranscriptLine]]:
    """The messages along each path from a root to a leaf, in the order of the leaves. Beyond
    MAX_HISTORIES, only the first and the last paths."""
    turns = _turns(trajectory)
    parents = {turn.index: turn.parent for turn in turns}
    inner = set(parents.values())
    leaves = [index for index in parents if index not in inner]
    if len(leaves) > MAX_HISTORIES:
        leaves = leaves[: MAX_HISTORIES // 2] + leaves[-MAX_HISTORIES // 2 :]

    histories = []
    for leaf in leaves:
        path: list[int] = []
        place: int | None = leaf
        while place is not None:
            path.append(place)
            place = parents[place]

        history = [line for index in reversed(path) for line in lines[index]]
        if history:
            histories.append(history)

    return histories


def _common(histories: Sequence[Sequence[_TranscriptLine]]) -> int:
    """The number of messages that all histories begin with. For a single history, those before the
    first reply."""
    if len(histories) == 1:
        return sum(1 for _ in takewhile(lambda line: line.role != "assistant", histories[0]))
    columns = zip(*histories, strict=False)
    return sum(
        1 for _ in takewhile(lambda column: len({x.full_text for x in column}) == 1, columns)
    )


def _attempt_lines(
    histories: Sequence[Sequence[_TranscriptLine]], common: int, cut_off: bool
) -> list[str]:
    lines: list[str] = []
    for number, history in enumerate(histories):
        shared = common
        earlier = 0
        for index, earlier_history in enumerate(histories[:number]):
            same = (
                _common([earlier_history, history]) if earlier_history != history else len(history)
            )
            if same > shared:
                shared = same
                earlier = index + 1

        if len(histories) > 1:
            head: dict[str, object] = {"history": number + 1, "of": len(histories)}
            if earlier:
                head |= {"goes_on_from_history": earlier, "after_message": shared - common}
            lines.append(json.dumps(head))

        lines += [line.shown for line in history[shared:]]

    if cut_off:
        lines.append(json.dumps({"cut_off_by_a_limit": True}))

    return lines


def _line(message: Message, longest: int, has_images: bool) -> _TranscriptLine:
    """`has_images`: the judge sees some images, so the line names those of the message."""
    images = list(images_of_messages([message]))

    def fields(longest: int | None) -> dict[str, object]:
        values = {
            "role": message.role,
            "name": message.name,
            "reasoning": clip(message.reasoning, longest),
            "content": clip(message.text, longest),
            "images": list(map(image_name, images)) if has_images else [],
            "images_not_shown": 0 if has_images else len(images),
            "tool_calls": [
                {"name": clip(call.name, longest), "arguments": clip(call.arguments, longest)}
                for call in message.tool_calls
            ],
        }
        return {name: value for name, value in values.items() if value or name == "content"}

    full_text = json.dumps(fields(None), ensure_ascii=False)
    written = (
        full_text if len(full_text) <= longest else json.dumps(fields(longest), ensure_ascii=False)
    )
    return _TranscriptLine(message.role, full_text, escape_json_line(written))


def _tool_lines(trajectories: Sequence[Trajectory]) -> tuple[str, ...]:
    """A line for each tool of an attempt."""
    schemas: dict[str, None] = {}
    for trajectory in trajectories:
        for turn in _turns(trajectory):
            if turn.tools:
                schemas |= dict.fromkeys(_schemas(turn.tools))
    return tuple(_within([escape_json_line(schema) for schema in schemas], MAX_TOOLS))


def _schemas(text: str) -> list[str]:
    try:
        tools = json.loads(text)
    except ValueError:
        tools = [text]

    written = (
        json.dumps(
            tool.get("function", tool) if isinstance(tool, dict) else tool, ensure_ascii=False
        )
        for tool in (tools if isinstance(tools, list) else [tools])
    )
    return [
        schema if len(schema) <= MAX_TOOLS // 2 else json.dumps(clip(schema, 1000))
        for schema in written
    ]


def clip(text: str | None, longest: int | None) -> str | None:
    """The head and the tail of a text, with the number of characters left out between them."""
    if text is None or longest is None or len(text) <= longest:
        return text
    head = longest - longest // 2
    tail = longest // 2
    left_out = len(text) - longest
    return f"{text[:head]} [... {left_out} characters left out ...] {text[len(text) - tail :]}"


def _within(lines: Sequence[str], longest: int) -> list[str]:
    """The first and the last lines that fit, with the number of lines left out between them."""
    if sum(map(len, lines)) <= longest:
        return list(lines)

    head: list[str] = []
    tail: list[str] = []
    room = longest
    place = 0
    end = len(lines)
    while place < end:
        from_head = sum(map(len, head)) <= sum(map(len, tail))
        line = lines[place] if from_head else lines[end - 1]
        if len(line) > room and (head or tail):
            break

        room -= len(line)
        if from_head:
            head.append(line)
            place += 1
        else:
            tail.append(line)
            end -= 1

    return [*head, json.dumps({"messages_left_out": end - place}), *reversed(tail)]


def mark_of(*texts: str) -> str:
    """The mark of the fences around these texts, which none of them contains."""
    joined = "\n".join(texts)
    mark = blake2b(joined.encode("utf-8", "replace"), digest_size=MARK_BYTES).hexdigest()
    while mark in joined:
        mark = blake2b(
            (mark + joined).encode("utf-8", "replace"), digest_size=MARK_BYTES
        ).hexdigest()
    return mark


def fence(mark: str, what: str, lines: Sequence[str]) -> str:
    """Lines between two fences."""
    return "\n".join([f"--- {mark} begin of {what} ---", *lines, f"--- {mark} end of {what} ---"])


def escape_json_line(line: str) -> str:
    """The same line of JSON, without text that looks like markup and without invisible
    characters."""
    return _HIDDEN.sub(_code, _MARKUP.sub(_code, line))


def _code(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
