"""The shown runs: those in the given folders, and stores by their URL.

A folder is that of a run, a sweep or an `agentevo eval`, or contains such folders. Symbolic links
are not followed, and nothing outside of the given folders is read. If a file of a run links to
another place, it counts as missing, and a store outside must be given by its URL. A run that is
gone or damaged stays in the list with a sentence that says so.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

from agentevo.errors import ConfigError
from agentevo.runs.folder.run_folder import is_run_folder, is_sweep_folder, run_store_url
from agentevo.runtime.credentials import REFERENCE, is_same_place, refuse_password, without_password
from agentevo.runtime.paths import name_problem

MAX_DEPTH = 5
"""How deep the folders within a given folder are searched for runs."""
MAX_LOOKED = 50_000
"""The maximum number of folders that are searched."""
MAX_RUNS = 5_000
SCAN_S = 2.0
"""The age in seconds at which the list of runs is read again."""
NEVER_RUNS = {"checkpoints", "plots", "tensorboard", "node_modules", "__pycache__"}
RESULTS_FILE = "eval.json"
"""The first file of a folder that `agentevo eval --out` makes."""
HELD_OUT = "held_out"
"""The folder of a pipeline's own evaluations."""
PIPELINE_FILE = "pipeline.json"
"""The file with the progress of a pipeline with one seed."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SQLITE = "sqlite:///"


@dataclass(frozen=True)
class RunSource:
    """A run, or a store without a folder."""

    key: str
    """The run's name in URLs: its folder relative to the given one, with `~` for each slash."""
    name: str
    folder: Path | None
    url: str | None = None
    """The URL of the store, if there is no folder."""
    sweep: str | None = None
    """The key of the sweep that contains the run: that of the sweep's folder."""

    def file(self, name: str) -> Path | None:
        """A file of the run's folder. None if there is no folder, or if the file is a link out of
        the folder."""
        if self.folder is None:
            return None

        path = self.folder / name
        try:
            inside = os.path.realpath(path).startswith(os.path.realpath(self.folder) + os.sep)
        except (OSError, ValueError):
            return None

        return path if inside else None


