"""Starting a run from the dashboard: a recipe that ships or a file below a shown folder, into a new
folder below it.

`agentevo train --dry-run` of the very same words is asked first, in a process of its own: what it
refuses is refused, in its words, and what it says of run.dir is what counts. It is asked once more
when that was confirmed, and has to say the same; whatever a file says a moment later, the last
words are run.overwrite=false and the new folder, so no run is deleted. The run is a process
in a session of its own, whose output goes to a file, so it outlives the dashboard. What was
started is kept in FOLDER/.started/ID: start.json and log.txt.

Not promised: that a recipe is harmless. Recipes import code and run commands, so whoever has the
token of control can do what the user who started the dashboard can.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import yaml

from agentevo.config.sources import OVERRIDE, packaged_recipes
from agentevo.errors import ConfigError
from agentevo.files import open_regular, write_atomic
from agentevo.runs.folder import is_run_folder

STARTED = ".started"
LOCK = "lock"
COMMANDS = ("train", "sft")
CHECK_S = 45.0
"""How long a recipe may take to be read; an answer of the dashboard has 60 s."""
BUSY_S = 5.0
MAX_OVERRIDES = 100
MAX_RUNNING = 8
LARGEST = 1_000_000
"""Bytes of start.json that are read."""
LOG_TAIL = 20_000
"""Bytes of a log that its page shows."""
MAX_LISTED = 50
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}){0,3}")
_ID = re.compile(r"[0-9a-f]{32}")
_checking = threading.BoundedSemaphore(2)
"""Recipes that are read at once: each is a process."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be started."""

    command: str
    recipe: str
    """As the command gets it."""
    overrides: list[str]
    run_dir: str

    def words(self) -> list[str]:
        return [
            self.command,
            self.recipe,
            *self.overrides,
            "run.overwrite=false",
            f"run.dir={self.run_dir}",
        ]


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What was started."""

    id: str
    wanted: Wanted
    at: float
    who: str
    address: str
    process: int = 0
    code: int | None = None
    """Its exit code, where this dashboard was still there at its end."""


def wanted_from(
    folders: Sequence[Path], command: str, recipe: str, overrides: str, name: str
) -> Wanted:
    """What a form asks for. Raises ConfigError for what is outside of the shown folders, and for
    words that would not be an override."""
    if command not in COMMANDS:
        raise ConfigError(f"the command is one of {', '.join(COMMANDS)}")

    usable = [folder for folder in folders if not is_run_folder(folder)]
    if not usable:
        raise ConfigError(
            "runs are started below a folder that is shown: give `agentevo ui` one that holds "
            "runs, such as `runs`"
        )

    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"the run's folder is {name[:100]!r}: give a name such as lake-2, of letters, digits, "
            "_, - and dots"
        )

    lines = [line.strip() for line in overrides.splitlines() if line.strip()]
    if len(lines) > MAX_OVERRIDES:
        raise ConfigError(f"there are {len(lines)} overrides, and at most {MAX_OVERRIDES} are read")

    for line in lines:
        found = OVERRIDE.fullmatch(line)
        if found is None:
            raise ConfigError(f"{line[:100]!r} is no override: write one key=value a line")
        if found["key"] in ("run.dir", "run.overwrite"):
            raise ConfigError(f"{found['key']}: the dashboard starts new runs only, by their name")

    target = _inside(usable[0], name)
    if os.path.lexists(target):
        raise ConfigError(f"{target} is there already: give another name")

    for one in target.relative_to(usable[0]).parents:
        if is_run_folder(usable[0] / one):
            raise ConfigError(f"{one} is a run, which holds no other: give another name")

    return Wanted(
        command=command,
        recipe=_recipe(folders, recipe.strip()),
        overrides=lines,
        run_dir=str(target),
    )


def _inside(root: Path, name: str) -> Path:
    target = root / name
    if not os.path.realpath(target).startswith(os.path.realpath(root) + os.sep):
        raise ConfigError(f"{name}: leads out of {root}: give another name")
    return target


def _recipe(folders: Sequence[Path], recipe: str) -> str:
    if recipe in packaged_recipes():
        return recipe

    if "\0" in recipe or not recipe.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"{recipe[:100]!r} is no recipe that ships: choose one, or give a .yaml file below "
            "a shown folder"
        )

    for root in folders:
        real = os.path.realpath(root / recipe)
        if real.startswith(os.path.realpath(root) + os.sep) and os.path.isfile(real):
            return real

    raise ConfigError(f"{recipe[:200]}: there is no such file below a shown folder")


def check(wanted: Wanted) -> str:
    """What the run's configuration would be, as YAML. Raises ConfigError with what the command
    says. Blocks for as long as reading a recipe takes."""
    if not _checking.acquire(timeout=BUSY_S):
        raise ConfigError("other recipes are being read: try again")

    try:
        said = subprocess.run(
            [sys.executable, "-m", "agentevo", *wanted.words(), "--dry-run"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHECK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the recipe could not be read within {CHECK_S:.0f} s") from None
    finally:
        _checking.release()

    if said.returncode:
        raise ConfigError((said.stderr or said.stdout).strip()[-4000:] or "the recipe is refused")

    try:
        config: Any = yaml.safe_load(said.stdout)
        run = config["run"]
        folder = str(run["dir"])
        overwrites = bool(run["overwrite"])
    except (yaml.YAMLError, KeyError, TypeError):
        raise ConfigError(
            "this recipe is a sweep, or imports something that prints: start it at the command line"
        ) from None

    if os.path.realpath(folder) != os.path.realpath(wanted.run_dir) or overwrites:
        raise ConfigError(
            "the recipe sets run.overwrite, or another run.dir: start it at the command line"
        )

    return said.stdout


def digest(config: str) -> str:
    """What a confirmation holds of what `check` has said."""
    return hashlib.sha256(config.encode("utf-8", "surrogatepass")).hexdigest()


def start(root: Path, wanted: Wanted, *, id: str, who: str, address: str) -> str:
    """Starts it; the same id again starts nothing. Returns the id. Raises ConfigError."""
    if not _ID.fullmatch(id):
        raise ConfigError("this is no form of this dashboard: load its page again")

    place = root / STARTED / id
    try:
        (root / STARTED).mkdir(exist_ok=True)
        if (root / STARTED).is_symlink():
            raise OSError("it is a link")

        with _only_starter(root):
            try:
                place.mkdir()
            except FileExistsError:
                return id

            try:
                process, told = _begin(root, wanted, id=id, who=who, address=address)
            except BaseException:
                shutil.rmtree(place, ignore_errors=True)
                raise
    except OSError as error:
        raise ConfigError(
            f"{place} can't be written ({error.strerror or error}), so nothing was started"
        ) from error

    def wait() -> None:
        code = process.wait()
        with suppress(OSError):
            _write(place, msgspec.structs.replace(told, code=code))

    threading.Thread(target=wait, name=f"started {wanted.run_dir}", daemon=True).start()
    return id


@contextmanager
def _only_starter(root: Path) -> Iterator[None]:
    """Nobody else starts anything below that folder meanwhile, in no other process either: what
    goes on is counted, and one more is started, in one piece. Raises ConfigError, OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(root / STARTED / LOCK, flags, 0o666)
    try:
        ends = time.monotonic() + BUSY_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > ends:
                    raise ConfigError("another run is being started: try again") from None
                time.sleep(0.02)

        yield
    finally:
        os.close(handle)


