"""Tool calls and reasoning, read out of a model's text. See docs/messages.md.

parser      ToolCallParser and StreamingParse: whole texts, and texts that arrive in pieces
families    which parser a chat template asks for
parsed      what comes out
output      deltas, the white space around what was cut out, and reading calls one by one
text        how text in pieces is read
parameters  values by a tool's schema
json_notation, named_json, tags, elements, llama, harmony    the notations, by family
"""

from agentevo.models.tool_calls.families import find_parser, parser_named, parser_names
from agentevo.models.tool_calls.parsed import (
    ArgumentsDelta,
    CallFailed,
    CallFinished,
    CallStarted,
    ContentDelta,
    Delta,
    MalformedCall,
    Parsed,
    ReasoningDelta,
    join_texts,
)
from agentevo.models.tool_calls.parser import StreamingParse, ToolCallParser

__all__ = [
    "ArgumentsDelta",
    "CallFailed",
    "CallFinished",
    "CallStarted",
    "ContentDelta",
    "Delta",
    "MalformedCall",
    "Parsed",
    "ReasoningDelta",
    "StreamingParse",
    "ToolCallParser",
    "find_parser",
    "join_texts",
    "parser_named",
    "parser_names",
]
