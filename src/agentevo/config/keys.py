"""The dotted keys of a pydantic tree: this module walks and explains them, guesses the key that was
meant, and describes in one line what is wrong with a value.

Invariant: every line begins with the dotted key as the user wrote it and ends with what is allowed;
pydantic's own locations and texts (union tags, validator names) never reach a user. Meaning,
default and range come from the field, so they are written once.

A polymorphic section (`environment`) has the keys of the model that its `type` chooses, and each
entry of a polymorphic list (`rewards`) has those of the model that its `name` chooses. Such a key
is walked once per distinct definition, and `option_of` has the types with that definition.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from agentevo.config import sources
from agentevo.config.field_words import (
    alternative_types,
    as_number,
    as_yaml,
    choices_of,
    describe_wrong_choice,
    describe_wrong_value,
    entry_problem,
    item_types,
    on_one_line,
    section_model,
    type_in_words,
    unit_of,
    with_article,
)
from agentevo.config.peer_keys import (
    in_our_words,
    is_whole_key,
    normal_key,
    translations,
    value_in_our_words,
)
from agentevo.errors import UnknownNameError
from agentevo.runtime.paths import name_problem

Variants = Mapping[str, Mapping[str, type[pydantic.BaseModel]]]
"""Polymorphic section -> its `type` -> the model with that type's keys; likewise for the entries of
a polymorphic list by their `name`."""
LISTS = {"rewards": "name", "tracking.backends": "name", "agent.tools": "type"}
"""Polymorphic lists -> the key of an entry that chooses its model."""
NAME = "NAME"
"""Appears in a key in place of the name of a section to which a recipe gives names
(`remote_models`)."""
SHOWN_TRANSLATIONS = 5
"""Maximum number of keys that an error translates for a whole section of another system."""


@dataclass(frozen=True)
class Explanation:
    """The explanation of one key for people. A section has `keys` and no default."""

    key: str
    meaning: str
    type: str
    """The type in words, with the allowed range: `whole number, at least 1`."""
    default: str
    """The default as YAML would write it; empty for a section and for a key that must be given."""
    unit: str
    """The unit of the value; empty if the value is a plain number, a name or a text."""
    choices: tuple[str, ...] = ()
    """The allowed values, if they can be listed."""
    option_of: tuple[str, ...] = ()
    """Types of a polymorphic section, or names of a list's entries, that have this key; empty for
    keys that are always there."""
    keys: tuple[Explanation, ...] = field(default=(), compare=False)
    """The keys of a section, in order."""


class ConfigKeys:
    """Every dotted key below `root`, with explanations; built once per tree."""

    def __init__(self, root: type[pydantic.BaseModel], variants: Variants) -> None:
        self._explanations: dict[str, list[Explanation]] = {}
        self._annotations: dict[str, list[Any]] = {}
        self._bounded: set[str] = set()
        for explanation, annotation in _walk(root, variants, ""):
            if "at most" in explanation.type or "below" in explanation.type:
                self._bounded.add(explanation.key)

            same = self._explanations.setdefault(explanation.key, [])
            equal = next((i for i, e in enumerate(same) if _same_but_types(e, explanation)), None)
            if equal is None:
                same.append(explanation)
            else:
                names = dict.fromkeys((*same[equal].option_of, *explanation.option_of))
                same[equal] = replace(same[equal], option_of=tuple(names))

            self._annotations.setdefault(explanation.key, []).append(annotation)

        for name in LISTS:
            for key in (key for key in self._explanations if key.startswith(f"{name}.")):
                self._explanations[key] = [
                    replace(e, option_of=()) if {*e.option_of} == {*variants.get(name, {})} else e
                    for e in self._explanations[key]
                ]

    def names(self) -> list[str]:
        """Dotted keys in the order of the tree, sections before their keys."""
        return list(self._explanations)

    def explain(self, key: str) -> list[Explanation]:
        """One explanation, or several if the types of a polymorphic section disagree about the
        key. Raises `UnknownNameError`."""
        if key not in self._explanations:
            raise UnknownNameError(
                f"{key}: unknown "
                f"key{self.suggestion(key) or '; `agentevo config` lists the sections'}"
            )

        explanations = self._explanations[key]
        below = [name for name in self.names() if _parent(name) == key]
        if not below:
            return explanations

        inner_keys = tuple(inner for name in below for inner in self._explanations[name])
        return [replace(explanations[0], keys=inner_keys)]

    def sections(self) -> list[Explanation]:
        """The explanations of the sections at the top of the tree."""
        return [self.explain(name)[0] for name in self.names() if "." not in name]

    def is_text(self, key: str) -> bool:
        """Whether the value is a text or a path, which needs no YAML quoting on the command
        line."""
        return any(
            kind in (str, Path)
            for annotation in self._annotations.get(key, ())
            for kind in alternative_types(annotation)
        )

    def suggestion(self, key: str, *, chosen: Mapping[str, str] | None = None) -> str:
        """`; did you mean trainer.group_size?`, or our key for a key of another system, or empty. A
        key of theirs without sections, such as TRL's beta, may stand in any section of ours that
        has no such key. `chosen`: the type of each polymorphic section."""
        best = self._nearest(key, chosen or {})
        peers = translations(key)
        section = _parent(key)
        is_elsewhere = best is None or _parent(best) != section
        their_key = _leaf(key) if section in self._explanations and is_elsewhere else key
        is_our_name = best is not None and (
            _leaf(best) == normal_key(_leaf(key)) or best == f"{key}s"
        )
        leads_there = any(best in peer.our_keys for peer in peers)
        if peers and not (is_our_name and (leads_there or not is_whole_key(their_key, peers))):
            return f"; {'; '.join(peer.sentence for peer in peers)}"
        return f"; did you mean {best}?" if best else ""

    def _nearest(self, key: str, chosen: Mapping[str, str]) -> str | None:
        """The key whose last name is most like that of `key`; of several, the one in the most
        similar section. A far guess is worse than none."""
        wanted = normal_key(_leaf(key))
        scores: dict[str, tuple[float, int]] = {}
        for name, explanations in self._explanations.items():
            options = {kind for explanation in explanations for kind in explanation.option_of}
            chosen_type = chosen.get(name.split(".")[0])
            is_other_type = options and chosen_type is not None and chosen_type not in options
            is_of_entry = name.startswith(tuple(f"{list_key}." for list_key in LISTS))
            likeness = _ratio(wanted, _leaf(name))
            is_slip = likeness > 0.8 or sorted(wanted) == sorted(_leaf(name))
            is_begun = name.startswith(f"{_parent(key)}.{wanted}_")
            if (is_slip or is_begun) and not is_other_type and not is_of_entry:
                closeness = 0.7 * likeness + 0.3 * _ratio(_parent(key), _parent(name))
                closeness += 0.2 * (likeness == 1.0)
                scores[name] = (closeness, -name.count("."))

        return max(scores, key=scores.__getitem__, default=None)

    def problem(self, error: ErrorDetails, *, chosen: Mapping[str, str]) -> str:
        """One pydantic error as `key: what is wrong; what is allowed`, without the place of the
        value in the file."""
        parts = [str(part) for part in error["loc"]]
        if len(parts) > 1 and f"{parts[0]}.{NAME}" in self._explanations:
            named = f"{parts[0]}.{parts[1]}"
            pattern_key = f"{parts[0]}.{NAME}"
            located = cast(ErrorDetails, {**error, "loc": (pattern_key, *parts[2:])})
            return self.problem(located, chosen=chosen).replace(pattern_key, named)

        kind = error["type"]
        value = error["input"]
        num_known = next(
            (n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in self._explanations), 0
        )
        key = ".".join(parts[:num_known])
        models = {model for item in self.kinds(key) if (model := section_model(item))}
        inside = error["loc"][num_known + 1 :]
        if inside and parts[num_known].isdigit() and len(models) > 1:  # the type comes first
            models = {model for model in models if inside[0] in _types_of(model)}
            inside = inside[1:]
        if len(error["loc"]) > num_known + 1 and parts[num_known].isdigit() and len(models) == 1:
            located = cast(ErrorDetails, {**error, "loc": inside})
            return entry_problem(f"{key}[{parts[num_known]}]", models.pop(), located)

        if kind in ("union_tag_invalid", "union_tag_not_found"):
            place = ".".join(parts[:num_known]) + "".join(f"[{part}]" for part in parts[num_known:])
            types = sorted(name for model in models for name in _types_of(model))
            return describe_wrong_choice(place, value, "type", types)

        if kind in ("extra_forbidden", "invalid_key"):
            return self._unknown_key(".".join(parts), value, chosen)

        if kind in ("value_error", "assertion_error"):
            text = str(error["ctx"]["error"])
            return f"{key}: {text}" if key else text

        if not key:
            return (
                "a recipe is a mapping of sections such as `model:` and `environment:`, not "
                f"{as_yaml(value)}"
            )

        if kind == "missing":
            is_known = num_known == len(parts)
            return (
                f"{key}: missing; give {with_article(self._explanation(key, chosen).type)}"
                if is_known
                else self.wrong_value(key, value, chosen=chosen)
            )

        place = key + "".join(f"[{part}]" for part in parts[num_known:] if part.isdigit())
        return self.wrong_value(key, value, chosen=chosen, place=place)

    def wrong_value(
        self, key: str, value: object, *, chosen: Mapping[str, str], place: str = ""
    ) -> str:
        """The line about a known key whose value has the wrong type or is out of range."""
        explanation = self._explanation(key, chosen)
        place = place or key
        if explanation.type == "section":
            inside = f"{key}.{_leaf(explanation.keys[0].key)}" if explanation.keys else key
            problem = (
                "is an empty section; remove it or put keys below it"
                if value is None
                else f"got {as_yaml(value)}; it is a section, set its keys"
            )
            return f"{place}: {problem}, such as {inside}"

        if isinstance(value, Mapping) and value:
            return (
                f"{key}.{next(iter(value))}: unknown key; {key} is a single value "
                f"({explanation.type})"
            )

        default = f" (default {explanation.default})" if explanation.default else ""
        words = describe_wrong_value(value, explanation.type, explanation.choices, default)
        return f"{place}: {words}"

    def kinds(self, key: str) -> list[Any]:
        """The types that a value of the key can have, or the types of the items of a list or tuple;
        empty for an unknown key."""
        return [
            kind
            for annotation in self._annotations.get(key, ())
            for alternative in alternative_types(annotation)
            for kind in item_types(alternative)
        ]

    def has_bound(self, key: str) -> bool:
        """Whether the key's own field says how large a number may be."""
        return key in self._bounded

    def _explanation(self, key: str, chosen: Mapping[str, str]) -> Explanation:
        chosen_type = chosen.get(key.split(".")[0])
        explanations = self.explain(key)
        return next((e for e in explanations if chosen_type in e.option_of), explanations[0])

    def _unknown_key(self, key: str, value: object, chosen: Mapping[str, str]) -> str:
        section = key.split(".")[0]
        owner_types = [kind for e in self._explanations.get(key, ()) for kind in e.option_of]
        if owner_types and section in chosen:
            return (
                f"{key}: unknown key for {section}.type={chosen[section]}; it is an option of "
                f"{', '.join(owner_types)}"
            )

        if not isinstance(value, Mapping):
            return f"{key}: unknown key{self.suggestion(key, chosen=chosen)}"

        leaves = [in_our_words(leaf) for leaf in sources.leaves(value, f"{key}.")]
        translations = list(dict.fromkeys(text for text in leaves if text is not None))
        if translations:
            return f"{key}: unknown key; {'; '.join(translations[:SHOWN_TRANSLATIONS])}"

        return f"{key}: unknown key{self.suggestion(key, chosen=chosen)}"


