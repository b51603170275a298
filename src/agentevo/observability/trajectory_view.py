"""A trajectory as readable text: turn by turn, with every sampled token and its probability.

`render_trajectory` returns a rich renderable, and `report.py` shows the same in HTML. Both colour
tokens by the same five levels of probability, and both show the stored data. The text of a prompt
comes from the turn's messages (or from its decoded ids, if there are none). The text of a
completion always comes from its ids, because the trainer uses those.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from agentevo.observability.tracing.texts import shorten_middle
from agentevo.types import ImagePart, Message, RemoteTurn, Task, TextPart, Trajectory, Turn

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

Decode = Callable[[int], str]
"""The text of a token id, special tokens included. Bytes that are not a whole character may become
U+FFFD."""

LEVELS = ((0.9, "certain"), (0.5, "likely"), (0.2, "open"), (0.05, "unlikely"), (0.0, "surprising"))
"""The (lowest probability, name) of each level, the most probable first."""
STYLES = ("default", "green", "cyan", "yellow", "bold red")
MAX_FILES = 50
"""The maximum number of stored files that are listed."""
MAX_ANSWER = 2_000
"""The maximum number of characters of an expected answer."""
ROLE_STYLES = {"system": "magenta", "user": "blue", "tool": "magenta", "assistant": "green"}


def probability_level(logprob: float) -> int:
    """The index into `LEVELS`, from 0 (almost certain) to 4 (very unlikely)."""
    probability = math.exp(min(logprob, 0.0))
    return next(
        (level for level, (lowest, _) in enumerate(LEVELS) if probability >= lowest),
        len(LEVELS) - 1,
    )


def shown_logprobs(turn: Turn) -> list[float] | None:
    """The log-probs of the sampled tokens. None for a greedy turn, whose recorded 0 is the log-prob
    of a point mass."""
    return list(turn.logprobs) if turn.temperature > 0 else None


def visible(text: str) -> str:
    """Line breaks, tabs and other control characters as symbols, so that a token stays on its line
    and can't control the terminal."""
    named = {"\n": "↵", "\t": "⇥", "\r": "␍"}
    return "".join(
        named.get(char) or (char if char.isprintable() else f"\\x{ord(char):02x}") for char in text
    )


def prompt_texts(turn: Turn, decode: Decode) -> list[tuple[str, str]]:
    """The (role, text) pairs of the new part of the turn's prompt: its messages without the
    policy's own, or its decoded ids if no messages were recorded."""
    messages = (
        turn.messages[:-1]
        if turn.messages and turn.messages[-1].role == "assistant"
        else turn.messages
    )
    if not messages:
        return [("prompt", "".join(decode(token) for token in turn.prompt_ids))]
    return [(message.role, message_text(message)) for message in messages]


def message_text(message: Message) -> str:
    """A message as readable text: its thought, its text with images by digest, its tool calls. For
    the result of a tool, the text names the tool."""
    source = [f"result of {message.name}"] if message.role == "tool" and message.name else []
    source += [f"of call {message.tool_call_id}"] if message.tool_call_id else []
    lines = [f"[{' '.join(source)}]"] if source else []
    lines += [f"[thought] {message.reasoning}"] if message.reasoning else []
    lines += [text] if (text := "".join(map(_part_text, _parts(message)))) else []
    lines += [
        f"[calls {call.name}{' as ' + call.id if call.id else ''}] {call.arguments}"
        for call in message.tool_calls
    ]
    return "\n".join(lines)


def _parts(message: Message) -> tuple[TextPart | ImagePart, ...]:
    return (TextPart(message.content),) if isinstance(message.content, str) else message.content


def _part_text(part: TextPart | ImagePart) -> str:
    if isinstance(part, TextPart):
        return part.text
    return f"[image {part.media_type}, SHA-256 {part.sha256[:12]}...]"


