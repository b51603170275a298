"""The fields of every form of the dashboard, by the address that takes it."""

from __future__ import annotations

FIELDS: dict[str, list[str]] = {
    "/runs/{run}/control": ["do", "session"],
    "/runs/{run}/data": ["do"],
    "/runs/{run}/annotate": ["attempt", "verdict", "note", "reply"],
    "/runs/{run}/prefer": ["a", "b", "better"],
    "/runs/{run}/try/end": ["pid"],
    "/runs/{run}/try/chat": ["which", "device", "conversation", "messages", "temperature"],
    "/runs/{run}/try/play": ["which", "kind", "task", "number", "query", "answer", "draw"],
    "/start": ["command", "recipe", "file", "overrides", "name"],
}
WORDS = {
    "do": ["stop", "save", "pause", "resume", "retry"],
    "verdict": ["right", "wrong", ""],
    "kind": ["own", "task", "train", "eval"],
    "which": ["start", "step_2", "best"],
    "command": ["train", "sft", "rm"],
    "messages": ['[{"role": "user", "content": "x"}]', "[", "{}", "[1]", "[[]]", "null", "1e999"],
}
"""Values of a field that come beside any text."""
