"""Models of ModelScope's hub, through its own package: `modelscope:OWNER/NAME[@REVISION]`.

The package asks the hub for the list of files and fetches the missing ones, so an interrupted fetch
is completed. If the hub can't be reached and the name has a revision, the local files of that
revision are used. Without a revision the local files may be an older version, so they are not used.
The package reads the hub's address, its cache and its token from MODELSCOPE_ENDPOINT,
MODELSCOPE_CACHE and MODELSCOPE_API_TOKEN.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentevo.errors import ModelError
from agentevo.runtime.extras import load_extra

MODELSCOPE = "modelscope:"
"""The prefix of a ModelScope model's name."""
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")


def check_name(name: str) -> None:
    """Raises ModelError for a name of another form, and MissingExtraError if the package is not
    installed."""
    _parts(name)
    _package(name)


def saved_folder(name: str) -> Path | None:
    """The folder of a model that was downloaded earlier. None if there is none, or if the package
    is not installed. Downloads nothing."""
    try:
        package = _package(name)
        return _download(package, name, ignored=(), local_files_only=True)
    except Exception:  # noqa: BLE001 (its cache may be anything; then the model is fetched)
        return None


def download(name: str, ignored: Sequence[str]) -> Path:
    """Downloads the model, except files that match `ignored`, and returns its folder. Raises
    ModelError and MissingExtraError."""
    _, revision = _parts(name)
    package = _package(name)
    try:
        return _download(package, name, ignored=ignored, local_files_only=False)
    except Exception as error:  # errors of the package and of the network have no common class
        if revision is not None and (folder := saved_folder(name)) is not None:
            return folder
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise ModelError(
            f"model {name!r}: ModelScope did not provide it ({reason}): check name, revision and "
            "network"
        ) from error


def _parts(name: str) -> tuple[str, str | None]:
    match = _NAME.fullmatch(name.removeprefix(MODELSCOPE))
    if match is None:
        raise ModelError(
            f"model {name[:100]!r}: a model of ModelScope is written "
            f"{MODELSCOPE}OWNER/NAME, or {MODELSCOPE}OWNER/NAME@REVISION"
        )
    return match["repo"], match["revision"]


def _package(name: str) -> Any:
    return load_extra("modelscope", "modelscope", f"model.name={name}")


def _download(package: Any, name: str, *, ignored: Sequence[str], local_files_only: bool) -> Path:
    repo, revision = _parts(name)
    folder = Path(
        package.snapshot_download(
            repo,
            revision=revision,
            ignore_patterns=list(ignored) or None,
            local_files_only=local_files_only,
        )
    )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: it is not a model for transformers")

    return folder
