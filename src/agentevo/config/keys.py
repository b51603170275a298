"""The dotted keys of a pydantic tree: walk them, explain one, find the one that was meant, and say
in one line what is wrong with a value.

Invariant: every line begins with the dotted key as the user wrote it and ends with what is allowed;
pydantic's own locations and texts (union tags, validator names) never reach a user. Meaning,
default and range come from the field, so they are written once.

A polymorphic section (`environment`) holds the keys of whichever model its `type` chooses: such a
key is walked once per distinct definition, with the types that have it in `option_of`.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from agentevo.errors import UnknownNameError
from agentevo.registry import nearest

Variants = Mapping[str, Mapping[str, type[pydantic.BaseModel]]]
"""Polymorphic section -> its `type` -> the model with that type's keys."""

COUNTED = {
    "tokens",
    "steps",
    "episodes",
    "turns",
    "actions",
    "tasks",
    "epochs",
    "threads",
    "layers",
    "heads",
    "samples",
    "minibatches",
}
"""Nouns that are their own unit when they end a key's name, or stand in its docstring as `in
tokens`."""
SUFFIXES = {"s": "seconds", "gb": "GiB"}


@dataclass(frozen=True)
class Explanation:
    """One key, for people. A section has `keys` and no default."""

    key: str
    meaning: str
    type: str
    """In words, with the allowed range: `whole number, at least 1`."""
    default: str
    """As YAML would write it; empty for a section and for a key that must be given."""
    unit: str
    """Empty where the value is a plain number, a name or a text."""
    choices: tuple[str, ...] = ()
    """The allowed values, where they can be listed."""
    option_of: tuple[str, ...] = ()
    """Types of a polymorphic section that have this key; empty for keys that are always there."""
    keys: tuple[Explanation, ...] = field(default=(), compare=False)
    """What a section holds, in order."""


