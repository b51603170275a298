"""A run can have several processes. The first process to start creates the run's folder, and the
configuration of the others must be the same. Machines that share no folder have a folder each, and
compare their configuration with the config.yaml under rollout.weights.url (`SharedConfig`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentevo.config import RunConfig, to_yaml
from agentevo.errors import ConfigError, StoreUnavailableError
from agentevo.inference.weights.weight_transport import (
    CONFIG_FILE,
    ID_FILE,
    WRITER_FILE,
    is_others,
    others_weights,
)
from agentevo.runs.folder.chain import HEAD
from agentevo.runs.folder.resume_rules import changes, check_resume, is_fixed, note_changes
from agentevo.runs.folder.shared_store import content_of
from agentevo.runs.folder.store_opening import OPEN_TIMEOUT_S, open_run_store
from agentevo.runtime.console import to_stderr
from agentevo.runtime.credentials import without_passwords
from agentevo.runtime.event_loop import in_thread, run_coroutine
from agentevo.runtime.files import create_atomic, write_atomic
from agentevo.runtime.parsing import ParseError, parse_yaml
from agentevo.runtime.paths import check_new_folder, short
from agentevo.runtime.retry import STORE_RETRY_S, with_retries
from agentevo.runtime.signals import finishes_before_stop

if TYPE_CHECKING:
    from agentevo.inference.weights.objects import Objects

T = TypeVar("T")
SHOWN_KEYS = 5
STAGING = ".config.yaml."


def ensure_run_folder(
    config: RunConfig,
    *,
    within_s: float | None = None,
    stop: Callable[[], bool] = lambda: False,
    note: Callable[[str], None] = to_stderr,
) -> bool:
    """Creates the run's folder with its config.yaml, unless another process has done so. Any number
    of processes may call this at the same time. Returns True when the folder exists.

    The process that creates the folder checks whether the store belongs to this run too. A store
    outside of the folder must be empty, unless the run's object store has the run. Waits for an
    unavailable database or object store, at most `within_s` seconds (see `open_run_store`), and
    reports that to `note`. Returns False, with nothing created, if `stop` is set during the wait.

    In a folder without a trainer, the configuration in the same run's object store replaces the
    folder's own: `learn --resume` changes it there. Raises ConfigError if the folder holds the run
    of another configuration (its place and name may differ) or other content, or if the store holds
    another run.
    """
    folder = config.run_dir
    target = folder / "config.yaml"
    if not target.is_file():
        _check_place(config)
        shared = SharedConfig.of(config)
        is_known = _is_known(config, shared, within_s, stop, note)
        url = config.store.url
        content: str | None = ""
        if url and not is_known:
            looking = _content_of(url, within_s, note)
            content = run_coroutine(_unless_stopped(looking, stop))
        if content:  # perhaps from a process of this run that has started in the meantime
            is_known = _is_known(config, shared, within_s, stop, note)
        if content is None or is_known is None:
            return False

        if is_known or not content:
            if shared is not None and not is_known:
                shared.write(to_yaml(config))
            _create(config)
        elif (
            not target.is_file()
        ):  # this run would have a config.yaml, because it is written before the store is used
            raise ConfigError(
                f"store.url: the store holds {content} of another run: give another file, "
                "?schema=NAME or database, or that run's own run.dir"
            )
    elif not _take_over(config, within_s, stop, note):
        return False

    _refuse_others(changes(config), short(folder), _remedy(folder))
    return True


def _take_over(
    config: RunConfig,
    within_s: float | None,
    stop: Callable[[], bool],
    note: Callable[[str], None],
) -> bool:
    """Gives an existing folder without a trainer this recipe, if the object store of its run
    already has it. Raises ConfigError if the object store has another recipe. Returns False if
    `stop` is set before the answer."""
    changed = changes(config)
    shared = SharedConfig.of(config)
    if shared is None or _is_trainers(config.run_dir) or "rollout.weights.url" in changed:
        return True

    is_known = _is_known(config, shared, within_s, stop, note)
    if is_known and changed:
        check_resume(config, started_separately=True)  # otherwise it is another run's folder
        write_atomic(config.run_dir / "config.yaml", to_yaml(config))

    return is_known is not None


async def confirm_run(
    config: RunConfig, *, resume: bool, note: Callable[[str], None]
) -> Callable[[], None]:
    """Checks that the folder still has this configuration, or with `resume` may change to it. The
    process that holds the run's lock calls this. Returns a function that updates the run's object
    store, because a killed process may have left another configuration there. Raises ConfigError,
    also if the folder belongs to another run."""
    folder = config.run_dir
    shared = SharedConfig.of(config)
    changed = changes(config)
    differing: dict[str, tuple[Any, Any]] = {}

    if not resume:
        _refuse_others(changed, short(folder), _remedy(folder))
    elif changed and not _is_trainers(folder):
        raise ConfigError(
            f"{short(folder)}: this run's trainer never used this folder, so the recipe can't be "
            f"changed here: give the run.dir of its trainer, or leave --resume out"
        )
    else:
        check_resume(config, started_separately=True)

    if shared is not None:
        shared_tree = await shared.read(OPEN_TIMEOUT_S, note)
        differing = changes(config, shared_tree)
        if shared_tree:
            fixed_changes = {key: values for key, values in differing.items() if is_fixed(key)}
            _refuse_others(fixed_changes, shared.place)
        await shared.check_writer(folder, OPEN_TIMEOUT_S, note)

    note_changes(changed, note)

    def make_final() -> None:
        if shared is not None and differing:
            shared.write(to_yaml(config))

    return make_final


def _is_trainers(folder: Path) -> bool:
    """Whether a trainer has used the folder. Its head.json may have been deleted, as its own error
    messages recommend."""
    return any((folder / name).is_file() for name in (HEAD, "metrics.jsonl"))


def _remedy(folder: Path) -> str:
    remedy = f" (give {folder / 'config.yaml'} as the recipe"
    if not _is_trainers(folder):
        remedy += ", or delete this folder if the trainer has changed it in its own folder"
    return remedy + ")"


def _refuse_others(changed: dict[str, tuple[Any, Any]], place: str, remedy: str = "") -> None:
    if changed:
        shown = [
            without_passwords(f"{key}={was!r} and not {now!r}")
            for key, (was, now) in list(changed.items())[:SHOWN_KEYS]
        ]
        omitted = f", and {len(changed) - SHOWN_KEYS} more" if len(changed) > SHOWN_KEYS else ""
        may_change = not any(is_fixed(key) for key in changed)
        how = "`agentevo learn RECIPE --resume` changes them for all, and " if may_change else ""
        raise ConfigError(
            f"{place} is a run with {', '.join(shown)}{omitted}: all processes of a run need the "
            f"same recipe and overrides{remedy}; {how}another run.dir"
            f"{'' if remedy else ' and rollout.weights.url'} starts another run"
        )


def _is_known(
    config: RunConfig,
    shared: SharedConfig | None,
    within_s: float | None,
    stop: Callable[[], bool],
    note: Callable[[str], None],
) -> bool | None:
    """Whether the object store has this run. None if `stop` is set before the answer. Raises
    ConfigError if it has another run."""
    if shared is None:
        return False
    reading = shared.read(OPEN_TIMEOUT_S if within_s is None else within_s, note)
    shared_tree = run_coroutine(_unless_stopped(reading, stop))
    if shared_tree:
        _refuse_others(changes(config, shared_tree), shared.place)
    return None if shared_tree is None else bool(shared_tree)


async def _unless_stopped(work: Coroutine[Any, Any, T], stop: Callable[[], bool]) -> T | None:
    """The result of `work`. None if `stop` is set before it."""
    looking = asyncio.create_task(work)
    return looking.result() if await finishes_before_stop(looking, stop) else None


def _check_place(config: RunConfig) -> None:
    folder = config.run_dir
    check_new_folder(folder, "run.dir")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if "config.yaml" not in names and any(not name.startswith(STAGING) for name in names):
        raise ConfigError(
            f"{short(folder)} is not empty and is not a run's folder: give another run.dir"
        )


async def _content_of(url: str, within_s: float | None, note: Callable[[str], None]) -> str:
    """Describes the content of a store outside of the folder."""
    async with await open_run_store(url, within_s=within_s, notify=note) as store:
        return await with_retries(
            lambda: content_of(store),
            within_s=STORE_RETRY_S,
            what="checking that the store is empty",
            notify=note,
        )


def _create(config: RunConfig) -> None:
    """Creates config.yaml unless another process has done so. `ensure_run_folder` then compares
    it."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    create_atomic(config.run_dir / "config.yaml", to_yaml(config))