def _begin(
    root: Path, wanted: Wanted, *, id: str, who: str, address: str
) -> tuple[subprocess.Popen[bytes], Start]:
    """The process, and what is kept of it. Raises ConfigError where too many go on."""
    if sum(is_alive(one) for one in _all_started(root)) >= MAX_RUNNING:
        raise ConfigError(f"{MAX_RUNNING} runs that were started here go on: wait for one")
    if os.path.lexists(wanted.run_dir):
        raise ConfigError(f"{wanted.run_dir} is there by now: give another name")

    place = root / STARTED / id
    with (place / "log.txt").open("xb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "agentevo", *wanted.words()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    told = Start(
        id=id, wanted=wanted, at=time.time(), who=who, address=address, process=process.pid
    )
    _write(place, told)
    return process, told


def _write(place: Path, told: Start) -> None:
    write_atomic(place / "start.json", msgspec.json.encode(told) + b"\n")


def started(root: Path) -> list[Start]:
    """What was started below that folder, the newest first, MAX_LISTED at most."""
    return sorted(_all_started(root), key=lambda one: -one.at)[:MAX_LISTED]


def _all_started(root: Path) -> list[Start]:
    found = []
    with suppress(OSError), os.scandir(root / STARTED) as entries:
        for entry in entries:
            if _ID.fullmatch(entry.name) and (one := read_start(root, entry.name)) is not None:
                found.append(one)
    return found


def read_start(root: Path, id: str) -> Start | None:
    """One of them; None where there is none of that id."""
    if not _ID.fullmatch(id):
        return None
    try:
        with _open(root, id, "start.json") as file:
            return msgspec.json.decode(file.read(LARGEST), type=Start)
    except (OSError, msgspec.MsgspecError):
        return None


def _open(root: Path, id: str, name: str) -> BinaryIO:
    """A file of what was started. Raises OSError, also for what a link leads to."""
    place = root / STARTED / id
    if os.path.realpath(place) != os.path.join(os.path.realpath(root), STARTED, id):
        raise OSError(f"{place} leads elsewhere")
    return open_regular(place / name)


def name_of(root: Path, one: Start) -> str:
    """The run's folder below that one, as its form has said it."""
    place = Path(one.wanted.run_dir)
    return str(place.relative_to(root)) if place.is_relative_to(root) else place.name


def is_alive(one: Start) -> bool:
    """Whether its process goes on, on this machine."""
    if one.code is not None:
        return False
    try:
        command = Path(f"/proc/{one.process}/cmdline").read_bytes()
    except OSError:
        return False
    return one.wanted.run_dir.encode() in command


def log_of(root: Path, id: str) -> str:
    """The end of what it printed."""
    try:
        with _open(root, id, "log.txt") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_TAIL))
            return file.read(LOG_TAIL).decode("utf-8", "replace")
    except OSError:
        return ""