class ConfigKeys:
    """Every dotted key below `root`, with explanations; built once per tree."""

    def __init__(self, root: type[pydantic.BaseModel], variants: Variants) -> None:
        self._variants = variants
        self._explanations: dict[str, list[Explanation]] = {}
        self._annotations: dict[str, list[Any]] = {}
        for explanation, annotation in _walk(root, variants, ""):
            same = self._explanations.setdefault(explanation.key, [])
            twin = next(
                (i for i, other in enumerate(same) if _same_but_types(other, explanation)), None
            )
            if twin is None:
                same.append(explanation)
            else:
                same[twin] = replace(
                    same[twin], option_of=(*same[twin].option_of, *explanation.option_of)
                )
            self._annotations.setdefault(explanation.key, []).append(annotation)

    def names(self) -> list[str]:
        """Dotted keys in the order of the tree, sections before what they hold."""
        return list(self._explanations)

    def explain(self, key: str) -> list[Explanation]:
        """One explanation, or several where the types of a polymorphic section disagree about the
        key. Raises `UnknownNameError`."""
        if key not in self._explanations:
            raise UnknownNameError(
                f"{key}: unknown "
                f"key{self.suggestion(key) or '; `agentevo config explain` lists the sections'}"
            )
        found = self._explanations[key]
        if found[0].type != "section":
            return found
        return [
            replace(
                found[0],
                keys=tuple(
                    one
                    for name in self.names()
                    if _parent(name) == key
                    for one in self._explanations[name]
                ),
            )
        ]

    def sections(self) -> list[Explanation]:
        """The top level of the tree."""
        return [self.explain(name)[0] for name in self.names() if "." not in name]

    def is_text(self, key: str) -> bool:
        """Whether the value is a text or a path, which needs no YAML quoting on the command
        line."""
        return any(
            kind in (str, Path)
            for annotation in self._annotations.get(key, ())
            for kind in _members(annotation)
        )

    def suggestion(
        self, key: str, *, chosen: Mapping[str, str] | None = None, section: bool | None = None
    ) -> str:
        """`; did you mean trainer.group_size?`, or empty. `chosen` says which type each polymorphic
        section has; `section` whether the value given was a mapping, which makes sections
        likelier."""
        best = self._nearest(key, chosen or {}, section)
        return f"; did you mean {best}?" if best else ""

    def _nearest(self, key: str, chosen: Mapping[str, str], section: bool | None) -> str | None:
        best, best_score = None, 0.0
        for name in self.names():
            explanation = self._explanations[name][0]
            options = {kind for one in self._explanations[name] for kind in one.option_of}
            if (
                options
                and name.split(".")[0] in chosen
                and chosen[name.split(".")[0]] not in options
            ):
                continue
            likely = section is None or section == (explanation.type == "section")
            score = _closeness(key, name) + (0.1 if likely else 0.0)
            if score > best_score:
                best, best_score = name, score
        return best if best_score >= 0.6 else None

    def problem(self, error: ErrorDetails, *, chosen: Mapping[str, str]) -> str:
        """One pydantic error as `key: what is wrong; what is allowed`, without the place where the
        value was written."""
        parts = [str(part) for part in error["loc"]]
        kind, given = error["type"], error["input"]
        if kind in ("extra_forbidden", "invalid_key"):
            return self._unknown_key(".".join(parts), given, chosen)
        known = next(
            (n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in self._explanations), 0
        )
        key = ".".join(parts[:known])
        if kind in ("value_error", "assertion_error"):
            text = str(error["ctx"]["error"])
            return f"{key}: {text}" if key else text
        if not key:
            return (
                "a recipe is a mapping of sections such as `model:` and `environment:`, not "
                f"{_show(given)}"
            )
        if kind == "missing":
            whole = known == len(parts)
            return (
                f"{key}: missing; give {_with_article(self._explanation(key, chosen))}"
                if whole
                else self.wrong_value(key, given, chosen=chosen)
            )
        place = key + "".join(f"[{part}]" for part in parts[known:] if part.isdigit())
        return self.wrong_value(key, given, chosen=chosen, place=place)

    def wrong_value(
        self, key: str, given: object, *, chosen: Mapping[str, str], place: str = ""
    ) -> str:
        """A known key with a value of the wrong type or out of range."""
        explanation = self._explanation(key, chosen)
        place = place or key
        if explanation.type == "section":
            inside = f"{key}.{_leaf(explanation.keys[0].key)}" if explanation.keys else key
            what = (
                "is an empty section; remove it or put keys below it"
                if given is None
                else f"got {_show(given)}; it is a section, set its keys"
            )
            return f"{place}: {what}, such as {inside}"
        if isinstance(given, Mapping) and given:
            return (
                f"{key}.{next(iter(given))}: unknown key; {key} is a single value "
                f"({explanation.type})"
            )
        guess = nearest(given, list(explanation.choices)) if isinstance(given, str) else None
        hint = f" did you mean {guess}?" if guess else ""
        default = f" (default {explanation.default})" if explanation.default else ""
        return f"{place}: got {_show(given)};{hint} needs {_with_article(explanation)}{default}"

    def misplaced_booleans(
        self, tree: Mapping[str, Any], *, chosen: Mapping[str, str], prefix: str = ""
    ) -> list[str]:
        """Lines for true and false where a number or text belongs: pydantic would take them for 1
        and 0."""
        lines = []
        for key, value in tree.items():
            if isinstance(value, Mapping):
                lines += self.misplaced_booleans(value, chosen=chosen, prefix=f"{prefix}{key}.")
            elif isinstance(value, bool) and not self._accepts_bool(f"{prefix}{key}"):
                lines.append(self.wrong_value(f"{prefix}{key}", value, chosen=chosen))
        return lines

    def _explanation(self, key: str, chosen: Mapping[str, str]) -> Explanation:
        wanted = chosen.get(key.split(".")[0])
        found = self.explain(key)
        return next((one for one in found if wanted in one.option_of), found[0])

    def _accepts_bool(self, key: str) -> bool:
        kinds = [
            kind
            for annotation in self._annotations.get(key, (bool,))
            for kind in _members(annotation)
        ]
        return any(kind in (bool, Any) or get_origin(kind) is Literal for kind in kinds)

    def _unknown_key(self, key: str, given: object, chosen: Mapping[str, str]) -> str:
        section = key.split(".")[0]
        elsewhere = [kind for one in self._explanations.get(key, ()) for kind in one.option_of]
        if elsewhere and section in chosen:
            return (
                f"{key}: unknown key for {section}.type={chosen[section]}; it is an option of "
                f"{', '.join(elsewhere)}"
            )
        return (
            f"{key}: unknown "
            f"key{self.suggestion(key, chosen=chosen, section=isinstance(given, Mapping))}"
        )


