"""Style sheet and scripts, as files to serve and as text inside one file.

The URL of a file has a digest of its content, so browsers cache it permanently.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PREFIX = "/static"
UPLOT = "vendor/uplot-1.6.32.min.js"


@cache
def contents(name: str) -> bytes:
    """The content of a file below static/; a template gives its name."""
    return files("agentevo.observability.pages").joinpath("static", *name.split("/")).read_bytes()


@cache
def names() -> frozenset[str]:
    """Every file that is served."""
    static = files("agentevo.observability.pages").joinpath("static")
    return frozenset(
        f"{folder}{entry.name}"
        for folder, where in (("", static), ("vendor/", static.joinpath("vendor")))
        for entry in where.iterdir()
        if entry.is_file() and kind(entry.name)
    )


def kind(name: str) -> str | None:
    """The media type of a file that is served; None for any other, such as a licence."""
    return next((media for ending, media in KINDS.items() if name.endswith(ending)), None)


@cache
def digest(name: str) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of a file's contents."""
    return hashlib.sha256(contents(name)).hexdigest()[:12]


def url(name: str) -> str:
    """The URL at which the dashboard serves the file."""
    return f"{PREFIX}/{digest(name)}/{name}"


def inline_style(*names: str) -> str:
    """These style sheets, for a `<style>` of a self-contained file. No text in them ends that
    element."""
    return "\n".join(contents(name).decode() for name in names).replace("</style", "<\\/style")


def inline_script(*names: str) -> str:
    """These scripts, for a `<script>` of a self-contained file. No text in them ends that
    element."""
    return "\n".join(contents(name).decode() for name in names).replace("</script", "<\\/script")
