"""The recipe's key `import`: the user's modules and files. They are executed before names are
resolved, so that a recipe can name the environments, agents and rewards that they register.

An entry is a Python file (`./my_agent.py`), a package's folder, or the name of a module. It is
searched for next to the recipe, then in the current folder, like files of tasks; a module is
searched for last on Python's path. An override's entry is the caller's code, so it is not searched
for in a run's folder. Paths become absolute here, so that a run's config.yaml finds the code again
in any process. A file's folder goes to the end of `sys.path`, so that the file can import its
neighbours. Nothing is executed twice in one process.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from agentevo.config import sources
from agentevo.config.interpolation import InterpolationError, resolve_tree
from agentevo.errors import ConfigError, LoadingTimeoutError, describe_error, shown
from agentevo.runtime.paths import spelling_hint
from agentevo.runtime.tracebacks import traceback_of
from agentevo.runtime.user_code import load_in_time

KEY = "import"
TRUST = "AGENTEVO_TRUST_RUNS"
"""The environment variable that, set to `1`, makes code in the folders of runs trusted."""
OF_A_RUN = "config.yaml"
"""A file of this name is a run's configuration, independent of the other files in its folder: a
person who passes a run on can delete every other sign of it."""
STORE_KEYS = ("store", "store.url")
"""Keys whose value is a URL with the name of a registered store as scheme, never a module."""
OF_YOUR_OWN = "; for your own, set import=[./my_file.py], or in Python register or pass it first"
"""The end of the error for an unknown agent, environment or reward."""
MAX_NAME = 250
"""The maximal length of a file's name without its suffix, on common file systems."""


def import_all(
    tree: Mapping[str, Any], overrides: Sequence[str], *, where: str, folder: Path
) -> tuple[str, ...]:
    """Imports the entries of the recipe `tree`, read from `folder`, or of an override; returns them
    with absolute paths. Raises ConfigError with the error of the user's code."""
    import_overrides = [text for text in overrides if sources.split_override(text)[0] == KEY]
    written = sources.merge(
        {KEY: tree.get(KEY)}, import_overrides, where=where, is_text=lambda key: False
    )[KEY]
    place = "override" if import_overrides else where
    entries = [written] if isinstance(written, str) else [] if written is None else written
    if not isinstance(entries, list) or not all(
        isinstance(entry, str) and entry for entry in entries
    ):
        raise ConfigError(
            f"{place}: {KEY}: got {written!r}; needs a list of modules or files, such as "
            "[./my_agent.py]"
        )

    is_run = (folder / OF_A_RUN).is_file()
    places = [*([] if import_overrides and is_run else [folder]), Path.cwd()]
    folders = list(dict.fromkeys(place.resolve() for place in places))
    try:
        return tuple(_import(entry, folders) for entry in entries)
    except ConfigError as error:
        lines = str(error).splitlines()
        lines[0] = f"{place}: {KEY}: {lines[0]}"
        raise ConfigError("\n".join(lines)) from error


