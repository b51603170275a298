"""The fields of every form of the dashboard, by the address that takes it."""

from __future__ import annotations

FIELDS: dict[str, list[str]] = {
    "/runs/{run}/control": ["do", "session", "id"],
    "/runs/{run}/try/end": ["pid"],
    "/runs/{run}/try/chat": ["which", "device", "conversation", "messages", "temperature"],
}
WORDS = {
    "do": ["stop", "save", "pause", "resume"],
    "which": ["start", "step_2", "best"],
    "messages": ['[{"role": "user", "content": "x"}]', "[", "{}", "[1]", "[[]]", "null", "1e999"],
}
"""Values of a field that come beside any text."""
