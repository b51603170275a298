"""Converts recorded calls of models to conversations for `agentevo sft`."""

from agentevo.data.traces.rows import FORMS, Imported, import_traces

__all__ = ["FORMS", "Imported", "import_traces"]