def _walk(
    model: type[pydantic.BaseModel], variants: Variants, prefix: str
) -> Iterator[tuple[Explanation, Any]]:
    """Every key below `model` with its annotation, sections before their contents."""
    for name, info in model.model_fields.items():
        key = f"{prefix}{info.alias or name}"
        section = _section_model(info.annotation)
        if section is None:
            yield _explain_field(key, info), info.annotation
            continue
        yield (
            Explanation(key, _clean(info.description or section.__doc__ or ""), "section", "", ""),
            info.annotation,
        )
        if key in variants:
            yield from _walk_variants(key, variants[key], section.model_fields["type"])
        else:
            yield from _walk(section, variants, f"{key}.")


def _walk_variants(
    key: str, kinds: Mapping[str, type[pydantic.BaseModel]], chooser: FieldInfo
) -> Iterator[tuple[Explanation, Any]]:
    names = tuple(kinds)
    default = "" if chooser.is_required() else _show(chooser.default)
    meaning = (
        f"Which {_leaf(key)} it is, and with that which other keys {key} has. `agentevo "
        f"list {_leaf(key)}s` says what each one is."
    )
    yield (
        Explanation(f"{key}.type", meaning, f"one of {', '.join(names)}", default, "", names),
        str,
    )
    for kind, model in kinds.items():
        for explanation, annotation in _walk(model, {}, f"{key}."):
            if explanation.key != f"{key}.type":
                yield replace(explanation, option_of=(kind,)), annotation


def _explain_field(key: str, info: FieldInfo) -> Explanation:
    kinds = _members(info.annotation)
    choices = tuple(
        str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)
    )
    if kinds == [bool]:
        choices = ("true", "false")
    limits = [*info.metadata, *_annotated_limits(info.annotation)]
    words = ", ".join([_alternatives(info.annotation), *_range_in_words(limits)]) + _or_null(
        info.annotation
    )
    meaning = _clean(info.description or "")
    default = "" if info.is_required() else _show(info.get_default(call_default_factory=True))
    return Explanation(key, meaning, words, default, _unit(_leaf(key), meaning, kinds), choices)


def _section_model(annotation: Any) -> type[pydantic.BaseModel] | None:
    return next(
        (
            kind
            for kind in _members(annotation)
            if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)
        ),
        None,
    )