NUMBERS = 1e9
"""Bound on the absolute value of every count, time in seconds and size."""


def refused_values(
    tree: Mapping[str, Any], keys: ConfigKeys, *, chosen: Mapping[str, str], prefix: str = ""
) -> list[str]:
    """A line for each value in `tree` that is invalid in every section, also in those of other
    packages and of user code. `chosen`: as in `ConfigKeys.problem`.

    - true or false for a number or a text, which pydantic would read as 1, 0 or "True"
    - numbers that are not finite, or beyond NUMBERS if the key has no bound
    - values that are valid in another system, or mean something else there (peer_keys.md)
    - texts that files, databases or tokenizers can't store, and paths that file systems can't
    """
    lines: list[str] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            lines += refused_values(value, keys, chosen=chosen, prefix=f"{key}.")
            continue

        for place, item in _items(key, value):
            problem = _problem(key, item, keys)
            remark = value_in_our_words(key, item)
            if remark is not None:
                lines.append(f"{place}: got {as_yaml(item)}; {remark}")
            elif problem is _NOT_OF_THE_KIND:
                lines.append(keys.wrong_value(key, item, chosen=chosen, place=place))
            elif problem:
                lines.append(f"{place}: {problem}")

    return lines


_NOT_OF_THE_KIND = "not of the kind"