def check_code_of_run(folder: Path, tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> None:
    """Raises ConfigError if the configuration of a run in `folder` imports code that came with the
    folder, under `import` or as another value that becomes an import. Runs name code by its path on
    the machine where they were made. With this check, a person who passes a run on can't run code
    on the machine of a person who looks at it. Keys that an override sets are not checked."""
    if os.environ.get(TRUST) == "1":
        return

    named = [sources.split_override(text)[0] for text in overrides]
    try:
        plain = resolve_tree(tree)
    except InterpolationError as error:
        raise ConfigError(f"{folder / OF_A_RUN}: {error}") from error

    for key, entry in (*_imports_in(tree), *_modules_in(plain)):
        if any(key == name or key.startswith(f"{name}.") for name in named):
            continue
        if _comes_with(entry, folder.resolve()):
            raise ConfigError(
                f"{folder / OF_A_RUN}: {key}: {shown(entry)} is code in the run's folder or "
                "the current folder: AgentEvo does not run it unasked. Read it; then name it "
                f"yourself with '{key}={'[PATH]' if key == KEY else 'VALUE'}', or set {TRUST}=1 "
                f"(give your own recipe another name than {OF_A_RUN})"
            )


def _imports_in(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, entry) of each entry of the recipe's `import`."""
    written = tree.get(KEY) or []
    for entry in written if isinstance(written, list) else [written]:
        if isinstance(entry, str):
            yield KEY, entry


def _modules_in(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, module or file) of the other values that become imports: `MODULE:NAME`, as gymnasium
    takes it, at any place; the id and the args of an environment of verifiers; verl's files of
    tools, which name classes."""
    leaves = list(_leaves("", tree))
    texts = {text for _, text in leaves}
    for key, text in leaves:
        is_id = key.endswith("id")
        if key in STORE_KEYS:
            continue

        module, colon, _ = text.partition(":")
        if colon and _may_be_module(module) and (is_id or not re.search(r"\s", text)):
            yield key, module.removesuffix(".py")

        if "verl_tools" in texts and key.endswith(".file"):
            yield key, text if os.path.isabs(text) else f"./{text}"

        if "verifiers" in texts and (is_id or ".args." in key):
            name = text.rsplit("/", 1)[-1].partition("@")[0].replace("-", "_")
            if _may_be_module(name):
                yield from ((key, name), (key, name.lower()))


def _may_be_module(text: str) -> bool:
    """Whether Python can find a file by that name, which need not be an identifier."""
    return all(0 < len(part) < MAX_NAME and "/" not in part for part in text.split("."))


def _leaves(key: str, value: object) -> Iterator[tuple[str, str]]:
    """(dotted key, text) of every text in the tree."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}" if key else str(name), item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(f"{key}.{index}", item)


def _is_module_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _comes_with(entry: str, folder: Path) -> bool:
    """Whether an entry is a path without a fixed place, or leads into the folder, or is a module
    that is in the folder or in the current folder and is not imported yet."""
    if _is_path(entry):
        return not os.path.isabs(entry) or Path(entry).resolve().is_relative_to(folder)

    cwd = Path.cwd().resolve()
    bases = (folder, cwd) if len(entry) < MAX_NAME else ()
    if any(_source(base / f"{entry}.py") or _source(base / entry) for base in bases):
        return True
    if entry in sys.modules:
        return False

    top = entry.partition(".")[0]
    is_imported = getattr(sys.modules.get(top), "__file__", None) is not None
    for place in _places(top):
        inner = place.relative_to(cwd).parts if place.is_relative_to(cwd) else ()
        is_found_here = inner != () and inner[0].partition(".")[0] == top
        if (is_found_here and not is_imported) or place.is_relative_to(folder):
            return True

    return False


def _places(module: str) -> list[Path]:
    """The file of a module and the folders of its parts."""
    spec = _spec(module)
    if spec is None:
        return []
    return [
        Path(place).resolve()
        for place in (spec.origin, *(spec.submodule_search_locations or ()))
        if place is not None and os.path.isabs(place)
    ]


def check_recipe_of_run(path: Path, tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> None:
    """Does the check of `check_code_of_run` for a recipe that is the config.yaml of a run."""
    if path.name == OF_A_RUN:
        check_code_of_run(path.parent, tree, overrides)


def import_for(recipe: str) -> None:
    """Imports the modules of a recipe, so that the names and options that they register are known.
    Raises ConfigError."""
    path = sources.find_recipe(recipe)
    tree = sources.read_yaml(path)
    check_recipe_of_run(path, tree)
    import_all(tree, (), where=str(path), folder=path.parent)


def _import(entry: str, folders: Sequence[Path]) -> str:
    """Executes one entry, once per process, and returns it with an absolute path."""
    looked_in = " and ".join(map(str, folders))
    if _is_path(entry):
        paths = [folder / Path(entry).expanduser() for folder in folders]
        path = next(filter(None, map(_source, paths)), None)
        if path is None:
            hint = next(filter(None, (spelling_hint(place, _is_source) for place in paths)), "")
            raise ConfigError(
                f"{entry} is neither a Python file nor a package's folder (looked in {looked_in}): "
                f"{hint}give the path of a file that ends in .py"
            )
    elif not _is_module_name(entry):
        raise ConfigError(f"{entry!r} is not a module's name: write a file as ./{entry}")
    else:
        names = (f"{entry}.py", entry)
        paths = [folder / name for folder in folders for name in names]
        path = next(filter(None, map(_source, paths)), None)
        if path is None and _spec(entry) is None:
            hint = next(filter(None, (spelling_hint(place, _is_source) for place in paths)), "")
            raise ConfigError(
                f"no module is called {entry!r}, and there is no {entry}.py in {looked_in}: "
                f"{hint}install its package, or give the path of a file, such as ./my_agent.py"
            )

        if path is None:
            _execute(entry, lambda: importlib.import_module(entry))
            return entry

    _import_file(path)
    return str(path.parent if path.name == "__init__.py" else path)


def _is_path(entry: str) -> bool:
    return entry.endswith(".py") or "/" in entry or entry in (".", "..")


def _source(path: Path) -> Path | None:
    """The file that is executed for a path: itself, or a package's `__init__.py`."""
    if path.is_dir():
        path = path / "__init__.py"
    return path.resolve() if path.suffix == ".py" and path.is_file() else None


def _is_source(path: Path) -> bool:
    return _source(path) is not None


def _spec(name: str) -> ModuleSpec | None:
    """Where Python would find a module of that name."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a parent that is not a package, or a module without a spec
        return None


def _import_file(path: Path) -> None:
    """Imports a file under its own name, as Python would from its folder, or under a made-up name
    if another module has that name."""
    package = path.name == "__init__.py"
    if any(_is_file_of(module, path) for module in list(sys.modules.values())):
        return

    name, folder = (path.parent.name, path.parents[1]) if package else (path.stem, path.parent)
    namesake = _spec(name) if name.isidentifier() else None
    is_taken = namesake is not None and namesake.origin != str(path)
    if is_taken or name in sys.modules or not name.isidentifier():
        name = f"agentevo_import_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

    spec = importlib.util.spec_from_file_location(
        name, path, submodule_search_locations=[str(path.parent)] if package else None
    )
    assert spec is not None and spec.loader is not None

    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    sys.modules[name] = module
    try:
        _execute(str(path), lambda: loader.exec_module(module))
    except BaseException:
        sys.modules.pop(name, None)
        raise


def _is_file_of(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and file.endswith(path.name) and Path(file).resolve() == path


def _execute(entry: str, work: Callable[[], object]) -> None:
    """Runs the work. An error of the user's code becomes a ConfigError that shows where it was
    raised."""
    try:
        load_in_time(work, f"the import of {entry}")
    except (LoadingTimeoutError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also SystemExit, and everything else that a user's code raises
        raise ConfigError(f"{entry} can't be imported:\n{_shown(error)}") from error


def _shown(error: BaseException) -> str:
    """The traceback of an error; for a file that is not valid Python, the place in that file."""
    if isinstance(error, SyntaxError):
        return "".join(traceback.format_exception_only(error)).rstrip()
    return traceback_of(error) or describe_error(error)
