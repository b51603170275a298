"""Gemma's notation: the tool's name, then its arguments between braces, with texts between marks
and keys without.

    Gemma 4         <|tool_call>call:f{a:1,b:<|"|>text<|"|>,c:[true,{k:null}]}<tool_call|>
    FunctionGemma   <start_function_call>call:f{b:<escape>text<escape>}<end_function_call>

A text has no escapes and ends at the next mark. Keys and texts in JSON's quotes are read as well. A
value without marks that is no number (of at most MAX_WORD characters), true, false or null is a
text, up to the next comma or closing bracket.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial

from agentevo.models.tool_calls.json_notation import MAX_DEPTH, NUMBER, checked_name, read_value
from agentevo.models.tool_calls.output import OpenCall, ParsedOutput, Recovery, read_call, read_end
from agentevo.models.tool_calls.parameters import json_text
from agentevo.models.tool_calls.text import MAX_WORD, CallText, Wait, marks

_WORDS = ("true", "false", "null")


@dataclass(frozen=True, kw_only=True)
class GemmaCalls:
    """A notation of this kind, by its marks. `quote` is at both ends of a text."""

    begin: str
    end: str
    quote: str

    def read(self, out: ParsedOutput) -> Wait:
        """Reads the text to its end."""
        recovery = Recovery((self.end,), (self.begin,))
        while (yield from out.text.until(marks(self.begin), out.content)):
            yield from read_call(out, partial(self._read_call, out.text), recovery)

    def _read_call(self, text: CallText, call: OpenCall) -> Wait:
        yield from text.expect(self.begin)
        yield from text.expect("call:")
        name, mark = yield from text.collect("{", self.end)
        if mark != "{":
            raise text.broken("it has no arguments")
        call.set_name(checked_name(text, name.strip()))
        text.take_next()

        is_end = bool((yield from text.take_any("}")))
        while not is_end:
            call.begin_argument((yield from self._read_key(text)))
            call.add_arguments((yield from self._read_value(text, 1)))
            is_end = (yield from text.expect(",", "}", expected="a comma or }")) == "}"

        yield from read_end(text, (self.end,), (self.begin,))

    def _read_key(self, text: CallText) -> Generator[None, None, str]:
        yield from text.skip_space()
        quoted = yield from self._take_quoted(text)
        if quoted is None:
            key, _ = yield from text.collect(":", "}", ",")
            quoted = key.strip()

        yield from text.expect(":", expected="a colon after the key")
        return quoted

    def _read_value(self, text: CallText, depth: int) -> Generator[None, None, str]:
        """Takes a value, and returns it as JSON."""
        if depth > MAX_DEPTH:
            raise text.broken(f"its arguments are nested deeper than {MAX_DEPTH} levels")

        yield from text.skip_space()
        quoted = yield from self._take_quoted(text)
        if quoted is not None:
            return json_text(quoted)

        bracket = yield from text.take_any("{", "[")
        if bracket:
            return (yield from self._read_items(text, bracket, depth))

        word, _ = yield from text.collect(",", "}", "]")
        word = word.strip()
        is_number = len(word) <= MAX_WORD and NUMBER.fullmatch(word)
        return word if word in _WORDS or is_number else json_text(word)

    def _read_items(self, text: CallText, bracket: str, depth: int) -> Generator[None, None, str]:
        """Takes the rest of an object or list, and returns all of it as JSON."""
        closing = "}" if bracket == "{" else "]"
        items: list[str] = []
        is_end = bool((yield from text.take_any(closing)))
        while not is_end:
            key = ""
            if closing == "}":
                key = json_text((yield from self._read_key(text))) + ": "
            items.append(key + (yield from self._read_value(text, depth + 1)))
            mark = yield from text.expect(",", closing, expected=f"a comma or {closing}")
            is_end = mark == closing

        return bracket + ", ".join(items) + closing

    def _take_quoted(self, text: CallText) -> Generator[None, None, str | None]:
        """Takes a text with marks or quotes around it; None if there is none."""
        mark = yield from text.starts_with(self.quote, '"')
        if not mark:
            return None
        if mark == '"':
            pieces: list[str] = []
            yield from read_value(text, pieces.append)
            return str(json.loads("".join(pieces)))

        text.take_next(len(mark))
        quoted, _ = yield from text.collect(mark)
        text.take_next(len(mark))
        return quoted


GEMMA_CALLS = GemmaCalls(begin="<|tool_call>", end="<tool_call|>", quote='<|"|>')
FUNCTION_GEMMA_CALLS = GemmaCalls(
    begin="<start_function_call>", end="<end_function_call>", quote="<escape>"
)
