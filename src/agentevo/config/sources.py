"""The two sources of a configuration, read into one plain tree: a YAML recipe, and
`key.subkey=value` overrides.

This module only reads and merges; the meaning of keys and values is checked afterwards
(`agentevo.config`). Every error is one line, with the line of the file or the override that has the
mistake.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import pydantic

from agentevo.config.interpolation import (
    InterpolationError,
    Resolver,
    is_interpolation,
    resolve_tree,
    shorten,
)
from agentevo.errors import ConfigError, UnknownNameError, shown
from agentevo.runtime.parsing import MAX_DEPTH, MAX_KEY, ParseError, parse_yaml, read_text
from agentevo.runtime.paths import name_problem, spelling_hint
from agentevo.runtime.registry import nearest

SWITCH = "enabled"
SHORT_FORMS: dict[tuple[str, ...], str | None] = {
    ("model",): "name",
    ("environment",): "type",
    ("agent",): "type",
    ("algorithm",): "name",
    ("engine",): "type",
    ("store",): "url",
    ("tasks",): "train",
    ("tasks", "self_play"): "family",
    ("tasks", "curriculum"): None,
    ("profile",): SWITCH,
}
"""Sections of a recipe that can be written as a text or list -> the key of that value. SWITCH:
`true` and `false` set that key. None: `true` is the section with its defaults, and `false` is no
section."""

OVERRIDE = re.compile(r"(?P<key>[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*)=(?P<value>.*)", re.DOTALL)


def packaged_recipes() -> dict[str, Path]:
    """The file of every packaged recipe of a run, by its name, in the order of the names."""
    return packaged_files(".yaml")


def packaged_files(ending: str) -> dict[str, Path]:
    """Packaged files NAME and `ending` (NAME contains no dot), by NAME, in order.

    A wheel carries the folder `recipes/` inside the package; a checkout has it next to `src/`.
    """
    package = Path(__file__).parent.parent
    inside = package / "recipes"
    in_checkout = package.parent.parent / "recipes"
    paths = list(inside.glob(f"*/*{ending}")) or list(in_checkout.glob(f"*/*{ending}"))
    files = {path.name.removesuffix(ending): path for path in paths}
    return {name: files[name] for name in sorted(files) if "." not in name}


def recipe_names() -> list[str]:
    """Names of the packaged recipes, sorted."""
    return list(packaged_recipes())


def find_recipe(recipe: str) -> Path:
    """The file at a YAML path, or of the packaged recipe with that name."""
    path = Path(recipe)
    available = ", ".join(recipe_names())
    if problem := name_problem(recipe):
        raise ConfigError(f"recipe {shorten(recipe)!r}: {problem}")

    if path.suffix in {".yaml", ".yml"}:
        if os.path.isfile(path):
            return path
        raise ConfigError(
            f"recipe {recipe}: no such file: {spelling_hint(path, os.path.isfile)}packaged "
            f"recipes: {available}"
        )

    packaged = packaged_recipes().get(recipe)
    if packaged is not None:
        return packaged

    if os.path.exists(path):
        inside = next(iter(sorted(path.glob("*.yaml"))), None) if path.is_dir() else None
        remedy = f"use {inside}" if inside else "give a file whose name ends in .yaml"
        raise ConfigError(
            f"recipe {recipe}: is {'a folder' if path.is_dir() else 'not a .yaml file'}: {remedy}"
        )

    guess = nearest(recipe, recipe_names())
    hint = spelling_hint(path, _has_recipe)
    if guess and not (hint and "/" in recipe):
        hint = f"did you mean {guess!r}? "
    raise UnknownNameError(
        f"no recipe is called {recipe!r}: {hint}packaged recipes: {available}; or give the path of "
        "a .yaml file"
    )


def _has_recipe(path: Path) -> bool:
    """Whether the path is the file of a recipe, or a folder with one, such as a run's."""
    return path.suffix in {".yaml", ".yml"} or any(path.glob("*.yaml"))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a recipe file, with unresolved interpolations. Raises `ConfigError` for a file
    that is unreadable, not UTF-8, not YAML, empty, not a mapping or beyond the limits of `parsing`,
    or that has a key twice."""
    try:
        tree = parse_yaml(read_text(path))
    except ParseError as error:
        raise ConfigError(f"{path}: {error}") from error

    if tree is None:
        raise ConfigError(f"{path}: is empty; a recipe needs at least `environment: {{type: ...}}`")

    if not isinstance(tree, dict):
        kind = "a list" if isinstance(tree, list) else "a single value"
        raise ConfigError(
            f"{path}: a recipe is a mapping of sections such as `model:` and `environment:`, not "
            f"{kind}"
        )

    return tree


def split_override(override: str) -> tuple[str, str]:
    """`trainer.steps=10` -> ('trainer.steps', '10'). The value can contain `=`."""
    match = OVERRIDE.fullmatch(override)
    if match is None:
        raise ConfigError(
            f"override {shorten(override)!r}: write it as key.subkey=value, for example "
            "trainer.steps=10"
        )

    if len(match["key"]) > MAX_KEY:
        raise ConfigError(
            f"override {shorten(override)!r}: a key of {len(match['key']):,} characters: no key "
            f"has more than {MAX_KEY}"
        )

    return match["key"], match["value"]


def merge(
    tree: Mapping[str, Any], overrides: Sequence[str], *, where: str, is_text: Callable[[str], bool]
) -> dict[str, Any]:
    """`tree` with the overrides on top (later ones win) and `${...}` resolved. A value for a key
    that `is_text` accepts is taken literally; any other value is read as YAML."""
    try:
        merged = _plain(tree)
        for override in overrides:
            key, value = split_override(override)
            addition: Any = _override_value(override, key, value, is_text(key))
            for part in reversed(key.split(".")):
                addition = {part: addition}
            merged = _merge(merged, addition, key)

        return {
            section: _written_out_within((section,), value)
            for section, value in resolve_tree(merged).items()
        }
    except (InterpolationError, _MergeError) as error:
        raise ConfigError(f"{written_in(str(error), overrides, where, tree)}: {error}") from error


class _MergeError(Exception):
    """`key: what is wrong`."""


def _merge(
    tree: dict[str, Any],
    addition: Mapping[str, Any],
    key: str,
    place: tuple[str, ...] = (),
    root: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`tree` with `addition` on top. A section that is written as `${...}` takes its value from the
    tree. A section in its short form is written out, in either of the two: the short form sets its
    one key. `place`: the keys under which `root` holds `tree`."""
    merged = dict(tree)
    root = tree if root is None else root
    for name, value in addition.items():
        below = merged.get(name)
        child_place = (*place, name)
        if _in_recipe(child_place) in SHORT_FORMS and isinstance(
            _resolved_value(child_place, below, root), dict
        ):
            value = _written_out(child_place, value, _resolved_value(child_place, value, root))
        if isinstance(value, dict) and is_interpolation(below):
            below = Resolver(root).value(child_place, below)
        if isinstance(value, dict):
            below = _written_out(child_place, below, below)

        if {type(value), type(below)} == {dict, list}:
            raise _MergeError(
                f"{key}: a list and a mapping can't be merged: give the whole section or list "
                "that contains it"
            )

        if isinstance(value, dict) and isinstance(below, dict):
            value = _merge(below, value, key, (*place, name), root)

        merged[name] = value

    return merged


