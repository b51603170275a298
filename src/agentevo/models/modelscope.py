"""Models of ModelScope's hub, through its own package: `modelscope:OWNER/NAME[@REVISION]`.

The package asks the hub for the list of files and fetches the missing ones, so an interrupted fetch
is completed. Where the hub can't be reached, the local files of a revision that the name gives are
taken as they are; without a revision they may be an older version, and are not taken. The package
itself decides the hub's address, its cache and its token (MODELSCOPE_ENDPOINT, MODELSCOPE_CACHE,
MODELSCOPE_API_TOKEN).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentevo.errors import ModelError
from agentevo.extras import load_extra

MODELSCOPE = "modelscope:"
"""Prefix of the name of such a model."""
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")


def check_name(name: str) -> None:
    """Raises ModelError for a name of another form, MissingExtraError without the package."""
    _parts(name)
    _package(name)


def saved_folder(name: str) -> Path | None:
    """The folder of a model that an earlier fetch brought; None if there is none, or no
    package. Nothing is downloaded."""
    try:
        package = _package(name)
        return _download(package, name, ignored=(), local_files_only=True)
    except Exception:  # noqa: BLE001 (its cache may be anything; then the model is fetched)
        return None


def download(name: str, ignored: Sequence[str]) -> Path:
    """Brings the model onto this machine and returns its folder; files that match `ignored` stay
    away. Raises ModelError and MissingExtraError."""
    _, revision = _parts(name)
    package = _package(name)
    try:
        return _download(package, name, ignored=ignored, local_files_only=False)
    except Exception as error:  # what its package and the network raise has no common class
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