def outcome(trajectory: Trajectory) -> str:
    """A line with the end and the cost of the attempt."""
    result = "success" if trajectory.success else "no success"
    if trajectory.status == "failed":
        result = f"failed: {visible(trajectory.error or 'no reason recorded')}"

    turns = len(trajectory.turns)
    tokens = trajectory.num_completion_tokens()
    logprobs_of_turns = [
        logprobs for turn in trajectory.turns if (logprobs := shown_logprobs(turn)) is not None
    ]
    logprob = (
        f"log-prob {sum(map(sum, logprobs_of_turns)):.2f}"
        if logprobs_of_turns or not turns
        else "greedy"
    )
    limit_note = ", ended by a limit" if trajectory.truncated else ""

    return (
        f"{result}{limit_note}, reward {trajectory.reward:.4g}, {turns} turn{'s' * (turns != 1)}, "
        f"{tokens} {'sampled ' * (logprob != 'greedy')}tokens ({logprob}), "
        f"{trajectory.duration_s:.2f} s"
    )


def turn_facts(turn: Turn) -> str:
    """`reward 0.9, 12 tokens, finished by stop, version 7`, or `versions 7 to 8` if the weights
    changed during the turn."""
    low = min(turn.versions, default=0)
    high = max(turn.versions, default=0)
    versions = f"version {low}" if low == high else f"versions {low} to {high}"
    greedy = "" if turn.temperature > 0 else " (greedy: without probabilities)"
    return (
        f"reward {turn.reward:.4g}, {len(turn.completion_ids)} tokens{greedy}, finished by "
        f"{turn.finish_reason}, {versions}"
    )


def remote_heading(turn: RemoteTurn) -> str:
    """`remote turn 2 (continues 0): teacher, asked by solver`."""
    parent = "" if turn.parent is None else f" (continues {turn.parent})"
    agent = f", asked by {turn.agent}" if turn.agent else ""
    return visible(f"remote turn {turn.index}{parent}: {turn.model}{agent}")


def remote_facts(turn: RemoteTurn) -> str:
    """`34 tokens (24 of the prompt, 12 of them cached, and 10 of the answer), cost 0.002, finished
    by stop`."""
    cached_note = f", {turn.cached_tokens} of them cached" if turn.cached_tokens else ""
    return (
        f"{turn.prompt_tokens + turn.completion_tokens} tokens ({turn.prompt_tokens} of the prompt"
        f"{cached_note}, and {turn.completion_tokens} of the answer), cost {turn.cost:.4g}, "
        f"finished by {turn.finish_reason}"
    )


def expected_answer(task: Task) -> str:
    """`expected answer: 42`, and an answer that is no text as JSON. Empty if the task has none."""
    if task.answer is None:
        return ""
    is_text = isinstance(task.answer, str)
    answer = task.answer if is_text else json.dumps(task.answer, ensure_ascii=False, default=str)
    return f"expected answer: {visible(shorten_middle(answer, MAX_ANSWER))}"


def file_lines(trajectory: Trajectory) -> list[str]:
    """`out/table.csv, 1,234 bytes` for each stored file, at most 50."""
    lines = [f"{visible(path)}, {len(file):,} bytes" for path, file in trajectory.files.items()]
    num_omitted = len(lines) - MAX_FILES
    return [*lines[:MAX_FILES], *([f"and {num_omitted} more"] if num_omitted > 0 else [])]


