"""Named texts: the names of an agent's prompts, tool descriptions and examples, and the texts that
are allowed there.

A text is used literally: braces and `$` have no special meaning. Texts with control characters,
half of a surrogate pair, or more than MAX_CHARS characters are refused when they are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

from agentevo.config.field_words import suggest_nearest
from agentevo.errors import ConfigError, shown
from agentevo.runtime.parsing import ParseError, parse_yaml, read_text

MAX_CHARS = 100_000
"""Maximal number of characters of one text."""
MAX_TEXTS = 1000
"""Maximal number of texts of one agent."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def digest_of_text(text: str) -> str:
    """The digest of a text: the first 16 hexadecimal digits of its sha256."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def text_problem(name: Any, text: Any) -> str | None:
    """Why this is not a valid named text, as 'what: remedy'; None for a valid one."""
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        return f"{shown(name)} is not a valid name of a text: use letters, digits and _.:-"
    if not isinstance(text, str):
        return f"{name}: the value is a {type(text).__name__}: give a text"
    if len(text) > MAX_CHARS:
        return f"{name}: the text has {len(text):,} characters: give at most {MAX_CHARS:,}"

    control = _CONTROL.search(text)
    if control is not None:
        return (
            f"{name}: the text has the control character {control[0]!r} at position "
            f"{control.start()}: remove it"
        )

    try:
        text.encode()
    except UnicodeEncodeError:
        return f"{name}: the text has half of a surrogate pair, which is not a character: remove it"

    return None


def check_texts(texts: Mapping[Any, Any], patterns: Sequence[str] | None = None) -> dict[str, str]:
    """Checks the texts and returns them. `patterns`: the names that the agent uses, as patterns;
    None if only the agent's code knows them. Raises ValueError for an invalid text, and for a name
    that the agent does not use."""
    if len(texts) > MAX_TEXTS:
        raise ValueError(f"{len(texts)} texts: give at most {MAX_TEXTS}")

    for name, text in texts.items():
        problem = text_problem(name, text)
        if problem is not None:
            raise ValueError(problem)

        if patterns is not None and not any(fnmatchcase(name, pattern) for pattern in patterns):
            hint = suggest_nearest(name, patterns)
            raise ValueError(
                f"{name}: this agent has no such text: {hint}it has "
                f"{', '.join(patterns) or 'no'}{'' if patterns else ' texts'}"
            )

    return dict(texts)


def read_texts(path: Path) -> dict[str, str]:
    """The texts of a YAML file, a mapping from names to texts. Raises ConfigError."""
    try:
        texts = parse_yaml(read_text(path))
        if texts is None:
            texts = {}
        if not isinstance(texts, dict):
            raise ValueError(f"it contains a {type(texts).__name__}: write NAME: TEXT")
        return check_texts(texts)
    except (ParseError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def with_texts_of_file(section: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    """The section of an agent, as written in a recipe in `folder`, with the texts of the file that
    it names, next to the recipe or else in the current folder. Also returns the problem of that
    file, or an empty text."""
    texts_file = section.get("texts")
    if not isinstance(texts_file, (str, Path)):
        return dict(section), ""

    rest = {key: value for key, value in section.items() if key != "texts"}
    for base in (folder, Path.cwd()):
        path = Path(os.path.join(base, os.path.expanduser(texts_file)))
        try:
            if path.is_file():
                return {**rest, "texts": read_texts(path)}, ""
        except (ConfigError, OSError, ValueError) as error:
            return rest, f"agent.texts: {error}"

    return rest, (
        f"agent.texts: there is no file {shown(str(texts_file))}: give a YAML file of NAME: TEXT, "
        "or a mapping"
    )