def _members(annotation: Any) -> list[Any]:
    """The alternatives of a union without None and without Annotated wrappings; the annotation
    itself where it is no union."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [
            kind
            for member in get_args(annotation)
            if member is not type(None)
            for kind in _members(member)
        ]
    return [annotation]


def _annotated_limits(annotation: Any) -> list[Any]:
    """Constraints inside a type: those of `Annotated[int, Field(ge=1)]`, alone or in a union."""
    if get_origin(annotation) is Annotated:
        return [
            limit
            for extra in get_args(annotation)[1:]
            for limit in getattr(extra, "metadata", [extra])
        ]
    if get_origin(annotation) in (Union, types.UnionType):
        return [limit for member in get_args(annotation) for limit in _annotated_limits(member)]
    return []


SIMPLE_TYPES: dict[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    Any: "any value",
}
PLURALS = {
    "whole number": "whole numbers",
    "number": "numbers",
    "text": "texts",
    "path": "paths",
    "true or false": "true or false values",
}


def _alternatives(annotation: Any) -> str:
    return " or ".join(_type_in_words(kind) for kind in _members(annotation))


def _or_null(annotation: Any) -> str:
    return (
        ", or null"
        if get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation)
        else ""
    )


def _type_in_words(kind: Any) -> str:
    if kind in SIMPLE_TYPES:
        return SIMPLE_TYPES[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(str(choice) for choice in arguments)}"
    if origin in (tuple, list, set, frozenset) and arguments:
        item, limits = _alternatives(arguments[0]), _range_in_words(_annotated_limits(arguments[0]))
        number = "" if origin is not tuple or Ellipsis in arguments else f"{len(arguments)} "
        return f"list of {number}{PLURALS.get(item, item)}" + (
            f", each {', '.join(limits)}" if limits else ""
        )
    if origin is dict or kind is dict:
        return "mapping"
    return typing.cast(str, getattr(kind, "__name__", str(kind)))


RANGES = {
    "gt": "above {}",
    "ge": "at least {}",
    "lt": "below {}",
    "le": "at most {}",
    "multiple_of": "a multiple of {}",
    "min_length": "at least {} long",
    "max_length": "at most {} long",
    "pattern": "of the form {}",
}


def _range_in_words(constraints: list[Any]) -> list[str]:
    found = [
        (words, getattr(limit, name, None))
        for limit in constraints
        for name, words in RANGES.items()
    ]
    return [words.format(_show(bound)) for words, bound in found if bound is not None]


def _unit(name: str, meaning: str, kinds: list[Any]) -> str:
    """From the name (`timeout_s`, `micro_batch_tokens`, `groups_per_step`), else from the docstring
    (`..., in tokens`)."""
    if not any(kind in (int, float) for kind in kinds):
        return ""
    last = name.rsplit("_", 1)[-1]
    if last in SUFFIXES and "_" in name:
        return SUFFIXES[last]
    if last in COUNTED:
        return last
    if "_per_" in name:
        return name.replace("_", " ")
    stated = [
        word
        for word in re.findall(r"\bin ([a-z]+)\b", meaning)
        if word in COUNTED | {"seconds", "units", "bytes", "cells"}
    ]
    return stated[0] if stated else ""


def _closeness(wanted: str, known: str) -> float:
    """0 (unlike) to 1 (equal): mostly the last name, for a right name in a wrong section, and
    partly what stands before it."""
    wanted_parent, wanted_leaf = _parent(wanted), _leaf(wanted)
    known_parent, known_leaf = _parent(known), _leaf(known)
    leaves = _ratio(wanted_leaf, known_leaf)
    if leaves < 0.6:
        return 0.0
    return 0.7 * leaves + 0.3 * (
        1.0 if wanted_parent == known_parent else 0.9 * _ratio(wanted_parent, known_parent)
    )


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(
        None, one.replace("-", "_").lower(), other.lower(), autojunk=False
    ).ratio()


def _leaf(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _parent(key: str) -> str:
    return key.rpartition(".")[0]


def _clean(text: str) -> str:
    return " ".join(text.split())


def _show(value: object) -> str:
    """A value as YAML writes it on one line, cut after 60 characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key}: {_show(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(_show(item) for item in value) + "]"
    else:
        text = repr(str(value)) if isinstance(value, (str, Path)) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _with_article(explanation: Explanation) -> str:
    """`a whole number, at least 1`; lists of choices and `true or false` take no article."""
    words = explanation.type
    if words.startswith(("one of", "true or false", "any value")):
        return words
    return f"a {words}"


def _same_but_types(one: Explanation, other: Explanation) -> bool:
    return replace(one, option_of=()) == replace(other, option_of=())
