"""Multiple choice: the options of a task, and the option that a text chooses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import ascii_uppercase
from typing import Any

from agentevo.rewards.texts import squad_normalised
from agentevo.types import Task

OPTION_KEYS = ("options", "choices")
Options = dict[str, str]
"""Maps a label in upper case to the option's text, which is empty if the row has no texts."""
WITHOUT_TEXTS = dict.fromkeys(ascii_uppercase[:10], "")
_MARKS = " \t\r\n()[]{}*_`'\"$.:,;!?\u3002\uff1a"
_LEADING = re.compile(r"[\s(\[*_`]{0,9}([A-Za-z0-9]{1,2})[*_`]{0,3}(?:[)\]\s]{0,2}[).:\]]|\s-\s)")
_STATED = re.compile(
    r"(?:(?i:answer)|\u7b54\u6848)\s{0,3}(?:is|are|:|=|\u662f|\u4e3a|\uff1a){1,2}"
    r"[\s:(\[*_`]{0,9}(?:(?i:option|choice)[\s(\[*_`]{1,9})?([A-Z])(?![A-Za-z0-9])",
)
"""A letter that is stated as the answer, as opposed to options that a reply discusses."""
_SAID = re.compile(
    r"(?:(?i:answer|option|choice)|\u7b54\u6848)\s{0,3}(?:is|are|:|=|\u662f|\u4e3a|\uff1a){0,2}"
    r"[\s:(\[*_`]{0,9}([A-Z])(?![A-Za-z0-9])",
)
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])([B-HJ-Z]|[AI](?![ \t]{1,3}(?!or\b|and\b|is\b)[a-z]))(?![A-Za-z0-9'])"
)
"""A single letter. `A` and `I` before a word count as words, except in `A or B`."""
_TEX = re.compile(r"\\(?:text|mathrm|mathbf|textbf|textit)\s{0,3}\{([^{}]*)\}")


def options_of(task: Task, key: str | None) -> Options:
    """The options in the task's row: a list of texts, a mapping from labels to texts, or ARC's
    {"label": [...], "text": [...]}. Without options in the row, the letters A to J. Raises
    ValueError for any other form."""
    names = [key] if key is not None else [name for name in OPTION_KEYS if name in task.metadata]
    if not names:
        return WITHOUT_TEXTS

    raw_options: Any = task.metadata.get(names[0])
    if isinstance(raw_options, Mapping) and raw_options.keys() == {"label", "text"}:
        labels = raw_options["label"]
        texts = raw_options["text"]
        fit = isinstance(labels, list) and isinstance(texts, list) and len(labels) == len(texts)
        raw_options = dict(zip(labels, texts, strict=True)) if fit else None

    if isinstance(raw_options, (list, tuple)) and 0 < len(raw_options) <= len(ascii_uppercase):
        raw_options = dict(zip(ascii_uppercase, raw_options, strict=False))

    if not isinstance(raw_options, Mapping) or not raw_options:
        raise ValueError(
            f"the options of the task {task.id!r} (key {names[0]}) must be a list of texts or a "
            "mapping from letters to texts: set options_key"
        )

    return {str(label).strip().upper(): str(text) for label, text in raw_options.items()}


def check_right(answer: Any, options: Options, name: str) -> str:
    """The label of a task's right answer. The answer can be a label, a text, or an index from 0.
    Raises ValueError for an answer that is not an option."""
    if isinstance(answer, int) and not isinstance(answer, bool) and str(answer) not in options:
        labels = list(options)
        label = labels[answer] if 0 <= answer < len(labels) else None
    else:
        label = choice_of(str(answer), options)

    if label is None:
        raise ValueError(
            f"the answer of the task {name!r} is none of its options: got {answer!r}; they are "
            f"{', '.join(options)}"
        )

    return label


def choice_of(text: str, options: Options) -> str | None:
    """The label of the option that a text chooses. None if it chooses none or several."""
    text = _TEX.sub(r"\1", text).strip()
    bare = text.strip(_MARKS).upper()
    if bare in options:
        return bare

    normalised = squad_normalised(text)
    same = [label for label, option in options.items() if option and normalised == _words(option)]
    if len(same) == 1:
        return same[0]

    stated = [label for label in _STATED.findall(text) if label in options]
    if stated:
        return str(stated[-1])

    leading = _LEADING.match(text)
    if leading and leading[1].upper() in options:
        return leading[1].upper()

    named = [label for label in _SAID.findall(text) if label in options]
    if named:
        return str(named[-1])

    letters = {label for label in _TOKEN.findall(text) if label in options}
    if len(letters) == 1:
        return str(letters.pop())

    return None if letters else _by_text(normalised, options)


def _by_text(normalised: str, options: Options) -> str | None:
    """The single option whose text is in the answer. An option does not count if its text is part
    of another option in the answer."""
    contained = {
        label: words
        for label, option in options.items()
        if (words := _words(option)) and f" {words} " in f" {normalised} "
    }
    longest = [
        label
        for label, words in contained.items()
        if not any(
            f" {words} " in f" {other_words} " and words != other_words
            for other_words in contained.values()
        )
    ]
    return longest[0] if len(longest) == 1 else None


def _words(option: str) -> str:
    return squad_normalised(option)
