"""The end of a log as text: without the escapes that colour and move on a terminal, of a line that
a progress bar wrote over and over only what it last said."""

from __future__ import annotations

import re

from agentevo.pages.text import shown

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, moves
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # titles, links
    r"|\x1b[ -/]*[0-~]"
)
MOST_LINE = 2_000
"""Characters of one line."""


def log_text(data: bytes, *, is_cut: bool, most_lines: int = 400) -> str:
    """The last lines of what was read. `is_cut`: it begins within a line, which is left out."""
    text = _ESCAPES.sub("", data.decode("utf-8", "replace")).replace("\r\n", "\n")
    lines = text.split("\n")
    if is_cut and len(lines) > 1:
        lines = lines[1:]
    if lines and not lines[-1]:
        lines.pop()

    # A carriage return at the end overwrites nothing yet.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines[-most_lines:]]
    return "\n".join(shown(line, MOST_LINE) for line in lines)