class Sources:
    """The runs, evaluations and pipelines that a dashboard shows. Raises ConfigError for words that
    can't be a run, folder or store. Without `stores`, a store's URL is not accepted."""

    def __init__(self, words: Sequence[str], *, stores: bool = True) -> None:
        self._roots: list[Path] = []
        self._urls: list[str] = []
        for word in words or ["runs"]:
            if _URL.match(word):
                if not stores:
                    raise ConfigError(
                        f"{without_password(word)[:60]}: runs are followed in their folders: give "
                        "one, or one that holds some, such as `runs` (`agentevo ui` shows stores)"
                    )
                self._urls.append(refuse_password(word))
                continue

            if problem := name_problem(word):
                raise ConfigError(f"{word[:60]!r} {problem}")

            self._roots.append(Path(word).expanduser().absolute())

        self._runs: dict[str, RunSource] = {}
        self._results: dict[str, Path] = {}
        self._evaluated: dict[str, Path] = {}
        self._pipelines: dict[str, Path] = {}
        self._found_pipelines: dict[str, Path] = {}
        self._scanned_at = -SCAN_S
        self.is_cut = False
        """Whether there are more folders than are searched."""

    @property
    def missing(self) -> list[Path]:
        """Given folders that do not exist yet, but whose parents do."""
        return [root for root in self._roots if not os.path.lexists(root) and root.parent.is_dir()]

    def check(self, *, later: bool = False) -> None:
        """Raises ConfigError if a given folder does not exist. `later`: whether a folder may be
        created later."""
        missing = [root for root in self._roots if not os.path.isdir(root)]
        if later:
            missing = [root for root in missing if root not in self.missing]

        if missing:
            raise ConfigError(
                f"{missing[0]}: is not a folder: give a run's folder, one that holds runs, such as "
                "`runs`, or the URL of a store"
            )

    @property
    def folders(self) -> tuple[Path, ...]:
        """The given folders, absolute."""
        return tuple(self._roots)

    @property
    def shown(self) -> str:
        """The shown folders and stores, in words."""
        return ", ".join([*map(str, self._roots), *map(without_password, self._urls)])

    def runs(self) -> dict[str, RunSource]:
        """All runs by their key. Searched again if the last search is older than SCAN_S seconds.
        Reads disks: call it on a thread."""
        if time.monotonic() - self._scanned_at >= SCAN_S:
            sources_by_key: dict[str, RunSource] = {}
            self._evaluated = {}
            self._found_pipelines = {}

            for source in self._find():
                key = _free_key(source.key, sources_by_key)
                sources_by_key[key] = replace(source, key=key)
                if len(sources_by_key) >= MAX_RUNS:
                    self.is_cut = True
                    break

            self._runs = sources_by_key
            self._results = self._evaluated
            self._pipelines = self._found_pipelines
            self._scanned_at = time.monotonic()

        return self._runs

    def results(self) -> dict[str, Path]:
        """The folders of evaluations by their key, as `runs` gives the runs."""
        self.runs()
        return self._results

    def own_results(self) -> list[str]:
        """The keys of the evaluations that belong to no pipeline."""
        results = self.results()
        inside = {folder / HELD_OUT for folder in self._pipelines.values()}
        return [key for key, folder in results.items() if folder.parent not in inside]

    def pipelines(self) -> dict[str, Path]:
        """The folders of pipelines by their key, as `runs` gives the runs."""
        self.runs()
        return self._pipelines

    def pipeline_of(self, source: RunSource) -> str | None:
        """The key of the pipeline that has the run as a stage, as of the last search. None for any
        other run."""
        folder = source.folder
        if folder is None or folder.parent.name != "stages":
            return None
        pipeline_folder = folder.parent.parent
        return next(
            (key for key, place in self._pipelines.items() if place == pipeline_folder), None
        )

    def store_url(self, source: RunSource) -> str:
        """The URL of a run's store. Raises ConfigError for a store outside of the given folders and
        URLs. The author of a run's config.yaml must not choose a server, nor the environment
        variable that the server gets as a password (`${env:NAME}`)."""
        url = source.url or run_store_url(source.folder or Path())
        for root_url in self._urls:
            if is_same_place(root_url, url):  # the password may be in another variable by now
                return root_url

        if not url.startswith(_SQLITE) or REFERENCE.search(url):
            raise ConfigError(
                f"the store of this run is a database elsewhere: start `agentevo ui` with "
                f"'{without_password(url)}', as the run's config.yaml has it, as well"
            )

        real = os.path.realpath(os.path.expanduser(url.removeprefix(_SQLITE)))
        allowed = [os.path.realpath(root) for root in self._roots]
        allowed += [
            os.path.realpath(os.path.expanduser(root_url.removeprefix(_SQLITE)))
            for root_url in self._urls
            if root_url.startswith(_SQLITE)
        ]
        if any(real == place or real.startswith(place + os.sep) for place in allowed):
            return url

        raise ConfigError(
            f"the store of this run is outside of the folders that are shown: start "
            f"`agentevo ui` with {without_password(url)} as well"
        )

    def _find(self) -> Iterator[RunSource]:
        budget = [MAX_LOOKED]
        for root in self._roots:
            prefix = "" if len(self._roots) + len(self._urls) == 1 else root.name
            yield from self._below(root, root, prefix, MAX_DEPTH, budget)

        for url in self._urls:
            name = without_password(url).rstrip("/").rpartition("/")[2].partition("?")[0] or "store"
            yield RunSource(_key(name), name, None, url)

        self.is_cut = budget[0] <= 0

    def _below(
        self, root: Path, folder: Path, prefix: str, depth: int, budget: list[int]
    ) -> Iterator[RunSource]:
        budget[0] -= 1
        if budget[0] <= 0:
            return

        inner = folder.relative_to(root).as_posix()
        path = "/".join(part for part in (prefix, "" if inner == "." else inner) if part)
        if is_run_folder(folder):
            sweep = _key(path.rpartition("/")[0]) if is_sweep_folder(folder.parent) else None
            yield RunSource(_key(path or folder.name), folder.name, folder, sweep=sweep or None)
            return

        if is_results_folder(folder):
            _add(self._evaluated, _key(path or folder.name), folder)
            return

        if is_file_of(folder, PIPELINE_FILE):
            _add(self._found_pipelines, _key(path or folder.name), folder)
        if depth == 0:
            return

        try:
            with os.scandir(folder) as entries:
                names = sorted(
                    entry.name
                    for entry in entries
                    if not entry.name.startswith(".")
                    and entry.name not in NEVER_RUNS
                    and entry.is_dir(follow_symlinks=False)
                )
        except OSError:
            return

        for name in names:
            yield from self._below(root, folder / name, prefix, depth - 1, budget)


def _add(folders: dict[str, Path], key: str, folder: Path) -> None:
    if len(folders) < MAX_RUNS:
        folders[_free_key(key, folders)] = folder


def _free_key(key: str, taken: Container[str]) -> str:
    """The key, or the first of `KEY-2`, `KEY-3`, ... that is free."""
    numbered = (f"{key}-{number}" for number in count(2))
    return next(free for free in chain([key], numbered) if free not in taken)


def is_results_folder(path: Path) -> bool:
    """Whether the folder holds an evaluation. A symbolic link does not count."""
    return is_file_of(path, RESULTS_FILE)


def is_file_of(folder: Path, name: str) -> bool:
    """Whether the folder has such a file. A symbolic link does not count."""
    try:
        return stat.S_ISREG((folder / name).lstat().st_mode)
    except OSError:
        return False


def _key(path: str) -> str:
    """The text as a part of a URL's path, as readable as possible."""
    text = path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return re.sub(r"[^\w.~+=,@-]", "_", text.replace("/", "~"))[:300] or "run"
