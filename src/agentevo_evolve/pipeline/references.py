"""`${...}` in a pipeline: a reference to the output of another stage.

    ${stages.NAME.KEY}            KEY of the stage NAME; of a repeated one that of its last round
    ${stages.GROUP.NAME.KEY}      of a stage in a group, likewise
    ${previous.KEY}               in a repeated stage: of the round before
    ${previous.NAME.KEY}          in a group: of a stage of it, in the round before
    ${round}  ${stage.folder}     the number of the round, the stage's own folder

The part after `|` is the fallback for an output that does not exist, in the first round or because
the stage was skipped. It is another reference without its `${}`, or a text. KEY is `folder`,
`checkpoint`, `file`, or a number among the stage's results, such as `success`. Every other `${...}`
belongs to the recipe.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentevo_evolve.pipeline.schema import NAME

_REFERENCE = re.compile(r"\$\{\s*(?P<text>(?:stages|previous|stage)\.[^{}]*|round)\s*\}")
_BEGINS = ("stages.", "previous.", "stage.")


class ReferenceProblem(ValueError):
    """A reference is not valid."""


@dataclass(frozen=True)
class StageReference:
    """A reference as it is written in the file."""

    scope: str
    """`stages`, `previous`, `stage`, or `round`."""
    names: tuple[str, ...]
    """The name of the stage, or of the group and a stage in it. Empty for the stage itself."""
    key: str
    fallback: StageReference | str | None = None
    """The value if the output does not exist."""

    @property
    def text(self) -> str:
        """The reference as it was written, without its fallback."""
        return ".".join([self.scope, *self.names, *([self.key] if self.key else [])])


def parse_reference(text: str) -> StageReference:
    """Parses the text within `${}`. Raises ReferenceProblem."""
    written, bar, rest = (part.strip() for part in text.partition("|"))
    fallback: StageReference | str | None = None
    if bar:
        is_reference = rest.startswith(_BEGINS) or rest == "round"
        fallback = parse_reference(rest) if is_reference else rest
        if rest == "":
            raise ReferenceProblem(f"${{{text[:80]}}} has nothing after `|`")

    if written == "round":
        return StageReference("round", (), "", fallback)

    scope, *parts = (part.strip() for part in written.split("."))
    if scope == "stage" and parts == ["folder"]:
        return StageReference("stage", (), "folder", fallback)

    most = {"stages": (2, 3), "previous": (1, 2)}.get(scope, (0, 0))
    if not most[0] <= len(parts) <= most[1] or not all(NAME.fullmatch(part) for part in parts):
        raise ReferenceProblem(
            f"${{{text[:80]}}} is not a valid reference: write ${{stages.NAME.checkpoint}}, "
            "${previous.checkpoint}, ${stage.folder} or ${round}"
        )

    return StageReference(scope, tuple(parts[:-1]), parts[-1], fallback)


def references_in(value: Any) -> Iterator[StageReference]:
    """The references in a tree, in order. Raises ReferenceProblem."""
    for text in texts_in(value):
        for match in _REFERENCE.finditer(text):
            yield parse_reference(match["text"])


def texts_in(value: Any) -> Iterator[str]:
    """Every text in a tree of mappings, lists and single values."""
    if isinstance(value, Mapping):
        for child in value.values():
            yield from texts_in(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from texts_in(child)
    elif isinstance(value, str):
        yield value


def replace_references(value: Any, meaning: Callable[[StageReference], str | float]) -> Any:
    """A copy of a tree in which `meaning` replaces each reference. A text that is only a reference
    becomes the reference's value."""
    if isinstance(value, Mapping):
        return {key: replace_references(child, meaning) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_references(child, meaning) for child in value]
    if not isinstance(value, str):
        return value

    whole_reference = _REFERENCE.fullmatch(value.strip())
    if whole_reference:
        return meaning(parse_reference(whole_reference["text"]))

    return _REFERENCE.sub(lambda match: str(meaning(parse_reference(match["text"]))), value)


_FORM = re.compile(r"\s*(?P<left>\$\{[^{}]+\})\s*(?P<sign><=|>=|==|!=|<|>)\s*(?P<right>\S+)\s*")
SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


class StageCondition(NamedTuple):
    """`reference` is the reference as it is written."""

    reference: str
    sign: str
    right: float

    def holds(self, left_value: float) -> bool:
        """Whether the condition holds for the value of the reference."""
        return SIGNS[self.sign](left_value, self.right)


def condition(text: str) -> StageCondition:
    """Raises ValueError for an invalid condition."""
    match = _FORM.fullmatch(text)
    try:
        right = float(match["right"]) if match else math.nan
    except ValueError:
        right = math.nan

    if match is None or not math.isfinite(right):
        raise ValueError(
            f"when: {text[:80]!r} is not a valid condition: write one such as "
            "${stages.rl.success} > 0.5"
        )

    return StageCondition(match["left"], match["sign"], right)