def _resolved_value(place: tuple[str, ...], value: Any, root: Mapping[str, Any]) -> Any:
    """A value with `${...}` resolved, as far as the tree is known yet."""
    try:
        return Resolver(root).value(place, value) if is_interpolation(value) else value
    except InterpolationError:
        return value


def _in_recipe(place: tuple[str, ...]) -> tuple[str, ...]:
    """A place in a recipe, or in a pipeline, which has recipes under keys `config`, as a place in
    the recipe."""
    if place[0] in ("stages", "config", "held_out") and "config" in place:
        return place[place.index("config") + 1 :]
    return place


def _written_out(place: tuple[str, ...], section: Any, meaning: Any) -> Any:
    """A section that is written as one value, as a mapping; anything else unchanged. `meaning`: the
    resolved value."""
    place = _in_recipe(place)
    if place not in SHORT_FORMS:
        return section
    key = SHORT_FORMS[place]
    if key is None:
        return {True: {}, False: None}[meaning] if isinstance(meaning, bool) else section
    kinds = bool if key == SWITCH else (str, list)
    return {key: section} if isinstance(meaning, kinds) else section


def _written_out_within(place: tuple[str, ...], value: Any) -> Any:
    """A value of the tree without `${...}`, with its own short form and those of the sections below
    it written out."""
    value = _written_out(place, value, value)
    if not isinstance(value, dict):
        return value
    below = {name for *outer, name in SHORT_FORMS if tuple(outer) == place}
    return {
        name: _written_out_within((*place, name), item) if name in below else item
        for name, item in value.items()
    }