def _items(key: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _items(f"{key}[{index}]", item)
    else:
        yield key, value


def _problem(key: str, value: object, keys: ConfigKeys) -> str:
    kinds = keys.kinds(key)
    if isinstance(value, bool):
        fits = not kinds or any(
            kind in (bool, Any) or get_origin(kind) is Literal for kind in kinds
        )
        return "" if fits else _NOT_OF_THE_KIND

    if isinstance(value, (str, Path)):
        return _text_problem(str(value), kinds) or _number_problem(as_number(value), key, keys)

    return _number_problem(value, key, keys)


def _text_problem(text: str, kinds: list[Any]) -> str:
    if Path in kinds:
        problem = name_problem(text)
        return f"this path {problem}" if problem else ""

    if "\0" in text:
        return "a text with a NUL character: remove it"

    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"character {error.start} is half of a surrogate pair: remove it"

    return ""


def _number_problem(value: object, key: str, keys: ConfigKeys) -> str:
    kinds = keys.kinds(key)
    if not isinstance(value, (int, float)) or not any(kind in (int, float) for kind in kinds):
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return _NOT_OF_THE_KIND
    if abs(value) <= NUMBERS or keys.has_bound(key):
        return ""
    return f"got {value}; a number here is between -{NUMBERS:,.0f} and {NUMBERS:,.0f}"


def _walk(
    model: type[pydantic.BaseModel], variants: Variants, prefix: str
) -> Iterator[tuple[Explanation, Any]]:
    """Every key below `model` with its annotation, sections before their contents."""
    for name, info in model.model_fields.items():
        key = f"{prefix}{info.alias or name}"
        section = section_model(info.annotation)
        if (named := _named_section(info.annotation)) is not None:
            meaning = on_one_line(info.description or "")
            yield Explanation(key, meaning, "section", "", ""), info.annotation
            each = on_one_line(named.__doc__ or "")
            yield Explanation(f"{key}.{NAME}", each, "section", "", ""), named
            yield from _walk(named, variants, f"{key}.{NAME}.")
            continue

        if key in LISTS and key in variants:
            words = "list of names, or of mappings with the keys below it"
            if LISTS[key] == "type":
                words = type_in_words(info)
            yield replace(_explain_field(key, info), type=words), info.annotation
            yield from _walk_options(key, variants[key], variants)
            continue

        if section is None:
            yield _explain_field(key, info), info.annotation
            continue

        meaning = on_one_line(info.description or section.__doc__ or "")
        yield Explanation(key, meaning, "section", "", ""), info.annotation
        if key in variants:
            yield from _walk_variants(key, variants, section.model_fields["type"])
        else:
            yield from _walk(section, variants, f"{key}.")


def _walk_variants(
    key: str, variants: Variants, chooser: FieldInfo
) -> Iterator[tuple[Explanation, Any]]:
    names = tuple(variants[key])
    default = "" if chooser.is_required() else as_yaml(chooser.default)
    meaning = (
        f"The type of the {_leaf(key)}, which determines the other keys of {key}. `agentevo "
        f"list {_leaf(key)}s` describes each type."
    )
    yield (
        Explanation(f"{key}.type", meaning, f"one of {', '.join(names)}", default, "", names),
        str,
    )

    for explanation, annotation in _walk_options(key, variants[key], variants):
        if explanation.key != f"{key}.type":
            yield explanation, annotation


def _walk_options(
    key: str, models: Mapping[str, type[pydantic.BaseModel]], variants: Variants
) -> Iterator[tuple[Explanation, Any]]:
    for name, model in models.items():
        for explanation, annotation in _walk(model, variants, f"{key}."):
            if explanation.key == f"{key}.type" and not explanation.meaning:
                explanation = replace(explanation, meaning=on_one_line(model.__doc__ or ""))
            yield replace(explanation, option_of=explanation.option_of or (name,)), annotation


def _explain_field(key: str, info: FieldInfo) -> Explanation:
    meaning = on_one_line(info.description or "")
    default = "" if info.is_required() else as_yaml(info.get_default(call_default_factory=True))
    unit = unit_of(_leaf(key), meaning, alternative_types(info.annotation))
    return Explanation(key, meaning, type_in_words(info), default, unit, choices_of(info))


def _types_of(model: type[pydantic.BaseModel]) -> tuple[Any, ...]:
    """The values of `type` that choose this model among others."""
    field = model.model_fields.get("type")
    return () if field is None else get_args(field.annotation)


def _named_section(annotation: Any) -> type[pydantic.BaseModel] | None:
    """The model of the sections in a mapping from names to sections; None for other types."""
    if get_origin(annotation) is not dict:
        return None
    return section_model(get_args(annotation)[1])


def _ratio(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first.lower(), second.lower(), autojunk=False).ratio()


def _leaf(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _parent(key: str) -> str:
    return key.rpartition(".")[0]


def _same_but_types(first: Explanation, second: Explanation) -> bool:
    return replace(first, option_of=()) == replace(second, option_of=())