class SharedConfig:
    """The run's configuration under rollout.weights.url, with which machines that share no folder
    verify that they work on the same run."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    @classmethod
    def of(cls, config: RunConfig) -> SharedConfig | None:
        """The shared configuration of a run. None if its weights use no object store. Raises
        ConfigError for an address that can't be used."""
        from agentevo.inference.weights.objects import Objects

        url = config.rollout.weights.url
        return cls(Objects(url)) if url is not None else None

    @property
    def place(self) -> str:
        return self._objects.url

    async def read(self, within_s: float, notify: Callable[[str], None]) -> dict[str, Any]:
        """The configuration as a tree. Empty if there is none yet. Waits for an unavailable store.
        Raises StoreUnavailableError after `within_s` seconds, and ConfigError if the content is not
        a configuration."""

        content = await self._content(CONFIG_FILE, within_s, notify)
        try:
            tree = parse_yaml(content.decode())
        except (UnicodeDecodeError, ParseError) as error:
            raise self._wrong() from error

        if tree is not None and not isinstance(tree, dict):
            raise self._wrong()
        return tree or {}

    async def check_writer(
        self, folder: Path, within_s: float, notify: Callable[[str], None]
    ) -> None:
        """Raises ConfigError if the weights belong to another trainer than that of this folder,
        because only their trainer may change the run's configuration. Waits as `read` does."""
        own_id_file = folder / ID_FILE
        writer_id = (await self._content(WRITER_FILE, within_s, notify)).decode(errors="replace")
        if is_others(writer_id, own_id_file.read_text() if own_id_file.is_file() else ""):
            raise ConfigError(others_weights(self.place))

    async def _content(self, file: str, within_s: float, notify: Callable[[str], None]) -> bytes:
        async def attempt() -> bytes:
            try:
                return await in_thread(self._objects.get, file)
            except FileNotFoundError:
                return b""
            except OSError as error:
                raise StoreUnavailableError(f"{self.place}: {error}") from error

        return await with_retries(
            attempt,
            within_s=within_s,
            what="looking for the run in its object store",
            notify=notify,
        )

    def write(self, text: str) -> None:
        """Writes the configuration. Raises StoreUnavailableError."""
        try:
            self._objects.put(CONFIG_FILE, text.encode())
        except OSError as error:
            raise StoreUnavailableError(f"{self.place}: {error}") from error

    def _wrong(self) -> ConfigError:
        return ConfigError(
            f"{self.place}/{CONFIG_FILE} is not a run's configuration: set rollout.weights.url "
            f"to an address that only this run uses"
        )