def overlay(tree: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with the nested `options` on top; `${...}` stays as it is."""
    try:
        return _merge(_plain(tree), _plain(options), "options")
    except (InterpolationError, _MergeError) as error:
        raise ConfigError(str(error)) from error


def _plain(value: Any, key: str = "", depth: int = MAX_DEPTH) -> Any:
    """A copy made of mappings, lists and single values, with texts as keys."""
    if depth == 0:
        raise _MergeError(f"{key}: nested in more than {MAX_DEPTH} levels")

    if isinstance(value, Mapping):
        return {
            str(name): _plain(item, f"{key}.{name}" if key else str(name), depth - 1)
            for name, item in value.items()
        }

    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{key}[{place}]", depth - 1) for place, item in enumerate(value)]
    if isinstance(value, Enum):
        return _plain(value.value, key, depth - 1)
    if value is None or isinstance(value, (bool, Path, bytes)):
        return value

    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)

    remedy = "give a text, a number, true, false, null, a list or a mapping of these"
    if callable(value):
        by = next((to for word, to in DECORATORS.items() if word in key), "agent")
        remedy = f"put `@agentevo.{by}(NAME)` above it, and give that name here"

    raise _MergeError(
        f"{key}: {shown(value) if callable(value) else type(value).__name__} is not a valid type "
        f"for a configuration value: {remedy}"
    )


DECORATORS = {
    "credit": "credit",
    "loss_function": "policy_loss",
    "advantage_function": "advantage",
    "reward": "reward",
    "environment": "environment",
}
"""The word in a key that names a function or class of the user -> the decorator that registers
it."""


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every single value of a nested mapping by its dotted key."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= (
            leaves(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )

    return values


def refuse(
    problems: Iterable[str],
    overrides: Sequence[str],
    where: str,
    tree: Mapping[str, Any] | None = None,
) -> None:
    """Raises ConfigError with a line for each problem, if there are any. `tree`: the recipe as it
    is written."""
    lines = [f"{written_in(line, overrides, where, tree)}: {line}" for line in problems]
    if lines:
        raise ConfigError("\n".join(dict.fromkeys(lines)))


def written_in(
    line: str, overrides: Sequence[str], where: str, tree: Mapping[str, Any] | None = None
) -> str:
    """`override` if an override has set the key that begins a problem line, or if only overrides
    have put its section into `tree`; else `where`."""
    key = line.partition(":")[0].partition("[")[0]
    added = key if tree is None else _first_absent(key, tree)
    overridden = [split_override(override)[0] for override in overrides]
    return (
        "override"
        if any(
            f"{key}.".startswith(f"{overridden_key}.")
            or f"{overridden_key}.".startswith(f"{added}.")
            for overridden_key in overridden
        )
        else where
    )


def _first_absent(key: str, tree: Mapping[str, Any]) -> str:
    """The outermost section of `key` that is missing in the tree as written; the key itself if none
    is missing, or if a `${...}` replaces one."""
    section: Any = tree
    parts = key.split(".")
    for count, part in enumerate(parts, start=1):
        if is_interpolation(section):
            break
        if not isinstance(section, Mapping) or part not in section:
            return ".".join(parts[:count])
        section = section[part]

    return key


def overridden(overrides: Sequence[str], is_text: Callable[[str], bool]) -> dict[str, Any]:
    """Each override's key and value as it was read, with `${...}` unresolved."""
    pairs = [(override, *split_override(override)) for override in overrides]
    return {
        key: _override_value(override, key, value, is_text(key)) for override, key, value in pairs
    }


def _override_value(override: str, key: str, value: str, text: bool) -> Any:
    if text and not value.startswith(("'", '"')):
        return None if value in ("null", "~") else value

    if not value.strip():
        raise ConfigError(
            f"override {shorten(override)}: nothing after `=`; give a value, or null where the "
            "key may be empty"
        )

    if value.strip() == "???":  # merged, it would change nothing
        raise ConfigError(f"override {shorten(override)}: ??? is not a value: give one")

    try:
        return parse_yaml(value)
    except ParseError as error:
        raise ConfigError(
            f"override {shorten(override)}: {re.sub('^line [0-9]+: ', '', str(error))} (the part "
            "after `=` is read as YAML; put quotes around a text)"
        ) from error


def plain_option(value: Any, *, named: bool) -> Any:
    """An option of a Python call in the form that YAML has. A `named` option can be a plain
    name."""
    if isinstance(value, pydantic.BaseModel):
        chosen = value.model_dump(mode="json", exclude_unset=True)
        return {"type": value.type, **chosen} if hasattr(value, "type") else chosen
    if isinstance(value, Mapping):
        return {str(key): plain_option(item, named=False) for key, item in value.items()}
    return {"name": str(value)} if named and isinstance(value, (str, Path)) else value


def with_absolute_paths(section: Any, keys: Sequence[str], folder: Path) -> Any:
    """A section as written in a recipe in `folder`, with absolute paths for the files and folders
    under `keys`, so that every process of a run finds them: next to the recipe, else in the current
    folder. A value that is in neither is not changed, such as a dataset of the hub."""
    if not isinstance(section, dict):
        return section

    def absolute(source: object) -> object:
        if not isinstance(source, (str, Path)) or not str(source):
            return source
        for base in (folder, Path.cwd()):
            path = os.path.join(base, os.path.expanduser(source))
            if os.path.exists(path):  # pathlib's raises for what can be no path
                return os.path.realpath(path)
        return str(source)

    changed = dict(section)
    for key in keys:
        value = changed.get(key)
        if isinstance(value, (str, Path)):
            changed[key] = absolute(value)
        elif isinstance(value, (list, tuple)):
            changed[key] = [absolute(source) for source in value]

    stages = changed.get("stages")
    if isinstance(stages, (list, tuple)):  # these refer to the sources of `train`
        changed["stages"] = [with_absolute_paths(stage, ("sources",), folder) for stage in stages]

    return changed