class TokenLines:
    """Sampled tokens above their log-probs, wrapped to the console's width with aligned columns.
    Greedy tokens have no log-probs."""

    def __init__(self, turn: Turn, decode: Decode) -> None:
        texts = [visible(decode(token)) for token in turn.completion_ids]
        logprobs = shown_logprobs(turn)
        if logprobs is None:
            self._cells = [(text, "", STYLES[0]) for text in texts]
        else:
            self._cells = [
                (text, f"{logprob:.2f}", STYLES[probability_level(logprob)])
                for text, logprob in zip(texts, logprobs, strict=True)
            ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.cells import cell_len, set_cell_size
        from rich.text import Text

        def lines() -> Iterator[tuple[Text, Text]]:
            top = Text(no_wrap=True)
            bottom = Text(no_wrap=True)
            used = 0
            for token, logprob, style in self._cells:
                width = min(max(cell_len(token), len(logprob)) + 1, options.max_width)
                if used + width > options.max_width:
                    yield top, bottom
                    top = Text(no_wrap=True)
                    bottom = Text(no_wrap=True)
                    used = 0

                top.append(set_cell_size(token, width), style)
                bottom.append(set_cell_size(logprob, width), "dim")
                used += width

            yield top, bottom

        for top, bottom in lines():
            yield top
            yield bottom


def render_trajectory(
    trajectory: Trajectory, decode: Decode, credit: str = "", task: Task | None = None
) -> RenderableType:
    """The whole trajectory as a renderable for `rich.console.Console.print`. `credit`: the credit
    of its turns, in words. `task`: its task, whose expected answer is shown.

    Each turn has the new part of the prompt, the completion's tokens above their log-probs (natural
    log), then the turn's reward, finish reason and policy version. The turns of remote models
    follow, then a legend of the colours.
    """
    from rich.console import Group
    from rich.rule import Rule
    from rich.text import Text

    parts: list[RenderableType] = [
        Text(f"trajectory {trajectory.id}", "bold"),
        Text(
            f"task {trajectory.task_id}, group {trajectory.group_id}, attempt {trajectory.attempt}",
            "dim",
        ),
        *([Text(answer, "dim")] if task is not None and (answer := expected_answer(task)) else []),
        Text(
            outcome(trajectory),
            "green" if trajectory.success else "red" if trajectory.status == "failed" else "yellow",
        ),
    ]
    facts = [f"{name} {value:g}" for name, value in sorted(trajectory.metrics.items())]
    facts += [f"text {name} {digest}" for name, digest in sorted(trajectory.texts.items())]
    if facts:
        parts.append(Text(visible(", ".join(facts)), "dim"))
    if credit:
        parts.append(Text(credit, "dim"))

    for turn in trajectory.turns:
        parts += [Rule(Text(_turn_heading(turn)), align="left", style="dim")]
        for role, text in prompt_texts(turn, decode):
            lines = "\n".join(visible(line) for line in text.rstrip("\n").split("\n"))
            parts.append(
                Text.assemble((f"{role}: ", f"bold {ROLE_STYLES.get(role, 'blue')}"), lines)
            )

        parts.append(Text("policy:", f"bold {ROLE_STYLES['assistant']}"))
        parts.append(TokenLines(turn, decode))
        parts.append(Text(turn_facts(turn), "dim"))

    for remote in trajectory.remote_turns:
        parts += [Rule(Text(remote_heading(remote)), align="left", style="dim")]
        for message in remote.messages:
            text = message_text(message).rstrip("\n")
            lines = "\n".join(visible(line) for line in text.split("\n"))
            style = f"bold {ROLE_STYLES.get(message.role, 'blue')}"
            parts.append(Text.assemble((f"{message.role}: ", style), lines))
        parts.append(Text(remote_facts(remote), "dim"))

    if trajectory.files:
        parts += [Rule(Text("files that were kept"), align="left", style="dim")]
        parts += [Text(line) for line in file_lines(trajectory)]

    legend = Text("probability: ", "dim")
    for (lowest, name), style in zip(LEVELS, STYLES, strict=True):
        legend.append(name, style).append(f" from {lowest:g}   ", "dim")

    return Group(*parts, Rule(style="dim"), legend)


def _turn_heading(turn: Turn) -> str:
    parent = (
        ""
        if turn.parent is None or turn.parent == turn.index - 1
        else f" (continues turn {turn.parent})"
    )
    return f"turn {turn.index}{parent}: {len(turn.prompt_ids)} new prompt tokens"
