"""Reads conversations for training from files: converts rows into one form, checks them, and
reports every row that can't be used.

Importing this package loads neither torch nor an optional package.
"""

from agentevo.data.conversation import FORMS, ChatRow, read_conversations
from agentevo.data.row_report import BadRow, RowError, RowReport
from agentevo.data.rows import SourceRow, check_source, read_json_lines, read_rows

__all__ = [
    "FORMS",
    "BadRow",
    "ChatRow",
    "RowError",
    "RowReport",
    "SourceRow",
    "check_source",
    "read_conversations",
    "read_json_lines",
    "read_rows",
]
